"""The torch operators: schemas, fake implementations, and the CPU ones against what they wrap."""

import copy

import numpy as np
import pytest
import torch
from test_resolver import i32, make

from trtllm_hisparse.engine.attention import attend
from trtllm_hisparse.kernels import ops
from trtllm_hisparse.resolver import oracle

OPCHECKS = ("test_schema", "test_faketensor")


def tensors(x):
    """`ops.resolve` arguments of numpy inputs; owners and lru share memory with them."""
    names = ("selections", "cu_queries", "slots", "visible", "page_map", "host_map", "hot_table", "owners", "lru")
    return [torch.from_numpy(getattr(x, name)) for name in (*names, "stage_base")]


def test_resolve_on_cpu_is_the_oracle_with_a_plan_per_request():
    x = make([[0, 1, 2, 3], [8, 9, 2, 9], [5, -1, 5, 6]], hot_rows=4, cu=[0, 2, 3], n_slots=2, stage_rows=8)
    y = make([[0, 1, 2, 3], [8, 9, 2, 9], [5, -1, 5, 6]], hot_rows=4, cu=[0, 2, 3], n_slots=2, stage_rows=8)
    counters = torch.zeros(7, dtype=torch.int64)
    got = ops.resolve(*tensors(x), counters, 1, 8, 2)
    want = oracle.resolve(y)
    assert got.locations.tolist() == want.locations.tolist()
    assert got.count.tolist() == want.plan.count.tolist() == [6, 2]
    at = [*range(6), 8, 9]  # request 1 starts at query 2
    assert got.row[at].tolist() == want.plan.row.tolist()
    assert got.src[at].tolist() == want.plan.src.tolist()
    assert got.dst[at].tolist() == want.plan.dst.tolist()
    assert counters.tolist() == [0, 0, 11, 3, 8, 0, 0]
    assert np.array_equal(x.owners, y.owners)


def promoted(device, last):
    """A resolution that stages rows and its promotion, by the operators and by the oracle."""
    rng = np.random.default_rng(7)
    x = make(
        rng.integers(-1, 60, (7, 6)),
        hot_rows=8,
        cu=[0, 3, 4, 7],
        n_slots=4,
        slots=[2, 0, 3],
        stage_rows=20,
        page_rows=2,
    )
    y = copy.deepcopy(x)
    t = [tensor.to(device) for tensor in tensors(x)]
    counters = torch.zeros(7, dtype=torch.int64, device=device)
    plan = ops.resolve(*t, counters, 2, 20, 3)
    state = [t[i] for i in (0, 1, 2, 3, 6, 7, 8, 9)]
    got = ops.promote(plan, torch.tensor(last, dtype=torch.int32, device=device), *state, 2, 20)
    want = oracle.promote(y, oracle.resolve(y).plan, np.array(last, np.int32))
    assert got.count.tolist() == want.count.tolist()
    at = np.concatenate([c * 6 + np.arange(n) for c, n in zip(x.cu_queries, want.count, strict=False)]).astype(int)
    for name in ("row", "src", "dst"):
        assert getattr(got, name).cpu().numpy()[at].tolist() == getattr(want, name).tolist()
    assert t[7].tolist() == y.owners.tolist()
    assert t[8].tolist() == y.lru.tolist()
    return want.count.tolist()


def test_promote_on_cpu_is_the_oracle():
    counts = promoted("cpu", [1, -1, 6])
    assert counts[0] > 0
    assert counts[1] == 0
    assert counts[2] > 0


@pytest.mark.gpu
def test_promote_on_cuda_is_the_oracle():
    promoted("cuda", [2, 3, -1])


def test_copy_rows_and_append_on_cpu():
    plan = ops.Plan(*(torch.tensor(v) for v in ([[0]], [9] * 4, [3, 0, 1, 7], [5, 0, 2, 7], [1, 1])))
    source, target = torch.arange(8.0)[:, None], torch.full((8, 1), -1.0)
    ops.copy_rows(plan, torch.tensor([0, 1, 2]).int(), 2, [source], [target], torch.zeros(7, dtype=torch.int64))
    assert target[:, 0].tolist() == [-1, -1, 1, -1, -1, 3, -1, -1]
    counters = torch.zeros(7, dtype=torch.int64)
    broken = ops.Plan(*(torch.tensor(v) for v in ([[0]], [9] * 4, [-1, 8, 3, 7], [1, 2, 8, 7], [2, 2])))
    ops.copy_rows(broken, torch.tensor([0, 1, 2]).int(), 2, [source], [target], counters)
    assert target[:, 0].tolist() == [-1, -1, 1, -1, -1, 3, -1, 7]
    assert counters.tolist() == [0, 0, 0, 0, 0, 0, 3]
    ops.append(torch.tensor([[5.0], [6.0], [7.0]]), torch.tensor([4, -1, 0]), target)
    assert target[:, 0].tolist() == [7, -1, 1, -1, 5, 3, -1, 7]


def test_attention_on_cpu_is_attend():
    generator = torch.Generator().manual_seed(0)
    query, rows = torch.randn(2, 3, 6, generator=generator), torch.randn(5, 6, generator=generator)
    locations = torch.tensor([[4, -1, 0], [-1, -1, -1]]).int()
    got = ops.attention(query, rows, locations, 0.5, 4)
    assert torch.equal(got, attend(query, rows, locations, 0.5, 4))
    assert not got[1].any()


@pytest.mark.parametrize("name", ["resolve", "promote", "copy_rows", "append", "index_top_k", "attention"])
def test_operators_are_registered_soundly(name):
    """Schemas state what is mutated, and fake implementations give the real shapes and dtypes."""
    x = make([[0, 1], [2, 2]], hot_rows=4)
    counters = torch.zeros(7, dtype=torch.int64)
    long = torch.tensor([1, 0])
    arguments = {
        "promote": (
            *(torch.zeros(4, dtype=dtype) for dtype in (torch.int32, torch.int64, torch.int64)),
            *(torch.zeros(1, dtype=torch.int32) for _ in range(2)),
            *(tensors(x)[i] for i in (0, 1, 2, 3, 6, 7, 8, 9)),
            1,
            4,
        ),
        "resolve": (*tensors(x), counters, 1, 0, 2),
        "copy_rows": (
            long,
            long,
            torch.tensor([1]).int(),
            torch.tensor([0, 1]).int(),
            2,
            [torch.ones(2, 4)],
            [torch.zeros(2, 4)],
            counters,
        ),
        "append": (torch.ones(2, 3), long, torch.zeros(4, 3)),
        "index_top_k": (
            torch.ones(1, 2, 4),
            torch.ones(1, 2),
            torch.ones(2, 4, 4),
            torch.from_numpy(i32([[1, 0]])),
            torch.tensor([0, 1]).int(),
            torch.tensor([7]).int(),
            3,
            0.5,
        ),
        "attention": (torch.ones(1, 2, 6), torch.ones(4, 6), torch.tensor([[1, -1]]).int(), 0.5, 4),
    }
    op = getattr(torch.ops.hisparse, name).default
    torch.library.opcheck(op, arguments[name], test_utils=OPCHECKS)
