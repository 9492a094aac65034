"""Bitwise: a token's logits depend on its own request alone, and no memory but its own rows is read."""

import struct

import hf_oracle
import pytest
import torch
from hf_oracle import TOP_K
from hypothesis import given, settings
from hypothesis import strategies as st
from resident_kv import ResidentKV, prefill, threads

from trtllm_hisparse.engine import ops
from trtllm_hisparse.engine.attention import attend
from trtllm_hisparse.engine.index_cpu import index_top_k
from trtllm_hisparse.engine.torch_engine import TorchEngine

CASES = [("glm_shared", torch.float32), ("v32_yarn", torch.float32), ("glm_shared", torch.bfloat16)]
PROMPTS = {0: hf_oracle.prompt(110, seed=1), 1: hf_oracle.prompt(33, seed=2), 2: hf_oracle.prompt(77, seed=3)}


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    with threads(1):
        yield


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]}-{str(case[1])[6:]}")
def case(request, one_thread, tmp_path_factory):
    """(engine, {slot: logits of every prompt token, each prompt fed alone and at once})"""
    family, dtype = request.param
    path = tmp_path_factory.mktemp(family)
    hf_oracle.model(family).save_pretrained(path)
    engine = TorchEngine.load(path, dtype)
    alone = {s: prefill(engine, ResidentKV(engine), {0: p}, logits="all")[0] for s, p in PROMPTS.items()}
    assert all(rows.isfinite().all() for rows in alone.values())
    return engine, alone


def same(got, expected):
    """Equal to the bit, and finite."""
    return bool(torch.equal(got, expected) and got.isfinite().all())


@pytest.mark.parametrize("chunk", [1, 7, 64, None])
def test_batch_and_chunks_change_nothing(case, chunk):
    engine, alone = case
    got = prefill(engine, ResidentKV(engine, slots=3, max_tokens=192), PROMPTS, chunk, logits="all")
    for slot, rows in got.items():
        assert same(rows, alone[slot]), slot


@pytest.mark.parametrize("page_rows", [4, 16, 64])
@pytest.mark.parametrize("seed", [1, 2])
def test_placement_changes_nothing(case, page_rows, seed):
    engine, alone = case
    kv = ResidentKV(engine, slots=3, max_tokens=160, page_rows=page_rows, seed=seed)
    got = prefill(engine, kv, PROMPTS, chunk=60, logits="all")
    for slot, rows in got.items():
        assert same(rows, alone[slot]), slot


def test_page_table_width_changes_nothing(case):
    engine, alone = case
    for width in (3, 50):
        kv = ResidentKV(engine, max_tokens=192)
        got = engine.step(kv.step({0: PROMPTS[0]}, "all", table_width=width))
        assert same(got, alone[0])


def test_slot_order_changes_nothing(case):
    engine, alone = case
    kv = ResidentKV(engine, slots=3, max_tokens=192)
    prefill(engine, kv, {s: p[:20] for s, p in PROMPTS.items()})
    got = engine.step(kv.step({2: PROMPTS[2][20:], 1: PROMPTS[1][20:], 0: PROMPTS[0][20:]}, "all"))
    counts = [len(PROMPTS[s]) - 20 for s in (2, 1, 0)]
    for slot, rows in zip((2, 1, 0), got.split(counts), strict=True):
        assert same(rows, alone[slot][20:]), slot


def test_decode_beside_prefill_changes_nothing(case):
    engine, alone = case
    kv = ResidentKV(engine, slots=3, max_tokens=192)
    prefill(engine, kv, {1: PROMPTS[1][:-1]})
    got = engine.step(kv.step({0: PROMPTS[0], 1: PROMPTS[1][-1:]}, "all"))
    assert same(got[:-1], alone[0])
    assert same(got[-1:], alone[1][-1:])


@pytest.mark.parametrize("count", [1, 3])
def test_threads_and_batch_change_nothing_together(case, count):
    engine, _ = case
    with threads(count):
        lone = prefill(engine, ResidentKV(engine), {0: PROMPTS[1]}, chunk=1, logits="all")[0]
        kv = ResidentKV(engine, slots=3, max_tokens=192)
        assert same(prefill(engine, kv, PROMPTS, logits="all")[1], lone)


def test_logits_of_no_row(case):
    engine, _ = case
    kv = ResidentKV(engine)
    step = kv.step({0: [5, 6]})
    object.__setattr__(step.batch, "logit_rows", torch.tensor([], dtype=torch.int64))
    assert engine.step(step).shape == (0, engine.config.vocab_size)


# -- one request's NaN -------------------------------------------------------------------------------------


