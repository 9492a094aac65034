"""`trtllm-hisparse plan`, as a program would call it."""

import json
import subprocess
import sys

import pytest

from trtllm_hisparse.cli import main

SETTING = {
    "--context": "100000",
    "--hot-rows": "4096",
    "--slots": "35",
    "--max-width": "8",
    "--drafter-window": "2048",
    "--drafter-row-bytes": "12288",
}
PUBLISHED = ["plan", *(word for option in SETTING.items() for word in option)]


def figures(capsys, *arguments):
    assert main([*PUBLISHED, *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_command_line_gives_the_published_figures():
    """A process of its own: standard output is the JSON object and nothing else."""
    command = [sys.executable, "-m", "trtllm_hisparse.cli", *PUBLISHED, "--model", "glm-5.3", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL)
    result = json.loads(done.stdout)
    rounded = {name: round(value, 3) for name, value in result.items() if name.count("_gib")}
    assert rounded == {
        "resident_gib_per_session": 4.444,
        "adaptive_gib_per_session": 0.432,
        "resident_gib_per_session_speculative": 4.469,
        "adaptive_gib_per_session_speculative": 0.492,
        "ring_gib": 0.872,
        "staging_gib": 1.230,
        "staging_gib_dedicated": 23.994,
        "host_gib_per_session": 4.186,
    }
    assert result["ring_rows"] == 2176
    assert (result["resolver_calls"], result["follower_copies"], result["chi"]) == (21, 57, 4)


@pytest.mark.parametrize(
    ("model", "calls", "copies", "chi"), [("deepseek-v3.2", 61, 0, 1), ("deepseek-v4.1-flash", 8, 0, 1)]
)
def test_other_models(capsys, model, calls, copies, chi):
    result = figures(capsys, "--model", model)
    assert (result["resolver_calls"], result["follower_copies"], result["chi"]) == (calls, copies, chi)
    assert result["resident_gib_per_session"] > result["adaptive_gib_per_session"]


def test_figures_are_not_rounded(capsys):
    result = figures(capsys, "--model", "glm-5.3")
    assert result["resident_gib_per_session"] == 100_032 * 47_700 / 2**30


def test_session_counts_need_a_budget(capsys):
    assert figures(capsys, "--model", "glm-5.3")["sessions_adaptive"] is None
    result = figures(capsys, "--model", "glm-5.3", "--device-gib", "30", "--host-gib", "4000")
    assert result["sessions_resident"] == 6
    assert result["sessions_adaptive"] == 69
    assert result["sessions_resident_speculative"] == 6
    assert result["sessions_adaptive_speculative"] == 60
    assert result["sessions_host"] == 955


def test_table(capsys):
    assert main([*PUBLISHED, "--model", "glm-5.3", "--device-gib", "30", "--host-gib", "4000"]) == 0
    text = capsys.readouterr().out
    for figure in (
        "4.444",
        "0.432",
        "4.469",
        "0.492",
        "10.3x",
        "2,176",
        "1.230",
        "23.994",
        "21",
        "57",
        "69",
        "955",
    ):
        assert figure in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "glm-9"], "model: expected one of glm-5, glm-5.2, glm-5.3"),
        (["--model", "glm-5.3", "--hot-rows", "64"], "hot_rows: expected at least top_k = 2048"),
        (["--model", "glm-5", "--context", "300000"], "context: expected 1 to 202752"),
        (["--model", "glm-5.3", "--device-gib", "0"], "device_gib: expected a finite number above 0, got 0.0"),
        (["--model", "glm-5.3", "--host-gib", "inf"], "host_gib: expected a finite number above 0, got inf"),
        (["--model", "glm-5.3", "--device-gib", "1e-12"], "device_bytes: expected at least 1, got 0"),
    ],
)
def test_a_mistake_is_one_line(capsys, arguments, message):
    assert main([*PUBLISHED, *arguments]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert message in output.err
    assert output.err.count("\n") == 1
