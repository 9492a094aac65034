"""Who is admitted, who yields, who comes back; and that every request is answered once, whatever fails."""

import threading

import pytest
from manual_copies import ManualCopyEngine
from pattern_engine import SHARED, PatternEngine, history

from trtllm_hisparse.config import HiSparseConfig
from trtllm_hisparse.errors import InvariantError, RequestError
from trtllm_hisparse.kv.hierarchy import CopyKind, Device, Host
from trtllm_hisparse.kv.layout import Cost
from trtllm_hisparse.kv.pool import PageKind
from trtllm_hisparse.residency.reclaim import covering_prefix
from trtllm_hisparse.runtime.loop import Runtime
from trtllm_hisparse.runtime.request import FinishReason, Request

P = 4
CONFIG = {
    "device_pool_bytes": 24 << 10,
    "host_pool_bytes": 256 << 10,
    "hot_rows": 8,
    "page_rows": P,
    "max_requests": 3,
    "max_context": 128,
    "prefill_chunk": 8,
    "max_batch_tokens": 32,
    "population_pages": 2,
    "debug_checks": True,
}


def make(engine=None, copies=None, **changes):
    copies = copies or ManualCopyEngine()
    return Runtime(engine or PatternEngine(), HiSparseConfig(**(CONFIG | changes)), copies), copies


def ask(tag, prompt, max_tokens, **more):
    return Request((tag,) * prompt, max_tokens, **more)


def reasons(events):
    return [e.reason for e in events if e.reason is not None]


def drive(runtime, copies, until, most=400):
    for _ in range(most):
        if until():
            return
        runtime.step()
        copies.complete_all()
    raise AssertionError("never happened")


# -- every request is answered exactly once -----------------------------------------------------------------


class Raises(PatternEngine):
    """Fails in the middle of a step once the batch reaches position 9: a follower is left without its rows."""

    def step(self, kv):
        if kv.batch.positions.max() >= 9:
            kv.append(0, kv.payload(0)[: len(kv.batch.token_ids)].clone())
            raise OSError("device lost")
        return super().step(kv)


def test_an_engine_failure_under_a_caller_who_steps_himself_is_as_fatal_as_in_the_thread():
    """A step that broke off may have left hot slots without their bytes: no later step may read them."""
    runtime, _ = make(Raises())
    running, queued = [], []
    runtime.submit(ask(1, 9, 20), running.append)
    while not running:
        runtime.step()
    runtime.submit(ask(2, 5, 5), queued.append)
    with pytest.raises(OSError, match="device lost"):
        runtime.run_until_idle()
    assert not runtime.healthy
    assert reasons(running) == reasons(queued) == [FinishReason.ERROR]
    assert running[-1].error == "the server stopped: device lost"
    with pytest.raises(RuntimeError, match="stopped"):
        runtime.step()
    with pytest.raises(RuntimeError, match="stopped"):
        runtime.submit(ask(1, 1, 1), running.append)
    runtime.close()
    assert len(reasons(running)) == len(reasons(queued)) == 1


def test_a_failure_while_a_request_ends_answers_it_and_all_behind_it_in_the_inbox(monkeypatch):
    runtime, _ = make()
    first, second = [], []
    rid = runtime.submit(ask(1, 9, 20), first.append)
    runtime.step()
    runtime.cancel(rid)
    runtime.submit(ask(2, 9, 20), second.append)

    def broken(slot):
        raise InvariantError("page 3 is not held")

    monkeypatch.setattr(runtime._kv, "release", broken)
    with pytest.raises(InvariantError):
        runtime.step()
    assert reasons(first) == reasons(second) == [FinishReason.ERROR]


