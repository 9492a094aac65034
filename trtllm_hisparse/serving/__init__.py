"""Text in, text out: tokenizer, stop strings, cancellation, metrics, and Triton in front."""
