"""The hierarchy below the loop: sizes, page states, who frees what and when."""

import itertools
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from manual_copies import ManualCopyEngine
from pattern_engine import REINDEX, SHARED, PatternEngine, history, row

from trtllm_hisparse.config import HiSparseConfig, Placement
from trtllm_hisparse.errors import ConfigError, InvariantError
from trtllm_hisparse.kv import pool as pool_module
from trtllm_hisparse.kv.check import check
from trtllm_hisparse.kv.copies import ThreadCopyEngine
from trtllm_hisparse.kv.hierarchy import CopyKind, Device, Host, KVHierarchy
from trtllm_hisparse.kv.layout import Cost, KVLayout
from trtllm_hisparse.kv.pool import Arena, PageKind, PagePool
from trtllm_hisparse.kv.step import Block, HierarchyStep
from trtllm_hisparse.models.spec import LayerSpec, ModelSpec
from trtllm_hisparse.runtime.loop import Runtime
from trtllm_hisparse.runtime.request import FinishReason, Request

P = 4
CONFIG = HiSparseConfig(
    device_pool_bytes=64 << 10,
    host_pool_bytes=64 << 10,
    hot_rows=8,
    page_rows=P,
    max_requests=3,
    max_context=64,
    prefill_chunk=12,
    max_batch_tokens=32,
)


def layout_of(spec=SHARED, **changes):
    return KVLayout.resolve(spec, replace(CONFIG, **changes), torch.float32)


def hierarchy(spec=SHARED, **changes):
    copies = ManualCopyEngine()
    return KVHierarchy(layout_of(spec, **changes), copies), copies


def run(kv, slot, tag, rows, spec=SHARED):
    """Step `rows` rows of a tag through the checking engine and commit them; the pages this completed."""
    assert kv.open_tail(slot, rows)
    step = HierarchyStep(kv, [Block(slot, [tag] * rows)])
    PatternEngine(spec).step(step)
    step.end()
    return kv.commit(slot, rows)


def land(kv, copies):
    copies.complete_all()
    kv.poll()
    check(kv)


# -- sizes --------------------------------------------------------------------------------------------------


@st.composite
def specs(draw):
    """Any mix of producers, followers and shared sources."""
    layers = [LayerSpec(0, 0)]
    for i in range(1, draw(st.integers(1, 12))):
        kind = draw(st.sampled_from(["full", "follow", "none", "reindex"]))
        layers.append(
            {
                "full": LayerSpec(i, i),
                "follow": LayerSpec(0, i),
                "none": LayerSpec(None, None),
                "reindex": LayerSpec(i, 0, 0),
            }[kind]
        )
    return ModelSpec("random", tuple(layers), draw(st.integers(1, 6)), 16, 8)


@settings(max_examples=250, deadline=None)
@given(
    specs(),
    st.builds(
        dict,
        placement=st.sampled_from(list(Placement)),
        device_pool_bytes=st.integers(1, 1 << 17),
        host_pool_bytes=st.integers(0, 1 << 15),
        hot_rows=st.integers(1, 19),
        page_rows=st.integers(1, 9),
        max_requests=st.integers(1, 5),
        max_context=st.integers(1, 300),
        prefill_chunk=st.integers(1, 40),
        max_batch_tokens=st.integers(5, 40),
    ),
)
def test_an_accepted_configuration_runs_a_page_and_any_other_is_a_config_error(spec, values):
    """C15, C87: no third outcome."""
    config = HiSparseConfig(**values, debug_checks=True)
    try:
        runtime = Runtime(PatternEngine(spec), config, ManualCopyEngine())
    except ConfigError:
        return
    rows = min(config.page_rows, config.max_context)
    events = []
    runtime.submit(Request((7,) * rows, 1), events.append)
    runtime.run_until_idle()
    assert [(e.tokens, e.reason) for e in events] == [((7,), FinishReason.LENGTH)]
    runtime.close()


