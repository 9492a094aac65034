"""The CPU op against the oracle, and the oracle against hand-worked cases."""

import copy
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trtllm_hisparse.resolver import ResolveInputs, oracle, resolve

BOTH = pytest.mark.parametrize("op", [oracle.resolve, resolve], ids=["oracle", "cpu"])


def i32(values):
    return np.ascontiguousarray(np.array(values, np.int32))


def make(
    selections,
    *,
    hot_rows,
    visible=1 << 10,
    cu=None,
    slots=None,
    page_rows=1,
    n_slots=1,
    pages=1 << 10,
    resident=None,
    owners=None,
    lru=None,
    stage_rows=0,
):
    """Hot slot h of slot s lives at device row 10_000 * (s + 1) + h; host row of row x is 500 * s + x."""
    selections = i32(selections)
    queries = len(selections)
    cu = i32([0, queries] if cu is None else cu)
    slots = i32(range(len(cu) - 1) if slots is None else slots)
    page_map = np.full((n_slots, pages), -1, np.int32)
    for slot, page, device in resident or []:
        page_map[slot, page] = device
    hot_pages = -(-hot_rows // page_rows)
    hot = i32([[10_000 * (s + 1) // page_rows + h for h in range(hot_pages)] for s in range(n_slots)])
    return ResolveInputs(
        selections,
        cu,
        slots,
        i32(np.broadcast_to(visible, (queries,))),
        page_map,
        i32([[500 * s + j for j in range(pages)] for s in range(n_slots)]),
        hot,
        i32(np.full((n_slots, hot_rows), -1) if owners is None else owners),
        i32(np.tile(np.arange(hot_rows), (n_slots, 1)) if lru is None else lru),
        page_rows,
        np.arange(len(slots), dtype=np.int64) * stage_rows + 90_000,
        stage_rows,
    )


def hot(*slots):
    return [10_000 + s if s >= 0 else -1 for s in slots]


@BOTH
def test_minus_one_never_reaches_the_miss_path(op):
    """C02."""
    x = make([[3, 7, -1, -1, -1, -1, -1, -1]], hot_rows=8, visible=12)
    out = op(x)
    assert out.locations.tolist() == [hot(0, 1, -1, -1, -1, -1, -1, -1)]
    assert out.plan.src.tolist() == [3, 7]
    assert x.lru[0].tolist() == [2, 3, 4, 5, 6, 7, 0, 1]
    assert sorted(x.owners[0].tolist()) == [-1] * 6 + [3, 7]


@BOTH
def test_duplicates_own_one_slot(op):
    """C06, both steps."""
    x = make([[5, 5, 2, 9]], hot_rows=8, visible=12)
    out = op(x)
    assert out.locations.tolist() == [hot(0, 0, 1, 2)]
    assert out.counts.copied == 3
    assert x.lru[0].tolist() == [3, 4, 5, 6, 7, 0, 1, 2]
    x = replace(x, selections=i32([[5, 2, 5, 1]]))
    out = op(x)
    assert out.locations.tolist() == [hot(0, 1, 0, 3)]
    assert out.counts.copied == 1
    assert x.lru[0].tolist() == [4, 5, 6, 7, 2, 3, 0, 1]


@BOTH
def test_padding_request_touches_nothing_and_is_written(op):
    """C01, C07: padding is slot -1, whatever its selections say."""
    x = make([[1, 0, -1, -1], [7, 8, 9, 3]], hot_rows=4, visible=[2, 99], cu=[0, 1, 2], slots=[0, -1])
    out = op(x)
    assert out.locations.tolist() == [hot(0, 1, -1, -1), [-1] * 4]
    assert x.owners[0].tolist() == [1, 0, -1, -1]


@BOTH
def test_three_sources_in_one_row(op):
    """C09: a resident hit uses no hot slot and no copy."""
    x = make([[5, 2, 6, 7]], hot_rows=4, resident=[(0, 5, 777)], owners=[[0, 1, 2, 3]])
    out = op(x)
    assert out.locations.tolist() == [[777, *hot(2, 0, 1)]]
    assert x.lru[0].tolist() == [3, 0, 1, 2]
    assert (out.counts.direct, out.counts.hot, out.counts.host, out.counts.copied) == (1, 1, 2, 2)


@BOTH
def test_wholly_direct_request_leaves_state_bit_identical(op):
    x = make([[5, 4, 5]], hot_rows=4, resident=[(0, 5, 9), (0, 4, 8)], lru=[[2, 0, 3, 1]], owners=[[4, 5, 1, 0]])
    assert op(x).locations.tolist() == [[9, 8, 9]]
    assert x.lru[0].tolist() == [2, 0, 3, 1]
    assert x.owners[0].tolist() == [4, 5, 1, 0]


@BOTH
def test_ids_past_the_query_are_no_entry_per_query(op):
    """Eq. 5: query j of a block sees its own prefix only."""
    x = make([[4, 5, 6], [4, 5, 6]], hot_rows=8, visible=[5, 6])
    assert op(x).locations.tolist() == [hot(0, -1, -1), hot(0, 1, -1)]


@BOTH
def test_out_of_range_lru_value_claims_nothing(op):
    """C21."""
    x = make([[0, 1, 2, 3, 4, 5, 6, 7]], hot_rows=8, visible=12, lru=[[13, 1, 2, 3, 4, 5, 6, 7]])
    out = op(x)
    assert out.locations.tolist() == [hot(1, 2, 3, 4, 5, 6, 7, -1)]
    assert (out.counts.corrupt, out.counts.lost, out.counts.copied) == (1, 1, 7)
    assert x.owners[0].tolist() == [-1, 0, 1, 2, 3, 4, 5, 6]
    assert x.lru[0].tolist() == [-1, 1, 2, 3, 4, 5, 6, 7]


@BOTH
def test_queries_behind_the_last_request_are_padding(op):
    x = make([[1, 0], [7, 8], [9, 3]], hot_rows=4, cu=[0, 1])
    assert op(x).locations.tolist() == [hot(0, 1), [-1, -1], [-1, -1]]
    assert x.owners[0].tolist() == [1, 0, -1, -1]


@BOTH
def test_row_without_a_source_is_reported_and_owns_nothing(op):
    """C14, C18."""
    x = make([[20, 3]], hot_rows=4, owners=[[0, 1, 2, 9]])
    x.host_map[0, 20] = -1
    out = op(x)
    assert out.locations.tolist() == [hot(-1, 0)]
    assert x.owners[0].tolist() == [3, 1, 2, 9]
    assert out.counts.lost == 1


@BOTH
def test_union_overflow_goes_to_the_arena(op):
    """C69, eq. 6-8: a block's union exceeds B; each row is copied once and hits stay protected."""
    x = make([[0, 1, 2, 3], [4, 3, 5, 0]], hot_rows=4, stage_rows=8, owners=[[5, -1, -1, -1]])
    out = op(x)
    assert out.locations.tolist() == [[*hot(1, 2, 3), 90_000], [90_001, 90_000, *hot(0, 1)]]
    assert out.plan.src.tolist() == [0, 1, 2, 3, 4]
    assert out.counts.staged == 3
    assert x.lru[0].tolist() == [1, 2, 3, 0]


def test_staged_rows_the_last_accepted_query_wants_become_hot():
    """Rows 8 and 9 are staged; query 1 is the last accepted one and wants 9, so 8 comes second."""
    x = make([[0, 1, 2, 3], [8, 9, 2, 9]], hot_rows=4, stage_rows=8)
    out = oracle.resolve(x)
    assert out.locations.tolist() == [hot(0, 1, 2, 3), [90_000, 90_001, *hot(2), 90_001]]
    x = replace(x, selections=i32([[0, 1, 2, 3], [9, 7, 2, 9]]))
    got = oracle.promote(x, out.plan, i32([1]))
    assert got.row.tolist() == [9, 8]
    assert got.src.tolist() == [90_001, 90_000]
    assert got.dst.tolist() == hot(0, 1)
    assert x.owners[0].tolist() == [9, 8, 2, 3]
    assert x.lru[0].tolist() == [3, 0, 1, 2]


@pytest.mark.parametrize("last", [-1, 0])
def test_nothing_is_promoted_without_an_accepted_query_or_a_free_slot(last):
    x = make([[0, 1, 2, 3], [8, 9, 2, 9]], hot_rows=4, stage_rows=8)
    out = oracle.resolve(x)
    before = copy.deepcopy(x)
    assert oracle.promote(x, out.plan, i32([last])).count.tolist() == [0]  # query 0 holds all four slots
    assert np.array_equal(x.owners, before.owners)
    assert np.array_equal(x.lru, before.lru)


@BOTH
def test_overflow_without_an_arena_is_lost_not_wrong(op):
    out = op(make([[0, 1, 2]], hot_rows=2))
    assert out.locations.tolist() == [hot(0, 1, -1)]
    assert out.counts.lost == 1


@BOTH
def test_rows_past_32_bits_of_bytes(op):
    """C10: row numbers whose byte offsets exceed 32 bits come out exact."""
    x = make([[3]], hot_rows=1, page_rows=64)
    x.host_map[0, 0] = 33_000_000
    x.hot_table[0, 0] = 33_000_001
    out = op(x)
    assert out.plan.src.tolist() == [33_000_000 * 64 + 3]
    assert out.plan.dst.tolist() == [33_000_001 * 64]


@BOTH
@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"slots": i32([0, 0])}, "may appear once"),
        ({"slots": i32([0, 5])}, "expected -1..1"),
        ({"cu_queries": i32([0, 2, 1])}, "cu_queries"),
        ({"visible": i32([1, 9999])}, "visible"),
        ({"selections": np.zeros((2, 3), np.int64)}, "int32"),
        ({"lru": i32([[0, 1]])}, "owners, lru"),
    ],
)
def test_malformed_inputs_are_refused_before_any_state_changes(op, change, says):
    x = make([[1, 2, 3], [1, 2, 3]], hot_rows=4, n_slots=2, cu=[0, 1, 2])
    before = copy.deepcopy(x)
    with pytest.raises(ValueError, match=says):
        op(replace(x, **change))
    assert np.array_equal(x.owners, before.owners)


