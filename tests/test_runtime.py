"""The loop over the hierarchy with an engine that checks every row it reads."""

import threading

import pytest
import torch
from manual_copies import ManualCopyEngine
from pattern_engine import REINDEX, SHARED, PatternEngine, history

from trtllm_hisparse.config import HiSparseConfig, Placement
from trtllm_hisparse.errors import ConfigError, RequestError
from trtllm_hisparse.kv.hierarchy import Device
from trtllm_hisparse.kv.layout import Cost, KVLayout
from trtllm_hisparse.residency.manager import Admission
from trtllm_hisparse.runtime.loop import Runtime
from trtllm_hisparse.runtime.request import FinishReason, Request, SamplingParams

SMALL = {
    "device_pool_bytes": 64 << 10,
    "host_pool_bytes": 256 << 10,
    "hot_rows": 8,
    "page_rows": 4,
    "max_requests": 4,
    "max_context": 256,
    "prefill_chunk": 12,
    "max_batch_tokens": 32,
    "population_pages": 2,
    "debug_checks": True,
}


class Sink:
    def __init__(self):
        self.events = []
        self.ended = threading.Event()

    def __call__(self, event):
        assert not self.ended.is_set(), "an event after the last one"
        self.events.append(event)
        if event.reason is not None:
            self.ended.set()

    @property
    def tokens(self):
        return [t for e in self.events for t in e.tokens]

    @property
    def last(self):
        return self.events[-1]


@pytest.fixture
def runtimes():
    made = []

    def make(spec=SHARED, copies=None, engine=None, **changes):
        runtime = Runtime(engine or PatternEngine(spec), HiSparseConfig(**(SMALL | changes)), copies)
        made.append(runtime)
        return runtime

    yield make
    for runtime in made:
        runtime.close()
        if runtime.healthy:
            assert_nothing_left(runtime)


def assert_nothing_left(runtime):
    """The accounting check after every test: all pages and bytes are back."""
    runtime.check()
    stats = runtime.stats()
    assert (stats.running, stats.queue_depth, stats.pages_required, stats.pages_optional) == (0, 0, 0, 0)
    assert stats.pages_free == runtime.layout.device_pages
    assert stats.host_used_bytes == 0
    assert stats.device_used_bytes == runtime._kv.fixed_bytes


def ask(tag, prompt, max_tokens, **more):
    return Request((tag,) * prompt, max_tokens, **more)


LENGTHS = [(1, 1), (3, 2), (4, 9), (5, 1), (61, 20), (64, 8), (65, 30), (120, 40), (200, 56), (8, 100), (2, 3)]


@pytest.mark.parametrize("spec", [SHARED, REINDEX], ids=lambda s: s.name)
@pytest.mark.parametrize("placement", list(Placement))
def test_every_row_is_exact_under_churn(runtimes, spec, placement):
    """I1-I8: small pools, staggered arrivals, every length around a page boundary, all rows checked."""
    runtime = runtimes(spec, placement=placement)
    sinks = []
    for tag, (prompt, n) in enumerate(LENGTHS, start=1):
        sinks.append((tag, n, Sink()))
        runtime.submit(ask(tag, prompt, n), sinks[-1][2])
        runtime.step()
    runtime.run_until_idle()
    for tag, n, sink in sinks:
        assert sink.tokens == [tag] * n
        assert sink.last.reason is FinishReason.LENGTH
    stats = runtime.stats()
    assert stats.output_tokens == sum(n for _, n in LENGTHS)
    assert stats.prompt_tokens == sum(p for p, _ in LENGTHS)
    assert stats.admissions == len(LENGTHS)
    assert stats.device_peak_bytes <= stats.device_pool_bytes
    if placement is Placement.RESIDENT:
        assert stats.hot_rows == stats.host_rows == stats.backup_bytes == 0
    else:
        assert stats.host_rows > 0
        assert stats.hot_rows > 0


@pytest.mark.parametrize("length", [1, 3, 4, 5, 63, 64, 65, 119])
@pytest.mark.parametrize("placement", list(Placement))
def test_imported_history_of_any_length(runtimes, placement, length):
    """C60: imports that end before, on and after a page boundary; the rest of the prompt is computed here."""
    runtime = runtimes(placement=placement)
    sinks = [Sink() for _ in range(3)]
    for tag, sink in enumerate(sinks, start=1):
        runtime.submit(ask(tag, 120, 20, history=history(SHARED, tag, length)), sink)
    runtime.run_until_idle()
    assert [s.tokens for s in sinks] == [[tag] * 20 for tag in (1, 2, 3)]