def test_the_carve_loses_no_more_than_the_layout_allows_for():
    """Twelve cache states whose tables do not fill their alignment: every tensor loses some of it."""
    spec = ModelSpec("producers", tuple(LayerSpec(i, i) for i in range(12)), 1, 4, 4)
    for size in range(6000, 9000, 4):
        changes = {"hot_rows": 1, "page_rows": 1, "max_requests": 1, "device_pool_bytes": size}
        try:
            layout = layout_of(spec, **changes)
        except ConfigError:
            continue
        kv = KVHierarchy(layout, ManualCopyEngine())
        assert kv.device_arena.used <= size


@pytest.mark.parametrize("placement", list(Placement))
def test_the_smallest_pool_named_by_the_refusal_is_accepted(placement):
    """C87: what the message asks for is enough, and one byte less is not."""
    changes = {"placement": placement, "max_context": 4096, "hot_rows": 8}
    with pytest.raises(ConfigError, match="cannot run one request") as error:
        layout_of(**changes, device_pool_bytes=1)
    least = int(str(error.value).rsplit("at least ", 1)[1])
    layout = layout_of(**changes, device_pool_bytes=least)
    assert (layout.device_pages, layout.index_pages) == (1, 1)
    with pytest.raises(ConfigError, match=f"at least {least}"):
        layout_of(**changes, device_pool_bytes=least - 1)


# -- freeing ------------------------------------------------------------------------------------------------


def test_a_page_retired_under_a_reader_stays_accounted_for_when_its_request_leaves():
    """I3, I4: until the reader ends the page is neither free nor the next owner's."""
    kv, copies = hierarchy()
    kv.open(0, kv.layout.cost(64, 64))
    for page in run(kv, 0, 1, 2 * P):
        kv.backup(0, page)
    land(kv, copies)
    step = kv.begin_step()
    kv.retire(0, 0)
    kv.release(0)
    assert kv.device_pool.used == kv.required_pages()
    assert kv.device_pool.held(PageKind.TAIL, 0) == 0
    check(kv)
    kv.end_step(step)
    assert (kv.device_pool.used, kv.index_pool.used, kv.host_pool.used) == (0, 0, 0)


def test_a_page_under_a_copy_is_freed_once_and_only_when_the_copy_ended():
    """C35, I3."""
    kv, copies = hierarchy()
    kv.open(0, kv.layout.cost(64, 64))
    run(kv, 0, 1, 3 * P)
    kv.backup(0, 1)
    kv.release(0)
    held = {kv.device_pool.name: 1, kv.host_pool.name: 1, kv.index_pool.name: 0}
    assert {p.name: p.held(PageKind.DRAINING) for p in (kv.device_pool, kv.host_pool, kv.index_pool)} == held
    kv.open(0, kv.layout.cost(64, 64))
    run(kv, 0, 2, 2 * P)
    land(kv, copies)
    assert kv.device_pool.held(PageKind.DRAINING) == kv.host_pool.held(PageKind.DRAINING) == 0
    assert kv.host_map[0].max() == -1, "the former owner's backup is not the new owner's"
    assert kv.host_state[0].max() == Host.NONE


def test_a_late_copy_of_a_former_owner_publishes_nothing():
    """C27, C35: the same slot, the same logical page, the next generation."""
    kv, copies = hierarchy()
    cost = kv.layout.cost(64, 4)
    given = history(SHARED, 1, 2 * P)
    kv.open(0, cost)
    kv.import_index(0, 2 * P, given.index_keys)
    for page in (0, 1):
        rows = {i: stored[page * P : (page + 1) * P] for i, stored in given.rows.items()}
        assert kv.import_page(0, page, rows, PageKind.OPTIONAL if page else None)
    kv.release(0)
    kv.open(0, cost)
    kv.import_index(0, 2 * P, history(SHARED, 2, 2 * P).index_keys)
    for _ in range(3):
        copies.complete()
    kv.poll()
    assert kv.slots[0].imports == 1
    assert kv.host_map[0].max() == kv.page_map[0].max() == -1
    with pytest.raises(InvariantError, match="not ready to be stepped"):
        HierarchyStep(kv, [Block(0, [2])])
    kv.release(0)
    land(kv, copies)
    assert (kv.device_pool.used, kv.index_pool.used, kv.host_pool.used) == (0, 0, 0)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_reader_that_began_before_holds_the_page_one_that_began_after_does_not(order):
    """I3: quarantine ends with the last reader that could have seen the page, whatever order they end in."""
    kv, copies = hierarchy()
    kv.open(0, kv.layout.cost(64, 64))
    for page in run(kv, 0, 1, 3 * P):
        kv.backup(0, page)
    land(kv, copies)
    readers = kv.begin_step(), kv.begin_step()
    at = int(kv.device_page[0, 0])
    kv.retire(0, 0)
    late = kv.begin_step()
    kv.end_step(readers[order[0]])
    assert kv.device_pool.holder(at) is not None
    kv.end_step(readers[order[1]])
    assert kv.device_pool.holder(at) is None
    kv.end_step(late)
    check(kv)


