"""The MLPs: SwiGLU, and the mixture of experts with DeepSeek-V3's bias-corrected sigmoid router."""

import torch

from trtllm_hisparse.engine.ops import elementwise, linear, pad_rows, silu
from trtllm_hisparse.models.checkpoint import Scope
from trtllm_hisparse.models.config import ModelConfig


class MLP:
    """`down(silu(gate(x)) * up(x))` with weights gate, up `[inner, hidden]` and down `[hidden, inner]`."""

    def __init__(self, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> None:
        self._gate, self._up, self._down = gate, up, down

    @classmethod
    def load(cls, weights: Scope, hidden: int, inner: int) -> "MLP":
        """The three projections under a scope."""
        return cls(
            weights.tensor("gate_proj.weight", inner, hidden),
            weights.tensor("up_proj.weight", inner, hidden),
            weights.tensor("down_proj.weight", hidden, inner),
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`[T, hidden]` to `[T, hidden]`; T a multiple of TILE."""
        return linear(silu(linear(x, self._gate)) * linear(x, self._up), self._down)


class Router:
    """Chooses experts and their weights (DeepSeek-V3, arXiv 2412.19437, section 2.1.2), in float32."""

    def __init__(self, config: ModelConfig, weights: Scope) -> None:
        c = config
        self._config = c
        self._weight = weights.tensor("weight", c.n_routed_experts, c.hidden_size, dtype=torch.float32)
        self._bias = weights.tensor("e_score_correction_bias", c.n_routed_experts, dtype=torch.float32)

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Experts int64 `[T, num_experts_per_tok]` and their float32 weights."""
        c = self._config
        scores = elementwise(torch.sigmoid, linear(x.float(), self._weight))
        # The bias decides who is chosen; it is no part of the weight.
        grouped = (scores + self._bias).view(len(x), c.n_group, -1)
        best_groups = grouped.topk(2, -1).values.sum(-1).topk(c.topk_group, -1).indices
        dropped = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter_(1, best_groups, False)
        choice = grouped.masked_fill(dropped[..., None], -torch.inf).flatten(1)
        experts = choice.topk(c.num_experts_per_tok, -1).indices
        weights = scores.gather(1, experts)
        if c.norm_topk_prob:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return experts, weights * c.routed_scaling_factor


class MixtureOfExperts:
    """Routed experts plus the shared ones. Stored per expert (released files) or fused in 3-D tensors."""

    def __init__(self, config: ModelConfig, weights: Scope) -> None:
        hidden, inner = config.hidden_size, config.moe_intermediate_size
        self._router = Router(config, weights.under("gate."))
        self._experts = _load_experts(weights.under("experts."), config.n_routed_experts, hidden, inner)
        shared = weights.under("shared_experts.")
        self._shared = MLP.load(shared, hidden, inner * config.n_shared_experts)

    def __call__(self, x: torch.Tensor, tokens: int) -> torch.Tensor:
        """`[T, hidden]` to `[T, hidden]`; T a multiple of TILE. Rows past `tokens` are padding: no routed expert
        runs for them."""
        experts, weights = self._router(x)
        outputs = x.new_zeros(*experts.shape, x.shape[1])
        experts = experts[:tokens]
        for expert in set(experts.flatten().tolist()):
            token, choice = (experts == expert).nonzero(as_tuple=True)
            outputs[token, choice] = self._experts[expert](pad_rows(x[token]))[: len(token)]
        # Summed in the token's own order of experts, never in the order the batch visits them.
        routed = outputs[:, 0] * weights[:, :1]
        for choice in range(1, weights.shape[1]):
            routed = routed + outputs[:, choice] * weights[:, choice, None]
        return routed.to(x.dtype) + self._shared(x)


def _load_experts(weights: Scope, count: int, hidden: int, inner: int) -> list[MLP]:
    if not weights.has("gate_up_proj"):
        return [MLP.load(weights.under(f"{i}."), hidden, inner) for i in range(count)]
    gate, up = weights.tensor("gate_up_proj", count, 2 * inner, hidden).chunk(2, 1)
    down = weights.tensor("down_proj", count, hidden, inner)
    return [MLP(gate[i], up[i], down[i]) for i in range(count)]
