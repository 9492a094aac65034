"""Tokenizer, stop strings, text service, and the Triton models' logic, without a server."""

import gc
import json
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from trtllm_hisparse.config import HiSparseConfig, Placement
from trtllm_hisparse.errors import CheckpointError, ConfigError, RequestError
from trtllm_hisparse.models.synthetic import write_checkpoint
from trtllm_hisparse.runtime.request import Event, FinishReason, Request, SamplingParams, Sink
from trtllm_hisparse.runtime.stats import RuntimeStats
from trtllm_hisparse.serving import triton
from trtllm_hisparse.serving.metrics import METRICS, MetricKind
from trtllm_hisparse.serving.sender import Keeper, Sender
from trtllm_hisparse.serving.stop import StopStrings
from trtllm_hisparse.serving.text import TextPiece, TextRequest, TextService
from trtllm_hisparse.serving.token_model import TokenModel
from trtllm_hisparse.serving.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"), layers=1, hidden=64, experts=2)


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Path) -> Tokenizer:
    return Tokenizer(checkpoint)


# -- tokenizer ----------------------------------------------------------------------------------------
@given(text=st.text(max_size=12))
@example(text="aé€😀e\u0301\ufffd")
def test_text_streams_whole_characters_wherever_it_is_cut(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    for cut in range(len(ids) + 1):
        detokenizer = tokenizer.detokenizer()
        pieces = [detokenizer.push(ids[:cut]), detokenizer.push(ids[cut:]), detokenizer.finish()]
        assert "".join(pieces) == text
        assert text.startswith(pieces[0])


@given(ids=st.lists(st.integers(0, 270), max_size=40))
@example(ids=[0xF0, 0x9F, 0x98, 256, 0x80, 0xC3, 0xC3, 0xA9, 0xED, 0xA0, 0x80, 0xE2, 0x82])
def test_any_ids_stream_to_what_they_decode_to(tokenizer: Tokenizer, ids: list[int]) -> None:
    """Broken UTF-8, special and unknown ids included: random models emit all of them."""
    detokenizer = tokenizer.detokenizer()
    pieces = [detokenizer.push((token_id,)) for token_id in ids]
    assert "".join(pieces) + detokenizer.finish() == tokenizer.decode(ids)


def test_added_tokens_are_plain_text(checkpoint: Path, tmp_path: Path) -> None:
    values = json.loads((checkpoint / "tokenizer.json").read_text())
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    values["added_tokens"].append({"id": 260, "content": "<think> é", **flags})
    (tmp_path / "tokenizer.json").write_text(json.dumps(values))
    (tmp_path / "config.json").write_text("{}")
    added = Tokenizer(tmp_path)
    assert added.detokenizer().push([97, 260, 98]) == added.decode([97, 260, 98]) == "a<think> éb"


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        (None, {"eos_token_id": 5}, {5}),
        (None, {"eos_token_id": [5, 6]}, {5, 6}),
        (None, {"eos_token_id": None}, set()),
        ({"eos_token_id": 7}, {"eos_token_id": 5}, {7}),
        ({"temperature": 1.0}, {"eos_token_id": 5}, {5}),
    ],
)
def test_end_of_sequence_ids(
    checkpoint: Path,
    tmp_path: Path,
    generation: dict[str, Any] | None,
    config: dict[str, Any],
    expected: set[int],
) -> None:
    (tmp_path / "tokenizer.json").symlink_to(checkpoint / "tokenizer.json")
    (tmp_path / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert Tokenizer(tmp_path).eos_ids == expected


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", None, "tokenizer.json: cannot be read: No such file"),
        ("tokenizer.json", "{", "tokenizer.json: not JSON"),
        ("tokenizer.json", "[]", "tokenizer.json: expected a JSON object, got list"),
        ("tokenizer.json", "{}", "tokenizer.json: decoder: expected ByteLevel, got None"),
        ("tokenizer.json", '{"decoder": {"type": "ByteLevel"}}', "tokenizer.json: not a tokenizer"),
        ("config.json", None, "config.json: cannot be read: No such file"),
        ("config.json", '{"eos_token_id": "x"}', "config.json: eos_token_id: expected a token id or a list"),
    ],
)
def test_unreadable_tokenizer_files(
    checkpoint: Path, tmp_path: Path, name: str, content: str | None, message: str
) -> None:
    for file in {"tokenizer.json", "config.json"} - {name}:
        (tmp_path / file).symlink_to(checkpoint / file)
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(CheckpointError, match=message):
        Tokenizer(tmp_path)


