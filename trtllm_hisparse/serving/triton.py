"""Tensors and parameters of the Triton models <-> requests and pieces. Names follow TensorRT-LLM's backend.

Triton itself checks names, dtypes and ranks against config.pbtxt; what it cannot know is checked here, and
every refusal is a RequestError that names the tensor.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trtllm_hisparse.config import HiSparseConfig
from trtllm_hisparse.errors import ConfigError, RequestError
from trtllm_hisparse.runtime.request import FinishReason, Request, SamplingParams
from trtllm_hisparse.serving.text import TextPiece, TextRequest

TOKEN_MODEL = "tensorrt_llm"
TEXT_MODEL = "ensemble"

Tensors = Mapping[str, npt.NDArray[Any]]

_ONLY_VALUE = {
    "beam_width": 1,
    "num_return_sequences": 1,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
"""Inputs that existing clients always send, with the one value that means what this server does."""


@dataclass(frozen=True)
class TokenCall:
    """A token-level inference request.

    streaming: one response per event; otherwise a single one.
    echo:      the single response begins with the prompt.
    """

    request: Request
    streaming: bool
    echo: bool


@dataclass(frozen=True)
class TextCall:
    """A text-level inference request; `streaming` and `echo` as in `TokenCall`."""

    request: TextRequest
    streaming: bool
    echo: bool


def model_parameters(model_config: str, *names: str) -> list[str]:
    """Values of exactly these `parameters` of config.pbtxt; `model_config` is the JSON `initialize` receives.

    ConfigError for one that is missing, unknown, or left as in the template.
    """
    given = {name: str(value["string_value"]) for name, value in json.loads(model_config)["parameters"].items()}
    if given.keys() != set(names):
        raise ConfigError(f"parameters: expected {', '.join(names)}, got {', '.join(given) or 'none'}")
    for name, value in given.items():
        if value.startswith("${"):
            raise ConfigError(f"{name}: still the template's {value}; start through triton_server/launch.py")
    return [given[name] for name in names]


def hisparse_config(value: str) -> HiSparseConfig:
    """Settings from a JSON object, the path of a file with one, or "" for the defaults."""
    if not value.strip():
        return HiSparseConfig()
    if not value.lstrip().startswith("{"):
        return HiSparseConfig.from_file(value)
    try:
        settings = json.loads(value)
    except json.JSONDecodeError as error:
        raise ConfigError(f"hisparse_config: not JSON: {error}") from None
    return HiSparseConfig.from_dict(settings)


def check_parameters(parameters: Mapping[str, Any]) -> None:
    """Refuse request parameters: HTTP `generate` turns every JSON key that names no tensor into one."""
    if parameters:
        raise RequestError(f"unknown input {', '.join(sorted(parameters))}")


def wants_stop(inputs: Tensors) -> bool:
    """Whether this is no generation but asks to end the one with the same request id."""
    return bool(_scalar(inputs, "stop", False))


def token_call(inputs: Tensors) -> TokenCall:
    """input_ids int32 [1, n], request_output_len int32 [1, 1], optional ones as in config.pbtxt."""
    prompt = inputs["input_ids"].reshape(-1)
    length = _scalar(inputs, "input_lengths", prompt.size)
    if not 0 <= length <= prompt.size:
        raise RequestError(f"input_lengths: expected 0..{prompt.size} (the size of input_ids), got {length}")
    if length == 0:
        raise RequestError("input_ids: expected at least one token, got none")
    stop_ids = _end_ids(inputs) or frozenset()
    if "stop_words_list" in inputs:
        stop_ids |= _stop_tokens(inputs["stop_words_list"])
    request = Request(
        prompt=tuple(prompt[:length].tolist()),
        max_tokens=_max_tokens(inputs, "request_output_len"),
        sampling=_sampling(inputs, "runtime_top_k", "runtime_top_p"),
        stop_ids=stop_ids,
    )
    return TokenCall(request, *_output_mode(inputs, "streaming"))


def text_call(inputs: Tensors) -> TextCall:
    """text_input bytes [1, 1], max_tokens int32 [1, 1], optional ones as in config.pbtxt."""
    request = TextRequest(
        text=_text("text_input", _scalar(inputs, "text_input", b"")),
        max_tokens=_max_tokens(inputs, "max_tokens"),
        sampling=_sampling(inputs, "top_k", "top_p"),
        # Existing clients send an empty string for "none".
        stop=tuple(_text("stop_words", word) for word in inputs.get("stop_words", np.empty(0)).flat if word),
        stop_ids=_end_ids(inputs),
    )
    return TextCall(request, *_output_mode(inputs, "stream"))


def token_inputs(request: Request) -> dict[str, npt.NDArray[Any]]:
    """The streaming token-level call for `request`: the inverse of `token_call`."""
    sampling = request.sampling
    inputs: dict[str, npt.NDArray[Any]] = {
        "input_ids": np.array([request.prompt], np.int32),
        "request_output_len": np.array([[request.max_tokens]], np.int32),
        "temperature": np.array([[sampling.temperature]], np.float32),
        "runtime_top_k": np.array([[sampling.top_k]], np.int32),
        "runtime_top_p": np.array([[sampling.top_p]], np.float32),
        "random_seed": np.array([[sampling.seed]], np.uint64),
        "streaming": np.array([[True]]),
    }
    if request.stop_ids:
        ids = sorted(request.stop_ids)
        inputs["stop_words_list"] = np.array([[ids, range(1, len(ids) + 1)]], np.int32)
    return inputs


def stop_inputs() -> dict[str, npt.NDArray[Any]]:
    """The call that ends the token-level request with the same request id."""
    return {
        "input_ids": np.zeros((1, 1), np.int32),
        "request_output_len": np.zeros((1, 1), np.int32),
        "stop": np.array([[True]]),
    }


def token_outputs(
    tokens: Sequence[int], reason: FinishReason | None, error: str | None = None
) -> dict[str, npt.NDArray[Any]]:
    """output_ids int32 [1, 1, n], sequence_length int32 [1, 1], finish_reason bytes [1] (empty before the
    last), and error bytes [1] when there is one.
    """
    outputs: dict[str, npt.NDArray[Any]] = {
        "output_ids": np.array(tokens, np.int32).reshape(1, 1, -1),
        "sequence_length": np.array([[len(tokens)]], np.int32),
        "finish_reason": _bytes(reason or ""),
    }
    return outputs if error is None else outputs | {"error": _bytes(error)}


def text_outputs(piece: TextPiece) -> dict[str, npt.NDArray[Any]]:
    """text_output bytes [1], finish_reason bytes [1] (empty before the last), output_ids int32 [1, n]."""
    return {
        "text_output": _bytes(piece.text),
        "finish_reason": _bytes(piece.reason or ""),
        "output_ids": np.array([piece.tokens], np.int32),
    }


def _scalar(inputs: Tensors, name: str, default: Any) -> Any:
    return inputs[name].item() if name in inputs else default


def _bytes(text: str) -> npt.NDArray[np.object_]:
    return np.array([text.encode()], np.object_)


def _text(name: str, value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise RequestError(f"{name}: expected UTF-8, got byte {error.object[error.start]:#04x}") from None


def _max_tokens(inputs: Tensors, name: str) -> int:
    value = int(_scalar(inputs, name, 0))
    if value < 1:
        raise RequestError(f"{name}: expected at least 1, got {value}")
    return value


def _sampling(inputs: Tensors, top_k_name: str, top_p_name: str) -> SamplingParams:
    """Greedy unless something asks for sampling; a top-p of 0 is TensorRT-LLM's "off"."""
    seeds = {name: _scalar(inputs, name, None) for name in ("seed", "random_seed") if name in inputs}
    if len(seeds) > 1:
        raise RequestError("seed: two names of one input, seed and random_seed, are given; expected one")
    top_k = int(_scalar(inputs, top_k_name, 0))
    top_p = float(_scalar(inputs, top_p_name, 0.0)) or 1.0
    sampled = top_k != 0 or top_p != 1.0
    return SamplingParams(
        temperature=float(_scalar(inputs, "temperature", 1.0 if sampled else 0.0)),
        top_k=top_k,
        top_p=top_p,
        seed=next(iter(seeds.values()), 0),
    )