def pool_of(pages, **changes):
    """device_pool_bytes whose payload pool has just `pages` pages."""
    values = SMALL | changes
    for size in range(16, 1 << 20, 16):
        try:
            config = HiSparseConfig(**(values | {"device_pool_bytes": size}))
            layout = KVLayout.resolve(SHARED, config, torch.float32)
        except ConfigError:
            continue
        if layout.device_pages >= pages:
            return size
    raise AssertionError


def until(runtime, copies, condition):
    for _ in range(2000):
        if condition():
            return
        runtime.step()
        copies.complete_all()
    raise AssertionError("never happened")


RECLAIM = {"host_pool_bytes": 1 << 20, "prefill_chunk": 8, "max_batch_tokens": 16, "population_pages": 1}


def two_resident_requests(runtimes, spare, **changes):
    """Each needs 7 required pages (hot 2, tail 5; 3 once decoding) and keeps 24 optional ones."""
    copies = ManualCopyEngine()
    copies.auto = True
    values = RECLAIM | changes
    runtime = runtimes(copies=copies, device_pool_bytes=pool_of(2 * (4 + 24) + spare, **values), **values)
    sinks = [Sink(), Sink()]
    for tag, sink in enumerate(sinks, start=1):
        runtime.submit(ask(tag, 96, 100), sink)
    until(runtime, copies, lambda: all(sink.tokens for sink in sinks))
    held = [runtime._kv.device_pool.held("optional", a.slot) for a in runtime._residency.admitted]
    assert held == [24, 24], "resident-first: all of the imported history stays"
    return runtime, copies, sinks


def test_reclaim_takes_whole_requests_and_only_as_many_as_needed(runtimes):
    """Eq. 4, C52, C62: the smallest covering prefix yields, the other request keeps every page."""
    runtime, copies, _ = two_resident_requests(runtimes, spare=3)
    kv, residency = runtime._kv, runtime._residency
    assert residency._unclaimed() == 3
    late = Sink()
    runtime.submit(ask(3, 96, 4), late)
    runtime.step()
    assert (runtime.stats().waits, runtime.stats().reclaims, runtime.stats().reclaimed_pages) == (1, 1, 24)
    assert len(copies.pending) == 24, "the yielding request is backed up, nobody else"
    while runtime.stats().admissions < 3:
        assert kv.device_pool.held("optional", residency.admitted[1].slot) == 24
        runtime.step()
        copies.complete()
    assert runtime.stats().reclaims == 1
    runtime.run_until_idle()
    assert late.tokens == [3] * 4
    assert runtime.stats().populated_pages > 0


def test_no_reclaim_when_free_pages_suffice(runtimes):
    """C62."""
    runtime, _, _ = two_resident_requests(runtimes, spare=6)
    late = Sink()
    runtime.submit(ask(3, 96, 4), late)
    runtime.step()
    assert (runtime.stats().admissions, runtime.stats().reclaims, runtime.stats().waits) == (3, 0, 0)
    runtime.run_until_idle()


def test_nothing_is_reclaimed_when_all_of_it_would_not_cover_the_deficit(runtimes):
    """Eq. 4: the admission waits, the others keep their pages."""
    runtime, copies, sinks = two_resident_requests(runtimes, spare=3)
    big = runtime._residency.price(256, 256)
    wanted = Cost(57, 2, 55, big.cost.index, big.cost.host)  # more than 3 free + 48 optional
    runtime._residency.enqueue(Admission(256, 256, wanted))
    for _ in range(3):
        runtime.step()
        copies.complete_all()
    assert (runtime.stats().waits, runtime.stats().reclaims) == (1, 0)
    assert runtime.stats().pages_optional == 48
    runtime._residency.leave(runtime._residency.waiting[0])
    runtime.run_until_idle()
    assert [len(s.tokens) for s in sinks] == [100, 100]