# -- transitions --------------------------------------------------------------------------------------------


def opened():
    """Slot 0 with 14 rows: pages 0 and 1 backed up, page 2 complete, page 3 partial, all in the tail."""
    kv, copies = hierarchy(prefill_chunk=16)
    kv.open(0, kv.layout.cost(64, 64))
    assert run(kv, 0, 1, 3 * P + 2) == [0, 1, 2]
    kv.backup(0, 0)
    kv.backup(0, 1)
    land(kv, copies)
    return kv, copies


@pytest.mark.parametrize(
    ("move", "says"),
    [
        (lambda kv: kv.backup(0, 0), "backup started twice"),
        (lambda kv: kv.backup(0, 3), "rows that are not committed"),
        (lambda kv: kv.keep(0, 3), "rows that are not committed"),
        (lambda kv: kv.retire(0, 2), "retired before its backup completed"),
        (lambda kv: kv.retire(0, 3), "rows that are not committed"),
        (lambda kv: kv.populate(0, 0), "TAIL, expected"),
        (lambda kv: kv.keep(0, 5), "ABSENT, expected"),
        (lambda kv: kv.open(0, Cost(1, 0, 1, 1, 0)), "slot 0 is in use"),
        (lambda kv: kv.release(1), "slot 1 is free"),
        (lambda kv: kv.open(1, Cost(999, 999, 2, 1, 0)), "admitted without room"),
        (lambda kv: kv.open_tail(0, 51), "past its 16 pages"),
        (lambda kv: kv.import_index(0, 4, {}), "into a slot that holds 14 rows"),
    ],
)
def test_an_illegal_transition_stops_before_it_changes_anything(move, says):
    kv, _ = opened()
    before = kv.device_state.copy(), kv.page_map.copy(), kv.host_map.copy()
    with pytest.raises(InvariantError, match=says):
        move(kv)
    assert all((a == b).all() for a, b in zip(before, (kv.device_state, kv.page_map, kv.host_map), strict=True))


def test_a_backup_is_no_host_copy_until_it_completed():
    """C31, C37, I2: state and map change at completion, and retiring waits for it."""
    kv, copies = opened()
    kv.backup(0, 2)
    assert (kv.host_state[0, 2], kv.host_map[0, 2]) == (Host.COPYING, -1)
    with pytest.raises(InvariantError, match="retired before"):
        kv.retire(0, 2)
    land(kv, copies)
    assert (kv.host_state[0, 2], kv.host_map[0, 2]) == (Host.DONE, kv.host_page[0, 2])
    kv.retire(0, 2)
    assert (kv.device_state[0, 2], kv.page_map[0, 2]) == (Device.ABSENT, -1)


def test_a_populated_page_is_readable_only_when_it_arrived():
    """I2: allocated, pending, ready."""
    kv, copies = opened()
    kv.retire(0, 0)
    assert not kv.direct(0)
    assert kv.populate(0, 0)
    assert (kv.device_state[0, 0], kv.page_map[0, 0]) == (Device.PENDING, -1)
    assert not kv.direct(0)
    check(kv)
    land(kv, copies)
    assert (kv.device_state[0, 0], kv.page_map[0, 0]) == (Device.READY, kv.device_page[0, 0])
    assert kv.direct(0)
    assert kv.populated_pages == 1


def test_the_tail_retires_oldest_first_and_no_more_than_it_needs():
    kv, _ = opened()
    kv.slots[0].tail_limit = 4
    assert kv.open_tail(0, P)
    assert kv.device_state[0, :6].tolist() == [Device.ABSENT, *[Device.TAIL] * 4, Device.ABSENT]


