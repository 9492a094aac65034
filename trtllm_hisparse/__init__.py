"""Load-adaptive KV hierarchy for long-context sparse-attention models."""

__version__ = "0.1.0"