@pytest.mark.parametrize("k", [1, 31, 32, 33, 63, 64, 65, 128])
@pytest.mark.parametrize("factor", [1, 2, 5])
def test_exact_order_over_many_steps(k, factor):
    """C19, C20: LRU order, owners, locations and plan equal the oracle's at each of 20 steps."""
    rng = np.random.default_rng(k * 10 + factor)
    a = make(np.zeros((2, k)), hot_rows=k * factor, n_slots=2, cu=[0, 1, 2], page_rows=4, pages=400)
    b = copy.deepcopy(a)
    working = [rng.permutation(1600)[:k] for _ in range(2)]
    hits = misses = 0
    for _ in range(20):
        for rows in working:
            renew = rng.random(k) < 0.5
            rows[renew] = rng.integers(0, 1600, renew.sum())
        sel = i32(working)
        slots = i32([1, 0])
        got = resolve(replace(a, selections=sel, visible=i32([1600, 1600]), slots=slots))
        want = oracle.resolve(replace(b, selections=sel, visible=i32([1600, 1600]), slots=slots))
        assert_same(got, want)
        assert np.array_equal(a.owners, b.owners)
        assert np.array_equal(a.lru, b.lru)
        assert all(sorted(row) == list(range(k * factor)) for row in a.lru.tolist())
        hits += got.counts.hot
        misses += got.counts.host
    assert misses > 0
    assert hits > 0 or k == 1


