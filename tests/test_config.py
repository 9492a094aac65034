"""config.json of the released models, the library's own files, and files that must be refused."""

import json
import math

import hf_oracle
import pytest
import torch

from trtllm_hisparse.errors import CheckpointError
from trtllm_hisparse.models.config import Yarn, load_config

# GLM-5.2 and DeepSeek-V3.2 as released, less what no engine reads.
GLM_52 = {
    "model_type": "glm_moe_dsa",
    "attention_bias": False,
    "eos_token_id": [154820, 154827, 154829],
    "first_k_dense_replace": 3,
    "head_dim": 192,
    "hidden_act": "silu",
    "hidden_size": 6144,
    "index_head_dim": 128,
    "index_n_heads": 32,
    "index_topk": 2048,
    "index_topk_freq": 4,
    "index_skip_topk_offset": 3,
    "index_topk_pattern": None,
    "indexer_rope_interleave": True,
    "intermediate_size": 12288,
    "kv_lora_rank": 512,
    "max_position_embeddings": 1048576,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 78,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 2048,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 8000000, "rope_type": "default"},
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "v_head_dim": 256,
    "vocab_size": 154880,
}
DEEPSEEK_V32 = {
    "model_type": "deepseek_v32",
    "attention_bias": False,
    "eos_token_id": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 2048,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-6,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "topk_group": 4,
    "v_head_dim": 128,
    "vocab_size": 129280,
}
MISSING = object()


@pytest.fixture
def load(tmp_path):
    def write(base, **changes):
        raw = {k: v for k, v in {**base, **changes}.items() if v is not MISSING}
        (tmp_path / "config.json").write_text(json.dumps(raw))
        return load_config(tmp_path)

    return write


def test_glm_52(load):
    config = load(GLM_52)
    spec = config.spec(torch.bfloat16)
    assert spec.producers == (0, 1, 2, *range(6, 78, 4))
    assert len(spec.producers) == 21
    assert [spec.layers[i].index for i in (3, 5, 6, 9, 77)] == [2, 2, 6, 6, 74]
    assert spec.payload_owners == tuple(range(78))
    assert spec.index_stores == spec.producers
    assert (spec.row_bytes, spec.index_row_bytes) == (1152, 256)
    assert (spec.top_k, spec.max_context, spec.chi) == (2048, 1048576, 4)
    assert config.softmax_scale == 256**-0.5 == 1 / 16
    assert config.qk_rope_head_dim == 64
    assert config.rope_theta == 8e6
    assert config.yarn is None
    assert config.index_rope_interleaved
    assert config.eos_token_ids == (154820, 154827, 154829)
    assert config.mlp_layer_types == ("dense",) * 3 + ("sparse",) * 75
    assert config.weight_block is None


def test_deepseek_v32(load):
    config = load(DEEPSEEK_V32)
    assert config.spec(torch.float32).producers == tuple(range(61))
    assert config.spec(torch.float32).row_bytes == 2304
    assert config.yarn == Yarn(40.0, 4096, 32.0, 1.0, 1.0, 1.0, None, True)
    assert math.isclose(config.softmax_scale, 192**-0.5 * (0.1 * math.log(40) + 1) ** 2, rel_tol=1e-15)
    assert not config.index_rope_interleaved
    assert config.eos_token_ids == (1,)
    assert config.norm_topk_prob
    assert (config.n_group, config.topk_group) == (8, 4)
    assert config.weight_block == (128, 128)


@pytest.mark.parametrize("family", hf_oracle.FAMILIES)
def test_files_the_library_writes(tmp_path, family):
    model = hf_oracle.model(family)
    model.save_pretrained(tmp_path)
    config = load_config(tmp_path)
    attention = model.model.layers[0].self_attn
    assert config.softmax_scale == pytest.approx(attention.scaling, rel=1e-15)
    assert config.indexer_types == tuple(
        "shared" if layer.self_attn.indexer is None else "full" for layer in model.model.layers
    )
    assert config.rms_norm_eps == model.config.rms_norm_eps
    assert config.attention_bias == model.config.attention_bias
    assert config.mlp_layer_types == tuple(model.config.mlp_layer_types)