@pytest.mark.parametrize("store", ["rows", "keys"])
@pytest.mark.parametrize("nan", [torch.nan, struct.unpack("f", b"\xff\xff\xff\xff")[0]], ids=["+nan", "-nan"])
def test_nan_stays_in_its_request_and_is_not_silent(case, store, nan):
    engine, alone = case
    kv = ResidentKV(engine, slots=3, max_tokens=192)
    prefill(engine, kv, {s: p[:-1] for s, p in PROMPTS.items()})
    last = engine.spec.producers[-1]
    # All of slot 1's history in one layer: at most k + 1 rows, so that some of it is selected.
    table = kv.tables[last] if store == "rows" else kv.key_tables[last]
    pages = getattr(kv, store)[last].view(-1, kv.page_rows, getattr(kv, store)[last].shape[1])
    pages[table[1]] = nan
    got = engine.step(kv.step({s: p[-1:] for s, p in PROMPTS.items()}))
    assert got[1].isnan().all()
    assert same(got[0], alone[0][-1])
    assert same(got[2], alone[2][-1])


# -- attention ---------------------------------------------------------------------------------------------


def gathered(locations):
    """Attention over a store of 8 rows, all NaN but 3 and 5; the rows' latent part has 4 of 6 elements."""
    payload = torch.full((8, 6), torch.nan)
    payload[3] = torch.tensor([1.0, 2.0, 3.0, 4.0, 0.5, -0.5])
    payload[5] = torch.tensor([-1.0, 0.5, 2.0, 8.0, 1.0, 1.0])
    query = torch.ones(len(locations), 2, 6)
    return payload, attend(query, payload, torch.tensor(locations, dtype=torch.int32), 0.25, 4)


def test_absent_entries_read_nothing():  # C81
    payload, out = gathered([[5, -1, -1, -1]])
    assert torch.equal(out, payload[5, :4].expand(1, 2, 4))


def test_leading_absent_entries():  # C82
    payload, out = gathered([[-1] * 16 + [3] + [-1] * 15, [3] + [-1] * 31])
    assert torch.equal(out, payload[3, :4].expand(2, 2, 4))


def test_query_without_entry_is_zero_and_disturbs_nobody():  # C83
    payload, out = gathered([[-1, -1], [3, -1], [-1, -1], [-1, 5]])
    assert torch.equal(out[[0, 2]], torch.zeros(2, 2, 4))
    assert torch.equal(out[1], payload[3, :4].expand(2, 4))
    assert torch.equal(out[3], payload[5, :4].expand(2, 4))


def test_weights_are_the_softmax():
    payload, out = gathered([[3, -1, 5]])
    weights = torch.tensor([payload[3].sum() * 0.25, payload[5].sum() * 0.25]).softmax(0)
    expected = weights[0] * payload[3, :4] + weights[1] * payload[5, :4]
    torch.testing.assert_close(out, expected.expand(1, 2, 4), rtol=1e-6, atol=0)


def test_duplicate_entries_count_twice():
    payload, out = gathered([[3, 5, 3]])
    scores = payload[[3, 5, 3]].sum(-1) * 0.25
    expected = (scores.softmax(0)[:, None] * payload[[3, 5, 3], :4]).sum(0)
    torch.testing.assert_close(out, expected.expand(1, 2, 4), rtol=1e-6, atol=0)


# -- top-k -------------------------------------------------------------------------------------------------

SCORES = [0.0, -0.0, 1.0, -1.0, 1.5, -2.25, 1e-42, -1e-42, 3e38, -3e38, float("inf"), -float("inf")]


def scored(scores, positions, top_k=4, page_rows=4, table=None, one_request=False):
    """Selections of queries at `positions` where position s scores `scores[s]`, and the unordered flags.

    One-element keys; a head of weight 1 passes the positive ones and a head of weight -1 the negative ones.
    Memory past the scores holds NaN.
    """
    pages = -(-len(scores) // page_rows)
    keys = torch.full((pages * page_rows, 1), torch.nan)
    keys[: len(scores), 0] = torch.tensor(scores)
    # Otherwise a request each, all over the same pages.
    cu = torch.tensor([0, len(positions)]).int() if one_request else torch.arange(len(positions) + 1).int()
    signs = torch.tensor([[1.0, -1.0]]).expand(len(positions), 2).contiguous()
    table = torch.arange(pages, dtype=torch.int32)[None] if table is None else table
    visible = torch.tensor(positions, dtype=torch.int32) + 1
    paged = keys.view(pages, page_rows, 1)
    return index_top_k(signs[..., None], signs, paged, table.expand(len(cu) - 1, -1), cu, visible, top_k)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(SCORES), min_size=1, max_size=150), st.integers(1, 12), st.data())
def test_top_k_is_by_score_then_position(scores, k, data):
    last = data.draw(st.integers(0, len(scores) - 1))
    expected = sorted(range(last + 1), key=lambda i: (-scores[i], i))[:k]
    selections, unordered = scored(scores, [last], k)
    assert selections.tolist() == [expected + [-1] * (k - len(expected))]
    assert not unordered.any()


def test_ties_go_to_the_lowest_position():
    selections, unordered = scored([0.0, 2.0, -0.0, 2.0, 5.0, 2.0, 2.0], [6, 2, 0])
    assert selections.dtype == torch.int32
    assert selections.tolist() == [[4, 1, 3, 5], [1, 0, 2, -1], [0, -1, -1, -1]]
    assert not unordered.any()