def test_a_failure_during_close_still_answers_everyone_and_ends_the_copies(monkeypatch):
    runtime, copies = make()
    sinks = [[], []]
    for tag, events in enumerate(sinks, start=1):
        runtime.submit(ask(tag, 9, 20), events.append)
    runtime.step()
    closed = []
    monkeypatch.setattr(copies, "close", lambda: closed.append(True))
    monkeypatch.setattr(runtime._kv, "release", lambda slot: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        runtime.close()
    assert [reasons(events) for events in sinks] == [[FinishReason.ERROR]] * 2
    assert closed == [True]


def test_a_failed_copy_stops_the_server_and_answers_everyone():
    class Failing(ManualCopyEngine):
        def poll(self):
            if self.pending:
                raise InvariantError("a copy failed")
            return []

    runtime, _ = make(copies=Failing(), placement="fixed")
    events = []
    runtime.submit(ask(1, 60, 20), events.append)
    with pytest.raises(InvariantError, match="a copy failed"):
        runtime.run_until_idle()
    assert reasons(events) == [FinishReason.ERROR]


def test_refusals_are_counted_at_once_on_an_idle_server():
    """Nothing wakes the loop for them; /metrics must show them all the same."""
    runtime, _ = make()
    with pytest.raises(RequestError):
        runtime.submit(ask(1, 500, 1), print)
    assert runtime.stats().refused == 1


# -- reclaim and population ---------------------------------------------------------------------------------


def optional(runtime):
    return [runtime._kv.device_pool.held(PageKind.OPTIONAL, a.slot) for a in runtime._residency.admitted]


def test_pages_on_their_way_out_are_not_reclaimed_for_twice():
    """Eq. 4: a cancelled request's pages come back when its copies end; nobody is disturbed for them."""
    runtime, copies = make(device_pool_bytes=20 << 10)
    a, b, c = [], [], []
    runtime.submit(ask(1, 60, 40), a.append)
    drive(runtime, copies, lambda: a)
    leaving = runtime.submit(ask(2, 100, 4, history=history(SHARED, 2, 90)), b.append)
    runtime.step()
    kv = runtime._kv
    assert (optional(runtime)[0], kv.copying) == (15, True)
    runtime.cancel(leaving)
    runtime.submit(ask(3, 100, 20, history=history(SHARED, 3, 90)), c.append)
    runtime.step()
    assert kv.device_pool.held(PageKind.DRAINING) > 0
    assert runtime.stats().reclaims == 0
    drive(runtime, copies, lambda: reasons(c))
    assert runtime.stats().reclaims == 0


def slots(runtime):
    return [a.slot for a in runtime._residency.admitted]


def test_the_shortest_covering_prefix():
    """Eq. 4, exact."""
    assert covering_prefix([4, 5, 6], [2, 3, 9], 0) == []
    assert covering_prefix([4, 5, 6], [2, 3, 9], -1) == []
    assert covering_prefix([4, 5, 6], [2, 3, 9], 2) == [4]
    assert covering_prefix([4, 5, 6], [2, 3, 9], 3) == [4, 5]
    assert covering_prefix([4, 5, 6], [2, 3, 9], 14) == [4, 5, 6]
    assert covering_prefix([4, 5, 6], [2, 3, 9], 15) is None
    assert covering_prefix([4, 5, 6], [0, 3, 9], 3) == [5]
    assert covering_prefix([], [], 1) is None


def test_prompt_pages_stay_and_decoded_pages_go_to_the_host():
    """Resident-first: 7 complete prompt pages of 30 rows are kept without a backup, page 7 is decoded."""
    runtime, copies = make()
    events = []
    runtime.submit(ask(1, 30, 60), events.append)
    drive(runtime, copies, lambda: events)
    kv, slot = runtime._kv, slots(runtime)[0]
    assert kv.pages_in(slot, Device.READY, Host.NONE) == list(range(7))
    assert kv.slots[slot].tail_limit == 2
    drive(runtime, copies, lambda: kv.slots[slot].committed >= 40)
    assert kv.pages_in(slot, Device.READY, Host.NONE) == list(range(7))
    assert kv.host_state[slot, 7] == Host.DONE
    assert kv.moved_bytes[CopyKind.BACKUP] == 3 * kv.layout.page_bytes, "pages 7, 8 and 9"


def test_fixed_placement_lets_go_of_every_prompt_page_after_the_prefill():
    runtime, copies = make(placement="fixed")
    events = []
    runtime.submit(ask(1, 40, 60), events.append)
    drive(runtime, copies, lambda: len(events) > 2)
    kv, slot = runtime._kv, slots(runtime)[0]
    assert optional(runtime) == [0]
    assert kv.pages_in(slot, Device.ABSENT, Host.DONE) == list(range(10))
    assert runtime._residency.admitted[0].yielding
    assert kv.moved_bytes[CopyKind.BACKUP] == 10 * kv.layout.page_bytes, "each page once"


def two_that_yielded(**changes):
    """Two decoding requests whose 10 prompt pages are on the host, with room for all of them."""
    runtime, copies = make(device_pool_bytes=32 << 10, **({"population_pages": 0} | changes))
    sinks = [[], []]
    for tag, events in enumerate(sinks, start=1):
        runtime.submit(ask(tag, 40, 80), events.append)
    drive(runtime, copies, lambda: all(sinks))
    for admission in runtime._residency.admitted:
        runtime._residency._yield(admission)
    drive(runtime, copies, lambda: optional(runtime) == [0, 0])
    runtime.step()
    assert [a.yielding for a in runtime._residency.admitted] == [False, False]
    return runtime, copies


def more_population(runtime, monkeypatch, pages):
    monkeypatch.setitem(runtime._kv.layout.config.__dict__, "population_pages", pages)


def test_population_is_bounded_round_robin_and_newest_first(monkeypatch):
    runtime, copies = two_that_yielded()
    kv, (a, b) = runtime._kv, slots(runtime)
    more_population(runtime, monkeypatch, 2)
    runtime._residency._turn = 0
    runtime.step()
    assert (kv.pages_in(a, Device.PENDING), kv.pages_in(b, Device.PENDING)) == ([8, 9], [])
    runtime.step()
    assert (kv.pages_in(a, Device.PENDING), kv.pages_in(b, Device.PENDING)) == ([8, 9], [8, 9])
    copies.complete_all()
    runtime.step()
    assert (kv.pages_in(a, Device.READY), kv.pages_in(a, Device.PENDING)) == ([8, 9], [6, 7])
    assert runtime.stats().populated_pages == 6


def test_population_passes_over_a_request_that_is_yielding(monkeypatch):
    """Its pages are on their way out; the others need not wait for that."""
    runtime, _ = two_that_yielded()
    kv, (a, b) = runtime._kv, slots(runtime)
    more_population(runtime, monkeypatch, 2)
    runtime._residency._turn = 0
    runtime._residency.admitted[0].yielding = True
    runtime._residency._populate()
    assert (kv.pages_in(a, Device.PENDING), kv.pages_in(b, Device.PENDING)) == ([], [8, 9])


def test_population_stops_at_the_reserve_and_while_somebody_waits(monkeypatch):
    runtime, _ = two_that_yielded()
    residency = runtime._residency
    more_population(runtime, monkeypatch, 99)
    reserve = residency._unclaimed() - 3
    monkeypatch.setitem(runtime._kv.layout.config.__dict__, "admission_reserve_pages", reserve)
    residency.waiting.append(residency.price(128, 128))
    residency._populate()
    assert optional(runtime) == [0, 0]
    residency.waiting.clear()
    residency._populate()
    assert (sum(optional(runtime)), residency._unclaimed()) == (3, reserve)


def test_a_yielding_request_gives_up_what_arrives_later():
    """An import that lands after the reclaim began is backed up and freed too; nothing is added meanwhile."""
    runtime, copies = make(device_pool_bytes=18 << 10)
    a, b = [], []
    runtime.submit(ask(1, 100, 20, history=history(SHARED, 1, 90)), a.append)
    runtime.step()
    kv, slot = runtime._kv, slots(runtime)[0]
    assert optional(runtime)[0] > 10
    runtime.submit(ask(2, 100, 20), b.append)
    runtime.step()
    assert (runtime.stats().reclaims, runtime._residency.admitted[0].yielding) == (1, True)
    copies.complete_all()
    runtime.step()
    assert kv.pages_in(slot, Device.READY, Host.COPYING) == list(range(22))
    for left in (22, 21, 20):
        assert (optional(runtime), len(slots(runtime))) == ([left], 1)
        copies.complete()
        runtime.step()
    assert len(slots(runtime)) == 2, "3 pages, and one of the tail reservation that shrank, covered the deficit"
    assert runtime.stats().reclaims == 1
    copies.complete_all()
    runtime._residency.advance()
    assert kv.pages_in(slot, Device.READY) == [], "a whole request is reclaimed"
    assert kv.pages_in(slot, Device.PENDING) == [21, 22], "and comes back"
    drive(runtime, copies, lambda: reasons(a) and reasons(b))


def test_queue_order_is_arrival_order_and_a_wait_is_counted_once():
    runtime, copies = make(max_requests=1)
    order = []
    for tag in (1, 2, 3):
        runtime.submit(ask(tag, 5, 2), lambda e, tag=tag: order.append((tag, e.reason)))
    drive(runtime, copies, lambda: len(order) == 6)
    assert order == [(tag, reason) for tag in (1, 2, 3) for reason in (None, FinishReason.LENGTH)]
    assert runtime.stats().waits == 2


# -- the cost of a request ----------------------------------------------------------------------------------


def test_costs_in_pages():
    """Hot cache 2 pages; a chunk of 8 touches 3 pages, one more is in flight; in decode 1 and 1."""
    runtime, _ = make()
    cost = runtime.layout.cost
    assert cost(24, 24) == Cost(6, 0, 6, 6, 0), "served resident: it fits in what it would reserve"
    assert cost(25, 25) == Cost(6, 2, 4, 7, 7)
    assert cost(100, 1) == Cost(4, 2, 2, 25, 25)
    assert cost(100, 3) == Cost(5, 2, 3, 25, 25)
    assert (runtime.layout.tail_pages(1), runtime.layout.tail_pages(8)) == (2, 4)
    resident, _ = make(placement="resident")
    assert resident.layout.cost(25, 25) == Cost(7, 0, 7, 7, 0)


def test_a_short_request_is_served_resident_and_moves_nothing():
    runtime, copies = make()
    events = []
    runtime.submit(ask(1, 20, 5), events.append)
    drive(runtime, copies, lambda: reasons(events))
    stats = runtime.stats()
    assert (stats.hot_rows, stats.host_rows, stats.backup_bytes, stats.copied_bytes) == (0, 0, 0, 0)
    assert stats.direct_rows > 0


def test_imported_history_shorter_than_a_page_goes_to_the_tail():
    """The cost of an import counts what is computed here; its partial page is the tail's."""
    runtime, copies = make(placement="fixed")
    events = []
    runtime.submit(ask(1, 31, 40, history=history(SHARED, 1, 30)), events.append)
    runtime.step()
    kv, slot = runtime._kv, slots(runtime)[0]
    assert runtime._residency.admitted[0].cost == runtime.layout.cost(70, 1)
    assert (kv.device_pool.held(PageKind.TAIL, slot), optional(runtime)) == (1, [0])
    drive(runtime, copies, lambda: reasons(events))
    assert [t for e in events for t in e.tokens] == [1] * 40


# -- sinks and threads --------------------------------------------------------------------------------------


def test_a_sink_may_cancel_and_submit():
    """Cancelling oneself and another in the middle of the same commit; a request submitted from a sink runs."""
    runtime, copies = make()
    seen = {1: [], 2: [], 3: []}
    ids = {}

    def first(event):
        seen[1].append(event)
        if len(seen[1]) == 1:
            runtime.cancel(ids[1])
            runtime.cancel(ids[2])
            runtime.submit(ask(3, 3, 2), seen[3].append)

    ids[1] = runtime.submit(ask(1, 4, 50), first)
    ids[2] = runtime.submit(ask(2, 4, 50), seen[2].append)
    drive(runtime, copies, lambda: reasons(seen[3]))
    assert reasons(seen[1]) == reasons(seen[2]) == [FinishReason.CANCELLED]
    assert (len(seen[1]), len(seen[2])) == (2, 2)
    assert reasons(seen[3]) == [FinishReason.LENGTH]


def test_whoever_was_accepted_before_a_close_is_answered_once():
    """C35: clients submit while the server shuts down; refused or answered, never neither."""
    for _ in range(5):
        runtime = Runtime(PatternEngine(), HiSparseConfig(**(CONFIG | {"debug_checks": False})))
        runtime.start()
        accepted, begun = [], threading.Event()

        def client(runtime=runtime, accepted=accepted, begun=begun):
            while True:
                events = []
                try:
                    runtime.submit(ask(1, 9, 3), events.append)
                except RuntimeError:
                    return
                accepted.append(events)
                begun.set()

        threads = [threading.Thread(target=client) for _ in range(3)]
        for thread in threads:
            thread.start()
        assert begun.wait(10)
        runtime.close()
        for thread in threads:
            thread.join()
        assert all(len(reasons(events)) == 1 for events in accepted)
        runtime.check()


def test_gauges_return_to_zero():
    """C88: after all requests ended, whichever way, every gauge of use is exactly 0."""
    for placement in ("resident", "fixed", "adaptive"):
        runtime, copies = make(placement=placement)
        idle = runtime.stats()
        sinks = [[] for _ in range(5)]
        rids = [runtime.submit(ask(t, 40, 20), events.append) for t, events in enumerate(sinks, start=1)]
        drive(runtime, copies, lambda sinks=sinks: sinks[0])
        busy = runtime.stats()
        assert min(busy.running, busy.pages_required, busy.device_used_bytes - idle.device_used_bytes) > 0
        assert busy.queue_depth > 0
        runtime.cancel(rids[1])
        drive(runtime, copies, lambda sinks=sinks: all(map(reasons, sinks)))
        runtime.step()
        end = runtime.stats()
        assert (end.queue_depth, end.running, end.pages_required, end.pages_optional) == (0, 0, 0, 0)
        assert (end.pages_pending, end.host_used_bytes, end.pages_free) == (0, 0, idle.pages_free)
        assert end.device_used_bytes == idle.device_used_bytes
        assert end.device_peak_bytes >= busy.device_used_bytes
        assert (end.cancelled, end.failed, end.admissions) == (1, 0, 5)