SIX = {**GLM_52, "num_hidden_layers": 6, "index_topk_freq": MISSING, "index_skip_topk_offset": MISSING}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "FFFFFF"),  # GLM-5
        ({"index_topk_freq": 1}, "FFFFFF"),
        ({"index_topk_freq": 2, "index_skip_topk_offset": 1}, "FSFSFS"),
        ({"index_topk_freq": 2, "index_skip_topk_offset": 2}, "FFSFSF"),
        ({"index_topk_freq": 4, "index_skip_topk_offset": 3}, "FFFSSS"),
        ({"index_topk_freq": 2, "index_skip_topk_offset": 1, "index_topk_pattern": "FSSSSF"}, "FSSSSF"),
        ({"index_topk_pattern": ["full", "shared"] * 3}, "FSFSFS"),
        ({"index_topk_pattern": "FSSSSF", "indexer_types": ["full"] * 6}, "FFFFFF"),
        ({"indexer_types": ["full"] * 3 + ["shared"] * 3 + ["full"]}, "FFFSSS"),  # with the MTP layer's
    ],
)
def test_indexer_types(load, changes, expected):
    names = {"F": "full", "S": "shared"}
    assert load(SIX, **changes).indexer_types == tuple(names[c] for c in expected)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"first_k_dense_replace": 0}, "SSSSSS"),
        ({"first_k_dense_replace": 9}, "DDDDDD"),
        ({"mlp_layer_types": ["sparse"] * 5 + ["dense"]}, "SSSSSD"),
    ],
)
def test_mlp_layer_types(load, changes, expected):
    names = {"D": "dense", "S": "sparse"}
    assert load(SIX, **changes).mlp_layer_types == tuple(names[c] for c in expected)


def test_optional_fields(load):
    config = load(
        DEEPSEEK_V32,
        eos_token_id=None,
        quantization_config=None,
        rope_scaling=None,
        n_group=MISSING,
        topk_group=MISSING,
        indexer_rope_interleave=True,
    )
    assert config.eos_token_ids == ()
    assert config.weight_block is None
    assert config.yarn is None
    assert config.softmax_scale == pytest.approx(192**-0.5, rel=1e-15)
    assert (config.n_group, config.topk_group) == (1, 1)
    assert config.index_rope_interleaved


def test_yarn_without_mscale_leaves_the_softmax_scale_alone(load):
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": None, "original_max_position_embeddings": 4096}
    config = load(DEEPSEEK_V32, rope_parameters=rope)
    assert config.yarn == Yarn(40.0, 4096, 32.0, 1.0, None, None, None, True)
    assert config.softmax_scale == pytest.approx(192**-0.5, rel=1e-15)