# -- stop strings ---------------------------------------------------------------------------------------
def first_stop(text: str, stops: list[str]) -> int | None:
    """Oracle: where the stop string that is completed first begins; the longest of those completed there."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return end - max(map(len, found))
    return None


STOPS = st.lists(st.text("ab", min_size=1, max_size=5), max_size=3)


@settings(max_examples=300)
@given(pieces=st.lists(st.text("ab", max_size=4), max_size=12), stops=STOPS)
@example(pieces=["aab", "aaab"], stops=["aabaaab"])
@example(pieces=["xab", "cd"], stops=["abcd", "bc"])
def test_stop_strings_match_the_oracle_wherever_the_text_is_cut(pieces: list[str], stops: list[str]) -> None:
    finder, passed = StopStrings(stops), ""
    for count, piece in enumerate(pieces, 1):
        text = "".join(pieces[:count])
        ready, stopped = finder.push(piece)
        passed += ready
        start = first_stop(text, stops)
        assert stopped == (start is not None)
        if stopped:
            assert passed == text[:start]
            return
        held = [n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])]
        assert passed == text[: len(text) - max(held, default=0)], "nothing is held back without need"
    assert passed + finder.finish() == "".join(pieces)


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(RequestError, match="stop: expected non-empty strings"):
        StopStrings(["a", ""])


# -- text service -----------------------------------------------------------------------------------------
class ScriptedRuntime:
    """The runtime's API over a script: one event each time `turn` is called, for every request in flight."""

    def __init__(self, script: list[Event]) -> None:
        self.script = script
        self.requests: list[Request] = []
        self.sinks: dict[int, tuple[Sink, Iterator[Event]]] = {}
        self.healthy = True
        self.cancelled: list[int] = []
        self._lock = threading.Lock()

    def start(self) -> None: ...

    def close(self) -> None:
        for request_id in list(self.sinks):
            self.cancel(request_id)

    def stats(self) -> RuntimeStats:
        return RuntimeStats(**{field.name: 0 for field in fields(RuntimeStats)})

    def submit(self, request: Request, sink: Sink) -> int:
        if request.max_tokens > 1000:
            raise RequestError("max_tokens: never")
        with self._lock:
            self.requests.append(request)
            self.sinks[len(self.requests)] = (sink, iter(self.script))
            return len(self.requests)

    def cancel(self, request_id: int) -> None:
        with self._lock:
            entry = self.sinks.pop(request_id, None)
        if entry is not None:
            self.cancelled.append(request_id)
            entry[0](Event(request_id, reason=FinishReason.CANCELLED))

    def fail(self) -> None:
        """Break down as the runtime does: unhealthy first, then everyone is told."""
        self.healthy = False
        for sink, _ in self.sinks.values():
            sink(Event(0, reason=FinishReason.ERROR, error="row 7 has two owners"))
        self.sinks.clear()

    def turn(self) -> None:
        for request_id, (sink, events) in list(self.sinks.items()):
            event = next(events, None)
            if event is not None:
                if event.reason is not None:
                    del self.sinks[request_id]
                sink(event)

    def play(self) -> "ScriptedRuntime":
        """Play the whole script into each request as it is submitted."""
        submit = self.submit

        def submit_and_play(request: Request, sink: Sink) -> int:
            request_id = submit(request, sink)
            for _ in self.script:
                self.turn()
            return request_id

        self.submit = submit_and_play  # type: ignore[method-assign]
        return self


def spelled(text: str, reason: FinishReason = FinishReason.LENGTH) -> list[Event]:
    """One event per byte, the last with the reason."""
    data = text.encode()
    return [Event(1, (byte,), reason if i == len(data) else None) for i, byte in enumerate(data, 1)]


def test_text_comes_in_pieces_and_every_token_once(tokenizer: Tokenizer) -> None:
    runtime = ScriptedRuntime(spelled("né!")).play()
    pieces = list(TextService.over(runtime, tokenizer).generate(TextRequest("hi", 4)))
    assert pieces == [
        TextPiece("n", (110,)),
        TextPiece("", (0xC3,)),
        TextPiece("é", (0xA9,)),
        TextPiece("!", (33,), FinishReason.LENGTH),
    ]
    assert runtime.requests == [Request((104, 105), 4, stop_ids=tokenizer.eos_ids)]


