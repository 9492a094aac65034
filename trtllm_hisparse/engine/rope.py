"""Rotary position embedding, plain and YaRN."""

import math
from typing import NamedTuple

import torch

from trtllm_hisparse.engine.ops import elementwise
from trtllm_hisparse.models.config import ModelConfig, Yarn, yarn_mscale


class Rotation(NamedTuple):
    """cos and sin of each row's angles, float32 `[T, qk_rope_head_dim / 2]`."""

    cos: torch.Tensor
    sin: torch.Tensor


class RotaryEmbedding:
    """Angles of the `qk_rope_head_dim` rotated dimensions; attention and indexer share them."""

    def __init__(self, config: ModelConfig) -> None:
        self.inverse_frequencies, self.attention_factor = frequencies(config)

    def __call__(self, positions: torch.Tensor) -> Rotation:
        """The rotation of integer `positions [T]`; T a multiple of TILE."""
        angles = positions.float()[:, None] * self.inverse_frequencies
        return Rotation(
            elementwise(torch.cos, angles) * self.attention_factor,
            elementwise(torch.sin, angles) * self.attention_factor,
        )


def rotate(x: torch.Tensor, rotation: Rotation, interleaved: bool) -> torch.Tensor:
    """Rotate the last dimension of `x [T, heads, qk_rope_head_dim]`.

    Pairs are neighbours (x0, x1), (x2, x3), ... when `interleaved`, else (x_i, x_{i + n/2}). Either way the result
    holds all first members, then all second ones, the order a stored rope key has.
    """
    first, second = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
    first, second = first.float(), second.float()
    cos, sin = rotation.cos[:, None], rotation.sin[:, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


def frequencies(config: ModelConfig) -> tuple[torch.Tensor, float]:
    """Inverse frequencies, float32 `[qk_rope_head_dim / 2]`, and the factor on cos and sin.

    YaRN (arXiv 2309.00071, section 3.2) divides the slow frequencies by `factor`, keeps the fast ones, and blends
    linearly between the dimensions that turn `beta_fast` and `beta_slow` times within the original context.
    """
    dim = config.qk_rope_head_dim
    periods = config.rope_theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    yarn = config.yarn
    if yarn is None:
        return 1.0 / periods, 1.0
    low, high = _ramp(yarn, config.rope_theta, dim)
    slow = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return slow / (yarn.factor * periods) + (1 - slow) / periods, _attention_factor(yarn)


def _ramp(yarn: Yarn, theta: float, dim: int) -> tuple[float, float]:
    """Dimensions between which the blend runs."""

    def dimension(turns: float) -> float:
        wavelength = yarn.original_max_position_embeddings / (turns * 2 * math.pi)
        return dim * math.log(wavelength) / (2 * math.log(theta))

    low, high = dimension(yarn.beta_fast), dimension(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    return low, high if high != low else high + 0.001


def _attention_factor(yarn: Yarn) -> float:
    if yarn.attention_factor is not None:
        return yarn.attention_factor
    if yarn.mscale and yarn.mscale_all_dim:
        return yarn_mscale(yarn.factor, yarn.mscale) / yarn_mscale(yarn.factor, yarn.mscale_all_dim)
    return yarn_mscale(yarn.factor, 1.0)
