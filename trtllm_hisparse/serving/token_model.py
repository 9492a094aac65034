"""The token-level Triton model: one runtime, many response senders."""

import contextlib
import json
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any

from trtllm_hisparse.errors import RequestError
from trtllm_hisparse.runtime.build import load_runtime
from trtllm_hisparse.runtime.loop import Runtime
from trtllm_hisparse.runtime.request import Event, FinishReason
from trtllm_hisparse.runtime.stats import RuntimeStats
from trtllm_hisparse.serving import triton
from trtllm_hisparse.serving.metrics import METRICS, MetricKind
from trtllm_hisparse.serving.sender import POLL_S, Keeper, Sender

FLUSH_S = 1.0
"""Time Triton gets to hand the last answers to their clients before it is told to stop."""


@dataclass(eq=False)
class Reply:
    """Where one request's responses go.

    client_id:  Triton's request id, which the client chose; may be empty.
    request_id: the runtime's; None until it is submitted.
    tokens:     not sent yet.
    """

    sender: Sender
    client_id: str
    call: triton.TokenCall
    request_id: int | None = None
    tokens: list[int] = field(default_factory=list)


class TokenModel:
    """`execute` submits and returns; one thread owns every response sender after that.

    pb_utils: the module `triton_python_backend_utils`.
    runtime:  started and closed here.
    on_fatal: called once, when serving cannot go on.
    """

    def __init__(self, pb_utils: Any, runtime: Runtime, on_fatal: Callable[[], None]) -> None:
        self._pb = pb_utils
        self._runtime = runtime
        self._on_fatal = on_fatal
        self._metrics = MetricPublisher(pb_utils)
        self._keeper = Keeper()
        self._lock = threading.Lock()
        self._live: set[Reply] = set()
        self._events: SimpleQueue[tuple[Reply, Event]] = SimpleQueue()
        self._closing = threading.Event()
        self._delivery = threading.Thread(target=self._run, name="hisparse-delivery", daemon=True)
        runtime.start()
        self._delivery.start()

    @classmethod
    def load(cls, pb_utils: Any, model_config: str) -> "TokenModel":
        """Build from config.pbtxt's parameters; the errors of `load_runtime` say what is wrong."""
        checkpoint, dtype, config = triton.model_parameters(
            model_config, "checkpoint_path", "dtype", "hisparse_config"
        )
        runtime = load_runtime(checkpoint, triton.hisparse_config(config), dtype)
        return cls(pb_utils, runtime, ServerProcess().stop)

    def execute(self, requests: list[Any]) -> None:
        """Submit or refuse each request; returns at once."""
        for request in requests:
            sender = Sender(self._pb, request, self._keeper)
            try:
                self._accept(request, sender)
            except RequestError as error:
                sender.refuse(error)
            except Exception as error:
                self._pb.Logger.log_error(traceback.format_exc())
                sender.refuse(error)

    def close(self) -> None:
        """Cancel what is in flight, answer it, end the threads."""
        self._runtime.close()
        self._closing.set()
        self._delivery.join()

    # -- Triton's thread ------------------------------------------------------------------------------
    def _accept(self, request: Any, sender: Sender) -> None:
        inputs = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        triton.check_parameters(json.loads(request.parameters() or "{}"))
        if triton.wants_stop(inputs):
            self._stop(request.request_id())
            sender.finish()
            return
        reply = Reply(sender, request.request_id(), triton.token_call(inputs))
        if reply.call.echo:
            reply.tokens.extend(reply.call.request.prompt)
        with self._lock:
            self._live.add(reply)
        try:
            reply.request_id = self._runtime.submit(
                reply.call.request, lambda event: self._events.put((reply, event))
            )
        except BaseException:
            with self._lock:
                self._live.discard(reply)
            raise

    def _stop(self, client_id: str) -> None:
        if not client_id:
            raise RequestError("stop: expected the id of the request to end as this request's id, got none")
        for reply in self._snapshot():
            if reply.client_id == client_id:
                self._cancel(reply)

    def _cancel(self, reply: Reply) -> None:
        if reply.request_id is not None:
            self._runtime.cancel(reply.request_id)

    def _snapshot(self) -> list[Reply]:
        with self._lock:
            return list(self._live)

    # -- the delivery thread --------------------------------------------------------------------------
    def _run(self) -> None:
        try:
            self._deliver()
        except Exception as error:
            self._pb.Logger.log_error(f"this server cannot go on and stops\n{traceback.format_exc()}")
            try:
                for reply in self._snapshot():
                    self._send(reply, Event(0, reason=FinishReason.ERROR, error=f"the server stopped: {error}"))
                time.sleep(FLUSH_S)
            finally:
                self._on_fatal()

    def _deliver(self) -> None:
        next_poll = 0.0
        while not (self._closing.is_set() and self._events.empty()):
            with contextlib.suppress(Empty):
                self._send(*self._events.get(timeout=POLL_S))
            if time.monotonic() < next_poll:
                continue
            next_poll = time.monotonic() + POLL_S
            for reply in self._snapshot():
                if reply.sender.is_cancelled():
                    self._cancel(reply)
            self._metrics.update(self._runtime.stats())
            if not self._runtime.healthy:
                self._runtime.close()  # its thread has ended then, and told every request why
                while not self._events.empty():
                    self._send(*self._events.get())
                raise RuntimeError("the runtime has failed")

    def _send(self, reply: Reply, event: Event) -> None:
        final = event.reason is not None
        if final:
            with self._lock:
                self._live.discard(reply)
        reply.tokens.extend(event.tokens)
        if not reply.call.streaming and not final:
            return
        try:
            self._respond(reply, event)
        except self._pb.TritonModelException as error:
            self._pb.Logger.log_error(f"request {event.request_id}: a response could not be sent: {error}")
            if final:
                reply.sender.refuse(error)
            else:
                self._runtime.cancel(event.request_id)
        reply.tokens.clear()

    def _respond(self, reply: Reply, event: Event) -> None:
        # After a first response an error travels in band: as a Triton error it would wedge a BLS parent.
        if event.reason is FinishReason.ERROR and not reply.sender.responded:
            reply.sender.refuse(RuntimeError(event.error))
            return
        outputs = triton.token_outputs(reply.tokens, event.reason, event.error)
        reply.sender.respond(outputs, final=event.reason is not None)


