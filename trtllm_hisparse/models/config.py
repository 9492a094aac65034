"""A Hugging Face `config.json` of the two DSA families, checked once and then plain numbers.

`glm_moe_dsa` (GLM-5, 5.1, 5.2, 5.3) and `deepseek_v32` (DeepSeek-V3.2) are multi-head latent attention (MLA)
over rows a lightning indexer selects, with a mixture of experts behind it. They differ in the indexer's rotary
layout and in which layers own an indexer. Field names are Hugging Face's.
"""

import json
import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from trtllm_hisparse.errors import CheckpointError
from trtllm_hisparse.models.spec import LayerSpec, ModelSpec

FAMILIES = ("glm_moe_dsa", "deepseek_v32")


@dataclass(frozen=True)
class Yarn:
    """YaRN context extension (arXiv 2309.00071), with DeepSeek's two mscale factors.

    attention_factor: factor on cos and sin; None = derived from the mscales.
    truncate:         round the ramp's ends to whole dimensions.
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float
    beta_slow: float
    mscale: float | None
    mscale_all_dim: float | None
    attention_factor: float | None
    truncate: bool


@dataclass(frozen=True)
class ModelConfig:
    """One model. Sizes are elements, not bytes.

    eos_token_ids:           ids that end a text; empty when the file names none.
    indexer_types:           "full" or "shared" per layer; a shared layer attends over the selection of the
                             nearest full layer below it.
    mlp_layer_types:         "dense" or "sparse" (mixture of experts) per layer.
    index_rope_interleaved:  the indexer rotates pairs (x0, x1), (x2, x3), ... as GLM does; otherwise halves.
    attention_bias:          q_a, kv_a and o projections have a bias.
    yarn:                    None = plain rotary embedding.
    weight_block:            rows and columns that share one scale in an FP8 checkpoint; None = not quantised.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    index_topk: int
    index_n_heads: int
    index_head_dim: int
    index_rope_interleaved: bool
    indexer_types: tuple[str, ...]
    mlp_layer_types: tuple[str, ...]
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    n_group: int
    topk_group: int
    norm_topk_prob: bool
    routed_scaling_factor: float
    rms_norm_eps: float
    attention_bias: bool
    tie_word_embeddings: bool
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    rope_theta: float
    yarn: Yarn | None
    weight_block: tuple[int, int] | None

    @property
    def row_dim(self) -> int:
        """Elements of one payload row: latent, then rotated key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @cached_property
    def softmax_scale(self) -> float:
        """Factor on the attention scores; YaRN multiplies it by mscale_all_dim's mscale squared."""
        scale = 1 / math.sqrt(self.qk_nope_head_dim + self.qk_rope_head_dim)
        if self.yarn is not None and self.yarn.mscale_all_dim:
            scale *= yarn_mscale(self.yarn.factor, self.yarn.mscale_all_dim) ** 2
        return scale

    def spec(self, dtype: torch.dtype) -> ModelSpec:
        """The model as the hierarchy sees it, with rows stored in `dtype`."""
        layers: list[LayerSpec] = []
        producer = 0
        for i, kind in enumerate(self.indexer_types):
            producer = i if kind == "full" else producer
            layers.append(LayerSpec(index=producer, payload=i))
        return ModelSpec(
            name=self.model_type,
            layers=tuple(layers),
            top_k=self.index_topk,
            row_bytes=self.row_dim * dtype.itemsize,
            index_row_bytes=self.index_head_dim * dtype.itemsize,
            max_context=self.max_position_embeddings,
            source="config.json of the checkpoint",
        )