@pytest.mark.parametrize(
    ("base", "changes", "message"),
    [
        (GLM_52, {"model_type": "llama"}, "model_type: expected glm_moe_dsa or deepseek_v32, got 'llama'"),
        (GLM_52, {"model_type": MISSING}, "model_type: expected glm_moe_dsa or deepseek_v32, got None"),
        (GLM_52, {"kv_lora_rank": MISSING}, "kv_lora_rank: expected a whole number of at least 1, got None"),
        (GLM_52, {"kv_lora_rank": 0}, "kv_lora_rank: expected a whole number of at least 1, got 0"),
        (GLM_52, {"kv_lora_rank": True}, "kv_lora_rank: expected a whole number of at least 1, got True"),
        (GLM_52, {"hidden_size": "6144"}, "hidden_size: expected a whole number of at least 1, got '6144'"),
        (GLM_52, {"q_lora_rank": None}, "q_lora_rank: expected a whole number of at least 1, got None"),
        (GLM_52, {"rms_norm_eps": 0}, "rms_norm_eps: expected a finite number above 0, got 0"),
        (GLM_52, {"rms_norm_eps": math.inf}, "rms_norm_eps: expected a finite number above 0, got inf"),
        (GLM_52, {"attention_bias": 1}, "attention_bias: expected true or false, got 1"),
        (GLM_52, {"hidden_act": "gelu"}, "hidden_act: expected 'silu', got 'gelu'"),
        (GLM_52, {"scoring_func": "softmax"}, "scoring_func: expected 'sigmoid', got 'softmax'"),
        (GLM_52, {"moe_layer_freq": 2}, "moe_layer_freq: expected 1, got 2"),
        (
            GLM_52,
            {"eos_token_id": [1, "2"]},
            r"eos_token_id: expected a token id or a list of them, got \[1, '2'\]",
        ),
        (GLM_52, {"rope_parameters": None}, "rope_theta: expected a finite number above 0, got None"),
        (GLM_52, {"rope_parameters": 3}, "rope_parameters: expected an object, got 3"),
        (
            GLM_52,
            {"rope_parameters": {"rope_theta": 1e4, "rope_type": "linear", "factor": 2}},
            "rope_parameters: rope_type: expected 'default' or 'yarn', got 'linear'",
        ),
        (
            DEEPSEEK_V32,
            {"rope_scaling": {"type": "yarn", "factor": 40}},
            "rope_scaling: original_max_position_embeddings: expected a whole number of at least 1, got None",
        ),
        (GLM_52, {"qk_rope_head_dim": 63}, "qk_rope_head_dim: expected an even number, got 63"),
        (GLM_52, {"index_head_dim": 32}, "index_head_dim: expected at least qk_rope_head_dim = 64, got 32"),
        (
            DEEPSEEK_V32,
            {"n_group": 7},
            "n_group: expected groups of at least 2 that divide 256 routed experts, got 7",
        ),
        (DEEPSEEK_V32, {"n_group": 256}, "n_group: expected groups of at least 2"),
        (DEEPSEEK_V32, {"topk_group": 9}, "topk_group: expected at most n_group = 8, got 9"),
        (DEEPSEEK_V32, {"num_experts_per_tok": 129}, "num_experts_per_tok: expected at most 128"),
        (SIX, {"indexer_types": ["full"] * 5}, "indexer_types: expected 6 entries, one per layer, got"),
        (
            SIX,
            {"indexer_types": ["full", "half"] * 3},
            r"indexer_types\[1\]: expected full or shared, got 'half'",
        ),
        (SIX, {"indexer_types": ["shared"] * 6}, r"indexer_types\[0\]: expected full, as no layer below"),
        (SIX, {"index_topk_pattern": "FFXFFF"}, r"index_topk_pattern\[2\]: expected full or shared, got 'X'"),
        (
            SIX,
            {"index_topk_freq": 4},
            "index_skip_topk_offset: expected a whole number of at least 1, got None",
        ),
        (SIX, {"mlp_layer_types": ["dense"] * 9}, "mlp_layer_types: expected 6 entries, one per layer, got"),
        (
            DEEPSEEK_V32,
            {"quantization_config": {"quant_method": "awq"}},
            "quantization_config: quant_method: expected 'fp8', got 'awq'",
        ),
        (
            DEEPSEEK_V32,
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128]}},
            r"weight_block_size: expected two whole numbers of at least 1, got \[128\]",
        ),
    ],
)
def test_refused(load, tmp_path, base, changes, message):
    with pytest.raises(CheckpointError, match=message) as error:
        load(base, **changes)
    assert str(error.value).startswith(str(tmp_path / "config.json"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "config.json: expected a file, found none"),
        (b"{", "config.json: expected readable JSON, got: "),
        (b"\xff\xfe", "config.json: expected readable JSON, got: "),
        (b"[1]", "config.json: expected a JSON object, got list"),
    ],
)
def test_unreadable_file(tmp_path, content, message):
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        load_config(tmp_path)