@pytest.mark.parametrize("tokens_per_event", [1, 2, 3, 7])
def test_a_stop_string_ends_the_request(tokenizer: Tokenizer, tokens_per_event: int) -> None:
    data = b"one STOP two"
    chunks = [data[i : i + tokens_per_event] for i in range(0, len(data), tokens_per_event)]
    runtime = ScriptedRuntime([Event(1, tuple(chunk)) for chunk in chunks]).play()
    pieces = list(TextService.over(runtime, tokenizer).generate(TextRequest("hi", 99, stop=("STOP", "zz"))))
    assert "".join(piece.text for piece in pieces) == "one "
    assert bytes(token for piece in pieces for token in piece.tokens) == b"one STOP"
    assert [piece.reason for piece in pieces if piece.reason] == [FinishReason.STOP]
    assert runtime.cancelled == [1]


def test_held_back_text_comes_at_the_end(tokenizer: Tokenizer) -> None:
    runtime = ScriptedRuntime(spelled("one STO", FinishReason.STOP)).play()
    pieces = list(TextService.over(runtime, tokenizer).generate(TextRequest("hi", 99, stop=("STOP",))))
    assert pieces[-1] == TextPiece("STO", (ord("O"),), FinishReason.STOP)


def test_an_error_is_the_last_piece(tokenizer: Tokenizer) -> None:
    script = [*spelled("ab")[:1], Event(1, reason=FinishReason.ERROR, error="no luck")]
    pieces = list(TextService.over(ScriptedRuntime(script).play(), tokenizer).generate(TextRequest("hi", 9)))
    assert pieces == [TextPiece("a", (97,)), TextPiece("", (), FinishReason.ERROR, "no luck")]


def test_cancel_from_another_thread_ends_a_waiting_iteration(tokenizer: Tokenizer) -> None:
    runtime = ScriptedRuntime([])
    generation = TextService.over(runtime, tokenizer).generate(TextRequest("hi", 9))
    timer = threading.Timer(0.05, generation.cancel)
    timer.start()
    assert list(generation) == [TextPiece("", (), FinishReason.CANCELLED)]
    timer.join()


@pytest.mark.parametrize("read", [0, 1])
def test_closing_a_generation_leaves_nothing_in_flight(tokenizer: Tokenizer, read: int) -> None:
    runtime = ScriptedRuntime(spelled("abc")[:2]).play()
    with TextService.over(runtime, tokenizer).generate(TextRequest("hi", 9)) as generation:
        for _ in range(read):
            next(generation)
    assert runtime.cancelled == [1]
    assert not runtime.sinks
    assert list(generation) == []


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (TextRequest("", 1), "prompt: expected text"),
        (TextRequest("a", 1, stop=("",)), "stop: expected non-empty"),
        (TextRequest("a", 2000), "max_tokens: never"),
    ],
)
def test_a_request_that_cannot_run_is_refused_at_once(
    tokenizer: Tokenizer, request_: TextRequest, message: str
) -> None:
    runtime = ScriptedRuntime([])
    with pytest.raises(RequestError, match=message):
        TextService.over(runtime, tokenizer).generate(request_)
    assert not runtime.sinks


# -- metrics ------------------------------------------------------------------------------------------------
def test_every_statistic_is_one_series() -> None:
    stats = RuntimeStats(**{field.name: i for i, field in enumerate(fields(RuntimeStats))})
    samples = [(metric, labels, value) for metric in METRICS for labels, value in metric.samples(stats)]
    assert sorted(value for _, _, value in samples) == list(range(len(fields(RuntimeStats))))
    assert len({(metric.name, *labels.items()) for metric, labels, _ in samples}) == len(samples)
    for metric, labels, _ in samples:
        assert set(labels) == ({metric.label} if metric.label else set())
        assert metric.name.endswith("_total") == (metric.kind is MetricKind.COUNTER)


# -- tensors ----------------------------------------------------------------------------------------------
def scalar(value: Any, dtype: Any = np.int32) -> Any:
    return np.array([[value]], dtype)


def token_tensors(**more: Any) -> dict[str, Any]:
    return {"input_ids": np.array([[5, 6, 7]], np.int32), "request_output_len": scalar(9), **more}


def text_tensors(**more: Any) -> dict[str, Any]:
    return {"text_input": np.array([["hé".encode()]], object), "max_tokens": scalar(9), **more}