def yarn_mscale(factor: float, mscale: float) -> float:
    """YaRN's attention temperature, `0.1 mscale ln(factor) + 1` (arXiv 2309.00071, equation 22)."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def load_config(path: str | Path) -> ModelConfig:
    """Read `config.json` in checkpoint directory `path`.

    Raises CheckpointError, naming file, field, expected and actual, for a missing or malformed file, a family
    or a feature that is not supported, and sizes that contradict each other.
    """
    return _parse(Fields.read(Path(path) / "config.json"))


class Fields:
    """A JSON object whose every access is checked and names the file and the field when it fails."""

    def __init__(self, raw: dict[str, Any], where: str) -> None:
        self.raw = raw
        self.where = where

    @classmethod
    def read(cls, file: Path) -> "Fields":
        """The object in `file`."""
        try:
            raw = json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise CheckpointError(f"{file}: expected a file, found none") from None
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{file}: expected readable JSON, got: {error}") from error
        if not isinstance(raw, dict):
            raise CheckpointError(f"{file}: expected a JSON object, got {type(raw).__name__}")
        return cls(raw, str(file))

    def fail(self, name: str, expected: str, actual: object) -> CheckpointError:
        """The error for field `name`."""
        return CheckpointError(f"{self.where}: {name}: expected {expected}, got {actual!r}")

    def has(self, name: str) -> bool:
        """Whether the field is there and not null."""
        return self.raw.get(name) is not None

    def section(self, name: str) -> "Fields":
        """A nested object; an absent one is empty."""
        value = self.raw.get(name)
        if value is None:
            value = {}
        if not isinstance(value, dict):
            raise self.fail(name, "an object", value)
        return Fields(value, f"{self.where}: {name}")

    def integer(self, name: str, default: int | None = None, low: int = 1) -> int:
        """A whole number of at least `low`."""
        value = self.raw[name] if self.has(name) else default
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise self.fail(name, f"a whole number of at least {low}", value)
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number above 0."""
        value = self.raw[name] if self.has(name) else default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise self.fail(name, "a finite number above 0", value)
        return float(value)

    def optional_number(self, name: str) -> float | None:
        """A finite number above 0, or None."""
        return self.number(name) if self.has(name) else None

    def flag(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self.raw[name] if self.has(name) else default
        if not isinstance(value, bool):
            raise self.fail(name, "true or false", value)
        return value

    def only(self, name: str, *supported: object) -> None:
        """Refuse a field that is there with a value this package does not implement."""
        if self.has(name) and self.raw[name] not in supported:
            raise self.fail(name, " or ".join(repr(s) for s in supported), self.raw[name])


def _parse(f: Fields) -> ModelConfig:
    model_type = f.raw.get("model_type")
    if model_type not in FAMILIES:
        raise f.fail("model_type", " or ".join(FAMILIES), model_type)
    f.only("hidden_act", "silu")
    f.only("scoring_func", "sigmoid")
    f.only("topk_method", "noaux_tc")
    f.only("moe_layer_freq", 1)
    f.only("mlp_bias", False)
    f.only("rope_interleave", True)
    layers = f.integer("num_hidden_layers")
    theta, yarn = _rope(f)
    config = ModelConfig(
        model_type=str(model_type),
        vocab_size=f.integer("vocab_size"),
        hidden_size=f.integer("hidden_size"),
        intermediate_size=f.integer("intermediate_size"),
        moe_intermediate_size=f.integer("moe_intermediate_size"),
        num_hidden_layers=layers,
        num_attention_heads=f.integer("num_attention_heads"),
        q_lora_rank=f.integer("q_lora_rank"),
        kv_lora_rank=f.integer("kv_lora_rank"),
        qk_nope_head_dim=f.integer("qk_nope_head_dim"),
        qk_rope_head_dim=f.integer("qk_rope_head_dim"),
        v_head_dim=f.integer("v_head_dim"),
        index_topk=f.integer("index_topk"),
        index_n_heads=f.integer("index_n_heads"),
        index_head_dim=f.integer("index_head_dim"),
        index_rope_interleaved=f.flag("indexer_rope_interleave", model_type == "glm_moe_dsa"),
        indexer_types=_indexer_types(f, layers),
        mlp_layer_types=_mlp_layer_types(f, layers),
        n_routed_experts=f.integer("n_routed_experts"),
        n_shared_experts=f.integer("n_shared_experts"),
        num_experts_per_tok=f.integer("num_experts_per_tok"),
        n_group=f.integer("n_group", 1),
        topk_group=f.integer("topk_group", 1),
        norm_topk_prob=f.flag("norm_topk_prob", True),
        routed_scaling_factor=f.number("routed_scaling_factor"),
        rms_norm_eps=f.number("rms_norm_eps"),
        attention_bias=f.flag("attention_bias", False),
        tie_word_embeddings=f.flag("tie_word_embeddings", False),
        max_position_embeddings=f.integer("max_position_embeddings"),
        eos_token_ids=_eos_token_ids(f),
        rope_theta=theta,
        yarn=yarn,
        weight_block=weight_block(f),
    )
    _check_sizes(f, config)
    return config


def _check_sizes(f: Fields, c: ModelConfig) -> None:
    if c.qk_rope_head_dim % 2:
        raise f.fail("qk_rope_head_dim", "an even number", c.qk_rope_head_dim)
    if c.index_head_dim < c.qk_rope_head_dim:
        raise f.fail("index_head_dim", f"at least qk_rope_head_dim = {c.qk_rope_head_dim}", c.index_head_dim)
    if c.n_routed_experts % c.n_group or c.n_routed_experts < 2 * c.n_group:
        raise f.fail("n_group", f"groups of at least 2 that divide {c.n_routed_experts} routed experts", c.n_group)
    if c.topk_group > c.n_group:
        raise f.fail("topk_group", f"at most n_group = {c.n_group}", c.topk_group)
    reachable = c.topk_group * c.n_routed_experts // c.n_group
    if c.num_experts_per_tok > reachable:
        raise f.fail("num_experts_per_tok", f"at most {reachable} (topk_group groups)", c.num_experts_per_tok)


def _rope(f: Fields) -> tuple[float, Yarn | None]:
    """theta and YaRN, from `rope_parameters` or from the released `rope_theta` + `rope_scaling`.

    `head_dim` is not read: released GLM files carry 192 there, and the rotary width is `qk_rope_head_dim`.
    """
    rope = f.section("rope_parameters" if f.has("rope_parameters") else "rope_scaling")
    theta = rope.number("rope_theta") if rope.has("rope_theta") else f.number("rope_theta")
    key = "rope_type" if rope.has("rope_type") else "type"
    rope.only(key, "default", "yarn")
    if rope.raw.get(key, "default") != "yarn":
        return theta, None
    original = rope.integer("original_max_position_embeddings")
    return theta, Yarn(
        factor=rope.number("factor", f.integer("max_position_embeddings") / original),
        original_max_position_embeddings=original,
        beta_fast=rope.number("beta_fast", 32),
        beta_slow=rope.number("beta_slow", 1),
        mscale=rope.optional_number("mscale"),
        mscale_all_dim=rope.optional_number("mscale_all_dim"),
        attention_factor=rope.optional_number("attention_factor"),
        truncate=rope.flag("truncate", True),
    )


def _indexer_types(f: Fields, layers: int) -> tuple[str, ...]:
    """The list, else the pattern ("FSSS..." or a list), else frequency and offset, else all full."""
    letters = {"F": "full", "S": "shared"}
    if f.has("indexer_types"):
        return _layer_list(f, "indexer_types", f.raw["indexer_types"], layers, ("full", "shared"))
    if f.has("index_topk_pattern"):
        pattern = f.raw["index_topk_pattern"]
        kinds = [letters.get(c, c) for c in pattern] if isinstance(pattern, str) else pattern
        return _layer_list(f, "index_topk_pattern", kinds, layers, ("full", "shared"))
    freq = f.integer("index_topk_freq", 1)
    if freq == 1:
        return ("full",) * layers
    # No default: published ones disagree (2 in the library, 3 in the checkpoints).
    offset = f.integer("index_skip_topk_offset")
    return tuple("shared" if max(i - offset + 1, 0) % freq else "full" for i in range(layers))


def _mlp_layer_types(f: Fields, layers: int) -> tuple[str, ...]:
    if f.has("mlp_layer_types"):
        return _layer_list(f, "mlp_layer_types", f.raw["mlp_layer_types"], layers, ("dense", "sparse"))
    dense = min(f.integer("first_k_dense_replace", low=0), layers)
    return ("dense",) * dense + ("sparse",) * (layers - dense)


def _layer_list(f: Fields, name: str, value: object, layers: int, kinds: tuple[str, str]) -> tuple[str, ...]:
    """One entry per decoder layer; entries of the MTP layers behind them are dropped."""
    mtp = f.integer("num_nextn_predict_layers", 0, low=0)
    if not isinstance(value, list) or len(value) not in (layers, layers + mtp):
        raise f.fail(name, f"{layers} entries, one per layer", value)
    for i, kind in enumerate(value):
        if kind not in kinds:
            raise f.fail(f"{name}[{i}]", " or ".join(kinds), kind)
    if value[0] == "shared":
        raise f.fail(f"{name}[0]", "full, as no layer below could share its selection", value[0])
    return tuple(value[:layers])


def _eos_token_ids(f: Fields) -> tuple[int, ...]:
    value = f.raw.get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in ids):
        raise f.fail("eos_token_id", "a token id or a list of them", value)
    return tuple(ids)


def weight_block(f: Fields) -> tuple[int, int] | None:
    """(rows, columns) that share one FP8 scale, from `quantization_config`; None when there is none."""
    if not f.has("quantization_config"):
        return None
    quantization = f.section("quantization_config")
    if quantization.raw.get("quant_method") != "fp8":
        raise quantization.fail("quant_method", "'fp8'", quantization.raw.get("quant_method"))
    quantization.only("fmt", "e4m3")
    block = quantization.raw.get("weight_block_size", [128, 128])
    if not isinstance(block, list) or len(block) != 2 or any(type(b) is not int or b < 1 for b in block):
        raise quantization.fail("weight_block_size", "two whole numbers of at least 1", block)
    return block[0], block[1]