def _end_ids(inputs: Tensors) -> frozenset[int] | None:
    """`end_id`: one id, -1 for no end token at all; None when it is not given."""
    end_id = _scalar(inputs, "end_id", None)
    return None if end_id is None else frozenset() if end_id == -1 else frozenset({end_id})


def _stop_tokens(words: npt.NDArray[np.int32]) -> frozenset[int]:
    """int32 [1, 2, n]: the ids of all words in a row, and under them where each word ends, padded with -1."""
    ids, ends = words[0].tolist()
    tokens, start = set(), 0
    for end in ends:
        if end == -1:
            break
        if end - start != 1 or end > len(ids):
            raise RequestError(
                f"stop_words_list: expected words of one token, got ids [{start}, {end}) of {len(ids)} as one; "
                f"the model '{TEXT_MODEL}' takes stop strings of any length in stop_words"
            )
        tokens.add(ids[start])
        start = end
    return frozenset(tokens)


def _output_mode(inputs: Tensors, streaming_name: str) -> tuple[bool, bool]:
    """(streaming, echo); also refuses settings of features this server does not have."""
    for name, only in _ONLY_VALUE.items():
        value = _scalar(inputs, name, only)
        if value != only:
            raise RequestError(f"{name}: only {only} is supported, got {value}")
    streaming = bool(_scalar(inputs, streaming_name, False))
    echo = not streaming and not _scalar(inputs, "exclude_input_in_output", True)
    return streaming, echo
