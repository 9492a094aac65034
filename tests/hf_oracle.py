"""Hugging Face's own model classes as the outside reference: tiny random checkpoints, and what they compute."""

import os
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
import transformers

VOCAB = 512
TOP_K = 32

PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
# mscale and mscale_all_dim differ, so that cos and sin carry a factor of their own.
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 40.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
    "original_max_position_embeddings": 128,
}
GLM = {"rms_norm_eps": 1e-5, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
GROUPS = {"n_group": 4, "topk_group": 2}
SHARED = ["full", "full", "full", "shared", "shared", "shared", "full", "shared"]

# family: (class, seed, layers, what differs). Seeds are ones whose smallest gap at a cut is above 1e-5.
FAMILIES = {
    "glm_shared": ("GlmMoeDsa", 4, 8, {**GLM, "indexer_types": SHARED}),
    "glm": ("GlmMoeDsa", 11, 4, {**GLM, "attention_bias": True}),
    "v32": ("DeepseekV32", 4, 4, {**GROUPS, "rope_parameters": PLAIN}),
    "v32_yarn": ("DeepseekV32", 10, 4, {**GROUPS, "rope_parameters": YARN}),
}


def build(family):
    """The family's tiny model, every tensor random: neutral norms and biases would hide errors."""
    name, seed, layers, different = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=64,
        num_hidden_layers=layers,
        first_k_dense_replace=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=64,
        kv_lora_rank=64,
        qk_rope_head_dim=16,
        qk_nope_head_dim=32,
        v_head_dim=32,
        n_routed_experts=8,
        n_shared_experts=1,
        num_experts_per_tok=2,
        index_topk=TOP_K,
        index_head_dim=32,
        index_n_heads=16,  # with fewer, relu leaves many scores at exactly 0: ties
        max_position_embeddings=4096,
        pad_token_id=None,
        bos_token_id=0,
        eos_token_id=1,
        **different,
    )
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    randomise(model, seed)
    return model.eval()


@torch.no_grad()
def randomise(model, seed):
    generator = torch.Generator().manual_seed(seed)
    tensors = list(model.named_parameters())
    tensors += [(n, b) for n, b in model.named_buffers() if n.endswith("e_score_correction_bias")]
    for name, tensor in sorted(tensors):
        noise = torch.randn(tensor.shape, generator=generator)
        if "embed_tokens" in name:
            tensor.copy_(noise)
        elif tensor.ndim >= 2:
            tensor.copy_(noise / tensor.shape[-1] ** 0.5)
        elif name.endswith("e_score_correction_bias"):
            tensor.copy_(0.05 * noise)
        elif name.endswith("weight"):
            tensor.copy_(1 + 0.1 * noise)
        else:
            tensor.copy_(0.1 * noise)


@cache
def model(family):
    """`build(family)`, once."""
    return build(family)


def prompt(length, seed=18):
    """Random token ids."""
    return torch.randint(2, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@dataclass
class Trace:
    """A greedy run. tokens: chosen ids. logits: `[steps, vocab]`, the first of the last prompt position.
    selections: {producer: per query, the visible ids as a set}; gaps: {producer: `[queries]`}, the distance
    between the last score taken and the first left out."""

    tokens: list[int]
    logits: torch.Tensor
    selections: dict[int, list[frozenset[int]]]
    gaps: dict[int, torch.Tensor]


@torch.no_grad()
def greedy(model, ids, steps):
    """Prefill in one piece, then `steps - 1` single-token steps with the library's cache."""
    cache = transformers.DynamicCache(config=model.config)
    feed = torch.tensor([ids])
    tokens, logits = [], []
    with recorded(model) as (selections, gaps):
        for _ in range(steps):
            out = model(input_ids=feed, past_key_values=cache, use_cache=True)
            logits.append(out.logits[0, -1])
            tokens.append(int(logits[-1].argmax()))
            feed = torch.tensor([tokens[-1:]])
    return Trace(
        tokens,
        torch.stack(logits),
        {layer: visible_sets(rows) for layer, rows in selections.items()},
        {layer: torch.cat(g) for layer, g in gaps.items()},
    )


@torch.no_grad()
def forward(model, ids):
    """Logits `[T, vocab]` of one uncached pass."""
    return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]


def visible_sets(rows):
    """The library returns positions after the query for short histories; they are no selection."""
    queries = [row for block in rows for row in block.tolist()]
    return [frozenset(i for i in row if i <= q) for q, row in enumerate(queries)]


@contextmanager
def recorded(model):
    """Record every indexer's result and the gap at its cut, by standing in for `Tensor.topk` while it runs."""
    selections, gaps, handles = {}, {}, []
    running = []
    plain = torch.Tensor.topk

    def topk(scores, k, dim=-1, **kw):
        if running:
            ranked = scores[0].sort(-1, descending=True).values
            gap = torch.full(scores.shape[1:2], torch.inf)
            if scores.shape[-1] > k:
                cut = ranked[:, k] > -1e30
                gap[cut] = (ranked[:, k - 1] - ranked[:, k])[cut]
            gaps.setdefault(running[-1], []).append(gap)
        return plain(scores, k, dim=dim, **kw)

    def leave(layer, out):
        running.pop()
        selections.setdefault(layer, []).append(out[0].clone())

    for layer, block in enumerate(model.model.layers):
        indexer = block.self_attn.indexer
        if indexer is not None:
            handles.append(indexer.register_forward_pre_hook(lambda m, a, n=layer: running.append(n)))
            handles.append(indexer.register_forward_hook(lambda m, a, out, n=layer: leave(n, out)))
    torch.Tensor.topk = topk
    try:
        yield selections, gaps
    finally:
        torch.Tensor.topk = plain
        for handle in handles:
            handle.remove()