class MetricPublisher:
    """`METRICS` as Triton custom metrics."""

    def __init__(self, pb_utils: Any) -> None:
        family = pb_utils.MetricFamily
        kinds = {MetricKind.COUNTER: family.COUNTER, MetricKind.GAUGE: family.GAUGE}
        self._families = {
            metric.name: family(name=metric.name, description=metric.description, kind=kinds[metric.kind])
            for metric in METRICS
        }
        self._series: dict[tuple[str, ...], Any] = {}
        self._values: dict[tuple[str, ...], int] = {}

    def update(self, stats: RuntimeStats) -> None:
        """Publish what changed since the last call."""
        for metric in METRICS:
            for labels, value in metric.samples(stats):
                key = (metric.name, *labels.values())
                series = self._series.get(key)
                if series is None:
                    series = self._series[key] = self._families[metric.name].Metric(labels=labels)
                before = self._values.get(key, 0)
                if value == before:
                    continue
                if metric.kind is MetricKind.COUNTER:
                    series.increment(value - before)
                else:
                    series.set(value)
                self._values[key] = value


class ServerProcess:
    """The tritonserver that started this stub process.

    A dead runtime has to end the server: this backend has no readiness of its own, and a stub that exits
    leaves Triton reporting ready.
    """

    def __init__(self) -> None:
        self._pid = os.getppid()

    def stop(self) -> None:
        """Ask it to exit; its endpoints close at once."""
        if os.getppid() == self._pid:
            os.kill(self._pid, signal.SIGTERM)
