"""The serving loop: one thread owns the hierarchy and runs

    arrivals, cancellations -> residency -> batch -> engine step -> sample -> commit -> events

`step` is that, top to bottom; everything public besides is thread-safe.
"""

import logging
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from trtllm_hisparse.config import HiSparseConfig
from trtllm_hisparse.engine.base import Engine
from trtllm_hisparse.errors import RequestError
from trtllm_hisparse.kv.check import check
from trtllm_hisparse.kv.copies import CopyEngine, ThreadCopyEngine
from trtllm_hisparse.kv.hierarchy import KVHierarchy
from trtllm_hisparse.kv.layout import KVLayout
from trtllm_hisparse.kv.step import Block, HierarchyStep
from trtllm_hisparse.residency.manager import Admission, Residency
from trtllm_hisparse.runtime.batcher import Active, next_batch
from trtllm_hisparse.runtime.request import Event, FinishReason, ImportedHistory, Request, Sink
from trtllm_hisparse.runtime.sampling import sample
from trtllm_hisparse.runtime.stats import LoopCounts, RuntimeStats, snapshot

log = logging.getLogger(__name__)

COPY_WAIT_S = 0.05
"""Longest sleep while nothing can run before a copy completes."""


class Runtime:
    """Continuous batching over one engine and one KV hierarchy.

    Drive it with `start` (own thread) or call `step` yourself, not both.
    """

    def __init__(self, engine: Engine, config: HiSparseConfig, copies: CopyEngine | None = None) -> None:
        """Allocate the pools; ConfigError when they cannot serve this model."""
        layout = KVLayout.resolve(engine.spec, config, engine.dtype)
        self._engine = engine
        self._kv = KVHierarchy(layout, copies or ThreadCopyEngine())
        self._residency = Residency(self._kv)
        self._counts = LoopCounts()
        self._active: dict[int, Active] = {}
        self._running: list[Active] = []
        self._inbox: deque[Active | int] = deque()
        """Arrivals, and ids to cancel, in the order they came."""
        self._wake = threading.Condition()
        self._next_id = 0
        self._closing = False
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._stats = snapshot(self._kv, self._residency, self._counts)

    # -- any thread -----------------------------------------------------------------------------------
    def submit(self, request: Request, sink: Sink) -> int:
        """Queue a request and return its id; events follow through `sink`, the last one carries the reason.

        RequestError, with the figures, for a request that could never run; RuntimeError after a shutdown.
        """
        try:
            admission = self._price(request)
        except RequestError:
            with self._wake:
                self._counts.refused += 1
            raise
        with self._wake:
            if self._closing or self._failure is not None:
                raise RuntimeError("the runtime has stopped") from self._failure
            active = Active(self._next_id, request, sink, admission, list(request.prompt))
            self._next_id += 1
            self._inbox.append(active)
            self._wake.notify_all()
        return active.id

    def cancel(self, request_id: int) -> None:
        """End a request wherever it is; unknown and finished ids are ignored."""
        with self._wake:
            self._inbox.append(request_id)
            self._wake.notify_all()

    def start(self) -> None:
        """Run the loop on a thread of its own until `close`."""
        self._thread = threading.Thread(target=self._run, name="hisparse-loop", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Cancel what is in flight, stop the loop, finish the copies. Idempotent; not from a sink."""
        with self._wake:
            closed, self._closing = self._closing, True
            self._wake.notify_all()
        if closed:
            return
        if self._thread is not None:
            self._thread.join()
        try:
            if self._failure is None:
                with self._fatal():
                    self._take_inbox()
                    for active in list(self._active.values()):
                        self._finish(active, FinishReason.CANCELLED)
        finally:
            self._kv.copies.close()
        if self._failure is None:
            self._kv.poll()
            self._stats = snapshot(self._kv, self._residency, self._counts)

    @property
    def healthy(self) -> bool:
        """False once a broken invariant or an engine failure has stopped the loop."""
        return self._failure is None

    @property
    def layout(self) -> KVLayout:
        """The resolved pools."""
        return self._kv.layout

    def stats(self) -> RuntimeStats:
        """Counters and gauges as of the last step; refusals as of now, for an idle loop hears of none."""
        return replace(self._stats, refused=self._counts.refused)

    def check(self) -> None:
        """Full accounting check (InvariantError); only between steps, from the thread that drives them."""
        check(self._kv)

    # -- the loop -------------------------------------------------------------------------------------
    def step(self) -> bool:
        """One pass. False when there was nothing to run (idle, or waiting for copies).

        Any error out of it is fatal: every request has been answered, and the runtime is not healthy any more.
        """
        if self._failure is not None:
            raise RuntimeError("the runtime has stopped") from self._failure
        with self._fatal():
            return self._step()

    def _step(self) -> bool:
        self._take_inbox()
        for admission in self._residency.advance():
            self._running.append(next(a for a in self._active.values() if a.admission is admission))
        batch = next_batch(self._kv, self._running)
        if batch:
            step = HierarchyStep(self._kv, [block for _, block in batch])
            logits = self._engine.step(step)
            step.end()
            self._commit(batch, logits)
            self._counts.steps += 1
        if self._kv.layout.config.debug_checks:
            self.check()
        self._stats = snapshot(self._kv, self._residency, self._counts)
        return bool(batch)

    def run_until_idle(self) -> None:
        """Step until every submitted request has ended (for callers without a thread)."""
        while True:
            if not self.step():
                if not self._active and not self._inbox:
                    return
                self._kv.copies.wait(COPY_WAIT_S)

    def _run(self) -> None:
        try:
            while not self._closing:
                if self.step():
                    continue
                if self._kv.copying:
                    self._kv.copies.wait(COPY_WAIT_S)
                else:
                    with self._wake:
                        self._wake.wait_for(lambda: self._inbox or self._closing)
        except Exception:  # every request has been answered
            log.exception("the serving loop stopped")

    @contextmanager
    def _fatal(self) -> Iterator[None]:
        """Whatever goes wrong inside stops the runtime: bookkeeping and memory may disagree from here on."""
        try:
            yield
        except BaseException as error:
            with self._wake:
                self._failure = error
            self._fail_all(f"the server stopped: {error}")
            raise

    def _take_inbox(self) -> None:
        while self._inbox:
            with self._wake:
                item = self._inbox.popleft()
            if isinstance(item, Active):
                self._active[item.id] = item
                self._residency.enqueue(item.admission)
            elif item in self._active:
                self._finish(self._active[item], FinishReason.CANCELLED)

    def _commit(self, batch: list[tuple[Active, Block]], logits: torch.Tensor) -> None:
        """Make the step's rows history, draw the next tokens, tell the requests."""
        row = 0
        for active, block in batch:
            self._counts.prompt_tokens += len(block.tokens) if active.produced == 0 else 0
            self._residency.committed(active.admission, self._kv.commit(block.slot, len(block.tokens)))
            if block.logits:
                if active.produced == 0:
                    self._residency.prefilled(active.admission)
                self._extend(active, logits[row])
                row += 1

    def _extend(self, active: Active, logits: torch.Tensor) -> None:
        request = active.request
        try:
            token = sample(logits, request.sampling, len(active.tokens) - 1)
        except RequestError as error:
            self._finish(active, FinishReason.ERROR, error=str(error))
            return
        if token in request.stop_ids:
            self._finish(active, FinishReason.STOP)
            return
        active.tokens.append(token)
        self._counts.output_tokens += 1
        if active.produced == request.max_tokens:
            self._finish(active, FinishReason.LENGTH, (token,))
        else:
            self._tell(active, Event(active.id, (token,)))

    def _finish(
        self, active: Active, reason: FinishReason, tokens: tuple[int, ...] = (), error: str | None = None
    ) -> None:
        """The one way a request ends: its pages go back, then its sink hears the reason."""
        self._residency.leave(active.admission)
        del self._active[active.id]
        if active in self._running:
            self._running.remove(active)
        self._counts.cancelled += reason is FinishReason.CANCELLED
        self._counts.failed += reason is FinishReason.ERROR
        self._tell(active, Event(active.id, tokens, reason, error))

    def _tell(self, active: Active, event: Event) -> None:
        try:
            active.sink(event)
        except Exception:  # a client's fault must not touch the others
            log.exception("request %d: its sink failed; the request is cancelled", active.id)
            if event.reason is None:
                self.cancel(active.id)

    def _fail_all(self, message: str) -> None:
        """After a fatal error the hierarchy is not touched again; every request is answered."""
        with self._wake:
            waiting = [item for item in self._inbox if isinstance(item, Active)]
        for active in [*self._active.values(), *waiting]:
            self._tell(active, Event(active.id, reason=FinishReason.ERROR, error=message))
        self._active.clear()

    # -- what a request must satisfy --------------------------------------------------------------------
    def _price(self, request: Request) -> Admission:
        layout = self._kv.layout
        limit, vocab = layout.config.max_context, self._engine.vocab_size
        if not request.prompt:
            raise RequestError("prompt: expected at least one token, got none")
        bad = next((t for t in request.prompt if not 0 <= t < vocab), None)
        if bad is not None:
            raise RequestError(f"prompt: expected token ids in 0..{vocab - 1}, got {bad}")
        if request.max_tokens < 1:
            raise RequestError(f"max_tokens: expected at least 1, got {request.max_tokens}")
        # The last output token is never fed back, so it needs no row.
        total = len(request.prompt) + request.max_tokens - 1
        if total > limit:
            raise RequestError(
                f"prompt of {len(request.prompt)} tokens and max_tokens={request.max_tokens} need {total} "
                f"positions, more than max_context={limit}"
            )
        if request.history is not None:
            self._check_history(request.history, len(request.prompt))
        admission = self._residency.price(total, len(request.prompt), request.history)
        never = layout.why_never(admission.cost)
        if never is not None:
            raise RequestError(f"a context of {total} positions can never run: it {never}")
        return admission

    def _check_history(self, history: ImportedHistory, prompt: int) -> None:
        layout = self._kv.layout
        if not 1 <= history.length < prompt:
            raise RequestError(
                f"history: expected 1..{prompt - 1} rows for a prompt of {prompt} tokens (the last is computed "
                f"here), got {history.length}"
            )
        for what, given, stores in (
            ("rows", history.rows, self._kv.payload),
            ("index_keys", history.index_keys, self._kv.index),
        ):
            if set(given) != set(stores):
                raise RequestError(f"history.{what}: expected layers {sorted(stores)}, got {sorted(given)}")
            for layer, store in stores.items():
                expected = (history.length, store.shape[1])
                if tuple(given[layer].shape) != expected or given[layer].dtype != layout.dtype:
                    raise RequestError(
                        f"history.{what}[{layer}]: expected {list(expected)} {layout.dtype}, got "
                        f"{list(given[layer].shape)} {given[layer].dtype}"
                    )
