"""Reading weights: shards, fused experts, FP8 blocks, and every way a file can be wrong."""

import json
from collections import Counter

import hf_oracle
import numpy as np
import pytest
import torch
from resident_kv import ResidentKV, prefill, threads
from safetensors.torch import load_file, save_file

from trtllm_hisparse.engine.torch_engine import TorchEngine
from trtllm_hisparse.errors import CheckpointError
from trtllm_hisparse.models import fp8
from trtllm_hisparse.models.checkpoint import Checkpoint
from trtllm_hisparse.models.config import load_config

FAMILY = "glm_shared"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    with threads(1):
        yield


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint as the library writes it, in one file."""
    path = tmp_path_factory.mktemp("single")
    hf_oracle.model(FAMILY).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def expected(saved):
    return logits(saved)


@pytest.fixture
def write(saved, tmp_path):
    """Write a copy of the checkpoint with other tensors and other config fields."""

    def copy(tensors, **config):
        raw = json.loads((saved / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({**raw, **config}))
        save_file({n: t.contiguous() for n, t in tensors.items()}, tmp_path / SINGLE)
        return tmp_path

    return copy


def tensors_of(path):
    return load_file(path / SINGLE)


def logits(path):
    engine = TorchEngine.load(path)
    return prefill(engine, ResidentKV(engine), {0: hf_oracle.prompt(60)}, logits="all")[0]


# -- layouts -----------------------------------------------------------------------------------------------


def test_shards(expected, tmp_path):
    hf_oracle.model(FAMILY).save_pretrained(tmp_path, max_shard_size="1MB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 3
    assert torch.equal(logits(tmp_path), expected)


def test_fused_experts(saved, expected, write):
    tensors = tensors_of(saved)
    fused = {n: t for n, t in tensors.items() if ".experts." not in n}
    fused |= {n: t for n, t in hf_oracle.model(FAMILY).state_dict().items() if ".experts." in n}
    assert fused["model.layers.1.mlp.experts.gate_up_proj"].shape == (8, 128, 128)
    assert len(fused) < len(tensors)
    assert torch.equal(logits(write(fused)), expected)


def test_mtp_layers_are_ignored(saved, expected, write):
    extra = {
        "model.layers.8.eh_proj.weight": torch.zeros(3),
        "model.layers.8.input_layernorm.weight": torch.zeros(1),
    }
    path = write(tensors_of(saved) | extra, num_nextn_predict_layers=1)
    assert torch.equal(logits(path), expected)


def test_tied_embeddings(saved, write):
    tensors = tensors_of(saved)
    tied = write({n: t for n, t in tensors.items() if n != "lm_head.weight"}, tie_word_embeddings=True)
    got = logits(tied)
    untied = write(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()})
    assert torch.equal(got, logits(untied))


def test_every_tensor_is_read_at_most_once(saved, monkeypatch):
    reads = Counter()
    plain = Checkpoint._read

    def counting(self, file, name, shape):
        reads[name] += 1
        return plain(self, file, name, shape)

    monkeypatch.setattr(Checkpoint, "_read", counting)
    TorchEngine.load(saved)
    assert set(reads) == set(tensors_of(saved))
    assert set(reads.values()) == {1}


def test_opening_reads_no_tensor(saved, monkeypatch):
    monkeypatch.setattr(Checkpoint, "_read", None)
    assert "lm_head.weight" in Checkpoint(saved)
    assert "lm_head.bias" not in Checkpoint(saved)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
def test_tensor_comes_in_the_dtype_asked_for(saved, write, stored):
    value = torch.tensor([1.0, -2.5, 0.1])
    path = write({"a": value.to(stored)})
    got = Checkpoint(path).tensor("a", (3,), torch.bfloat16)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, value.to(stored).to(torch.bfloat16))


# -- FP8 ---------------------------------------------------------------------------------------------------


def reference(weight, scale, block):
    """Element by element, in float64."""
    out = np.zeros(weight.shape)
    for index in np.ndindex(*weight.shape):
        *lead, r, c = index
        out[index] = float(weight[index]) * float(scale[(*lead, r // block[0], c // block[1])])
    return torch.tensor(out)


@pytest.mark.parametrize(
    ("shape", "block"),
    [((6, 8), (2, 4)), ((7, 5), (3, 2)), ((1, 9), (4, 4)), ((2, 5, 3), (2, 2)), ((3, 3), (128, 128))],
)
def test_dequantise(shape, block):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(shape, generator=generator).to(torch.float8_e4m3fn)
    scale = torch.tensor([1.5, 0.3, 0.07])[torch.randint(0, 3, fp8.scale_shape(shape, block), generator=generator)]
    got = fp8.dequantise(weight, scale, block)
    assert got.dtype == torch.float32
    assert torch.equal(got, reference(weight.float(), scale, block).float())


def test_dequantise_by_hand():
    weight = torch.tensor([[1.0, 2.0, 4.0], [8.0, 16.0, 32.0], [0.5, -1.0, 64.0]]).to(torch.float8_e4m3fn)
    got = fp8.dequantise(weight, torch.tensor([[1.5, 3.0], [0.25, 10.0]]), (2, 2))
    assert got.tolist() == [[1.5, 3.0, 12.0], [12.0, 24.0, 96.0], [0.125, -0.25, 640.0]]


def test_scale_of_another_shape_is_refused():
    weight = torch.zeros(4, 4).to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"scale: expected shape \[2, 1\], got \[1, 2\]"):
        fp8.dequantise(weight, torch.ones(1, 2), (2, 4))


def quantised(tensors, block):
    """(FP8 tensors, the same as plain floats): every projection the released checkpoints quantise."""
    generator = torch.Generator().manual_seed(0)
    packed, plain = {}, {}
    for name, tensor in tensors.items():
        packed[name] = plain[name] = tensor
        if "_proj.weight" in name and "weights_proj" not in name:
            scale = torch.tensor([1.5, 0.3])[
                torch.randint(0, 2, fp8.scale_shape(tuple(tensor.shape), block), generator=generator)
            ]
            weight = tensor.to(torch.float8_e4m3fn)
            packed[name], packed[f"{name}_scale_inv"] = weight, scale
            grid = torch.kron(scale, torch.ones(block))[: tensor.shape[0], : tensor.shape[1]]
            plain[name] = weight.float() * grid
    return packed, plain


@pytest.mark.parametrize("block", [[128, 128], [48, 80]])  # of weights like [80, 128]: ragged in each way
def test_fp8_model(saved, expected, write, block):
    packed, plain = quantised(tensors_of(saved), tuple(block))
    config = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": block}
    got = logits(write(packed, quantization_config=config))
    assert torch.equal(got, logits(write(plain)))
    assert (got - expected).abs().max() > 0.1


# -- what must be refused ----------------------------------------------------------------------------------


def fails(path, message, name="a", shape=(3,)):
    with pytest.raises(CheckpointError, match=message):
        Checkpoint(path).tensor(name, shape, torch.float32)


def test_missing_directory(tmp_path):
    fails(tmp_path / "none", "none: expected a checkpoint directory, found none")


def test_missing_config(tmp_path):
    fails(tmp_path, "config.json: expected a file, found none")


def test_no_weights(write):
    path = write({})
    (path / SINGLE).unlink()
    fails(path, f"expected {SINGLE} or {INDEX}, found neither")


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_truncated_file(write, keep):
    path = write({"a": torch.zeros(3000)})
    (path / SINGLE).write_bytes((path / SINGLE).read_bytes()[:keep])
    fails(path, rf"{SINGLE}: expected a complete safetensors file, got: ")


def test_corrupt_header(write):
    path = write({"a": torch.zeros(3)})
    raw = bytearray((path / SINGLE).read_bytes())
    raw[8:12] = b"!!!!"
    (path / SINGLE).write_bytes(raw)
    fails(path, rf"{SINGLE}: expected a complete safetensors file, got: ")


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"b": torch.zeros(3)}, "expected tensor a, found none"),
        ({"a": torch.zeros(3, 1)}, r"model.safetensors: a: expected shape \[3\], got \[3, 1\]"),
        (
            {"a": torch.zeros(3, dtype=torch.int8)},
            "a: expected dtype torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, got torch.int8",
        ),
        ({"a": torch.zeros(3).to(torch.float8_e5m2)}, "a: expected dtype .*, got torch.float8_e5m2"),
        ({"a": torch.zeros(3).to(torch.float8_e4m3fn)}, r"a: expected an FP8 matrix, got shape \[3\]"),
    ],
)
def test_wrong_tensor(write, tensors, message):
    fails(write(tensors), message)


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        ({}, "model.safetensors: a: expected FP8 scales a_scale_inv, found none"),
        ({"a_scale_inv": torch.ones(2, 2)}, r"a_scale_inv: expected shape \[2, 3\], got \[2, 2\]"),
        (
            {"a_scale_inv": torch.ones(2, 3, dtype=torch.int32)},
            "a_scale_inv: expected floating point, got torch.int32",
        ),
    ],
)
def test_wrong_scale(write, scale, message):
    weight = torch.zeros(130, 260).to(torch.float8_e4m3fn)  # blocks of 128 unless the config says otherwise
    fails(write({"a": weight, **scale}), message, shape=(130, 260))


def test_layer_missing_from_a_checkpoint_is_named(saved, write):
    tensors = tensors_of(saved)
    del tensors["model.layers.6.self_attn.indexer.k_norm.bias"]
    with pytest.raises(
        CheckpointError, match=r"expected tensor model\.layers\.6\.self_attn\.indexer\.k_norm\.bias"
    ):
        TorchEngine.load(write(tensors))


def test_config_that_contradicts_the_weights_is_named(saved, write):
    with pytest.raises(
        CheckpointError, match=r"layers\.0\.self_attn\.q_a_proj\.weight: expected shape \[72, 128\]"
    ):
        TorchEngine.load(write(tensors_of(saved), q_lora_rank=72))


@pytest.fixture
def sharded(write):
    """Tensor a in shard x, with an index to falsify."""
    path = write({})
    (path / SINGLE).unlink()
    save_file({"a": torch.tensor([1.0, 2.0, 3.0])}, path / "x.safetensors")

    def index(content):
        (path / INDEX).write_text(content if isinstance(content, str) else json.dumps(content))
        return path

    return index


def test_index(sharded):
    path = sharded({"weight_map": {"a": "x.safetensors"}})
    assert Checkpoint(path).tensor("a", (3,), torch.float32).tolist() == [1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", f"{INDEX}: expected readable JSON, got: "),
        ({}, f"{INDEX}: weight_map: expected an object naming the shard of every tensor"),
        ({"weight_map": []}, f"{INDEX}: weight_map: expected an object, got "),
        ({"weight_map": {"a": 3}}, r"weight_map\[a\]: expected a file name, got 3"),
        (
            {"weight_map": {"a": "../x.safetensors"}},
            r"weight_map\[a\]: expected a file name, got '../x.safetensors'",
        ),
        (
            {"weight_map": {"a": "y.safetensors"}},
            f"{INDEX}: expected shard y.safetensors beside it, found none",
        ),
        ({"weight_map": {"b": "x.safetensors"}}, "expected tensor a, found none"),
    ],
)
def test_wrong_index(sharded, content, message):
    fails(sharded(content), message)


def test_index_that_names_the_wrong_shard(sharded):
    path = sharded({"weight_map": {"a": "x.safetensors", "b": "x.safetensors"}})
    fails(path, rf"x\.safetensors: expected tensor b, which {INDEX} places here, found none", name="b")


def test_damaged_shard_is_found_on_opening(sharded):
    path = sharded({"weight_map": {"a": "x.safetensors"}})
    (path / "x.safetensors").write_bytes(b"12345678")
    with pytest.raises(CheckpointError, match=r"x\.safetensors: expected a complete safetensors file"):
        Checkpoint(path)


def test_config_is_read_from_the_same_directory(saved):
    assert load_config(saved).num_hidden_layers == 8