def test_the_tail_waits_when_its_reservation_is_in_flight_and_changes_nothing():
    """C30: page 2 has no host copy yet, so it may not make room."""
    kv, copies = opened()
    kv.slots[0].tail_limit = 2
    kv.backup(0, 2)
    assert not kv.open_tail(0, P)
    assert kv.device_pool.held(PageKind.TAIL, 0) == 2
    land(kv, copies)
    assert kv.open_tail(0, P)
    assert kv.device_state[0, :5].tolist() == [Device.ABSENT] * 3 + [Device.TAIL] * 2


def test_rows_that_were_not_committed_are_written_again():
    """I5: positions 14 and 15 are run, not committed, run again with other bytes."""
    kv, _ = opened()
    for tag in (7, 1):
        assert kv.open_tail(0, 2)
        step = HierarchyStep(kv, [Block(0, [tag] * 2)])
        step.append(0, row(torch.tensor([tag] * 2), 0, torch.tensor([14, 15])))
        step.end()
        at = int(kv.device_page[0, 3]) * P + 2
        assert kv.payload[0][at : at + 2, 0].tolist() == [tag, tag]
        assert kv.slots[0].committed == 14


# -- one step -----------------------------------------------------------------------------------------------


def test_a_follower_that_did_not_run_the_plan_stops_the_step():
    """Layer 1 shares the cache state of layer 0: it must bring its own bytes for the slots layer 0 claimed."""
    kv, _ = opened()
    kv.retire(0, 0)
    assert kv.open_tail(0, 1)
    step = HierarchyStep(kv, [Block(0, [1])])
    step.resolve(0, torch.tensor([[0, 1, 2, -1, -1, -1]], dtype=torch.int32))
    step.locations(0)
    with pytest.raises(InvariantError, match=r"layers \[1\] did not run the plan of layer 0"):
        step.end()


def test_every_member_gathers_once_and_the_census_counts_entries():
    kv, _ = opened()
    kv.retire(0, 0)
    assert kv.open_tail(0, 1)
    before = kv.census[0].direct
    step = HierarchyStep(kv, [Block(0, [1])])
    step.resolve(0, torch.tensor([[0, 1, 0, 9, -1, 99]], dtype=torch.int32))
    for layer in (0, 1, 0, 1):
        at = step.locations(layer)
        assert (at >= 0).tolist() == [[True, True, True, True, False, False]]
        want = row(torch.tensor([1] * 4), layer, torch.tensor([0, 1, 0, 9]))
        assert torch.equal(kv.payload[layer][at[0, :4].long()], want)
    step.end()
    assert kv.moved_bytes[CopyKind.GATHER] == 2 * 2 * 16, "two rows, two members, once each"
    census = kv.census[0]
    assert (census.direct - before, census.hot, census.host, census.copied) == (1, 0, 3, 2)


def test_two_requests_select_the_same_positions_and_get_their_own_bytes():
    """C27: positions repeat between requests and between owners of a slot."""
    kv, copies = hierarchy(max_requests=2)
    for tag in (1, 2, 3):
        slot = tag % 2
        if kv.is_open(slot):
            kv.release(slot)
        kv.open(slot, kv.layout.cost(64, 64))
        for page in run(kv, slot, tag, 3 * P):
            kv.backup(slot, page)
        land(kv, copies)
        for page in range(3):
            kv.retire(slot, page)
        run(kv, slot, tag, 1)
    assert min(kv.owners[0][0].max(), kv.owners[0][1].max()) >= 0
    kv.release(1)
    for table in (*kv.owners, kv.hot_table, kv.page_map, kv.host_map, kv.index_map):
        assert (table[1] == -1).all()
    check(kv)


@pytest.mark.parametrize(
    ("block", "error"),
    [
        (Block(1, [1]), InvariantError),
        (Block(0, []), ValueError),
        (Block(0, [1], logits=2), ValueError),
        (Block(0, [1], logits=-1), ValueError),
        (Block(0, [1] * 3), InvariantError),
    ],
)
def test_a_step_that_cannot_run_is_refused_and_leaves_no_reader(block, error):
    kv, _ = opened()
    with pytest.raises(error):
        HierarchyStep(kv, [block])
    assert not kv._steps


