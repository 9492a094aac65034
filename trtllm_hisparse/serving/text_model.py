"""The text-level Triton model: tokenises, calls the token-level model, streams text."""

import json
import threading
import traceback
import uuid
from collections.abc import Iterator
from typing import Any

from trtllm_hisparse.errors import RequestError
from trtllm_hisparse.runtime.request import Event, FinishReason, Request
from trtllm_hisparse.serving import triton
from trtllm_hisparse.serving.sender import POLL_S, Keeper, Sender
from trtllm_hisparse.serving.text import Generation, TextPiece, TextService
from trtllm_hisparse.serving.tokenizer import Tokenizer


class CallError(Exception):
    """The token-level model answered with an error: its TritonError."""

    def __init__(self, error: Any) -> None:
        super().__init__(error.message())
        self.error = error


class CallStream:
    """A token-level request as a `TokenStream`; iteration raises CallError when it was refused.

    Triton hands no cancellation from a caller to the model it calls, so `cancel` sends that model a stop
    request. A stop that overtakes its request finds nothing, so it may be sent again until the end.
    """

    def __init__(self, pb_utils: Any, request: Request, keeper: Keeper) -> None:
        self._pb = pb_utils
        self._request = request
        self._keeper = keeper
        self._id = uuid.uuid4().hex
        self._ended = False

    def __iter__(self) -> Iterator[Event]:
        error = None
        try:
            # To the end, whatever comes: a response iterator left half-read keeps the model from unloading.
            for response in self._call(triton.token_inputs(self._request)):
                if response.has_error():
                    error = response.error()
                elif outputs := {tensor.name(): tensor.as_numpy() for tensor in response.output_tensors()}:
                    yield _event(outputs)
        finally:
            self._ended = True
        if error is not None:
            raise CallError(error)

    def cancel(self) -> None:
        if not self._ended:
            for _ in self._call(triton.stop_inputs()):
                pass

    def _call(self, inputs: dict[str, Any]) -> Iterator[Any]:
        responses = self._pb.InferenceRequest(
            model_name=triton.TOKEN_MODEL,
            request_id=self._id,
            inputs=[self._pb.Tensor(*item) for item in inputs.items()],
            requested_output_names=["output_ids", "finish_reason", "error"],
        ).exec(decoupled=True)
        yield from responses
        self._keeper.keep(responses)


class TextModel:
    """One thread per request in flight, and one that looks for cancelled ones.

    pb_utils: the module `triton_python_backend_utils`.
    """

    def __init__(self, pb_utils: Any, tokenizer: Tokenizer) -> None:
        self._pb = pb_utils
        self._keeper = Keeper()
        self._service = TextService(tokenizer, lambda request: CallStream(pb_utils, request, self._keeper))
        self._lock = threading.Lock()
        self._threads: set[threading.Thread] = set()
        self._live: dict[Generation, Sender] = {}
        self._closing = threading.Event()
        self._watch = threading.Thread(target=self._watch_cancellation, name="hisparse-watch", daemon=True)
        self._watch.start()

    @classmethod
    def load(cls, pb_utils: Any, model_config: str) -> "TextModel":
        """Build from config.pbtxt's parameters; CheckpointError for tokenizer files that cannot be read."""
        (checkpoint,) = triton.model_parameters(model_config, "checkpoint_path")
        return cls(pb_utils, Tokenizer(checkpoint))

    def execute(self, requests: list[Any]) -> None:
        """Start a thread for each request; returns at once."""
        for request in requests:
            thread = threading.Thread(target=self._serve, args=(request,), name="hisparse-text", daemon=True)
            with self._lock:
                self._threads.add(thread)
            thread.start()

    def close(self) -> None:
        """Cancel what is in flight, wait for its end."""
        self._closing.set()
        self._watch.join()
        with self._lock:
            threads = list(self._threads)
        for thread in threads:
            thread.join()

    def _serve(self, request: Any) -> None:
        sender = Sender(self._pb, request, self._keeper)
        try:
            self._generate(request, sender)
        except RequestError as error:
            sender.refuse(error)
        except CallError as error:
            sender.forward(error.error)
        except Exception as error:
            self._pb.Logger.log_error(traceback.format_exc())
            sender.refuse(error)
        finally:
            with self._lock:
                self._threads.discard(threading.current_thread())

    def _generate(self, request: Any, sender: Sender) -> None:
        triton.check_parameters(json.loads(request.parameters() or "{}"))
        call = triton.text_call({tensor.name(): tensor.as_numpy() for tensor in request.inputs()})
        with self._service.generate(call.request) as generation:
            with self._lock:
                self._live[generation] = sender
            try:
                for piece in generation if call.streaming else [_joined(generation, call)]:
                    if piece.reason is FinishReason.ERROR:
                        sender.refuse(RuntimeError(piece.error))
                    else:
                        sender.respond(triton.text_outputs(piece), final=piece.reason is not None)
            finally:
                with self._lock:
                    del self._live[generation]

    def _watch_cancellation(self) -> None:
        closing = False
        while not closing or self._live:
            closing = self._closing.wait(POLL_S)
            with self._lock:
                live = list(self._live.items())
            for generation, sender in live:
                if closing or sender.is_cancelled():
                    generation.cancel()


def _event(outputs: dict[str, Any]) -> Event:
    reason = outputs["finish_reason"].item().decode()
    return Event(
        request_id=0,
        tokens=tuple(outputs["output_ids"].reshape(-1).tolist()),
        reason=FinishReason(reason) if reason else None,
        error=outputs["error"].item().decode() if "error" in outputs else None,
    )


def _joined(generation: Generation, call: triton.TextCall) -> TextPiece:
    """The whole output as one piece, after the prompt where that is asked for."""
    pieces = list(generation)
    return TextPiece(
        text="".join([call.request.text if call.echo else "", *(piece.text for piece in pieces)]),
        tokens=tuple(token for piece in pieces for token in piece.tokens),
        reason=pieces[-1].reason,
        error=pieces[-1].error,
    )