@given(
    prompt=st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=5),
    stop_ids=st.frozensets(st.integers(0, 99)),
    temperature=st.floats(0, 8, width=32),
    top_p=st.floats(0, 1, width=32, exclude_min=True),
    seed=st.integers(0, 2**64 - 1),
)
def test_a_request_survives_the_trip_through_tensors(
    prompt: list[int], stop_ids: frozenset[int], temperature: float, top_p: float, seed: int
) -> None:
    sampling = SamplingParams(temperature, 3, top_p, seed)
    request = Request(tuple(prompt), 7, sampling, stop_ids)
    assert triton.token_call(triton.token_inputs(request)) == triton.TokenCall(request, True, False)


def test_defaults_of_the_token_level_model() -> None:
    call = triton.token_call(token_tensors())
    assert call == triton.TokenCall(Request((5, 6, 7), 9), streaming=False, echo=False)
    assert triton.token_call(token_tensors(input_lengths=scalar(2))).request.prompt == (5, 6)
    assert triton.token_call(token_tensors(runtime_top_k=scalar(4))).request.sampling.temperature == 1.0
    assert triton.token_call(token_tensors(runtime_top_p=scalar(0.0, np.float32))).request == call.request


def test_defaults_of_the_text_level_model() -> None:
    assert triton.text_call(text_tensors()) == triton.TextCall(TextRequest("hé", 9), False, False)