def test_the_admission_reserve_is_left_free_for_the_next_admission(runtimes):
    """M_res: optional history stops short of it, and an admission draws on it without waiting."""
    runtime = runtimes(**RECLAIM, device_pool_bytes=pool_of(40, **RECLAIM), admission_reserve_pages=6)
    first, second = Sink(), Sink()
    runtime.submit(ask(1, 200, 50), first)
    while not first.tokens:
        runtime.step()
        assert runtime._residency._unclaimed() >= 6
    runtime.submit(ask(2, 90, 5), second)
    runtime.step()
    assert (runtime.stats().admissions, runtime.stats().waits) == (2, 0)
    runtime.run_until_idle()


def test_a_request_that_can_never_fit_is_refused_with_figures_and_blocks_nobody(runtimes):
    """C57, C58, C55."""
    runtime = runtimes(host_pool_bytes=80 * 20 * 4)  # 20 host pages of 4 rows
    good = Sink()
    runtime.submit(ask(2, 70, 5), good)
    says = r"needs 50 host pages of 4 rows, the pool has 20 \(host_pool_bytes=6400\)"
    with pytest.raises(RequestError, match=says):
        runtime.submit(ask(1, 150, 50), Sink())
    with pytest.raises(RequestError, match="need 257 positions, more than max_context=256"):
        runtime.submit(ask(1, 256, 2), Sink())
    runtime.run_until_idle()
    assert good.tokens == [2] * 5
    assert runtime.stats().refused == 2


def test_longest_context_runs_to_its_last_row(runtimes):
    """C15, C57: prompt + output at the limit exactly."""
    for placement in Placement:
        runtime = runtimes(placement=placement, max_requests=1, max_batch_tokens=12)
        a, b = Sink(), Sink()
        runtime.submit(ask(1, 256, 1), a)
        runtime.submit(ask(2, 1, 256), b)
        runtime.run_until_idle()
        assert (len(a.tokens), len(b.tokens)) == (1, 256)


def test_admission_waits_for_host_pages_and_runs_later(runtimes):
    """C54, C55: capacity of every tier is reserved at admission, nothing fails inside a step."""
    runtime = runtimes(host_pool_bytes=80 * 4 * 60, placement="fixed")
    sinks = [Sink() for _ in range(3)]
    for tag, sink in enumerate(sinks, start=1):
        runtime.submit(ask(tag, 90, 10), sink)
    runtime.step()
    assert (runtime.stats().running, runtime.stats().queue_depth) == (2, 1)
    runtime.run_until_idle()
    assert [s.tokens for s in sinks] == [[t] * 10 for t in (1, 2, 3)]
    assert runtime.stats().waits == 1


WHEN = ["before the loop", "queued", "importing", "prefill", "decode", "backup in flight"]


@pytest.mark.parametrize("when", WHEN)
def test_cancel_at_any_point_leaves_nothing(runtimes, when):
    """C35, C79, I3: pages return only after the copies that touch them."""
    copies = ManualCopyEngine()
    runtime = runtimes(copies=copies, placement="fixed", max_requests=1, max_batch_tokens=12)
    other, sink, after = Sink(), Sink(), Sink()
    if when == "queued":
        runtime.submit(ask(9, 100, 50), other)
    given = history(SHARED, 1, 90) if when == "importing" else None
    rid = runtime.submit(ask(1, 100, 50, history=given), sink)
    if when != "before the loop":
        for _ in range(300):
            runtime.step()
            produced = len(sink.tokens)
            if when in ("queued", "prefill", "importing") or (produced > 6 and copies.pending):
                break
            copies.complete_all()
            if when == "decode" and produced > 3:
                break
    in_flight = len(copies.pending)
    assert in_flight > 0 or when not in ("importing", "backup in flight")
    runtime.cancel(rid)
    runtime.cancel(rid)
    runtime.submit(ask(2, 100, 30), after)
    runtime.step()
    runtime.check()
    assert sink.last.reason is FinishReason.CANCELLED
    assert len(copies.pending) >= min(in_flight, 1)
    copies.auto = True
    runtime.run_until_idle()
    assert after.tokens == [2] * 30
    assert other.tokens == ([9] * 50 if when == "queued" else [])


def test_stop_ids_end_a_request_without_being_emitted(runtimes):
    runtime = runtimes()
    sink = Sink()
    runtime.submit(ask(7, 5, 10, stop_ids=frozenset({7})), sink)
    runtime.run_until_idle()
    assert sink.tokens == []
    assert sink.last.reason is FinishReason.STOP


