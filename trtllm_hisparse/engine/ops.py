"""Batch-invariant building blocks: a row's result depends on that row alone, to the last bit.

A library picks its summation order by the shape it is given, so the same row can come out differently in a larger
batch. Three rules prevent that (measured on CPU with 1 to 16 threads, float32 and bfloat16):

1. Rows come in tiles of `TILE`; a matrix product is a batched product whose elements have one fixed shape, and
   of which there are never fewer than two (a lone element would be split over threads).
2. Reductions (norms, softmax) run along the last dimension, whose length is fixed by the model.
3. A transcendental function runs over spans of fixed length, because a vector body and its scalar remainder
   round differently.

Additions and multiplications of single elements are exact under IEEE 754 whatever the shape.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F

TILE = 8
SPAN = 1 << 14  # below the size at which torch splits an elementwise loop over threads
VECTOR = 64  # a multiple of every vector length in use


def pad_rows(x: torch.Tensor) -> torch.Tensor:
    """`x [T, ...]` with zero rows added up to the next multiple of `TILE`."""
    missing = -len(x) % TILE
    return torch.cat([x, x.new_zeros(missing, *x.shape[1:])]) if missing else x


def bmm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """`a [n, i, j] @ b [n, j, l]`, each element's bits independent of n."""
    if len(a) == 1:
        return torch.bmm(a.expand(2, -1, -1), b.expand(2, -1, -1))[:1]
    return torch.bmm(a, b)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`x [T, K] @ weight [N, K].T + bias [N]`; T a multiple of `TILE`."""
    tiles = x.reshape(len(x) // TILE, TILE, x.shape[1])
    product = bmm(tiles, weight.t().expand(len(tiles), -1, -1)).view(len(x), len(weight))
    return product if bias is None else product + bias


def linear_per_head(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`x [T, H, K]` times `weight [H, K, N]`, head by head: `[T, H, N]`; T a multiple of `TILE`."""
    out = x.new_empty(*x.shape[:2], weight.shape[-1])
    for tile, product in zip(torch.split(x, TILE), torch.split(out, TILE), strict=True):
        product.copy_(bmm(tile.transpose(0, 1), weight).transpose(0, 1))
    return out


def elementwise(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """`function(x)` for a transcendental function of single elements."""
    flat = x.reshape(-1)
    padded = F.pad(flat, (0, -len(flat) % VECTOR))
    return torch.cat([function(span) for span in torch.split(padded, SPAN)])[: len(flat)].view(x.shape)


def silu(x: torch.Tensor) -> torch.Tensor:
    """`x * sigmoid(x)`."""
    return elementwise(F.silu, x)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`x / sqrt(mean(x²) + eps) * weight` along the last dimension; the statistics in float32."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * (wide * scale).to(x.dtype)
