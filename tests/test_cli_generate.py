"""`trtllm-hisparse generate` and the demo, as a user runs them."""

import json
import re

import pytest

from trtllm_hisparse import demo
from trtllm_hisparse.cli import main
from trtllm_hisparse.models.synthetic import write_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"), layers=4, hidden=64, top_k=16)


@pytest.fixture
def prompts(tmp_path):
    paths = []
    for name, length in (("a", 700), ("b", 333)):
        path = tmp_path / f"{name}.txt"
        path.write_text(("the quick brown fox jumps over the lazy dog; " * 30)[:length])
        paths += ["--prompt-file", str(path)]
    return paths


def generate(capsys, checkpoint, prompts, *more):
    status = main(["generate", str(checkpoint), *prompts, "--host-pool-mib", "64", "--hot-rows", "48", *more])
    out, err = capsys.readouterr()
    return status, out, err


@pytest.mark.parametrize("sampling", [[], ["--temperature", "0.9", "--seed", "3", "--top-p", "0.95"]])
def test_json_is_the_same_under_every_placement(capsys, checkpoint, prompts, sampling):
    results = {}
    for placement in ("resident", "fixed", "adaptive"):
        flags = ["--placement", placement, "--device-pool-mib", "1.4", "--max-tokens", "24", "--json", *sampling]
        if placement == "resident":
            flags[3] = "16"
        status, out, _ = generate(capsys, checkpoint, prompts, *flags)
        assert status == 0
        results[placement] = json.loads(out)
    resident = results["resident"]
    assert [len(tokens) for tokens in resident["outputs"]] == [24, 24]
    assert resident["census"]["hot"] == resident["census"]["host"] == 0
    for placement in ("fixed", "adaptive"):
        assert results[placement]["outputs"] == resident["outputs"]
        assert results[placement]["texts"] == resident["texts"]
        assert results[placement]["census"]["host"] > 0
        assert sum(results[placement]["census"].values()) == sum(resident["census"].values())
    pool = results["adaptive"]["pool"]
    assert pool["device_pool_bytes"] == int(1.4 * 2**20)
    assert 0 < pool["device_peak_bytes"] <= pool["device_pool_bytes"]


def test_plain_output_shows_text_and_census(capsys, checkpoint, prompts):
    status, out, _ = generate(capsys, checkpoint, prompts, "--max-tokens", "4")
    assert status == 0
    assert "a.txt" in out
    assert "census" in out


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--hot-rows", "8"], r"hot_rows=8 cannot hold one step's selections: .* 1 x 16 = 16"),
        (["--device-pool-mib", "0.01"], r"device_pool_bytes=10485 cannot run one request"),
        (["--host-pool-mib", "0.1", "--device-pool-mib", "1.5"], r"host pages of 64 rows, the pool has \d"),
        (["--max-tokens", "0"], "max_tokens: expected at least 1, got 0"),
        (["--temperature", "-1"], "temperature: expected a finite number"),
        (["--prompt-file", "/nonexistent.txt"], "/nonexistent.txt: cannot be read"),
    ],
)
def test_a_users_mistake_is_one_line(capsys, checkpoint, prompts, flags, says):
    status, out, err = generate(capsys, checkpoint, prompts, *flags)
    assert status == 2
    assert out == ""
    assert err.startswith("error: ")
    assert len(err.strip().splitlines()) == 1
    assert re.search(says, err)


def test_not_a_checkpoint(capsys, tmp_path, prompts):
    status, _, err = generate(capsys, tmp_path, prompts)
    assert (status, len(err.strip().splitlines())) == (2, 1)
    assert "tokenizer.json" in err


def test_prompts_that_are_no_text(capsys, checkpoint, tmp_path):
    bad, empty = tmp_path / "bad", tmp_path / "empty"
    bad.write_bytes(b"ab\xff")
    empty.write_text("")
    assert "byte 2 is 0xff" in generate(capsys, checkpoint, ["--prompt-file", str(bad)])[2]
    assert "the prompt is empty" in generate(capsys, checkpoint, ["--prompt-file", str(empty)])[2]


def test_the_demo_ends_with_its_figures(capsys, monkeypatch, tmp_path):
    """The real thing with shorter prompts."""
    monkeypatch.setattr(demo, "BUILD", tmp_path)
    monkeypatch.setattr(demo, "PROMPTS", (("textwrap", 2000), ("heapq", 1400), ("queue", 1700)))
    monkeypatch.setattr(demo, "FIRST_WAVE", 2)
    monkeypatch.setattr(demo, "MAX_TOKENS", 24)
    config = demo.replace(demo.CONFIG, device_pool_bytes=6 << 20, max_context=2048, max_requests=3)
    monkeypatch.setattr(demo, "CONFIG", config)
    assert demo.main() == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["tokens_equal_resident"] is True
    assert (report["requests"], report["tokens"], report["admissions"]) == (3, 72, 3)
    assert report["history_bytes"] > report["device_pool_bytes"] >= report["device_peak_bytes"] > 0
    assert set(report["census"]) == {"direct", "hot", "host"}
    assert report["census"]["host"] > 0
    assert report["server"].startswith("triton 2.")
