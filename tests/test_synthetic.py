"""The synthetic checkpoint, as Hugging Face's own classes and our loader see it."""

import json
import os
from itertools import pairwise
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from resident_kv import threads
from safetensors.torch import load_file

from trtllm_hisparse.models.config import load_config
from trtllm_hisparse.models.synthetic import SPECIAL_TOKENS, VOCAB_SIZE, write_checkpoint
from trtllm_hisparse.serving.tokenizer import Tokenizer

FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("synthetic") / "checkpoint")


@pytest.fixture(scope="module")
def model(checkpoint):
    return transformers.AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    ).eval()


@pytest.fixture(scope="module")
def tokenizer(checkpoint):
    return transformers.AutoTokenizer.from_pretrained(checkpoint)


def test_loads_with_no_key_missing_or_left_over(checkpoint):
    model, info = transformers.GlmMoeDsaForCausalLM.from_pretrained(checkpoint, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"))
    assert model.config.model_type == "glm_moe_dsa"


def test_names_are_those_the_library_saves(checkpoint, model, tmp_path):
    model.save_pretrained(tmp_path)
    ours, theirs = load_file(checkpoint / FILES[1]), load_file(tmp_path / FILES[1])
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_config_survives_the_library(checkpoint, model, tmp_path):
    """A field the library renames or drops would mean something else there than here."""
    model.config.save_pretrained(tmp_path)
    assert load_config(tmp_path) == load_config(checkpoint)


def test_configuration(checkpoint):
    config = load_config(checkpoint)
    assert config.indexer_types == ("full",) * 3 + ("shared",) * 3 + ("full", "shared")
    assert config.mlp_layer_types == ("dense",) + ("sparse",) * 7
    assert config.eos_token_ids == (256,)
    assert (config.vocab_size, config.max_position_embeddings) == (VOCAB_SIZE, 32768)


def test_no_tensor_is_neutral(checkpoint):
    for name, tensor in load_file(checkpoint / FILES[1]).items():
        assert tensor.float().std() > 0.01, name
        assert tensor.isfinite().all(), name


def test_same_arguments_same_bytes(checkpoint, tmp_path):
    again = write_checkpoint(tmp_path / "again")
    assert all((again / name).read_bytes() == (checkpoint / name).read_bytes() for name in FILES)
    other = write_checkpoint(tmp_path / "other", seed=1)
    assert (other / FILES[1]).read_bytes() != (checkpoint / FILES[1]).read_bytes()


def test_sizes_and_dtype(tmp_path):
    path = write_checkpoint(
        tmp_path, layers=3, hidden=64, experts=4, top_k=16, max_context=1024, dtype=torch.bfloat16
    )
    assert {tensor.dtype for tensor in load_file(path / FILES[1]).values()} == {torch.bfloat16}
    model, info = transformers.AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert model.dtype == torch.bfloat16
    config = load_config(path)
    assert (config.num_hidden_layers, config.hidden_size, config.index_topk) == (3, 64, 16)


def test_other_dtypes_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"dtype: expected torch.float32 or torch.bfloat16, got torch.float16"):
        write_checkpoint(tmp_path, dtype=torch.float16)


# -- tokenizer --------------------------------------------------------------------------------------------
@given(text=st.text())
def test_any_text_comes_back(checkpoint, tokenizer, text):
    ids = tokenizer(text, add_special_tokens=True)["input_ids"]
    ours = Tokenizer(checkpoint)
    assert tuple(ids) == ours.encode(text)
    # Text that spells a special token is that token, which decoding leaves out.
    if not any(special in text for special in SPECIAL_TOKENS):
        assert ids == list(text.encode())
        assert tokenizer.decode(ids) == ours.decode(ids) == text


@given(data=st.binary())
def test_any_bytes_decode_as_utf8_would(tokenizer, data):
    assert tokenizer.decode(list(data)) == data.decode("utf-8", errors="replace")


def test_special_tokens(checkpoint, tokenizer):
    assert [tokenizer.convert_tokens_to_ids(t) for t in SPECIAL_TOKENS] == [256, 257, 258, 259]
    assert len(tokenizer) == VOCAB_SIZE
    assert tokenizer("a<|endoftext|>b")["input_ids"] == [97, 256, 98]
    assert tokenizer.eos_token_id == json.loads((checkpoint / FILES[0]).read_text())["eos_token_id"]
    ours = Tokenizer(checkpoint)
    assert ours.eos_ids == {256}
    assert ours.decode([97, 256, 98]) == "ab"


# -- what the random weights are tuned for ----------------------------------------------------------------
@torch.no_grad()
@threads(1)
def test_text_varies_and_selections_overlap(model):
    """By chance consecutive selections would share 8 % of their rows here (k = 32 of about 400)."""
    selections = {}
    for i, layer in enumerate(model.model.layers):
        if layer.self_attn.indexer is not None:
            layer.self_attn.indexer.register_forward_hook(
                lambda module, args, rows, i=i: selections.setdefault(i, []).append(set(rows[0, -1].tolist()))
            )
    source = Path(json.__file__).read_bytes()
    ids, cache, tokens, printable = torch.tensor([list(source[:400])]), None, [], []
    for _ in range(32):
        out = model(input_ids=ids, past_key_values=cache, use_cache=True)
        cache, logits = out.past_key_values, out.logits[0, -1]
        printable.append(logits.softmax(-1)[[10, *range(32, 127)]].sum())
        ids = logits.argmax().view(1, 1)
        tokens.append(int(ids))
    assert len(set(tokens)) >= 12
    assert all(t == 10 or 32 <= t < 127 for t in tokens)
    assert torch.stack(printable).min() > 0.99
    for layer, rows in selections.items():
        overlap = [len(a & b) / 32 for a, b in pairwise(rows)]
        assert sum(overlap) / len(overlap) > 0.4, layer
