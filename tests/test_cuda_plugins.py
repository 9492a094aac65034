"""Every plugin's enqueue, called as TensorRT would, against the same call of the C ABI on a copy of the state."""

import copy

import numpy as np
import plugin_host
import pytest
import torch
from plugin_host import BF16, FLOAT, INT32, INT64
from test_cuda_attention import attend, case
from test_cuda_copy import random_bytes
from test_cuda_index import Case
from test_cuda_resolver import OnDevice, big
from test_resolver import i32

from trtllm_hisparse.kernels import abi, ops
from trtllm_hisparse.resolver import oracle

pytestmark = pytest.mark.gpu

TOKEN = torch.zeros(1, dtype=torch.int32)


@pytest.fixture(scope="module")
def host(built_plugins, tmp_path_factory):
    return plugin_host.Host(built_plugins, tmp_path_factory.mktemp("host"))


def table(*values):
    """A pointer table: tensors become addresses."""
    raw = [v.data_ptr() if isinstance(v, torch.Tensor) else v for v in values]
    return torch.tensor(raw, dtype=torch.int64).pin_memory()


def enqueue(host, name, fields, types, inputs, outputs):
    plugin = host.create(name, {"abi_version": 1, **fields})
    size = plugin.workspace(types, [list(t.shape) for t in inputs])
    space = torch.full((size,), 0xFF, dtype=torch.uint8, device="cuda")
    stream = torch.cuda.current_stream().cuda_stream
    status = plugin.enqueue(types, inputs, outputs, space.data_ptr() if size else 0, stream)
    torch.cuda.synchronize()
    return status


def poisoned(shape, dtype):
    return torch.full(shape, -77, dtype=dtype, device="cuda")


class Step:
    """A resolution's inputs on the device, its state table and one store of 16-byte rows."""

    def __init__(self, x, seed=0):
        self.device = device = OnDevice(x)
        t, p = device.t, device.params
        self.state = table(
            *(t[name] for name in ("page_map", "host_map", "hot_table", "owners", "lru")),
            device.out["counters"], p.slots, p.pages, p.hot_rows, p.hot_pages,
        )  # fmt: skip
        self.rows = random_bytes((120_000, 16), seed)
        self.backup = random_bytes((60_000, 16), seed + 1, pinned=True)
        self.store = table(self.rows, len(self.rows), self.backup, len(self.backup), device.out["counters"])
        names = ("selections", "cu_queries", "slots", "visible", "stage_base")
        self.inputs = [t[name] for name in names] + [self.state, self.store, TOKEN.cuda()]
        self.fields = {
            "page_rows": p.page_rows, "stage_rows": p.stage_rows, "max_width": p.max_width, "row_bytes": 16
        }  # fmt: skip
        self.types = [INT32, INT32, INT32, INT32, INT64, INT64, INT64, INT32]

    def plan(self):
        size, requests = self.device.x.selections.size, len(self.device.x.slots)
        return [
            poisoned((size,), torch.int32), poisoned((size,), torch.int64), poisoned((size,), torch.int64),
            poisoned((requests,), torch.int32),
        ]  # fmt: skip


def staged_step(seed=3):
    """Unions beyond the hot cache, every row on the host."""
    rng = np.random.default_rng(seed)
    x = big(rng, requests=3, width=4, k=50, hot_rows=64, context=400, page_rows=4, stage_rows=300, direct=0.0)
    x.hot_table[:] = np.arange(x.hot_table.size).reshape(x.hot_table.shape)
    x.stage_base[:] = 100_000 + 300 * np.arange(3)
    return x


def moved(rows, backup, plan):
    """Rows after a plan was run, by numpy."""
    want = rows.cpu().numpy().copy()
    want[plan.dst] = (backup if backup is not None else rows).cpu().numpy()[plan.src]
    return want


