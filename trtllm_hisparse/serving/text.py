"""Text requests over any source of tokens: the runtime in this process, or a model behind Triton."""

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Protocol

from trtllm_hisparse.errors import RequestError
from trtllm_hisparse.runtime.request import Event, FinishReason, Request, SamplingParams, Sink
from trtllm_hisparse.serving.stop import StopStrings
from trtllm_hisparse.serving.tokenizer import Tokenizer


@dataclass(frozen=True)
class TextRequest:
    """One generation from text.

    text:       the prompt, not empty.
    max_tokens: output tokens, at least one.
    stop:       strings that end the output; the string itself is not part of the text.
    stop_ids:   token ids that end the output; None = the checkpoint's end-of-sequence ids.
    """

    text: str
    max_tokens: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop: tuple[str, ...] = ()
    stop_ids: frozenset[int] | None = None


@dataclass(frozen=True)
class TextPiece:
    """A part of the output, in order. Text may lag behind its tokens while a character or a possible
    stop string is incomplete.

    tokens: new output ids; those of a stop string are included, later ones are not.
    reason: set in the last piece only.
    error:  message for reason `error`.
    """

    text: str
    tokens: tuple[int, ...] = ()
    reason: FinishReason | None = None
    error: str | None = None


class TokenStream(Protocol):
    """The events of one request in flight; must be read to the end, which is the event with a reason."""

    def __iter__(self) -> Iterator[Event]: ...

    def cancel(self) -> None:
        """Ask for the end; thread-safe, idempotent."""


class TokenRuntime(Protocol):
    """The part of `runtime.loop.Runtime` that text needs."""

    def submit(self, request: Request, sink: Sink) -> int: ...

    def cancel(self, request_id: int) -> None: ...


class RuntimeStream:
    """A request submitted to the runtime of this process. Raises what `submit` raises."""

    def __init__(self, runtime: TokenRuntime, request: Request) -> None:
        self._runtime = runtime
        self._events: SimpleQueue[Event] = SimpleQueue()
        self._request_id = runtime.submit(request, self._events.put)

    def __iter__(self) -> Iterator[Event]:
        while True:
            event = self._events.get()
            yield event
            if event.reason is not None:
                return

    def cancel(self) -> None:
        self._runtime.cancel(self._request_id)


class Generation(Iterator[TextPiece]):
    """The pieces of one request's output; the last one has a reason.

    Iterate in one thread; `cancel` from any. Exhausting or closing it leaves nothing of the request behind.
    """

    def __init__(self, stream: TokenStream, tokenizer: Tokenizer, stops: StopStrings) -> None:
        self._stream = stream
        self._events = iter(stream)
        self._pieces = self._read(tokenizer, stops)

    def __next__(self) -> TextPiece:
        return next(self._pieces)

    def cancel(self) -> None:
        """End the request; the remaining pieces come, the last one with reason `cancelled`."""
        self._stream.cancel()

    def close(self) -> None:
        """Cancel what is in flight and wait for its end; the remaining pieces are dropped."""
        self._pieces.close()
        self._drain()

    def __enter__(self) -> "Generation":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self, tokenizer: Tokenizer, stops: StopStrings) -> Generator[TextPiece, None, None]:
        detokenizer = tokenizer.detokenizer()
        for event in self._events:
            text = ""
            for count, token_id in enumerate(event.tokens, 1):
                ready, stopped = stops.push(detokenizer.push((token_id,)))
                text += ready
                if stopped:
                    yield TextPiece(text, event.tokens[:count], FinishReason.STOP)
                    self._drain()
                    return
            if event.reason is not None:
                ready, stopped = stops.push(detokenizer.finish())
                text += ready if stopped else ready + stops.finish()
            yield TextPiece(text, event.tokens, event.reason, event.error)

    def _drain(self) -> None:
        self._stream.cancel()
        for _ in self._events:
            pass


class TextService:
    """Text in, pieces of text out.

    open_stream: starts a token request and returns its stream; raises RequestError for one that could
                 never run. `TextService.over(runtime, tokenizer)` is the one for a runtime in this process.
    """

    def __init__(self, tokenizer: Tokenizer, open_stream: Callable[[Request], TokenStream]) -> None:
        self._tokenizer = tokenizer
        self._open_stream = open_stream

    @classmethod
    def over(cls, runtime: TokenRuntime, tokenizer: Tokenizer) -> "TextService":
        """A service on a runtime in this process."""
        return cls(tokenizer, lambda request: RuntimeStream(runtime, request))

    def generate(self, request: TextRequest) -> Generation:
        """Start a request; iterate over the result for its pieces.

        Raises RequestError, at once, for a request that could never run.
        """
        if not request.text:
            raise RequestError("prompt: expected text, got an empty string")
        stops = StopStrings(request.stop)
        stop_ids = self._tokenizer.eos_ids if request.stop_ids is None else request.stop_ids
        prompt = self._tokenizer.encode(request.text)
        stream = self._open_stream(Request(prompt, request.max_tokens, request.sampling, stop_ids))
        return Generation(stream, self._tokenizer, stops)
