"""The whole way: real tritonserver, real sockets, NVIDIA's client, a small checkpoint of random weights."""

import json
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient

from trtllm_hisparse.config import MIB, HiSparseConfig
from trtllm_hisparse.errors import CheckpointError
from trtllm_hisparse.models.synthetic import write_checkpoint
from trtllm_hisparse.runtime.build import load_runtime
from trtllm_hisparse.runtime.request import FinishReason, SamplingParams
from trtllm_hisparse.serving.client import InferenceServerException, TextStream, tensor
from trtllm_hisparse.serving.metrics import METRICS
from trtllm_hisparse.serving.server import MODEL_REPOSITORY, ServerError, TritonServer
from trtllm_hisparse.serving.text import TextPiece, TextRequest, TextService
from trtllm_hisparse.serving.tokenizer import Tokenizer
from trtllm_hisparse.serving.triton import TEXT_MODEL, TOKEN_MODEL

CONFIG = HiSparseConfig(
    device_pool_bytes=8 * MIB,
    host_pool_bytes=32 * MIB,
    hot_rows=64,
    page_rows=16,
    max_requests=8,
    max_context=1024,
    debug_checks=True,
)
PROMPT = "def add(a, b):\n    return a + b\n"
ENDLESS = CONFIG.max_context - len(PROMPT)
"""Output tokens that take longer than any test here."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(
        tmp_path_factory.mktemp("checkpoint"),
        seed=3,
        layers=3,
        hidden=64,
        experts=2,
        top_k=16,
        max_context=2048,
    )


@dataclass(frozen=True)
class Served:
    """A running `trtllm-hisparse serve`; its endpoints as `host:port`."""

    http_url: str
    grpc_url: str
    metrics_url: str


@pytest.fixture(scope="module")
def server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The command itself; ended by SIGTERM, it must leave nothing behind."""
    config = tmp_path_factory.mktemp("config") / "config.json"
    config.write_text(json.dumps(CONFIG.to_dict()))
    command = [sys.executable, "-m", "trtllm_hisparse.cli", "serve", str(checkpoint), "--config", str(config)]
    ports = ["--http-port", "0", "--grpc-port", "0", "--metrics-port", "0"]
    with subprocess.Popen([*command, *ports], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as serve:
        assert serve.stdout is not None
        assert serve.stderr is not None
        urls = re.findall(r"(?:HTTP|gRPC|metrics) ([\d.]+:\d+)", serve.stdout.readline())
        try:
            assert len(urls) == 3, serve.stderr.read()
            log = Path(serve.stdout.readline().split()[-1])
            served = Served(*urls)
            yield served
            assert metric(served, "hisparse_requests_running") == 0
            assert metric(served, "hisparse_unserved_requests_total", reason="failed") == 0
        finally:
            serve.terminate()
        assert serve.wait(30) == 0, serve.stderr.read()
        assert not log.parent.exists()


@pytest.fixture(scope="module")
def local(checkpoint: Path) -> Iterator[TextService]:
    """The same checkpoint without a server: what the server must answer."""
    runtime = load_runtime(str(checkpoint), CONFIG)
    runtime.start()
    yield TextService.over(runtime, Tokenizer(checkpoint))
    runtime.close()


def joined(pieces: list[TextPiece]) -> tuple[str, tuple[int, ...], FinishReason | None]:
    text = "".join(piece.text for piece in pieces)
    return text, tuple(token for piece in pieces for token in piece.tokens), pieces[-1].reason


def post(server: Served, path: str, body: dict[str, Any]) -> tuple[int, str]:
    request = urllib.request.Request(f"http://{server.http_url}{path}", json.dumps(body).encode())
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def metric(server: Served, name: str, **labels: str) -> int:
    with urllib.request.urlopen(f"http://{server.metrics_url}/metrics", timeout=10) as response:
        page = response.read().decode()
    suffix = "{" + ",".join(f'{key}="{value}"' for key, value in labels.items()) + "}" if labels else ""
    found = re.search(rf"^{re.escape(name + suffix)} (\S+)$", page, re.MULTILINE)
    assert found, f"{name}{suffix} is not on /metrics"
    return int(float(found[1]))


def eventually(condition: Any, seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


class TokenStream:
    """Requests to the token-level model as existing clients send them, on one gRPC stream."""

    def __init__(self, server: Served | TritonServer) -> None:
        self.client = grpcclient.InferenceServerClient(server.grpc_url)
        self.responses: SimpleQueue[Any] = SimpleQueue()
        self.client.start_stream(lambda result, error: self.responses.put(error or result))

    def __enter__(self) -> "TokenStream":
        return self

    def __exit__(self, *_: object) -> None:
        self.client.stop_stream()
        self.client.close()

    def send(self, inputs: list[Any], request_id: str = "", model: str = TOKEN_MODEL) -> None:
        self.client.async_stream_infer(model, inputs, request_id=request_id)

    def get(self) -> Any:
        return self.responses.get(timeout=30)


def token_inputs(max_tokens: int, streaming: bool, *more: Any) -> list[Any]:
    return [
        tensor("input_ids", list(PROMPT.encode()), np.int32),
        tensor("input_lengths", [len(PROMPT)], np.int32),
        tensor("request_output_len", [max_tokens], np.int32),
        tensor("streaming", [streaming], np.bool_),
        *more,
    ]


# -- answers --------------------------------------------------------------------------------------------
def test_the_models_are_ready(server: Served) -> None:
    for model in (TOKEN_MODEL, TEXT_MODEL):
        with urllib.request.urlopen(f"http://{server.http_url}/v2/models/{model}/ready", timeout=10) as response:
            assert response.status == 200


@pytest.mark.parametrize("stream", [True, False])
def test_grpc_gives_the_tokens_of_a_run_without_a_server(server: Served, local: TextService, stream: bool) -> None:
    expected = list(local.generate(TextRequest(PROMPT, 24)))
    with TextStream(server.grpc_url, PROMPT, 24, stream=stream) as pieces:
        got = list(pieces)
    assert joined(got) == joined(expected)
    assert len(got) == (len(expected) if stream else 1)


def test_sampling_and_stop_strings(server: Served, local: TextService) -> None:
    sampling = SamplingParams(temperature=0.75, top_k=20, top_p=0.875, seed=2**63 + 1)
    text = joined(list(local.generate(TextRequest(PROMPT, 24, sampling))))[0]
    stop = (text[7:9], "never")
    expected = joined(list(local.generate(TextRequest(PROMPT, 24, sampling, stop))))
    assert expected[2] is FinishReason.STOP
    with TextStream(
        server.grpc_url, PROMPT, 24, temperature=0.75, top_k=20, top_p=0.875, seed=2**63 + 1, stop=stop
    ) as pieces:
        assert joined(list(pieces)) == expected


def test_concurrent_streams_each_get_their_own_text(server: Served, local: TextService) -> None:
    prompts = [PROMPT * (i % 4 + 1) + str(i) for i in range(10)]
    streams = [TextStream(server.grpc_url, prompt, 12) for prompt in prompts]
    got = [joined(list(stream)) for stream in streams]
    assert got == [joined(list(local.generate(TextRequest(prompt, 12)))) for prompt in prompts]


def test_http_generate_and_generate_stream(server: Served, local: TextService) -> None:
    expected = list(local.generate(TextRequest(PROMPT, 8)))
    text, tokens, _ = joined(expected)
    body = {"text_input": PROMPT, "max_tokens": 8}

    status, answer = post(server, f"/v2/models/{TEXT_MODEL}/generate", body)
    assert status == 200, answer
    values = json.loads(answer)
    assert (values["text_output"], tuple(values["output_ids"]), values["finish_reason"]) == (
        text,
        tokens,
        "length",
    )

    status, answer = post(server, f"/v2/models/{TEXT_MODEL}/generate_stream", body | {"stream": True})
    assert status == 200, answer
    events = [json.loads(line.removeprefix("data: ")) for line in answer.splitlines() if line]
    assert len(events) == len(expected)
    assert "".join(event["text_output"] for event in events) == text

    status, answer = post(server, f"/v2/models/{TEXT_MODEL}/generate", body | {"exclude_input_in_output": False})
    assert json.loads(answer)["text_output"] == PROMPT + text


@pytest.mark.parametrize("streaming", [True, False])
def test_token_level_shapes(server: Served, local: TextService, streaming: bool) -> None:
    tokens = joined(list(local.generate(TextRequest(PROMPT, 6))))[1]
    got: list[int] = []
    with TokenStream(server) as stream:
        stream.send(token_inputs(6, streaming, tensor("end_id", [256], np.int32)))
        for _ in range(6 if streaming else 1):
            result = stream.get()
            ids = result.as_numpy("output_ids")
            assert ids.shape == (1, 1, 1 if streaming else 6)
            assert result.as_numpy("sequence_length").tolist() == [[ids.size]]
            got += ids[0][0].tolist()
        assert result.as_numpy("finish_reason").item() == b"length"
    assert tuple(got) == tokens


# -- cancellation -----------------------------------------------------------------------------------------
def test_cancelling_a_stream_frees_the_request(server: Served) -> None:
    before = metric(server, "hisparse_unserved_requests_total", reason="cancelled")
    with TextStream(server.grpc_url, PROMPT, ENDLESS) as stream:
        next(stream)
        eventually(lambda: metric(server, "hisparse_requests_running") == 1)
        stream.cancel()
        assert list(stream) == []
    eventually(lambda: metric(server, "hisparse_requests_running") == 0)
    assert metric(server, "hisparse_unserved_requests_total", reason="cancelled") == before + 1


@pytest.mark.parametrize("seen", [True, False])
def test_cancelling_in_prefill_or_on_the_way(server: Served, seen: bool) -> None:
    streams = [TextStream(server.grpc_url, PROMPT * 20 + str(i), 300) for i in range(3)]
    if seen:
        eventually(lambda: metric(server, "hisparse_requests_running") == 3)
    for stream in streams:
        stream.cancel()
    time.sleep(0.3)
    eventually(lambda: metric(server, "hisparse_requests_running") == 0)
    assert metric(server, "hisparse_queue_depth") == 0


def test_stop_by_request_id(server: Served) -> None:
    stop = [
        tensor("input_ids", [0], np.int32),
        tensor("request_output_len", [0], np.int32),
        tensor("stop", [True], np.bool_),
    ]
    with TokenStream(server) as stream:
        stream.send(token_inputs(ENDLESS, False), request_id="mine")
        eventually(lambda: metric(server, "hisparse_requests_running") == 1)
        stream.send(stop, request_id="mine")
        assert stream.get().as_numpy("finish_reason").item() == b"cancelled"
    eventually(lambda: metric(server, "hisparse_requests_running") == 0)


# -- bad input ----------------------------------------------------------------------------------------------
def test_bad_requests_leave_a_concurrent_stream_alone(server: Served, local: TextService) -> None:
    bad: list[tuple[str, int, dict[str, Any], str]] = [
        ("", 4, {}, "prompt: expected text, got an empty string"),
        (PROMPT, 0, {}, "max_tokens: expected at least 1, got 0"),
        (PROMPT, 4, {"temperature": -1.0}, "temperature: expected a finite number of at least 0, got -1.0"),
        (PROMPT, 4, {"top_p": 2.0}, "top_p: expected a number in (0, 1], got 2.0"),
        (PROMPT * 60, 4, {}, f"more than max_context={CONFIG.max_context}"),
    ]
    with TextStream(server.grpc_url, PROMPT, 64) as stream:
        pieces = [next(stream)]
        for text, max_tokens, options, message in bad:
            with TextStream(server.grpc_url, text, max_tokens, **options) as refused:
                with pytest.raises(InferenceServerException, match=re.escape(message)):
                    next(refused)
                assert list(refused) == []

        with TokenStream(server) as raw:
            raw.send(
                [tensor("text_input", [b"a"], np.object_), tensor("max_tokens", [4.0], np.float32)],
                model=TEXT_MODEL,
            )
            assert "data-type" in str(raw.get())
            raw.send(token_inputs(4, True, tensor("top_q", [1], np.int32)))
            assert "top_q" in str(raw.get())
            raw.send([tensor("input_ids", [999999], np.int32), tensor("request_output_len", [4], np.int32)])
            assert "expected token ids in 0.." in str(raw.get())

        for body, message in (
            ({"text_input": PROMPT, "max_tokens": 4, "temprature": 1.0}, "unknown input temprature"),
            ({"text_input": PROMPT}, "max_tokens"),
            (
                {"text_input": PROMPT, "max_tokens": 4, "beam_width": 2},
                "beam_width: only 1 is supported, got 2",
            ),
        ):
            status, answer = post(server, f"/v2/models/{TEXT_MODEL}/generate", body)
            assert status >= 400
            assert message in json.loads(answer)["error"]
        pieces += stream
    assert joined(pieces) == joined(list(local.generate(TextRequest(PROMPT, 64))))


# -- metrics -----------------------------------------------------------------------------------------------
def test_every_metric_is_published(server: Served) -> None:
    with TextStream(server.grpc_url, PROMPT, 2) as stream:
        list(stream)
    for family in METRICS:
        for value in family.fields:
            metric(server, family.name, **({family.label: value} if family.label else {}))
    assert metric(server, "hisparse_pool_bytes", pool="host") == CONFIG.host_pool_bytes
    assert metric(server, "hisparse_tokens_total", kind="output") > 0


# -- life and death ------------------------------------------------------------------------------------------
def test_addresses_that_cannot_be_had(checkpoint: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ServerError, match=f"cannot listen on 127.0.0.1:{port}: Address already in use"):
            TritonServer(checkpoint, grpc_port=port).start()
    with pytest.raises(ServerError, match=r"cannot listen on no\.such\.host"):
        TritonServer(checkpoint, host="no.such.host").start()
    with pytest.raises(ServerError, match=r"cannot start: .*No such file or directory: '/none/log'"):
        TritonServer(checkpoint, log_file=Path("/none/log")).start()


def test_a_checkpoint_that_cannot_be_loaded_is_one_clear_line(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such directory"), TritonServer(tmp_path / "none"):
        pass
    broken = tmp_path / "broken"
    shutil.copytree(checkpoint, broken)
    (broken / "model.safetensors").unlink()
    with pytest.raises(ServerError) as caught, TritonServer(broken, CONFIG):
        pass
    expected = f"{broken}: expected model.safetensors or model.safetensors.index.json, found neither"
    assert str(caught.value) == expected


def test_a_failed_runtime_ends_the_server(checkpoint: Path, tmp_path: Path) -> None:
    """A model repository whose engine breaks on one prompt; everyone is answered, then nothing is ready.

    A client that keeps its stream open must not keep the server.
    """
    repository = tmp_path / "models"
    shutil.copytree(MODEL_REPOSITORY, repository)
    model = repository / TOKEN_MODEL / "1" / "model.py"
    model.write_text(
        model.read_text()
        + """
from trtllm_hisparse.engine.torch_engine import TorchEngine
from trtllm_hisparse.errors import InvariantError

step = TorchEngine.step

def broken_step(self, kv):
    if (kv.batch.token_ids == ord("$")).any():
        raise InvariantError("row 7 has two owners")
    return step(self, kv)

TorchEngine.step = broken_step
"""
    )
    with TritonServer(checkpoint, CONFIG, model_repository=repository) as server:
        assert server.metadata()["name"] == "triton"
        idle = TokenStream(server)
        with TextStream(server.grpc_url, PROMPT, ENDLESS) as victim:
            next(victim)
            with TextStream(server.grpc_url, "$", 4) as culprit:
                with pytest.raises(InferenceServerException, match="row 7 has two owners"):
                    list(culprit)
                with pytest.raises(InferenceServerException, match="the server stopped"):
                    list(victim)
        server.wait()
        with pytest.raises(OSError, match="refused"):
            urllib.request.urlopen(f"http://{server.http_url}/v2/health/ready", timeout=5)
        idle.__exit__()