def test_resolve_follow_and_copy_back(host):
    """Locations, plan, state and bytes of producer and follower; then the staged rows become hot in both."""
    x = staged_step()
    y = copy.deepcopy(x)
    want = oracle.resolve(y)
    step, other = Step(x), Step(copy.deepcopy(x), seed=9)
    before = step.rows.clone()
    locations, plan = poisoned(x.selections.shape, torch.int32), step.plan()
    outputs = [locations, *plan]
    assert enqueue(host, "HiSparseResolve", step.fields, step.types, step.inputs, outputs) == 0
    step.device.out |= {"locations": locations, "plan": plan[:3], "count": plan[3]}
    step.device.equals(want, y)
    assert want.counts.staged > 0
    assert np.array_equal(step.rows.cpu().numpy(), moved(before, step.backup, want.plan))

    def follow(plan, from_device):
        token = poisoned((1,), torch.int32)
        before = other.rows.clone()
        inputs = [step.device.t["cu_queries"], *plan[1:], other.store, TOKEN.cuda()]
        fields = {"top_k": 50, "row_bytes": 16, "from_device": from_device}
        types = [INT32, INT64, INT64, INT32, INT64, INT32]
        assert enqueue(host, "HiSparseFollow", fields, types, inputs, [token]) == 0
        return before, token

    before, token = follow(plan, 0)
    assert token.tolist() == [0]
    assert np.array_equal(other.rows.cpu().numpy(), moved(before, other.backup, want.plan))

    last = i32(x.cu_queries[1:] - 1)
    promoted, before = step.plan(), step.rows.clone()
    inputs = [*step.inputs, torch.from_numpy(last).cuda(), *plan]
    types = [*step.types, INT32, INT32, INT64, INT64, INT32]
    assert enqueue(host, "HiSparseCopyBack", step.fields, types, inputs, promoted) == 0
    want = oracle.promote(y, want.plan, last)
    assert want.count.sum() > 0
    assert promoted[3].tolist() == want.count.tolist()
    step.device.same_state(y)
    assert np.array_equal(step.rows.cpu().numpy(), moved(before, None, want))
    before, _ = follow(promoted, 1)
    assert np.array_equal(other.rows.cpu().numpy(), moved(before, None, want))
    assert step.device.out["counters"].tolist()[abi.COUNTERS.index("corrupt")] == 0


def test_append(host):
    rows = torch.randn(5, 80, generator=torch.Generator().manual_seed(0)).bfloat16().cuda()
    destination = torch.tensor([4, -1, 0, 2, 9], device="cuda")
    store, want = (torch.full((5, 80), 7.0, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    ops.append(rows, destination, want)
    token = poisoned((1,), torch.int32)
    fields = {"source_format": abi.BF16, "format": abi.BF16, "paged_keys": 0, "page_rows": 64, "scale": 1.0}
    inputs = [rows, destination, table(store, 5, 0, 0, 0)]
    assert enqueue(host, "HiSparseAppend", fields, [BF16, INT64, INT64], inputs, [token]) == 0
    assert torch.equal(store, want)
    assert token.tolist() == [0]


def test_index_top_k(host):
    index = Case([300, 64, 700], [2, 1, 3], heads=8)
    want, unordered = index.on_gpu(100, key_format=abi.BF16, query_format=abi.BF16)
    t = index.t
    keys = table(t["keys"], t["keys"].shape[0] * t["keys"].shape[1], 0, 0, 0)
    inputs = [t["query"], t["weight"], t["page_table"], t["cu_queries"], t["visible"], keys, TOKEN.cuda()]
    outputs = [poisoned(want.shape, torch.int32), poisoned((len(want),), torch.int8)]
    fields = {"top_k": 100, "page_rows": 64, "query_format": 1, "key_format": 1, "scale": index.params.scale}
    types = [BF16, FLOAT, INT32, INT32, INT32, INT64, INT32]
    assert enqueue(host, "HiSparseIndexTopK", fields, types, inputs, outputs) == 0
    assert torch.equal(outputs[0].cpu(), want)
    assert outputs[1].tolist() == unordered.tolist()


def test_attention(host):
    q, rows, _, locations, latent = case(queries=3, heads=16, k=300)
    want = attend(q, rows, locations, latent=latent, fmt=abi.BF16)
    out = torch.full_like(want, torch.nan)
    fields = {
        "latent": latent, "query_format": 1, "row_format": 1, "out_format": 0, "scale": 0.1, "row_scale": 1.0
    }  # fmt: skip
    inputs = [q, locations, table(rows, len(rows), 0, 0, 0), TOKEN.cuda()]
    assert enqueue(host, "HiSparseAttention", fields, [BF16, INT32, INT64, INT32], inputs, [out]) == 0
    assert torch.equal(out, want)


@pytest.mark.parametrize(
    ("store", "says"),
    [
        (lambda rows: table(rows, 5, 0, 0, 0).cuda(), "store: expected a table in pinned host memory"),
        (lambda rows: table(rows, 5), "store: expected a table of 5 entries, got 2"),
        (lambda _: table(0, 5, 0, 0, 0), "store: expected a pointer, got null"),
    ],
)
def test_a_bad_table_fails_the_step_with_its_name(host, store, says):
    rows = torch.zeros(1, 8, device="cuda")
    fields = {"source_format": abi.F32, "format": abi.F32, "paged_keys": 0, "page_rows": 64, "scale": 1.0}
    inputs = [rows, torch.zeros(1, dtype=torch.int64, device="cuda"), store(rows)]
    assert enqueue(host, "HiSparseAppend", fields, [FLOAT, INT64, INT64], inputs, [TOKEN.cuda()]) != 0
    assert says in host.log
    assert host.log.startswith("HiSparseAppend: ")
