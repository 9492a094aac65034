"""What a caller asks for and what comes back."""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

import torch

from trtllm_hisparse.errors import RequestError


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is drawn. `temperature` 0 is greedy.

    temperature: > 0 divides the logits.
    top_k:       keep the k likeliest tokens; 0 = all.
    top_p:       keep the likeliest tokens that together reach this probability, in (0, 1].
    seed:        draws depend on (seed, position) alone, so they repeat at any load and placement.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < float("inf"):
            raise RequestError(f"temperature: expected a finite number of at least 0, got {self.temperature}")
        if self.top_k < 0:
            raise RequestError(f"top_k: expected 0 (all) or more, got {self.top_k}")
        if not 0.0 < self.top_p <= 1.0:
            raise RequestError(f"top_p: expected a number in (0, 1], got {self.top_p}")
        if not 0 <= self.seed < 1 << 64:
            raise RequestError(f"seed: expected 0 .. 2**64 - 1, got {self.seed}")


@dataclass(frozen=True)
class ImportedHistory:
    """Rows and index keys computed elsewhere: the decode side of a prefill-decode split.

    They cover the first `length` prompt tokens; the rest of the prompt (one token at least) is computed here.

    rows:       {payload owner: [length, row]} in the model's dtype.
    index_keys: {index-key owner: [length, index_dim]} in the model's dtype.
    """

    length: int
    rows: dict[int, torch.Tensor]
    index_keys: dict[int, torch.Tensor]


@dataclass(frozen=True)
class Request:
    """One generation.

    prompt:     token ids, at least one.
    max_tokens: output tokens, at least one.
    stop_ids:   token ids that end the output; the stop token itself is not part of it.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop_ids: frozenset[int] = frozenset()
    history: ImportedHistory | None = None


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(frozen=True)
class Event:
    """What a request's sink receives: tokens in order, then exactly one event with a reason.

    tokens: new output ids of this event; may be empty in the last one.
    reason: set in the last event only.
    error:  message for reason `error`.
    """

    request_id: int
    tokens: tuple[int, ...] = ()
    reason: FinishReason | None = None
    error: str | None = None


Sink = Callable[[Event], None]
"""Called from the serving loop's thread; must return quickly and not raise."""