def assert_same(got, want):
    assert np.array_equal(got.locations, want.locations)
    for name in ("row", "src", "dst", "count"):
        assert np.array_equal(getattr(got.plan, name), getattr(want.plan, name)), name
    assert got.counts == want.counts


@st.composite
def hostile(draw):
    n_slots = draw(st.integers(1, 3))
    p = draw(st.sampled_from([1, 3, 4]))
    pages = draw(st.integers(1, 6))
    hot_rows = draw(st.integers(1, 9))
    k = draw(st.integers(1, 6))
    slots = draw(st.permutations(range(n_slots)))
    slots = [s if draw(st.booleans()) else -1 for s in slots]
    widths = [draw(st.integers(0, 3)) for _ in slots]
    cu = np.concatenate([[0], np.cumsum(widths)])
    ids = st.one_of(st.integers(-3, pages * p + 2), st.just(0))
    x = make(
        np.array([[draw(ids) for _ in range(k)] for _ in range(cu[-1])], np.int32).reshape(-1, k),
        hot_rows=hot_rows,
        visible=[draw(st.integers(0, pages * p)) for _ in range(cu[-1])],
        cu=cu,
        slots=slots,
        page_rows=p,
        n_slots=n_slots,
        pages=pages,
        stage_rows=draw(st.integers(0, 5)),
        resident=[(draw(st.integers(0, n_slots - 1)), j, 40 + j) for j in range(pages) if draw(st.booleans())],
        lru=[draw(st.permutations(range(hot_rows))) for _ in range(n_slots)],
    )
    for s in range(n_slots):
        held = draw(st.lists(st.integers(0, pages * p - 1), max_size=hot_rows, unique=True))
        x.owners[s, : len(held)] = held
        if draw(st.integers(0, 9)) == 0:
            x.lru[s, 0] = draw(st.sampled_from([-5, hot_rows, 1 << 30]))
        if draw(st.integers(0, 5)) == 0:
            x.host_map[s, 0] = -1
        if draw(st.integers(0, 5)) == 0:
            x.hot_table[s] = -1
    return x


@settings(max_examples=400, deadline=None)
@given(hostile())
def test_cpu_equals_oracle_on_hostile_inputs(x):
    y = copy.deepcopy(x)
    assert_same(resolve(x), oracle.resolve(y))
    assert np.array_equal(x.owners, y.owners)
    assert np.array_equal(x.lru, y.lru)
