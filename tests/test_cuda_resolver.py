"""The CUDA resolver, promotion and copies against the oracle, bit for bit."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from test_resolver import hostile, i32, make

from trtllm_hisparse.kernels import abi, ops
from trtllm_hisparse.resolver import CopyPlan, oracle

pytestmark = pytest.mark.gpu

POISON = -77
NAMES = ("selections", "cu_queries", "slots", "visible", "page_map", "host_map", "hot_table", "owners", "lru")


class OnDevice:
    """Numpy inputs on the GPU, with poisoned outputs, called through the C ABI."""

    def __init__(self, x, max_width=None):
        self.x = x
        queries, k = x.selections.shape
        self.t = {name: torch.from_numpy(getattr(x, name).copy()).cuda() for name in (*NAMES, "stage_base")}
        self.out = {
            "locations": torch.full((max(queries, 1), k), POISON, dtype=torch.int32, device="cuda"),
            "count": torch.full((len(x.slots),), POISON, dtype=torch.int32, device="cuda"),
            "counters": torch.zeros(7, dtype=torch.int64, device="cuda"),
        }
        for plan in ("plan", "promoted"):
            self.out[plan] = [
                torch.full((max(queries, 1) * k,), POISON, dtype=dtype, device="cuda")
                for dtype in (torch.int32, torch.int64, torch.int64)
            ]
        self.out["promoted_count"] = torch.full_like(self.out["count"], POISON)
        width = max_width or max(1, int(np.diff(x.cu_queries).max(initial=1)))
        self.params = abi.ResolveParams(
            requests=len(x.slots),
            queries=queries,
            max_width=width,
            top_k=k,
            slots=x.page_map.shape[0],
            pages=x.page_map.shape[1],
            hot_rows=x.owners.shape[1],
            hot_pages=x.hot_table.shape[1],
            page_rows=x.page_rows,
            stage_rows=x.stage_rows,
            slot_of=self.t["slots"].data_ptr(),
            stage_base=self.t["stage_base"].data_ptr(),
            locations=self.out["locations"].data_ptr(),
            plan=abi.Plan(*(t.data_ptr() for t in (*self.out["plan"], self.out["count"]))),
            counters=self.out["counters"].data_ptr(),
            **{name: self.t[name].data_ptr() for name in NAMES if name != "slots"},
        )

    def run(self):
        abi.call("hs_resolve", self.params, torch.cuda.current_stream().cuda_stream)

    def promote(self, last_query):
        self.last_query = torch.from_numpy(last_query).cuda()
        plan = abi.Plan(*(t.data_ptr() for t in (*self.out["promoted"], self.out["promoted_count"])))
        params = abi.PromoteParams(step=self.params, last_query=self.last_query.data_ptr(), promoted=plan)
        abi.call("hs_promote", params, torch.cuda.current_stream().cuda_stream)

    def plan(self, name="plan"):
        count = self.out["count" if name == "plan" else "promoted_count"].cpu().numpy()
        k = self.x.selections.shape[1]
        parts = [int(cu) * k + np.arange(n) for cu, n in zip(self.x.cu_queries, count, strict=False)]
        used = np.concatenate([np.arange(0), *parts]).astype(int)
        return CopyPlan(*(t.cpu().numpy()[used] for t in self.out[name]), count)

    def equals(self, want, y):
        """Everything the call wrote, and nothing else, is what the oracle wrote."""
        got = self.out["locations"].cpu().numpy()[: len(y.selections)]
        assert np.array_equal(got, want.locations)
        same_plan(self.plan(), want.plan)
        counts = dict(zip(abi.COUNTERS, self.out["counters"].tolist(), strict=True))
        assert counts == vars(want.counts)
        self.same_state(y)

    def same_state(self, y):
        assert np.array_equal(self.t["owners"].cpu().numpy(), y.owners)
        assert np.array_equal(self.t["lru"].cpu().numpy(), y.lru)


def same_plan(got, want):
    for name in ("count", "row", "src", "dst"):
        assert np.array_equal(getattr(got, name), getattr(want, name)), name


def agree(x, **kwargs):
    y = copy.deepcopy(x)
    device = OnDevice(x, **kwargs)
    device.run()
    device.equals(oracle.resolve(y), y)


@settings(max_examples=300, deadline=None)
@given(hostile())
def test_hostile_inputs(x):
    agree(x)


def big(rng, *, requests, width, k, hot_rows, page_rows=64, context=20_000, direct=0.3, stage_rows=0):
    """A ragged batch over warm state, with duplicates, -1 and invisible ids."""
    widths = rng.integers(1, width + 1, requests)
    widths[0] = width
    cu = np.concatenate([[0], np.cumsum(widths)])
    pages = -(-context // page_rows)
    sel = rng.integers(-50, context + 50, (cu[-1], k))
    sel[:, -1] = sel[:, 0]
    x = make(
        sel,
        hot_rows=hot_rows,
        cu=cu,
        visible=rng.integers(context // 2, context, cu[-1]),
        slots=rng.permutation(requests + 2)[:requests],
        n_slots=requests + 2,
        page_rows=page_rows,
        pages=pages,
        stage_rows=stage_rows,
        lru=[rng.permutation(hot_rows) for _ in range(requests + 2)],
    )
    resident = rng.random(x.page_map.shape) < direct
    x.page_map[resident] = rng.integers(0, 1 << 20, int(resident.sum()))
    for owners in x.owners:
        held = rng.permutation(context)[:hot_rows]
        owners[: len(held)] = held
        owners[rng.random(hot_rows) < 0.1] = -1
    return x


@pytest.mark.parametrize(
    ("requests", "width", "k", "hot_rows", "stage_rows"),
    [
        (1, 1, 1, 1, 0),
        (3, 1, 31, 64, 0),
        (2, 3, 33, 66, 40),
        (5, 1, 2048, 4096, 0),
        (64, 1, 2048, 6144, 0),
        (2, 1, 2047, 32768, 0),
        (3, 4, 2048, 8192, 512),
        (2, 8, 2048, 4096, 16384),
        (2, 16, 2048, 2048, 32768),
        (2, 16, 2048, 32768, 64),
        (200, 1, 100, 257, 7),
    ],
)
def test_sizes(requests, width, k, hot_rows, stage_rows):
    rng = np.random.default_rng(requests * width + k)
    agree(big(rng, requests=requests, width=width, k=k, hot_rows=hot_rows, stage_rows=stage_rows))


@pytest.mark.parametrize("direct", [0.0, 1.0])
def test_all_miss_and_all_direct(direct):
    x = big(np.random.default_rng(0), requests=3, width=2, k=500, hot_rows=2000, direct=direct)
    x.owners[:] = -1
    agree(x)


def test_every_entry_the_same_row():
    agree(make(np.full((2, 2048), 7), hot_rows=4096, cu=[0, 2]))


def test_rows_that_collide_in_every_cell():
    """A union as large as the set allows, of rows a page apart."""
    sel = np.arange(16 * 2048).reshape(16, 2048) * 64
    agree(make(sel, hot_rows=4096, pages=40_000, page_rows=64, visible=40_000 * 64, stage_rows=32768))


def test_exact_order_over_many_steps_with_slots_reused():
    """State carried on the device through steps, one slot released and taken over halfway."""
    rng = np.random.default_rng(5)
    k, hot_rows = 65, 130
    x = make(np.zeros((2, k)), hot_rows=hot_rows, n_slots=3, cu=[0, 1, 2], page_rows=4, pages=400, stage_rows=9)
    y = copy.deepcopy(x)
    owners, lru = torch.from_numpy(x.owners).cuda(), torch.from_numpy(x.lru).cuda()
    for step in range(20):
        if step == 10:
            y.owners[1], y.lru[1] = -1, np.arange(hot_rows)
            owners[1], lru[1] = -1, torch.arange(hot_rows, dtype=torch.int32)
        now = replace(
            y,
            selections=i32(rng.integers(0, 300, (2, k))),
            visible=i32([1600, 1600]),
            slots=i32([1, step % 2 * 2]),
        )
        device = OnDevice(now)
        device.t["owners"].copy_(owners)
        device.t["lru"].copy_(lru)
        device.run()
        device.equals(oracle.resolve(now), now)
        owners, lru = device.t["owners"], device.t["lru"]


def test_row_numbers_past_31_bits_of_bytes_and_elements():
    """C10: page ids whose rows lie past 2^31 bytes and past 2^31 elements; host rows past 2^31 rows."""
    x = make([[3, 70, 130]], hot_rows=1, visible=256, page_rows=64, pages=4, stage_rows=2)
    x.host_map[0] = [2**31 - 1, 33_000_000, 33_554_000, 0]
    x.hot_table[0, 0] = 2**31 // 64 - 1
    x.stage_base[:] = 2**31 - 2
    y = copy.deepcopy(x)
    device = OnDevice(x)
    device.run()
    device.equals(oracle.resolve(y), y)
    assert device.plan().src[0] == (2**31 - 1) * 64 + 3
    assert device.out["locations"].tolist() == [[2**31 - 64, 2**31 - 2, 2**31 - 1]]


def test_broken_device_inputs_touch_nothing():
    """A slot that does not exist and a request wider than stated are counted, and write no state."""
    x = make([[1, 2], [3, 4], [5, 6]], hot_rows=4, cu=[0, 1, 3], n_slots=2)
    device = OnDevice(x, max_width=1)
    device.t["slots"].copy_(torch.tensor([2, 1]))
    device.run()
    assert device.out["locations"].tolist() == [[-1, -1]] * 3
    assert device.out["count"].tolist() == [0, 0]
    assert device.out["counters"].tolist() == [0, 0, 0, 0, 0, 0, 2]
    device.same_state(x)


def test_graph_replay_with_changing_lengths():
    """C01, C07: one captured launch; batch, widths and lengths change under it, padding included."""
    rng = np.random.default_rng(9)
    first = big(rng, requests=4, width=3, k=100, hot_rows=400, stage_rows=50)
    first = replace(first, selections=np.resize(first.selections, (12, 100)), visible=np.resize(first.visible, 12))
    device = OnDevice(first, max_width=3)
    device.run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        device.run()
    for seed in range(5):
        rng = np.random.default_rng(seed)
        x = big(rng, requests=4, width=3, k=100, hot_rows=400, stage_rows=50)
        spare = 12 - len(x.selections)
        x = replace(
            x,
            selections=np.concatenate([x.selections, i32(rng.integers(0, 99, (spare, 100)))]),
            visible=np.concatenate([x.visible, i32([99] * spare)]),
        )
        x.slots[seed % 4] = -1
        for name, tensor in device.t.items():
            tensor.copy_(torch.from_numpy(getattr(x, name)))
        for tensor in (device.out["locations"], device.out["count"], *device.out["plan"]):
            tensor.fill_(POISON)
        device.out["counters"].zero_()
        device.x = x
        graph.replay()
        y = copy.deepcopy(x)
        device.equals(oracle.resolve(y), y)


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("selections", 0, "selections: expected a pointer, got null"),
        ("owners", 2, "owners: expected 4-byte alignment"),
        ("top_k", 2049, "top_k: expected 1..2048, got 2049"),
        ("top_k", 0, "top_k: expected 1..2048, got 0"),
        ("hot_rows", 32769, "hot_rows: expected 1..32768, got 32769"),
        ("max_width", 17, "max_width: expected 1..16, got 17"),
        ("hot_pages", 0, "hot_pages: expected 4.."),
        ("requests", 1025, "requests: expected 0..1024"),
        ("stage_rows", -1, "stage_rows: expected 0.."),
        ("counters", 4, "counters: expected 8-byte alignment"),
    ],
)
def test_bad_arguments_are_refused_with_the_fields_name(field, value, says):
    x = make([[1, 2]], hot_rows=4)
    device = OnDevice(x)
    setattr(device.params, field, value)
    with pytest.raises(ValueError, match=says):
        device.run()
    assert device.out["locations"].tolist() == [[POISON, POISON]]


# -- promotion -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("seed", range(12))
def test_promotion(seed):
    rng = np.random.default_rng(seed)
    k, hot_rows = [(4, 4), (100, 64), (2048, 2048), (33, 5000)][seed % 4]
    width = 3 if seed % 4 == 2 else 5
    x = big(rng, requests=4, width=width, k=k, hot_rows=hot_rows, stage_rows=width * k, context=6 * k, page_rows=4)
    x.slots[1] = -1
    y = copy.deepcopy(x)
    device = OnDevice(x)
    device.run()
    plan = oracle.resolve(y).plan
    same_plan(device.plan(), plan)
    accepted = x.cu_queries[:-1] + rng.integers(0, np.diff(x.cu_queries))
    accepted[seed % 4] = -1
    device.promote(i32(accepted))
    same_plan(device.plan("promoted"), oracle.promote(y, plan, i32(accepted)))
    device.same_state(y)
    assert seed % 4 not in (1, 2) or device.plan("promoted").count.sum() > 0


def test_promotion_bytes():
    """Copy-back moves the arena's rows into the slots it gave them."""
    x = make([[0, 1, 2, 3], [8, 9, 2, 9]], hot_rows=4, stage_rows=8)
    device = OnDevice(x)
    device.run()
    device.promote(i32([1]))
    store = torch.arange(100_000, device="cuda", dtype=torch.float32)[:, None].repeat(1, 4)
    plan = device.plan("promoted")
    before = store.clone()
    promoted = ops.Plan(device.out["locations"], *device.out["promoted"], device.out["promoted_count"])
    ops.copy_rows(promoted, device.t["cu_queries"], 4, [store], [store], device.out["counters"])
    assert plan.count.tolist() == [2]
    for src, dst in zip(plan.src, plan.dst, strict=True):
        assert torch.equal(store[dst], before[src])
    changed = (store != before).any(1).nonzero().flatten().tolist()
    assert changed == sorted(plan.dst.tolist())