class Spoiled(PatternEngine):
    """NaN logits for one tag."""

    def step(self, kv):
        logits = super().step(kv)
        logits[kv.batch.token_ids[kv.batch.logit_rows] == 13] = float("nan")
        return logits


def test_one_requests_error_leaves_the_others_running(runtimes):
    runtime = runtimes(engine=Spoiled())
    good, bad = Sink(), Sink()
    runtime.submit(ask(1, 30, 10), good)
    runtime.submit(ask(13, 30, 10), bad)
    runtime.run_until_idle()
    assert good.tokens == [1] * 10
    assert bad.last.reason is FinishReason.ERROR
    assert "non-finite" in bad.last.error
    assert runtime.stats().failed == 1


def test_a_sink_that_raises_ends_only_its_own_request(runtimes):
    runtime = runtimes()
    good = Sink()

    def broken(event):
        raise OSError("client gone")

    runtime.submit(ask(2, 10, 50), broken)
    runtime.submit(ask(1, 10, 50), good)
    runtime.run_until_idle()
    assert good.tokens == [1] * 50
    assert runtime.stats().cancelled == 1


class Broken(PatternEngine):
    """Drops one page from the maps behind the hierarchy's back."""

    def step(self, kv):
        if kv.batch.positions.max() > 20:
            kv._kv.page_map[0, 0] = -1
        return super().step(kv)


@pytest.mark.parametrize("debug", [False, True])
def test_a_broken_invariant_stops_the_server_and_answers_everyone(runtimes, debug):
    runtime = runtimes(engine=Broken(), debug_checks=debug, placement="resident")
    a, b = Sink(), Sink()
    runtime.start()
    runtime.submit(ask(1, 10, 100), a)
    runtime.submit(ask(2, 10, 100), b)
    assert a.ended.wait(10)
    assert b.ended.wait(10)
    assert not runtime.healthy
    assert a.last.reason is b.last.reason is FinishReason.ERROR
    assert "the server stopped" in a.last.error
    with pytest.raises(RuntimeError, match="stopped"):
        runtime.submit(ask(1, 1, 1), Sink())


def test_threads_submit_and_cancel_while_the_loop_runs(runtimes):
    runtime = runtimes(debug_checks=False)
    runtime.start()
    sinks = {}

    def client(base):
        for n in range(6):
            tag = base * 10 + n + 1
            sinks[tag] = Sink()
            rid = runtime.submit(ask(tag, 20 + 13 * n, 30), sinks[tag])
            if n % 3 == 2:
                runtime.cancel(rid)

    threads = [threading.Thread(target=client, args=(base,)) for base in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for tag, sink in sinks.items():
        assert sink.ended.wait(30)
        assert set(sink.tokens) <= {tag}
        assert sink.last.reason in (FinishReason.LENGTH, FinishReason.CANCELLED)


def test_close_cancels_what_is_in_flight(runtimes):
    runtime = runtimes()
    sink = Sink()
    runtime.submit(ask(1, 30, 100), sink)
    runtime.step()
    runtime.close()
    assert sink.last.reason is FinishReason.CANCELLED
    with pytest.raises(RuntimeError):
        runtime.submit(ask(1, 1, 1), sink)


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        (Request((), 1), "at least one token"),
        (Request((1, -1), 1), r"0\.\.4095, got -1"),
        (Request((4096,), 1), "got 4096"),
        (Request((1,), 0), "max_tokens: expected at least 1, got 0"),
        (ask(1, 10, 2, history=history(SHARED, 1, 10)), "1..9 rows"),
        (ask(1, 10, 2, history=history(REINDEX, 1, 5)), r"expected layers \[0, 1, 2, 3, 4\], got \[1\]"),
    ],
)
def test_malformed_requests_are_refused_at_once(runtimes, request_, says):
    with pytest.raises(RequestError, match=says):
        runtimes().submit(request_, Sink())


