"""A small GLM-DSA checkpoint of random weights, in Hugging Face format: for tests and for the demo.

It has every part of the real architecture (MLA, shared indices, mixture of experts) at toy sizes. Nothing was
trained: its text is noise. What makes that noise useful:

- every tensor is random, norm gains and biases included, so that no part is neutral;
- all embeddings share one constant direction, which index queries see and everything else is blind to.
  Consecutive steps then select overlapping rows, as trained models do, where plain random weights overlap
  only by chance, and the text still varies (measured after 3000 bytes of source code, k = 32: 62 to 73 %
  overlap of consecutive selections per layer, 34 distinct tokens among 64 greedy ones);
- an offset keeps the output to printable ASCII, so that it can be shown; it never ends by itself.
"""

import json
import string
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from trtllm_hisparse.models.byte_level import BYTE_OF_CHAR

SPECIAL_TOKENS = ("<|endoftext|>", "<|user|>", "<|assistant|>", "<|pad|>")
"""Ids 256 and up, behind the 256 bytes; the first ends a text."""
EOS_ID = 256
VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)

Array = npt.NDArray[np.float32]


def write_checkpoint(
    path: str | Path,
    *,
    seed: int = 0,
    layers: int = 8,
    hidden: int = 128,
    experts: int = 8,
    top_k: int = 32,
    max_context: int = 32768,
    common: float = 8.0,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """Write config.json, model.safetensors, tokenizer.json and tokenizer_config.json; returns the directory.

    layers:      the first is dense; 0, 1, 2, 6, 10, ... select, the others share (GLM-5.3's pattern).
    hidden:      hidden size.
    experts:     routed experts, two of them per token, beside a shared one.
    top_k:       rows each query selects.
    max_context: positions the model supports.
    common:      size of the constant all embeddings share, relative to the rest; 0 = no locality.
    dtype:       of the stored weights: float32 or bfloat16.

    The same arguments give the same bytes. ValueError for another dtype.
    """
    if dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"dtype: expected torch.float32 or torch.bfloat16, got {dtype}")
    out = Path(path)
    out.mkdir(parents=True, exist_ok=True)
    config = _config(layers, hidden, experts, top_k, max_context, str(dtype).removeprefix("torch."))
    _write_json(out / "config.json", config)
    tensors = {name: torch.from_numpy(a).to(dtype) for name, a in _weights(config, seed, common).items()}
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    _tokenizer().save(str(out / "tokenizer.json"))
    _write_json(out / "tokenizer_config.json", _tokenizer_config(max_context))
    return out


def _write_json(file: Path, values: dict[str, Any]) -> None:
    file.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")


# -- configuration ----------------------------------------------------------------------------------------
def _config(layers: int, hidden: int, experts: int, top_k: int, max_context: int, dtype: str) -> dict[str, Any]:
    return {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "model_type": "glm_moe_dsa",
        "dtype": dtype,
        "vocab_size": VOCAB_SIZE,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 64,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "index_topk": top_k,
        "index_n_heads": 16,  # with fewer, relu leaves many scores at exactly 0: ties
        "index_head_dim": 32,
        "indexer_types": ["full" if i < 3 or i % 4 == 2 else "shared" for i in range(layers)],
        "indexer_rope_interleave": True,
        "intermediate_size": 2 * hidden,
        "moe_intermediate_size": hidden // 2,
        "first_k_dense_replace": 1,
        "mlp_layer_types": ["dense"] + ["sparse"] * (layers - 1),
        "n_routed_experts": experts,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "max_position_embeddings": max_context,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": EOS_ID,
        "pad_token_id": None,
    }


# -- weights ----------------------------------------------------------------------------------------------
BRANCH_SCALE = 0.3
"""Of what attention and MLP add, so that the embeddings' constant still counts in the last layer."""
INDEX_ROPE_SCALE = 0.5
"""Of the rotary part of index queries, so that content outweighs position."""
HEAD_SCALE = 0.35
"""Standard deviation of the logits is a few times this, so that sampling at temperature 1 is varied."""
UNPRINTABLE = -12.0
"""Logit offset of every token that is no printable byte."""


