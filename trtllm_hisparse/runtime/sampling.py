"""Drawing the next token from one query's logits."""

import numpy as np
import torch

from trtllm_hisparse.errors import RequestError
from trtllm_hisparse.runtime.request import SamplingParams


def sample(logits: torch.Tensor, params: SamplingParams, position: int) -> int:
    """Next token id from float32 logits `[vocab]` of the query at `position`.

    Greedy takes the lowest id among equal maxima. Otherwise: softmax(logits / temperature), keep the `top_k`
    likeliest (lowest id first among equals), of these the shortest prefix that reaches `top_p`, and invert
    the distribution at u(seed, position), so that a draw depends on nothing else. RequestError when a logit is
    not a number.
    """
    values = logits.to(torch.float64).numpy()
    if not np.isfinite(values).all():
        raise RequestError(
            f"the model gave {int((~np.isfinite(values)).sum())} non-finite logits at position {position}"
        )
    if params.temperature == 0.0:
        return int(values.argmax())
    probs = np.exp((values - values.max()) / params.temperature)
    order = np.argsort(-probs, kind="stable")
    if params.top_k:
        order = order[: params.top_k]
    cumulative = np.cumsum(probs[order] / probs[order].sum())
    keep = int(np.searchsorted(cumulative, params.top_p)) + 1
    cumulative = cumulative[:keep]
    u = np.random.Generator(np.random.Philox(key=params.seed, counter=position)).random()
    drawn = int(np.searchsorted(cumulative, u * cumulative[-1], side="right"))
    return int(order[min(drawn, len(cumulative) - 1)])
