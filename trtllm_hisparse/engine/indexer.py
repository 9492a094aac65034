"""The lightning indexer (DeepSeek-V3.2, DSA): scores every earlier position, selects the best k.

    score[t, s] = sum over heads h of w[t, h] * relu(q[t, h] . k[s] * d**-0.5)

q comes from the normed query latent, k and w from the hidden state; k is one vector per position, shared by the
heads. Scores are float32 whatever the model's dtype.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F

from trtllm_hisparse.engine.ops import linear
from trtllm_hisparse.engine.rope import Rotation, rotate
from trtllm_hisparse.models.checkpoint import Scope
from trtllm_hisparse.models.config import ModelConfig

KEY_NORM_EPS = 1e-6


class IndexProjection(NamedTuple):
    """What an indexer makes of the hidden states.

    query:  float32 `[T, index heads, index_dim]`.
    weight: float32 `[T, index heads]`.
    key:    `[T, index_dim]` in the model's dtype, to be stored.
    """

    query: torch.Tensor
    weight: torch.Tensor
    key: torch.Tensor


class Indexer:
    """The indexer weights of one producer layer."""

    def __init__(self, config: ModelConfig, weights: Scope) -> None:
        c = config
        self._config = c
        self._q_b = weights.tensor("wq_b.weight", c.index_n_heads * c.index_head_dim, c.q_lora_rank)
        self._k = weights.tensor("wk.weight", c.index_head_dim, c.hidden_size)
        self._k_norm = weights.tensor("k_norm.weight", c.index_head_dim)
        self._k_norm_bias = weights.tensor("k_norm.bias", c.index_head_dim)
        self._weights = weights.tensor("weights_proj.weight", c.index_n_heads, c.hidden_size)

    def project(self, x: torch.Tensor, q_latent: torch.Tensor, rotation: Rotation) -> IndexProjection:
        """Index queries, head weights and keys of hidden states `x [T, hidden]`."""
        c = self._config
        query = linear(q_latent, self._q_b).view(len(x), c.index_n_heads, c.index_head_dim)
        key = F.layer_norm(linear(x, self._k), (c.index_head_dim,), self._k_norm, self._k_norm_bias, KEY_NORM_EPS)
        return IndexProjection(
            query=self._rotated(query, rotation).float(),
            weight=linear(x, self._weights).float() * c.index_n_heads**-0.5,
            key=self._rotated(key[:, None], rotation)[:, 0],
        )

    def _rotated(self, x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """The leading `qk_rope_head_dim` dimensions rotated, the others as they are."""
        rope_dim = self._config.qk_rope_head_dim
        rotated = rotate(x[..., :rope_dim], rotation, self._config.index_rope_interleaved)
        return torch.cat([rotated, x[..., rope_dim:]], -1)