def _weights(c: dict[str, Any], seed: int, common: float) -> dict[str, Array]:
    """{Hugging Face name: float32 array}, drawn in the order written here."""
    rng = np.random.default_rng(seed)
    hidden = c["hidden_size"]

    def normal(*shape: int, scale: float = 1.0) -> Array:
        return rng.standard_normal(shape, dtype=np.float32) * np.float32(scale)

    def matrix(rows: int, columns: int, scale: float = 1.0) -> Array:
        """Multiplies the size of its input by `scale`."""
        return normal(rows, columns, scale=scale * columns**-0.5)

    def blind(rows: int, direction: Array) -> Array:
        """A matrix that does not see `direction` and makes up for the room it takes in a normalised input."""
        unit = direction / np.linalg.norm(direction)
        weights = matrix(rows, direction.size)
        seen: Array = (weights - np.outer(weights @ unit, unit)) * np.float32((1 + common**2) ** 0.5)
        return seen

    def gain(size: int) -> Array:
        return 1 + normal(size, scale=0.1)

    def mlp(prefix: str, width: int, constant: Array) -> dict[str, Array]:
        return {
            f"{prefix}gate_proj.weight": blind(width, constant),
            f"{prefix}up_proj.weight": blind(width, constant),
            f"{prefix}down_proj.weight": matrix(hidden, width, BRANCH_SCALE),
        }

    def moe(prefix: str, constant: Array) -> dict[str, Array]:
        width, experts = c["moe_intermediate_size"], c["n_routed_experts"]
        tensors = {
            f"{prefix}gate.weight": blind(experts, constant),
            f"{prefix}gate.e_score_correction_bias": normal(experts, scale=0.05),
        }
        for i in range(experts):
            tensors |= mlp(f"{prefix}experts.{i}.", width, constant)
        return tensors | mlp(f"{prefix}shared_experts.", width, constant)

    def attention(prefix: str, constant: Array, full: bool) -> dict[str, Array]:
        heads, rope, nope, value = (
            c[name] for name in ("num_attention_heads", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
        )
        down, down_gain = matrix(c["q_lora_rank"], hidden), gain(c["q_lora_rank"])
        return {
            f"{prefix}q_a_proj.weight": down,
            f"{prefix}q_a_layernorm.weight": down_gain,
            f"{prefix}q_b_proj.weight": blind(heads * (nope + rope), down @ constant * down_gain),
            f"{prefix}kv_a_proj_with_mqa.weight": blind(c["kv_lora_rank"] + rope, constant),
            f"{prefix}kv_a_layernorm.weight": gain(c["kv_lora_rank"]),
            f"{prefix}kv_b_proj.weight": matrix(heads * (nope + value), c["kv_lora_rank"]),
            f"{prefix}o_proj.weight": matrix(hidden, heads * value, BRANCH_SCALE),
        } | (indexer(f"{prefix}indexer.", constant) if full else {})

    def indexer(prefix: str, constant: Array) -> dict[str, Array]:
        """Its queries and head weights see the constant, its keys do not."""
        heads, dim = c["index_n_heads"], c["index_head_dim"]
        query = matrix(heads * dim, c["q_lora_rank"])
        query.reshape(heads, dim, -1)[:, : c["qk_rope_head_dim"]] *= np.float32(INDEX_ROPE_SCALE)
        return {
            f"{prefix}wq_b.weight": query,
            f"{prefix}wk.weight": blind(dim, constant),
            f"{prefix}k_norm.weight": gain(dim),
            f"{prefix}k_norm.bias": normal(dim, scale=0.1),
            f"{prefix}weights_proj.weight": matrix(heads, hidden),
        }

    shared = normal(hidden)
    tensors = {"model.embed_tokens.weight": normal(VOCAB_SIZE, hidden) + np.float32(common) * shared}
    for i, (index_kind, mlp_kind) in enumerate(zip(c["indexer_types"], c["mlp_layer_types"], strict=True)):
        layer = f"model.layers.{i}."
        tensors[f"{layer}input_layernorm.weight"] = before = gain(hidden)
        tensors |= attention(f"{layer}self_attn.", shared * before, index_kind == "full")
        tensors[f"{layer}post_attention_layernorm.weight"] = after = gain(hidden)
        if mlp_kind == "dense":
            tensors |= mlp(f"{layer}mlp.", c["intermediate_size"], shared * after)
        else:
            tensors |= moe(f"{layer}mlp.", shared * after)
    tensors["model.norm.weight"] = last = gain(hidden)
    tensors["lm_head.weight"] = head = blind(VOCAB_SIZE, shared * last) * np.float32(HEAD_SCALE)
    # The constant comes out of the last norm nearly unchanged, so it can carry an offset.
    constant = shared * last
    head[_unprintable()] += np.float32(UNPRINTABLE) * constant / (constant @ constant)
    return tensors


def _unprintable() -> list[int]:
    """Every token id but those of printable ASCII and newline."""
    printable = set(f"{string.ascii_letters}{string.digits}{string.punctuation} \n".encode())
    return [token for token in range(VOCAB_SIZE) if token not in printable]


# -- tokenizer --------------------------------------------------------------------------------------------
def _tokenizer() -> tokenizers.Tokenizer:
    """One token per byte, so that any text comes back exactly; no merges."""
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=BYTE_OF_CHAR, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return tokenizer


def _tokenizer_config(max_context: int) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL_TOKENS[0],
        "pad_token": SPECIAL_TOKENS[-1],
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_context,
    }
