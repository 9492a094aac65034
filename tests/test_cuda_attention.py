"""Sparse attention on the GPU: against float64, and bitwise against itself in other company and other places."""

import pytest
import torch

from trtllm_hisparse.kernels import abi

pytestmark = pytest.mark.gpu

FORMATS = {abi.F32: torch.float32, abi.BF16: torch.bfloat16}


def store(x, fmt, scale=1.0):
    """Rows `x [n, dim]` as stored, and their values in float64, both on the GPU."""
    x = x.cuda()
    if fmt in FORMATS:
        rows = x.to(FORMATS[fmt])
        return rows, rows.double()
    if fmt == abi.FP8:
        rows = (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
        return rows.view(torch.uint8), rows.double() * scale
    latent = x[:, :512].reshape(-1, 4, 128)
    scales = latent.abs().amax(-1) / 448
    fp8 = (latent / scales[..., None]).to(torch.float8_e4m3fn)
    rotary = x[:, 512:].bfloat16()
    parts = (fp8.reshape(-1, 512), scales, rotary)
    rows = torch.cat([part.contiguous().view(torch.uint8) for part in parts], 1)
    values = (fp8.double() * scales.double()[..., None]).reshape(-1, 512)
    return rows, torch.cat([values, rotary.double()], 1)


def attend(query, rows, locations, *, latent, fmt, scale=0.1, row_scale=1.0, out_format=abi.F32, out=None):
    queries, heads, dim = query.shape
    if out is None:
        dtype = FORMATS[out_format]
        out = torch.full((queries, heads, latent), torch.nan, dtype=dtype, device="cuda")
    params = abi.AttentionParams(
        queries=queries,
        heads=heads,
        dim=dim,
        latent=latent,
        top_k=locations.shape[1],
        query_format=abi.F32 if query.dtype == torch.float32 else abi.BF16,
        row_format=fmt,
        out_format=out_format,
        scale=scale,
        row_scale=row_scale,
        query=query.data_ptr(),
        rows=rows.data_ptr(),
        store_rows=len(rows),
        locations=locations.data_ptr(),
        out=out.data_ptr(),
    )
    size = abi.workspace("hs_attention_workspace", params)
    space = torch.full((size,), 0xFF, dtype=torch.uint8, device="cuda")
    params.workspace = space.data_ptr()
    abi.call("hs_attention", params, torch.cuda.current_stream().cuda_stream)
    torch.cuda.current_stream().synchronize()
    return out


def reference(query, values, locations, latent, scale):
    """float64, entry by entry of the formula."""
    out = torch.zeros(*query.shape[:2], latent, dtype=torch.float64, device="cuda")
    for t, row in enumerate(locations.tolist()):
        at = [i for i in row if i >= 0]
        if at:
            x = values[torch.tensor(at, device="cuda")]
            out[t] = (query[t].double() @ x.T * scale).softmax(-1) @ x[:, :latent]
    return out


def case(
    *, queries, heads, k, n=5000, dim=576, latent=512, fmt=abi.BF16, query=torch.bfloat16, seed=0, row_scale=1.0
):
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(queries, heads, dim, generator=generator).to(query).cuda()
    rows, values = store(torch.randn(n, dim, generator=generator), fmt, row_scale)
    locations = torch.randint(0, n, (queries, k), generator=generator)
    locations[torch.rand(queries, k, generator=generator) < 0.1] = -1
    return q, rows, values, locations.int().cuda(), latent


@pytest.mark.parametrize("fmt", [abi.F32, abi.BF16, abi.FP8, abi.FP8_DS_MLA])
@pytest.mark.parametrize("query", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("queries", "heads", "k"),
    [(1, 1, 1), (3, 8, 33), (2, 16, 500), (2, 64, 2048), (1, 128, 2047), (2, 5, 257), (34, 64, 2048)],
)
def test_against_float64(fmt, query, queries, heads, k):
    scale = 0.03 if fmt == abi.FP8 else 1.0
    q, rows, values, locations, latent = case(
        queries=queries, heads=heads, k=k, fmt=fmt, query=query, row_scale=scale
    )
    got = attend(q, rows, locations, latent=latent, fmt=fmt, row_scale=scale)
    want = reference(q, values, locations, latent, 0.1)
    tolerance = 1e-5 if query == torch.float32 else 1e-2
    assert (got - want).norm() <= tolerance * want.norm()


@pytest.mark.parametrize(("dim", "latent"), [(80, 64), (24, 16), (7, 3), (1024, 1024)])
def test_sizes_of_small_models(dim, latent):
    q, rows, values, locations, _ = case(
        queries=3, heads=4, k=40, dim=dim, latent=latent, fmt=abi.F32, query=torch.float32
    )
    got = attend(q, rows, locations, latent=latent, fmt=abi.F32)
    want = reference(q, values, locations, latent, 0.1)
    assert (got - want).norm() <= 1e-5 * want.norm()


def test_uniform_weights_are_exact():
    """A zero query weighs its entries equally, duplicates twice: small integers come out exact."""
    rows = torch.arange(64, dtype=torch.float32)[:, None].repeat(1, 576).bfloat16().cuda()
    q = torch.zeros(2, 16, 576, dtype=torch.bfloat16, device="cuda")
    locations = torch.tensor([[3, -1, 5, 5, 63, -1, -1, 4], [-1, 7, -1, -1, -1, -1, -1, -1]]).int().cuda()
    got = attend(q, rows, locations, latent=512, fmt=abi.BF16)
    assert (got[0] == 16).all()
    assert (got[1] == 7).all()


@pytest.mark.parametrize("fmt", [abi.F32, abi.BF16, abi.FP8, abi.FP8_DS_MLA])
def test_rows_nobody_lists_are_never_read(fmt):
    """C03, C81: unlisted rows hold NaN; -1 and places outside the store are no entries; without any, zeros."""
    q, rows, values, locations, latent = case(queries=4, heads=16, k=300, fmt=fmt)
    locations[2] = -1
    locations[3, ::2] = 5000
    locations[3, 1::4] = 2**31 - 1
    listed = locations[(locations >= 0) & (locations < 5000)].long().unique()
    poisoned = torch.full_like(rows.view(torch.uint8), 0xFF)
    poisoned[listed] = rows.view(torch.uint8)[listed]
    got = attend(q, poisoned.view(rows.dtype), locations, latent=latent, fmt=fmt)
    want = reference(q, values, torch.where(locations < 5000, locations, -1), latent, 0.1)
    assert (got - want).norm() <= 1e-2 * want.norm()
    assert not got[2].any()


@pytest.mark.parametrize("fmt", [abi.F32, abi.BF16, abi.FP8, abi.FP8_DS_MLA])
@pytest.mark.parametrize(("heads", "k"), [(16, 700), (64, 2048)])
def test_bits_depend_neither_on_places_nor_on_company(fmt, heads, k):
    """I8: other physical rows, another batch size, other neighbours: the same bits. Of 64 heads the whole batch
    runs in the kernel for many heads and a few queries of it in the other one."""
    q, rows, _, locations, latent = case(queries=64, heads=heads, k=k, fmt=fmt)
    want = attend(q, rows, locations, latent=latent, fmt=fmt)
    place = torch.randperm(len(rows), generator=torch.Generator().manual_seed(1)).cuda()
    moved = torch.empty_like(rows)
    moved[place] = rows
    elsewhere = torch.where(locations >= 0, place[locations.clamp(min=0).long()].int(), -1)
    assert torch.equal(attend(q, moved, elsewhere, latent=latent, fmt=fmt), want)
    for some in (slice(5, 6), slice(0, 3), slice(10, 50)):
        got = attend(q[some].contiguous(), rows, locations[some].contiguous(), latent=latent, fmt=fmt)
        assert torch.equal(got, want[some])
    few = attend(q[:, 3:5].contiguous(), rows, locations, latent=latent, fmt=fmt)
    assert torch.equal(few, want[:, 3:5])


def test_bfloat16_output_is_the_rounded_float32_output():
    q, rows, _, locations, latent = case(queries=2, heads=16, k=64)
    wide = attend(q, rows, locations, latent=latent, fmt=abi.BF16)
    assert torch.equal(
        attend(q, rows, locations, latent=latent, fmt=abi.BF16, out_format=abi.BF16), wide.bfloat16()
    )


def test_rows_past_two_gibibytes_and_two_gibielements():
    """C10."""
    n = (1 << 31) // 576 + 1000
    rows = torch.empty(n, 576, dtype=torch.bfloat16, device="cuda")
    at = torch.tensor([n - 1, (1 << 31) // 1152 + 1, 13, n - 500])
    values = torch.randn(4, 576, generator=torch.Generator().manual_seed(0)).bfloat16().cuda()
    rows[at.cuda()] = values
    q = torch.randn(1, 16, 576, generator=torch.Generator().manual_seed(1)).bfloat16().cuda()
    got = attend(q, rows, at[None].int().cuda(), latent=512, fmt=abi.BF16)
    small = attend(q, values, torch.arange(4, dtype=torch.int32, device="cuda")[None], latent=512, fmt=abi.BF16)
    assert torch.equal(got, small)


def test_graph_replay_with_changed_locations():
    q, rows, _, locations, latent = case(queries=4, heads=16, k=300)
    out = torch.empty(4, 16, 512, device="cuda")
    params = abi.AttentionParams(
        queries=4,
        heads=16,
        dim=576,
        latent=512,
        top_k=300,
        query_format=abi.BF16,
        row_format=abi.BF16,
        out_format=abi.F32,
        scale=0.1,
        query=q.data_ptr(),
        rows=rows.data_ptr(),
        store_rows=len(rows),
        locations=locations.data_ptr(),
        out=out.data_ptr(),
    )
    space = torch.empty(abi.workspace("hs_attention_workspace", params), dtype=torch.uint8, device="cuda")
    params.workspace = space.data_ptr()
    abi.call("hs_attention", params, torch.cuda.current_stream().cuda_stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        abi.call("hs_attention", params, torch.cuda.current_stream().cuda_stream)
    for seed in range(3):
        fresh = case(queries=4, heads=16, k=300, seed=seed + 1)[3]
        fresh[seed, 10:] = -1
        locations.copy_(fresh)
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, attend(q, rows, fresh, latent=latent, fmt=abi.BF16))


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"dim": 1025}, r"dim: expected 1\.\.1024, got 1025"),
        ({"latent": 577}, r"latent: expected 1\.\.576, got 577"),
        ({"top_k": 2049}, r"top_k: expected 1\.\.2048"),
        ({"row_format": 7}, "row_format: expected an hs_format, got 7"),
        ({"row_format": abi.FP8_DS_MLA, "latent": 500}, r"latent: expected 512\.\.512, got 500"),
        ({"rows": 0}, "rows: expected a pointer, got null"),
        ({"query": 2}, "query: expected 16-byte alignment"),
        ({"workspace": 128}, "workspace: expected 256-byte alignment"),
    ],
)
def test_refusals_name_the_field(fields, says):
    given = {"dim": 576, "latent": 512, "top_k": 8, "row_format": abi.BF16} | dict.fromkeys(
        ("query", "rows", "locations", "out", "workspace"), 1 << 20
    )
    params = abi.AttentionParams(queries=1, heads=1, query_format=abi.BF16, store_rows=1, **(given | fields))
    with pytest.raises(ValueError, match=says):
        abi.call("hs_attention", params, 0)


def test_no_queries_is_no_work():
    abi.call("hs_attention", abi.AttentionParams(heads=1, dim=8, latent=8, top_k=1), 0)