def test_history_of_the_wrong_shape_or_dtype_is_named(runtimes):
    given = history(SHARED, 1, 5)
    given.rows[2] = given.rows[2].to(torch.float64)
    says = r"rows\[2\]: expected \[5, 4\] torch.float32, got \[5, 4\] torch.float64"
    with pytest.raises(RequestError, match=says):
        runtimes().submit(ask(1, 10, 2, history=given), Sink())


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"seed": -1}, "seed"),
    ],
)
def test_bad_sampling_parameters(values, says):
    with pytest.raises(RequestError, match=says):
        SamplingParams(**values)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"hot_rows": 5}, "hot_rows=5 cannot hold .* 1 x 6 = 6"),
        ({"max_width": 2, "hot_rows": 11}, "2 x 6 = 12"),
        ({"device_pool_bytes": 1000}, "cannot run one request"),
        ({"page_rows": 0}, "page_rows: expected a whole number of at least 1, got 0"),
        ({"page_rows": 4.0}, "got 4.0"),
        ({"max_requests": True}, "got True"),
        ({"placement": "mixed"}, "resident, fixed, adaptive, got 'mixed'"),
        ({"max_batch_tokens": 2}, "max_batch_tokens=2 is below"),
        ({"max_context": 1 << 21}, "exceeds the model's"),
    ],
)
def test_configurations_that_cannot_work_are_refused(values, says):
    """C69, C86."""
    with pytest.raises(ConfigError, match=says):
        Runtime(PatternEngine(), HiSparseConfig(**(SMALL | values)), ManualCopyEngine())


def test_unknown_setting_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"unknown setting hot_row; known: .*hot_rows"):
        HiSparseConfig.from_dict({"hot_row": 1})
    path = tmp_path / "c.json"
    path.write_text("{,}")
    with pytest.raises(ConfigError, match=r"c.json:1: not JSON"):
        HiSparseConfig.from_file(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        HiSparseConfig.from_file(tmp_path / "missing.json")


def test_draws_are_made_at_the_position_of_the_query(runtimes, monkeypatch):
    """So that a seed gives the same draws at any load, and speculation can repeat them."""
    positions = []

    def recorded(logits, params, position):
        positions.append(position)
        return int(logits.argmax())

    monkeypatch.setattr("trtllm_hisparse.runtime.loop.sample", recorded)
    runtime = runtimes()
    runtime.submit(ask(1, 10, 4), Sink())
    runtime.run_until_idle()
    assert positions == [9, 10, 11, 12]


def test_decoding_requests_go_before_prompts(runtimes):
    """A long prompt takes what is left of the step, never a decoding request's turn."""
    runtime = runtimes(max_requests=2, max_batch_tokens=12, placement="resident", device_pool_bytes=256 << 10)
    first, second = Sink(), Sink()
    runtime.submit(ask(1, 3, 40), first)
    runtime.step()
    runtime.submit(ask(2, 200, 5), second)
    for n in range(2, 18):
        runtime.step()
        assert len(first.tokens) == n
    assert second.tokens == []
    assert runtime.stats().prompt_tokens == 3 + 16 * 11
    runtime.run_until_idle()


def test_decoded_pages_never_become_optional(runtimes):
    """Section 3.1: optional residency covers imported history; decoded rows stay under tail and hot cache."""
    copies = ManualCopyEngine()
    copies.auto = True
    runtime = runtimes(copies=copies, device_pool_bytes=256 << 10)
    sink = Sink()
    runtime.submit(ask(1, 64, 150), sink)
    until(runtime, copies, lambda: len(sink.tokens) > 140)
    assert runtime._kv.pages_in(0, Device.READY) == list(range(16))
    assert runtime.stats().pages_optional == 16
    runtime.run_until_idle()
    peak = runtime.stats().device_peak_bytes
    runtime.submit(ask(2, 1, 1), Sink())
    runtime.run_until_idle()
    assert runtime.stats().device_peak_bytes == peak


def test_fixed_placement_backs_prompt_pages_up_as_they_fill(runtimes):
    """They stay readable for the rest of the prefill, and nothing is left to copy when it ends."""
    copies = ManualCopyEngine()
    copies.auto = True
    runtime = runtimes(copies=copies, placement="fixed", device_pool_bytes=256 << 10)
    runtime.submit(ask(1, 60, 10), Sink())
    for n in range(1, 5):
        runtime.step()
        assert runtime._kv.pages_in(0, Device.READY) == list(range(3 * n))
        assert len(copies.pending) == 3 * n
    runtime.run_until_idle()
