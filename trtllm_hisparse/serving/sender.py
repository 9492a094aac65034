"""A Triton response sender that is safe to ask and to use from two threads."""

import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy.typing as npt

from trtllm_hisparse.errors import RequestError

POLL_S = 0.05
"""How often senders are asked whether their clients have gone."""


class Keeper:
    """Holds on to objects for `KEEP_S` after their last use.

    Threads of the Python backend itself still use a response sender or a response iterator when it has given
    its last answer, and free what it leaves without Python's lock: one dropped at that moment corrupts memory
    or keeps the model from unloading (seen with Triton 2.51 under load).
    """

    KEEP_S = 2.0

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: deque[tuple[float, Any]] = deque()

    def keep(self, thing: Any) -> None:
        """Hold `thing`; let go of what has been held for long enough."""
        now, released = time.monotonic(), []
        with self._lock:
            self._kept.append((now, thing))
            while self._kept[0][0] < now - self.KEEP_S:
                released.append(self._kept.popleft())


class Sender:
    """The response sender of one request, until its final response.

    Triton frees its side with the final response, and asking it about cancellation after that, or at that
    moment, crashes the server: so the two exclude each other here.

    pb_utils: the module `triton_python_backend_utils`.
    keeper:   where it goes when it has ended.
    """

    def __init__(self, pb_utils: Any, request: Any, keeper: Keeper) -> None:
        self._pb = pb_utils
        self._sender = request.get_response_sender()
        self._keeper = keeper
        self._lock = threading.Lock()
        self._responded = False
        self._ended = False

    @property
    def responded(self) -> bool:
        """Whether a response has been sent."""
        return self._responded

    def respond(self, outputs: Mapping[str, npt.NDArray[Any]], final: bool) -> None:
        """Send one response; TritonModelException if Triton cannot take it (shared memory full, say)."""
        # Named, so that it outlives the sending: Triton drops what nobody requested without Python's lock.
        tensors = [self._pb.Tensor(name, array) for name, array in outputs.items()]
        self._send(self._pb.InferenceResponse(tensors), final)

    def refuse(self, error: Exception) -> None:
        """Send an error, the caller's mistake or ours, as the final response; nothing after one."""
        code = self._pb.TritonError.INVALID_ARG if isinstance(error, RequestError) else None
        self.forward(self._pb.TritonError(str(error), code or self._pb.TritonError.INTERNAL))

    def forward(self, error: Any) -> None:
        """Send a TritonError as the final response; nothing after one."""
        self._send(self._pb.InferenceResponse(error=error), final=True)

    def finish(self) -> None:
        """End without a response."""
        self._send(None, final=True)

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
        if final:
            self._keeper.keep(self._sender)
