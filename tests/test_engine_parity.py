"""TorchEngine against Hugging Face's own classes: logits, greedy tokens, selections."""

import math

import hf_oracle
import pytest
import torch
from hf_oracle import FAMILIES, TOP_K
from resident_kv import ResidentKV, prefill, threads
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from trtllm_hisparse.engine.rope import frequencies
from trtllm_hisparse.engine.torch_engine import TorchEngine
from trtllm_hisparse.models.config import load_config

STEPS = 64
LOGIT_TOLERANCE = 1e-4
NEAR_TIE = 1e-5  # a cut closer than this may fall either way


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    with threads(1):
        yield


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    """{family: TorchEngine of its checkpoint, as the library saves it}"""
    loaded = {}

    def get(family):
        if family not in loaded:
            path = tmp_path_factory.mktemp(family)
            hf_oracle.model(family).save_pretrained(path)
            loaded[family] = TorchEngine.load(path)
        return loaded[family]

    return get


def worst(got, expected):
    return (got - expected).abs().max().item()


@pytest.mark.parametrize("family", FAMILIES)
def test_teacher_forced_run_matches(engines, family):
    engine, prompt = engines(family), hf_oracle.prompt(400)
    trace = hf_oracle.greedy(hf_oracle.model(family), prompt, STEPS)
    kv = ResidentKV(engine)
    logits, selections = [], {layer: [] for layer in engine.spec.producers}
    for fed in [prompt, *([t] for t in trace.tokens[:-1])]:
        step = kv.step({0: fed})
        logits.append(engine.step(step)[0])
        for layer, rows in step.selections.items():
            selections[layer] += rows.tolist()
    logits = torch.stack(logits)

    assert logits.dtype == torch.float32
    assert worst(logits, trace.logits) < LOGIT_TOLERANCE
    assert logits.argmax(-1).tolist() == trace.tokens
    assert len(set(trace.tokens)) > STEPS / 2, "a repetitive text would prove little"
    assert list(selections) == list(trace.selections) == list(engine.spec.producers)
    for layer, expected in trace.selections.items():
        assert len(expected) == len(prompt) + STEPS - 1
        for query, row in enumerate(selections[layer]):
            got = [i for i in row if i >= 0]
            assert len(got) == len(set(got)) == min(TOP_K, query + 1)
            assert set(got) == expected[query] or trace.gaps[layer][query] < NEAR_TIE, (layer, query)


def test_free_running_greedy_text_matches(engines):
    engine, prompt = engines("glm_shared"), hf_oracle.prompt(400)
    trace = hf_oracle.greedy(hf_oracle.model("glm_shared"), prompt, STEPS)
    kv = ResidentKV(engine)
    tokens, fed = [], prompt
    for _ in range(STEPS):
        tokens.append(int(engine.step(kv.step({0: fed}))[0].argmax()))
        fed = tokens[-1:]
    assert tokens == trace.tokens


@pytest.mark.parametrize("family", ["glm_shared", "v32_yarn"])
@pytest.mark.parametrize("length", [1, TOP_K - 1, TOP_K, TOP_K + 1])
def test_around_the_dense_regime(engines, family, length):
    engine, prompt = engines(family), hf_oracle.prompt(length, seed=length)
    got = prefill(engine, ResidentKV(engine), {0: prompt}, logits="all")[0]
    assert worst(got, hf_oracle.forward(hf_oracle.model(family), prompt)) < LOGIT_TOLERANCE


def test_ragged_batch_in_chunks(engines):
    engine = engines("glm_shared")
    prompts = {slot: hf_oracle.prompt(n, seed=n) for slot, n in enumerate([230, 41, 7])}
    got = prefill(engine, ResidentKV(engine, slots=3), prompts, chunk=50, logits="all")
    for slot, prompt in prompts.items():
        assert worst(got[slot], hf_oracle.forward(hf_oracle.model("glm_shared"), prompt)) < LOGIT_TOLERANCE


def test_bfloat16_stays_near_float32(engines, tmp_path):
    hf_oracle.model("glm").save_pretrained(tmp_path)
    prompt = hf_oracle.prompt(TOP_K)  # at most k positions: no selection that rounding could flip
    logits = {}
    for dtype in (torch.float32, torch.bfloat16):
        engine = TorchEngine.load(tmp_path, dtype)
        logits[dtype] = prefill(engine, ResidentKV(engine), {0: prompt}, logits="all")[0]
    assert logits[torch.bfloat16].dtype == torch.float32
    difference = logits[torch.bfloat16] - logits[torch.float32]
    assert 1e-3 < difference.square().mean().sqrt() < 0.1  # logits have a standard deviation of 1


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"mscale": None, "mscale_all_dim": None},
        {"attention_factor": 1.7},
        {"truncate": False},
        {"factor": 0.5},
        {"beta_fast": 4.0, "beta_slow": 4.0},
        {"original_max_position_embeddings": 4096},
    ],
)
def test_yarn_frequencies(tmp_path, change):
    config = hf_oracle.model("v32_yarn").config
    ours = {**hf_oracle.YARN, **change}
    altered = type(config)(**{**config.to_dict(), "rope_parameters": ours})
    altered.save_pretrained(tmp_path)
    got, factor = frequencies(load_config(tmp_path))
    expected, expected_factor = ROPE_INIT_FUNCTIONS["yarn"](altered, "cpu")
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=0)
    assert math.isclose(factor, expected_factor, rel_tol=1e-12)
