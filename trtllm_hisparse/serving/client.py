"""A gRPC streaming client of the text model, over NVIDIA's `tritonclient`."""

from collections.abc import Iterator, Sequence
from queue import SimpleQueue
from typing import Any

import numpy as np
import numpy.typing as npt
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from trtllm_hisparse.runtime.request import FinishReason
from trtllm_hisparse.serving.text import TextPiece
from trtllm_hisparse.serving.triton import TEXT_MODEL


class TextStream(Iterator[TextPiece]):
    """One request on a gRPC stream of its own, from construction to its last piece; a context manager.

    Iterate in one thread; `cancel` and `close` from any. An error the server answers with, or a broken
    connection, is raised by the iteration as `InferenceServerException`.

    url:  `host:port` of the server's gRPC service.
    text, max_tokens, and the others: as the model's inputs; None = not sent, so the server's default holds.
    """

    def __init__(
        self,
        url: str,
        text: str,
        max_tokens: int,
        *,
        stream: bool = True,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
        stop: Sequence[str] = (),
        end_id: int | None = None,
    ) -> None:
        inputs = [
            tensor("text_input", [text.encode()], np.object_),
            tensor("max_tokens", [max_tokens], np.int32),
            tensor("stream", [stream], np.bool_),
        ]
        for name, value, dtype in (
            ("temperature", temperature, np.float32),
            ("top_k", top_k, np.int32),
            ("top_p", top_p, np.float32),
            ("random_seed", seed, np.uint64),
            ("end_id", end_id, np.int32),
        ):
            if value is not None:
                inputs.append(tensor(name, [value], dtype))
        if stop:
            inputs.append(tensor("stop_words", [word.encode() for word in stop], np.object_))
        self._responses: SimpleQueue[tuple[Any, Exception | None]] = SimpleQueue()
        self._open = True
        self._client = grpcclient.InferenceServerClient(url)
        self._client.start_stream(lambda result, error: self._responses.put((result, error)))
        self._client.async_stream_infer(TEXT_MODEL, inputs)

    def __next__(self) -> TextPiece:
        if not self._open:
            raise StopIteration
        result, error = self._responses.get()
        if result is None and error is None:  # closed
            raise StopIteration
        if error is not None:
            self._end(cancel=False)
            raise error
        reason = result.as_numpy("finish_reason").item().decode()
        piece = TextPiece(
            text=result.as_numpy("text_output").item().decode(),
            tokens=tuple(result.as_numpy("output_ids").reshape(-1).tolist()),
            reason=FinishReason(reason) if reason else None,
        )
        if piece.reason is not None:
            self._end(cancel=False)
        return piece

    def cancel(self) -> None:
        """End the request and the iteration, wherever they are."""
        self.close()

    def close(self) -> None:
        """End the stream; a request still in flight is cancelled. Idempotent."""
        self._end(cancel=True)

    def _end(self, cancel: bool) -> None:
        """Cancel only what is in flight: cancelling a request that has just ended leaks it in Triton."""
        if self._open:
            self._open = False
            self._client.stop_stream(cancel_requests=cancel)
            self._client.close()
            self._responses.put((None, None))

    def __enter__(self) -> "TextStream":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def tensor(name: str, values: Sequence[Any], dtype: npt.DTypeLike) -> grpcclient.InferInput:
    """An input of shape [1, len(values)]: a batch of one."""
    array = np.array([values], dtype)
    infer_input = grpcclient.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
    infer_input.set_data_from_numpy(array)
    return infer_input


__all__ = ["InferenceServerException", "TextStream", "tensor"]
