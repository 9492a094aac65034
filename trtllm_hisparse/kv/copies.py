"""Asynchronous copies with explicit completion: what a CUDA copy stream and its events are to a GPU."""

import threading
from collections import deque
from collections.abc import Sequence
from typing import NewType, Protocol

import torch

from trtllm_hisparse.errors import InvariantError

Ticket = NewType("Ticket", int)
"""Names one submitted copy until `poll` reports it."""

Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""(source, destination) of equal shape and dtype. The engine keeps them alive until the copy completed."""


class CopyEngine(Protocol):
    """Completion may come in any order. Until it is reported the destination is undefined, and neither the
    source nor the destination may be used for anything else."""

    def submit(self, pairs: Pairs) -> Ticket:
        """Start a copy; returns at once."""

    def poll(self) -> list[Ticket]:
        """Copies completed since the last call, each reported once. Never blocks."""

    def wait(self, timeout: float) -> None:
        """Block until some copy has completed and was not polled, none is in flight, or `timeout` seconds."""

    def close(self) -> None:
        """Finish what was submitted and release the engine."""


class ThreadCopyEngine:
    """Copies on one worker thread, in submission order."""

    def __init__(self) -> None:
        self._ready = threading.Condition()
        self._queue: deque[tuple[Ticket, Pairs]] = deque()
        self._done: list[Ticket] = []
        self._next = 0
        self._in_flight = 0
        self._closing = False
        self._failure: BaseException | None = None
        self._worker = threading.Thread(target=self._work, name="hisparse-copies", daemon=True)
        self._worker.start()

    def submit(self, pairs: Pairs) -> Ticket:
        with self._ready:
            if self._closing:
                raise InvariantError("copy submitted after the engine was closed")
            ticket = Ticket(self._next)
            self._next += 1
            self._in_flight += 1
            self._queue.append((ticket, pairs))
            self._ready.notify_all()
        return ticket

    def poll(self) -> list[Ticket]:
        with self._ready:
            if self._failure is not None:
                raise InvariantError("a copy failed") from self._failure
            done, self._done = self._done, []
            return done

    def wait(self, timeout: float) -> None:
        with self._ready:
            self._ready.wait_for(lambda: self._done or not self._in_flight or self._failure, timeout)

    def close(self) -> None:
        with self._ready:
            self._closing = True
            self._ready.notify_all()
        self._worker.join()

    def _work(self) -> None:
        while True:
            with self._ready:
                self._ready.wait_for(lambda: self._queue or self._closing)
                if not self._queue:
                    return
                ticket, pairs = self._queue.popleft()
            try:
                for source, destination in pairs:
                    destination.copy_(source)
            except BaseException as error:  # reported by poll, which stops the server
                with self._ready:
                    self._failure = error
                    self._ready.notify_all()
                return
            with self._ready:
                self._in_flight -= 1
                self._done.append(ticket)
                self._ready.notify_all()
