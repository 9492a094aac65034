"""Multi-head latent attention in absorbed form: the only thing read from history is a latent row.

A row is `[kv_a_layernorm(c) | rotated key]`. `kv_b_proj` maps the latent c to every head's key and value; its key
half is folded into the query and its value half is applied after the weighted sum (DeepSeek-V2, arXiv 2405.04434,
section 2.1.2), so no key or value is ever expanded.
"""

from typing import NamedTuple

import torch

from trtllm_hisparse.engine.ops import bmm, linear, linear_per_head, rms_norm
from trtllm_hisparse.engine.rope import Rotation, rotate
from trtllm_hisparse.models.checkpoint import Scope
from trtllm_hisparse.models.config import ModelConfig

LATENT_NORM_EPS = 1e-6  # fixed; `rms_norm_eps` is for the block norms only
QUERY_BLOCK = 64  # queries whose rows are gathered at a time, which bounds memory


class Projection(NamedTuple):
    """What attention makes of the hidden states.

    query:    `[T, H, row]`, in the space of rows.
    row:      `[T, row]`, to be stored.
    q_latent: `[T, q_lora_rank]`, normed; the indexer's query starts from it.
    """

    query: torch.Tensor
    row: torch.Tensor
    q_latent: torch.Tensor


class LatentAttention:
    """The attention weights of one layer."""

    def __init__(self, config: ModelConfig, weights: Scope) -> None:
        c = config
        self._config = c
        heads = c.num_attention_heads
        query_dim = c.qk_nope_head_dim + c.qk_rope_head_dim
        self._q_a = weights.tensor("q_a_proj.weight", c.q_lora_rank, c.hidden_size)
        self._q_norm = weights.tensor("q_a_layernorm.weight", c.q_lora_rank)
        self._q_b = weights.tensor("q_b_proj.weight", heads * query_dim, c.q_lora_rank)
        self._kv_a = weights.tensor("kv_a_proj_with_mqa.weight", c.row_dim, c.hidden_size)
        self._kv_norm = weights.tensor("kv_a_layernorm.weight", c.kv_lora_rank)
        kv_dim = c.qk_nope_head_dim + c.v_head_dim
        kv_b = weights.tensor("kv_b_proj.weight", heads * kv_dim, c.kv_lora_rank)
        key, value = torch.split(kv_b.view(heads, kv_dim, -1), [c.qk_nope_head_dim, c.v_head_dim], 1)
        self._key, self._value = key.contiguous(), value.mT.contiguous()
        self._o = weights.tensor("o_proj.weight", c.hidden_size, heads * c.v_head_dim)
        self._q_a_bias = self._kv_a_bias = self._o_bias = None
        if c.attention_bias:
            self._q_a_bias = weights.tensor("q_a_proj.bias", c.q_lora_rank)
            self._kv_a_bias = weights.tensor("kv_a_proj_with_mqa.bias", c.row_dim)
            self._o_bias = weights.tensor("o_proj.bias", c.hidden_size)

    def project(self, x: torch.Tensor, rotation: Rotation) -> Projection:
        """Queries and rows of hidden states `x [T, hidden]`."""
        c = self._config
        q_latent = rms_norm(linear(x, self._q_a, self._q_a_bias), self._q_norm, LATENT_NORM_EPS)
        query = linear(q_latent, self._q_b).view(len(x), c.num_attention_heads, -1)
        q_nope, q_rope = torch.split(query, [c.qk_nope_head_dim, c.qk_rope_head_dim], -1)
        row = linear(x, self._kv_a, self._kv_a_bias)
        latent, key = torch.split(row, [c.kv_lora_rank, c.qk_rope_head_dim], -1)
        latent = rms_norm(latent, self._kv_norm, LATENT_NORM_EPS)
        key = rotate(key[:, None], rotation, interleaved=True)[:, 0]
        absorbed = linear_per_head(q_nope, self._key)
        return Projection(
            query=torch.cat([absorbed, rotate(q_rope, rotation, interleaved=True)], -1),
            row=torch.cat([latent, key], -1),
            q_latent=q_latent,
        )

    def __call__(self, query: torch.Tensor, payload: torch.Tensor, locations: torch.Tensor) -> torch.Tensor:
        """Attention output `[T, hidden]` of `query [T, H, row]` over the rows at `locations [<= T, k]`."""
        c = self._config
        latent = attend(query, payload, locations, c.softmax_scale, c.kv_lora_rank)
        values = linear_per_head(latent.to(query.dtype), self._value)
        return linear(values.flatten(1), self._o, self._o_bias)


def attend(
    query: torch.Tensor, payload: torch.Tensor, locations: torch.Tensor, scale: float, latent_dim: int
) -> torch.Tensor:
    """Softmax-weighted sums of latent parts, float32 `[T, H, latent_dim]`, computed in float32.

    query:     `[T, H, row]`.
    payload:   `[rows, row]`; rows no location names may hold anything, NaN included.
    locations: int32 `[Q, k]`, Q <= T, -1 = no entry. A query without an entry, or past Q, gets zeros.
    """
    out = torch.zeros(*query.shape[:2], latent_dim, device=query.device)
    for start in range(0, len(locations), QUERY_BLOCK):
        at = locations[start : start + QUERY_BLOCK].long()
        absent = at < 0
        # Weight 0 is not enough for an absent entry: 0 x NaN is NaN.
        rows = payload[at.clamp(min=0)].float().masked_fill_(absent[..., None], 0)
        block = slice(start, start + len(at))
        scores = (bmm(query[block].float(), rows.mT) * scale).masked_fill_(absent[:, None], -torch.inf)
        # A query without any entry has a softmax of NaN, which the second mask turns into zeros.
        out[block] = bmm(scores.softmax(-1).masked_fill_(absent[:, None], 0), rows[..., :latent_dim])
    return out