# -- pools and memory ---------------------------------------------------------------------------------------


def test_counters_stay_true_over_a_thousand_random_moves():
    """C24, C49: free + used = capacity in every tier, at every step, and everything comes home."""
    kv, copies = hierarchy(host_pool_bytes=40 * 320, max_requests=2)
    dice = random.Random(5)
    pools = kv.device_pool, kv.index_pool, kv.host_pool
    for n in range(1000):
        slot = dice.randrange(2)
        cost = kv.layout.cost(64, 64)
        if not kv.is_open(slot):
            if cost.payload + kv.required_pages() <= kv.device_pool.free and cost.host <= kv.host_pool.free:
                kv.open(slot, cost)
        elif dice.random() < 0.05:
            kv.release(slot)
        elif kv.slots[slot].committed < 60 and kv.open_tail(slot, 1):
            for page in run(kv, slot, slot + 1, dice.randrange(1, 3)):
                kv.backup(slot, page)
        if copies.pending and dice.random() < 0.5:
            copies.complete(dice.randrange(9))
        kv.poll()
        for pool in pools:
            assert pool.free + pool.used == pool.capacity
            assert 0 <= pool.free <= pool.capacity
            assert sum(pool.held(kind) for kind in PageKind) == pool.used
        if n % 50 == 0:
            check(kv)
    for slot in range(2):
        if kv.is_open(slot):
            kv.release(slot)
    land(kv, copies)
    assert [pool.used for pool in pools] == [0, 0, 0]
    assert [pool.held(kind, slot) for pool in pools for kind in PageKind for slot in range(2)] == [0] * 24


def test_a_page_nobody_holds_is_not_given_back():
    pool = PagePool("some", 4)
    assert pool.take(5, PageKind.HOT, 0) is None
    pages = pool.take(3, PageKind.HOT, 0)
    pool.give(pages[:1])
    with pytest.raises(InvariantError, match="some pool: page 0 is not held"):
        pool.give(pages[:1])
    assert (pool.free, pool.used, pool.peak, pool.held(PageKind.HOT, 0)) == (2, 2, 3, 2)


def test_stores_are_disjoint_and_poisoned():
    """C11, C81: no two tensors share a byte; a row nobody wrote is NaN."""
    kv, _ = hierarchy(REINDEX)
    for arena in (
        [*kv.payload.values(), *kv.index.values(), *map(torch.from_numpy, [*kv.owners, *kv.lru, kv.page_map])],
        [*kv.backup_rows.values()],
    ):
        spans = sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in arena)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    for store in (*kv.payload.values(), *kv.index.values(), *kv.backup_rows.values()):
        assert store.isnan().all()


def test_a_pool_larger_than_the_memory_available_is_refused_with_figures(monkeypatch):
    """C47: before anything is allocated."""
    monkeypatch.setattr(pool_module, "available_bytes", lambda: 1000)
    assert Arena("host", 950).capacity == 950
    says = "host_pool_bytes: the host pool takes 951 bytes, more than 95 % of the 1000 bytes"
    with pytest.raises(ConfigError, match=says):
        Arena("host", 951)


def test_the_host_pool_is_refused_through_the_runtime(monkeypatch):
    """C47: what counts is what would be allocated, 16 pages for each of 3 slots."""
    need = 48 * 320 + layout_of().slack_bytes
    figures = iter([1 << 40, need])
    monkeypatch.setattr(pool_module, "available_bytes", lambda: next(figures))
    with pytest.raises(ConfigError, match=f"the host pool takes {need} bytes, .* the {need} bytes"):
        Runtime(PatternEngine(), CONFIG, ManualCopyEngine())


def test_hot_rows_that_do_not_fill_their_pages_are_accepted_with_a_warning(caplog):
    """C86."""
    layout_of(hot_rows=8)
    assert not caplog.records
    layout = layout_of(hot_rows=9)
    assert (layout.hot_pages, layout.hot_rows) == (3, 9)
    assert "hot_rows=9 is not a multiple of page_rows=4: 3 rows" in caplog.text