def test_stop_tokens_and_end_tokens() -> None:
    words = np.array([[[11, 12, 0], [1, 2, -1]]], np.int32)
    inputs = token_tensors(stop_words_list=words, end_id=scalar(2))
    assert triton.token_call(inputs).request.stop_ids == {2, 11, 12}
    assert triton.token_call(token_tensors(end_id=scalar(-1))).request.stop_ids == frozenset()
    assert triton.text_call(text_tensors(end_id=scalar(-1))).request.stop_ids == frozenset()
    assert triton.text_call(text_tensors(end_id=scalar(3))).request.stop_ids == frozenset({3})
    blank = np.array([[b"", b"x"]], object)
    assert triton.text_call(text_tensors(stop_words=blank)).request.stop == ("x",)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"request_output_len": scalar(0)}, "request_output_len: expected at least 1, got 0"),
        ({"input_ids": np.empty((1, 0), np.int32)}, "input_ids: expected at least one token"),
        ({"input_lengths": scalar(4)}, r"input_lengths: expected 0\.\.3"),
        ({"input_lengths": scalar(-1)}, r"input_lengths: expected 0\.\.3"),
        ({"temperature": scalar(-1, np.float32)}, "temperature: expected a finite number"),
        ({"temperature": scalar(np.nan, np.float32)}, "temperature: expected a finite number"),
        ({"runtime_top_k": scalar(-1)}, "top_k: expected 0"),
        ({"runtime_top_p": scalar(1.5, np.float32)}, "top_p: expected a number"),
        ({"seed": scalar(1, np.uint64), "random_seed": scalar(1, np.uint64)}, "seed: two names"),
        ({"beam_width": scalar(2)}, "beam_width: only 1 is supported, got 2"),
        (
            {"stop_words_list": np.array([[[1, 2], [2, -1]]], np.int32)},
            "stop_words_list: expected words of one",
        ),
        (
            {"stop_words_list": np.array([[[1, 2], [1, 9]]], np.int32)},
            "stop_words_list: expected words of one",
        ),
    ],
)
def test_token_level_inputs_that_are_refused(more: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        triton.token_call(token_tensors(**more))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"max_tokens": scalar(-3)}, "max_tokens: expected at least 1, got -3"),
        ({"text_input": np.array([[b"a\xff"]], object)}, "text_input: expected UTF-8, got byte 0xff"),
        (
            {"repetition_penalty": scalar(1.5, np.float32)},
            "repetition_penalty: only 1.0 is supported, got 1.5",
        ),
    ],
)
def test_text_level_inputs_that_are_refused(more: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        triton.text_call(text_tensors(**more))


def test_model_parameters_and_configuration(tmp_path: Path) -> None:
    def config(**parameters: str) -> str:
        return json.dumps({"parameters": {name: {"string_value": v} for name, v in parameters.items()}})

    assert triton.model_parameters(config(a="1", b="2"), "b", "a") == ["2", "1"]
    with pytest.raises(ConfigError, match="a: still the template's"):
        triton.model_parameters(config(a="${a}"), "a")
    with pytest.raises(ConfigError, match="parameters: expected a, b, got a"):
        triton.model_parameters(config(a="1"), "a", "b")
    file = tmp_path / "c.json"
    file.write_text('{"placement": "fixed"}')
    assert triton.hisparse_config("") == HiSparseConfig()
    assert triton.hisparse_config(str(file)).placement is Placement.FIXED
    assert triton.hisparse_config(' {"hot_rows": 7}').hot_rows == 7
    with pytest.raises(ConfigError, match="hisparse_config: not JSON"):
        triton.hisparse_config("{")
    with pytest.raises(ConfigError, match="unknown setting hot_row"):
        triton.hisparse_config('{"hot_row": 7}')


# -- the token-level model, over a stand-in for Triton's side ---------------------------------------------
class TritonSide:
    """`triton_python_backend_utils` as far as the token-level model uses it."""

    TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1

    class TritonModelException(Exception):  # noqa: N818 - Triton's name
        pass

    class TritonError:
        INVALID_ARG, INTERNAL = "invalid", "internal"

        def __init__(self, message: str, code: str) -> None:
            self.text = f"{code}: {message}"

    class Tensor:
        def __init__(self, name: str, array: Any) -> None:
            self.name, self.as_numpy = lambda: name, lambda: array

    class InferenceResponse:
        def __init__(self, tensors: Any = (), error: Any = None) -> None:
            self.outputs = {tensor.name(): tensor.as_numpy() for tensor in tensors}
            self.error = error.text if error else None

    class MetricFamily:
        COUNTER, GAUGE = "counter", "gauge"

        def __init__(self, name: str, description: str, kind: str) -> None: ...

        def Metric(self, labels: dict[str, str]) -> Any:  # noqa: N802 - Triton's name
            return SimpleNamespace(increment=lambda by: None, set=lambda to: None)

    Logger = SimpleNamespace(log_error=lambda text: None)


class Call:
    """A request and its response sender; `responses` ends with None."""

    def __init__(self, tensors: dict[str, Any], request_id: str = "", parameters: str = "") -> None:
        self.responses: SimpleQueue[Any] = SimpleQueue()
        self.gone = False
        self.ended = False
        self.request_id, self.parameters = lambda: request_id, lambda: parameters
        self.inputs = lambda: [TritonSide.Tensor(*item) for item in tensors.items()]
        self.get_response_sender = lambda: self

    def send(self, response: Any = None, flags: int = 0) -> None:
        assert not self.ended
        self.ended = flags == TritonSide.TRITONSERVER_RESPONSE_COMPLETE_FINAL
        if response is not None:
            self.responses.put(response)
        if self.ended:
            self.responses.put(None)

    def is_cancelled(self) -> bool:
        assert not self.ended, "asking after the final response crashes tritonserver"
        return self.gone

    def wait(self) -> list[Any]:
        return list(iter(lambda: self.responses.get(timeout=5), None))


def test_a_sender_is_left_alone_after_its_final_response() -> None:
    call = Call({})
    sender = Sender(TritonSide, call, Keeper())
    assert not sender.is_cancelled()
    sender.refuse(RequestError("no"))
    sender.refuse(RequestError("again"))
    sender.finish()
    call.gone = True
    assert not sender.is_cancelled()
    assert [response.error for response in call.wait()] == ["invalid: no"]


def test_the_keeper_lets_go_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter((0.0, 1.5, 3.0))
    monkeypatch.setattr("trtllm_hisparse.serving.sender.time.monotonic", lambda: next(clock))
    keeper, things = Keeper(), [Call({}) for _ in range(3)]
    held = [weakref.ref(thing) for thing in things]
    while things:
        keeper.keep(things.pop(0))
    gc.collect()
    assert [ref() is not None for ref in held] == [False, True, True]


@pytest.fixture
def model(request: pytest.FixtureRequest) -> Iterator[TokenModel]:
    runtime = ScriptedRuntime(request.param)
    stopped = threading.Event()
    model = TokenModel(TritonSide, runtime, stopped.set)  # type: ignore[arg-type]
    model.runtime, model.stopped = runtime, stopped  # type: ignore[attr-defined]
    yield model
    model.close()


scripted = pytest.mark.parametrize(
    "model", [[Event(1, (4,)), Event(1, (5, 6), FinishReason.LENGTH)]], indirect=True
)
failing = pytest.mark.parametrize(
    "model", [[Event(1, (4,)), Event(1, reason=FinishReason.ERROR, error="no luck")]], indirect=True
)


@scripted
def test_streaming_sends_each_event(model: Any) -> None:
    call = Call(token_tensors(streaming=scalar(True, bool)))
    model.execute([call])
    model.runtime.turn()
    model.runtime.turn()
    outputs = [response.outputs for response in call.wait()]
    assert [output["output_ids"].tolist() for output in outputs] == [[[[4]]], [[[5, 6]]]]
    assert [output["sequence_length"].tolist() for output in outputs] == [[[1]], [[2]]]
    assert [output["finish_reason"].item() for output in outputs] == [b"", b"length"]


@scripted
@pytest.mark.parametrize(("exclude", "ids"), [(True, [4, 5, 6]), (False, [5, 6, 7, 4, 5, 6])])
def test_without_streaming_there_is_one_response(model: Any, exclude: bool, ids: list[int]) -> None:
    call = Call(token_tensors(exclude_input_in_output=scalar(exclude, bool)))
    model.execute([call])
    model.runtime.turn()
    model.runtime.turn()
    (response,) = call.wait()
    assert response.outputs["output_ids"].tolist() == [[ids]]


@failing
def test_an_error_after_the_first_response_travels_in_band(model: Any) -> None:
    streaming, single = Call(token_tensors(streaming=scalar(True, bool))), Call(token_tensors())
    model.execute([streaming, single])
    model.runtime.turn()
    model.runtime.turn()
    last = streaming.wait()[-1]
    assert last.error is None
    assert (last.outputs["finish_reason"].item(), last.outputs["error"].item()) == (b"error", b"no luck")
    assert [response.error for response in single.wait()] == ["internal: no luck"]


@scripted
def test_a_bad_request_is_answered_and_the_others_go_on(model: Any) -> None:
    good = Call(token_tensors())
    bad = {
        "invalid: request_output_len: expected at least 1, got 0": Call(
            token_tensors(request_output_len=scalar(0))
        ),
        "invalid: max_tokens: never": Call(token_tensors(request_output_len=scalar(2000))),
        "invalid: unknown input temprature": Call(token_tensors(), parameters='{"temprature": 1}'),
        "invalid: stop: expected the id of the request": Call(token_tensors(stop=scalar(True, bool))),
    }
    model.execute([good, *bad.values()])
    for message, call in bad.items():
        (response,) = call.wait()
        assert response.error.startswith(message)
    model.runtime.turn()
    model.runtime.turn()
    assert good.wait()[0].outputs["output_ids"].tolist() == [[[4, 5, 6]]]


@scripted
def test_stop_by_request_id_and_a_client_that_goes_away(model: Any) -> None:
    stopped, left, kept = Call(token_tensors(), "a"), Call(token_tensors(), "b"), Call(token_tensors(), "c")
    stop = Call({"input_ids": np.zeros((1, 1), np.int32), "stop": scalar(True, bool)}, "a")
    left.gone = True
    model.execute([stopped, left, kept, stop])
    assert stop.wait() == []
    for call in (stopped, left):
        (response,) = call.wait()
        assert response.outputs["finish_reason"].item() == b"cancelled"
    assert not kept.ended
    assert sorted(model.runtime.cancelled) == [1, 2]


@scripted
def test_a_failed_runtime_answers_everyone_and_stops_the_server(model: Any) -> None:
    streaming, single = Call(token_tensors(streaming=scalar(True, bool))), Call(token_tensors())
    model.execute([streaming, single])
    model.runtime.turn()
    model.runtime.fail()
    assert streaming.wait()[-1].outputs["error"].item() == b"row 7 has two owners"
    assert [response.error for response in single.wait()] == ["internal: row 7 has two owners"]
    assert model.stopped.wait(5)


@scripted
@pytest.mark.parametrize("streaming", [True, False])
def test_a_response_that_cannot_be_sent_ends_only_its_request(model: Any, streaming: bool) -> None:
    broken, good = Call(token_tensors(streaming=scalar(streaming, bool))), Call(token_tensors())
    send = broken.send

    def full(response: Any = None, flags: int = 0) -> None:
        broken.send = send  # type: ignore[method-assign]
        raise TritonSide.TritonModelException("no shared memory")

    broken.send = full  # type: ignore[method-assign]
    model.execute([broken, good])
    model.runtime.turn()
    if streaming:
        assert broken.wait()[-1].outputs["finish_reason"].item() == b"cancelled"
    model.runtime.turn()
    if not streaming:
        assert [response.error for response in broken.wait()] == ["internal: no shared memory"]
    assert good.wait()[0].outputs["finish_reason"].item() == b"length"


@scripted
def test_closing_ends_what_is_in_flight(model: Any) -> None:
    call = Call(token_tensors())
    model.execute([call])
    start = time.monotonic()
    model.close()
    assert call.wait()[0].outputs["finish_reason"].item() == b"cancelled"
    assert time.monotonic() - start < 2
