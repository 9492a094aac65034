"""A Triton response sender that is safe to ask and to use from two threads."""

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy.typing as npt

from trtllm_hisparse.errors import RequestError


class Sender:
    """The response sender of one request, until its final response.

    Triton frees its side with the final response, and asking it about cancellation after that, or at that
    moment, crashes the server: so the two exclude each other here.

    pb_utils: the module `triton_python_backend_utils`.
    """

    def __init__(self, pb_utils: Any, request: Any) -> None:
        self._pb = pb_utils
        self._sender = request.get_response_sender()
        self._lock = threading.Lock()
        self._responded = False
        self._ended = False

    @property
    def responded(self) -> bool:
        """Whether a response has been sent."""
        return self._responded

    def respond(self, outputs: Mapping[str, npt.NDArray[Any]], final: bool) -> None:
        """Send one response; TritonModelException when Triton cannot take it (out of shared memory, for one)."""
        tensors = [self._pb.Tensor(name, array) for name, array in outputs.items()]
        self._send(self._pb.InferenceResponse(tensors), final)

    def refuse(self, error: Exception) -> None:
        """Send an error, the caller's mistake or ours, as the final response; nothing when there has been one."""
        code = self._pb.TritonError.INVALID_ARG if isinstance(error, RequestError) else None
        self.forward(self._pb.TritonError(str(error), code or self._pb.TritonError.INTERNAL))

    def forward(self, error: Any) -> None:
        """Send a TritonError as the final response; nothing when there has been one."""
        self._send(self._pb.InferenceResponse(error=error), final=True)

    def finish(self) -> None:
        """End without a response."""
        with self._lock:
            self._sender.send(flags=self._pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
            self._ended = True

    def is_cancelled(self) -> bool:
        """Whether the client has gone; False once the request has ended."""
        with self._lock:
            return not self._ended and bool(self._sender.is_cancelled())

    def _send(self, response: Any, final: bool) -> None:
        with self._lock:
            if self._ended:
                return
            self._sender.send(response, flags=self._pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL if final else 0)
            self._responded = True
            self._ended = final


class CancellationPoll:
    """Asks senders whether their clients have gone, `POLL_S` apart at least.

    The Python backend answers the question from memory that belongs to the sender, and lets go of it only
    after the answer: a sender dropped at that moment corrupts the heap or hangs the model's unloading. So
    every sender is kept for `KEEP_POLLS` more polls.
    """

    POLL_S = 0.05
    KEEP_POLLS = 20

    def __init__(self) -> None:
        self._asked: deque[Sequence[Sender]] = deque(maxlen=self.KEEP_POLLS)

    def cancelled(self, senders: Sequence[Sender]) -> list[Sender]:
        """Those of `senders` whose clients have gone."""
        self._asked.append(senders)
        return [sender for sender in senders if sender.is_cancelled()]