def test_imported_tensors_are_read_until_their_copy_ended_and_no_longer():
    """C39, C40: the caller may drop its tensors at once."""
    kv, copies = hierarchy()
    kv.open(0, kv.layout.cost(64, 4))
    given = history(SHARED, 5, P)
    kv.import_index(0, P, given.index_keys)
    kv.import_page(0, 0, given.rows, PageKind.OPTIONAL)
    del given
    noise = [torch.full((P, 4), -1.0) for _ in range(100)]
    land(kv, copies)
    assert run(kv, 0, 5, 1) == []
    del noise


def test_thread_copies_complete_in_order_and_a_failure_is_reported():
    engine = ThreadCopyEngine()
    source, target = torch.arange(4.0), torch.zeros(4)
    tickets = [engine.submit([(source, target)]) for _ in range(3)]
    engine.close()
    assert engine.poll() == tickets
    assert engine.poll() == []
    assert torch.equal(target, source)
    with pytest.raises(InvariantError, match="after the engine was closed"):
        engine.submit([(source, target)])
    broken = ThreadCopyEngine()
    broken.submit([(source, torch.zeros(3))])
    broken.wait(10)
    with pytest.raises(InvariantError, match="a copy failed"):
        broken.poll()
    broken.close()


# -- capacity -----------------------------------------------------------------------------------------------


def test_more_host_memory_never_means_fewer_sessions():
    """C66: the split between index keys and payload follows the host pool; the sessions it holds only grow."""
    held = []
    for host_kib in range(0, 400, 8):
        layout = layout_of(host_pool_bytes=host_kib << 10, max_requests=20, device_pool_bytes=48 << 10)
        cost = layout.cost(64, 64)
        held.append(
            min(
                layout.device_pages // cost.payload,
                layout.index_pages // cost.index,
                layout.host_pages // cost.host,
            )
        )
    assert held == sorted(held)
    assert (held[0], held[-1]) == (0, 12), "the pool has room for 12.75"


def test_sessions_that_fit_by_the_figures_fit_by_filling():
    """C51, C59: a host page holds all stores of a logical page, and demand is rounded with the same page size."""
    kv, _ = hierarchy(host_pool_bytes=2 * 16 * 320, max_requests=3)
    cost = kv.layout.cost(61, 61)
    assert (cost.host, kv.layout.host_pages) == (16, 32)
    kv.open(0, cost)
    kv.open(1, cost)
    assert (kv.host_pool.free, kv.layout.why_never(cost)) == (0, None)
    check(kv)


def test_maps_of_too_many_slots_are_part_of_the_refusal():
    """C67: owners and LRU order are paid for from the pool, and the message says what they take."""
    layout = layout_of()
    states = 4 * 3 * (3 * 16 + 2 + 2 * 8 * 2)
    assert layout.map_bytes == states
    with pytest.raises(ConfigError, match=f"maps take {states // 3 * 1000}, "):
        layout_of(max_requests=1000, max_batch_tokens=1000)


def test_a_model_that_keeps_no_history_or_packs_rows_is_refused():
    with pytest.raises(ConfigError, match="no layer keeps history"):
        layout_of(ModelSpec("window", (LayerSpec(None, None),), 1, 16, 8))
    with pytest.raises(ConfigError, match=r"compressed rows \(m > 1, layers \[0\]\)"):
        layout_of(ModelSpec("packed", (LayerSpec(0, 0),), 1, 16, 8, tokens_per_row=4))


def test_locations_that_would_not_fit_in_int32_are_refused():
    """C10: no memory is allocated to find out."""
    spec = ModelSpec("thin", (LayerSpec(0, 0),), 1, 4, 4, max_context=1 << 40)
    values = {"placement": "resident", "max_context": 1 << 31, "max_requests": 1, "page_rows": 1 << 10}
    with pytest.raises(ConfigError, match="pages of 1024 rows exceed int32 locations"):
        layout_of(spec, device_pool_bytes=1 << 35, **values)


def test_a_block_selects_no_more_than_the_hot_cache_holds():
    assert [layout_of(hot_rows=b).block for b in (6, 11, 12, 18)] == [1, 1, 2, 3]
    assert layout_of(hot_rows=1, placement="resident").block == 1