def test_score_follows_the_page_table():
    order = torch.tensor([[1, 0, -1]], dtype=torch.int32)
    selections, _ = scored([1.0, 2.0, 3.0, 4.0, 8.0, 7.0, 6.0, 5.0], [7], table=order)
    assert selections.tolist() == [[0, 1, 2, 3]]


def test_keys_past_the_query_are_ignored():
    scores = [1.0, 2.0, torch.nan, torch.inf]
    selections, unordered = scored(scores, [1])
    assert selections.tolist() == [[1, 0, -1, -1]]
    assert not unordered.any()
    selections, unordered = scored(scores, [0, 1, 3], one_request=True)
    assert selections[:2].tolist() == [[0, -1, -1, -1], [1, 0, -1, -1]]
    assert unordered.tolist() == [False, False, True]


def test_visible_nan_score_is_reported_for_its_query():
    _, unordered = scored([1.0, torch.nan, 2.0], [2, 1, 0])
    assert unordered.tolist() == [True, True, False]


@pytest.mark.parametrize("context", [TOP_K + 1, 64, 65, 700])
def test_scores_by_definition(context):
    """Against the formula in float64, over several key blocks and pages out of order."""
    generator = torch.Generator().manual_seed(context)
    heads, dim, page_rows = 3, 8, 16
    pages = -(-context // page_rows)
    order = torch.randperm(pages, generator=generator)
    keys = torch.full((pages, page_rows, dim), torch.nan)
    plain = torch.randn(context, dim, generator=generator)
    for i in range(context):
        keys[order[i // page_rows], i % page_rows] = plain[i]
    query, weight = (
        torch.randn(1, heads, dim, generator=generator),
        torch.randn(1, heads, generator=generator),
    )
    cu, visible = torch.tensor([0, 1]).int(), torch.tensor([context]).int()
    got, _ = index_top_k(query, weight, keys, order[None].int(), cu, visible, TOP_K)
    products = (query[0].double() @ plain.double().T * dim**-0.5).relu()
    expected = (weight[0].double()[:, None] * products).sum(0).sort(descending=True, stable=True)
    assert got[0].tolist() == expected.indices[:TOP_K].tolist()


# -- building blocks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_rows_do_not_depend_on_the_batch(count, dtype):
    generator = torch.Generator().manual_seed(0)
    with threads(count):
        for inner, outer in [(64, 192), (200, 24), (128, 512), (96, 40)]:
            x = torch.randn(160, inner, generator=generator).to(dtype)
            weight = torch.randn(outer, inner, generator=generator).to(dtype)
            whole = ops.linear(x, weight)
            torch.testing.assert_close(whole, x @ weight.T, rtol=2e-2, atol=0.3 if dtype.itemsize == 2 else 1e-4)
            order = torch.randperm(160, generator=generator)
            assert torch.equal(ops.linear(x[order], weight), whole[order])
            for start in range(0, 160, 8):
                assert torch.equal(ops.linear(x[start : start + 8], weight), whole[start : start + 8])


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("function", [torch.sigmoid, torch.cos, torch.nn.functional.silu])
def test_elementwise_does_not_depend_on_the_batch(count, function):
    x = torch.randn(400, 250, generator=torch.Generator().manual_seed(0))
    with threads(count):
        whole = ops.elementwise(function, x)
        torch.testing.assert_close(whole, function(x), rtol=1e-6, atol=1e-7)
        for rows in (8, 16, 136, 392):
            assert torch.equal(ops.elementwise(function, x[:rows]), whole[:rows])


@pytest.mark.parametrize("rows", [0, 1, 7, 8, 9])
def test_pad_rows(rows):
    x = torch.arange(rows * 3).view(rows, 3) + 1
    padded = ops.pad_rows(x)
    assert padded.shape == (-(-rows // 8) * 8, 3)
    assert torch.equal(padded[:rows], x)
    assert not padded[rows:].any()


# -- misuse ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token_ids": torch.tensor([5, 512])}, r"token_ids: expected 0\.\.511, got 5\.\.512"),
        ({"token_ids": torch.tensor([-1, 2])}, r"token_ids: expected 0\.\.511, got -1\.\.2"),
        ({"positions": torch.tensor([4095, 4096])}, r"positions: expected 0\.\.4095, got 4095\.\.4096"),
        ({"positions": torch.tensor([0])}, r"of one length of at least 1, got 2, 1 and 2"),
        ({"cu_queries": torch.tensor([0, 3])}, r"of one length of at least 1, got 2, 2 and 3"),
    ],
)
def test_bad_batch_is_refused(case, change, message):
    engine, _ = case
    step = ResidentKV(engine).step({0: [5, 6]})
    for name, value in change.items():
        object.__setattr__(step.batch, name, value)
    with pytest.raises(ValueError, match=message):
        engine.step(step)


def test_unsupported_dtype_is_refused(case):
    with pytest.raises(ValueError, match=r"dtype: expected torch.float32 or torch.bfloat16, got torch.float16"):
        TorchEngine(case[0].config, None, torch.float16)
