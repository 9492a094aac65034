"""Block-scaled FP8 weights: e4m3 values, one float scale per block of rows and columns."""

import torch

DTYPE = torch.float8_e4m3fn


def scale_shape(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, ...]:
    """Shape of the scales of a `[..., rows, columns]` weight; edge blocks may be ragged."""
    *lead, rows, columns = shape
    return (*lead, -(-rows // block[0]), -(-columns // block[1]))


def dequantise(weight: torch.Tensor, scale: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """float32 `weight * scale`, every scale spread over its block.

    weight: e4m3 `[..., rows, columns]`; scale: `scale_shape(weight.shape, block)`, the factor to multiply by
    (published as `<weight>_scale_inv`, the inverse of what quantisation multiplied by).
    """
    expected = scale_shape(tuple(weight.shape), block)
    if tuple(scale.shape) != expected:
        raise ValueError(f"scale: expected shape {list(expected)}, got {list(scale.shape)}")
    rows, columns = weight.shape[-2:]
    spread = scale.float().repeat_interleave(block[0], -2)[..., :rows, :]
    return weight.float() * spread.repeat_interleave(block[1], -1)[..., :columns]
