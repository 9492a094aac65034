"""Row copies from pinned host memory, appends and chunk copies, byte for byte."""

import numpy as np
import pytest
import torch

from trtllm_hisparse.kernels import abi, ops

pytestmark = pytest.mark.gpu


def stream():
    return torch.cuda.current_stream().cuda_stream


def random_bytes(shape, seed, pinned=False):
    data = torch.from_numpy(np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8))
    return data.pin_memory() if pinned else data.cuda()


def run(widths, counts, *, k=64, src_rows=5000, dst_rows=3000, seed=0, offset=0, bad=()):
    """Copies of one plan for several stores, against numpy."""
    rng = np.random.default_rng(seed)
    requests = len(counts)
    size = requests * k
    src = rng.integers(0, src_rows, size)
    dst = rng.permutation(dst_rows)[:size]
    for at, value in bad:
        src[at], dst[at] = value
    source = [
        random_bytes(src_rows * w + offset, i, pinned=True)[offset:].view(src_rows, w)
        for i, w in enumerate(widths)
    ]
    target = [random_bytes(dst_rows * w + offset, 50 + i)[offset:].view(dst_rows, w) for i, w in enumerate(widths)]
    want = [t.cpu().numpy().copy() for t in target]
    skipped = 0
    for r, n in enumerate(counts):
        for i in range(r * k, r * k + n):
            inside = 0 <= src[i] < src_rows and 0 <= dst[i] < dst_rows
            skipped += not inside
            for w, a in zip(want, source, strict=True):
                if inside:
                    w[dst[i]] = a[src[i]].numpy()
    counters = torch.zeros(7, dtype=torch.int64, device="cuda")
    plan = ops.Plan(
        torch.empty(0),
        torch.empty(0),
        torch.from_numpy(src).cuda(),
        torch.from_numpy(dst).cuda(),
        torch.tensor(counts, dtype=torch.int32, device="cuda"),
    )
    cu = torch.arange(requests + 1, dtype=torch.int32, device="cuda")
    ops.copy_rows(plan, cu, k, source, target, counters)
    for got, w in zip(target, want, strict=True):
        assert np.array_equal(got.cpu().numpy(), w)
    assert counters.tolist() == [0, 0, 0, 0, 0, 0, skipped]


@pytest.mark.parametrize("width", [576, 656, 1152, 16, 132, 68, 20, 7, 1])
def test_row_widths(width):
    run([width], [64, 0, 1, 63, 17])


def test_stores_that_start_off_a_16_byte_boundary():
    run([48], [5, 64], offset=4)
    run([48], [5, 64], offset=1)


def test_several_members_in_one_launch_and_in_two():
    run([576, 576, 1152, 656], [64, 3, 0])
    run([32] * 11, [64, 3, 0])


def test_many_requests_some_without_work():
    rng = np.random.default_rng(1)
    run([64], (rng.integers(0, 4, 700) * rng.integers(0, 2, 700)).tolist(), k=3, src_rows=100)


def test_nothing_to_do():
    run([576], [0, 0, 0])


def test_entries_outside_the_stores_are_counted_and_skipped():
    run([32, 32], [64], bad=[(3, (-1, 5)), (4, (5000, 6)), (5, (1, -7)), (6, (1, 3000)), (7, (2**40, 2**41))])


def run_far(source, target, src, dst):
    """Copies of a few rows between stores too large to fill."""
    source[src] = random_bytes((len(src), source.shape[1]), 3).cpu()
    target[dst.cuda()] = 0
    count = torch.tensor([len(src)], dtype=torch.int32, device="cuda")
    plan = ops.Plan(torch.empty(0), torch.empty(0), src.cuda(), dst.cuda(), count)
    cu = torch.tensor([0, 1], dtype=torch.int32, device="cuda")
    ops.copy_rows(plan, cu, len(src), [source], [target], torch.zeros(7, dtype=torch.int64, device="cuda"))
    assert torch.equal(target[dst.cuda()].cpu(), source[src])


def test_rows_past_two_gibibytes_moved_byte_by_byte():
    """C10: offsets past 2^31 in the unit the kernel counts in, on both sides."""
    rows = (1 << 31) // 655 + 100
    source = torch.empty(rows, 655, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(rows, 655, dtype=torch.uint8, device="cuda")
    run_far(source, target, torch.tensor([rows - 1, rows - 60, 13]), torch.tensor([rows - 1, 13, rows - 60]))


def test_destinations_past_two_gibi_16_byte_pieces():
    """C10: a store of 32 GiB and more."""
    rows = (1 << 31) // 72 + 100
    target = torch.empty(rows, 1152, dtype=torch.uint8, device="cuda")
    source = torch.empty(1000, 1152, dtype=torch.uint8, pin_memory=True)
    run_far(source, target, torch.tensor([999, 0, 13]), torch.tensor([rows - 1, 13, rows - 60]))


def test_copy_refusals_name_the_field():
    params = abi.CopyParams(requests=1, queries=1, top_k=4, members=9)
    with pytest.raises(ValueError, match=r"members: expected 1\.\.8, got 9"):
        abi.call("hs_copy_rows", params, stream())
    params.members = 1
    with pytest.raises(ValueError, match="cu_queries: expected a pointer"):
        abi.call("hs_copy_rows", params, stream())


# -- append --------------------------------------------------------------------------------------------------
def append(rows, destination, store, fmt, **fields):
    destination = torch.tensor(destination, device="cuda")
    params = abi.AppendParams(
        rows=rows.shape[0],
        dim=rows.shape[1],
        source_format={torch.float32: abi.F32, torch.bfloat16: abi.BF16}[rows.dtype],
        format=fmt,
        source=rows.data_ptr(),
        destination=destination.data_ptr(),
        store=store.data_ptr(),
        **fields,
    )
    abi.call("hs_append", params, stream())
    return store.cpu()


def values(dtype, rows, dim, seed=0):
    """Rows of very different sizes; the last is all zeros."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, dim, generator=generator) * torch.logspace(-6, 5, rows)[:, None]
    x[-1] = 0
    return x.to(dtype).cuda()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_plain_rows_are_scattered_and_padding_is_not(dtype):
    rows = values(dtype, 4, 80)
    store = torch.full((9, 80), 7.0, dtype=dtype, device="cuda")
    fmt = abi.F32 if dtype == torch.float32 else abi.BF16
    got = append(rows, [8, -1, 0, 9], store, fmt, store_rows=9)
    want = torch.full((9, 80), 7.0, dtype=dtype)
    want[8], want[0] = rows[0].cpu(), rows[2].cpu()
    assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8_with_one_scale(dtype):
    rows = values(dtype, 5, 576)
    store = torch.zeros(5, 576, dtype=torch.uint8, device="cuda")
    got = append(rows, [4, 3, 2, 1, 0], store, abi.FP8, scale=0.25, store_rows=5)
    want = (rows.float().cpu() / 0.25).clamp(-448, 448).to(torch.float8_e4m3fn).flip(0)
    assert torch.equal(got, want.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8_ds_mla(dtype):
    rows = values(dtype, 6, 576)
    store = torch.full((7, 656), 0xEE, dtype=torch.uint8, device="cuda")
    got = append(rows, [6, 0, 1, 2, 3, 4], store, abi.FP8_DS_MLA, store_rows=7)
    x = rows.float().cpu()
    for i, at in enumerate([6, 0, 1, 2, 3, 4]):
        scale = (x[i, :512].view(4, 128).abs().amax(1) / 448).clamp(min=torch.finfo(torch.float32).tiny)
        latent = (x[i, :512].view(4, 128) / scale[:, None]).clamp(-448, 448).to(torch.float8_e4m3fn)
        assert torch.equal(got[at, :512], latent.view(torch.uint8).flatten())
        assert torch.equal(got[at, 512:528].view(torch.float32), scale)
        assert torch.equal(got[at, 528:].view(torch.bfloat16), x[i, 512:].bfloat16())
    assert (got[5] == 0xEE).all()


def test_fp8_index_keys_in_pages():
    """Keys of a page, then their scales: powers of two at or above amax / 448."""
    p, dim, pages = 4, 128, 3
    rows = values(torch.bfloat16, 6, dim)
    rows[0, :] = 0
    rows[0, 5] = 448.0 * 2**-3  # exactly a power of two
    store = torch.full((pages * p * (dim + 4),), 0xEE, dtype=torch.uint8, device="cuda")
    at = [11, 0, 5, 6, 4, 7]
    got = append(rows, at, store, abi.FP8, paged_keys=1, page_rows=p, store_rows=pages * p).view(pages, -1)
    x = rows.float().cpu()
    for i, row in enumerate(at):
        amax = x[i].abs().max().item()
        scale = 2.0 ** np.ceil(np.log2(max(amax / 448, np.finfo(np.float32).tiny)))
        key = (x[i] / scale).to(torch.float8_e4m3fn)
        page, line = divmod(row, p)
        assert torch.equal(got[page, line * dim : (line + 1) * dim], key.view(torch.uint8))
        assert got[page, p * dim :].view(torch.float32)[line] == scale
    assert (got[0, dim : p * dim] == 0xEE).all()


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"format": abi.BF16}, "format: expected the source's format"),
        ({"format": abi.FP8_DS_MLA}, r"dim: expected 576\.\.576, got 80"),
        ({"format": abi.FP8}, "scale: expected a positive number"),
        ({"format": abi.FP8, "paged_keys": 1}, "page_rows: expected 1"),
        ({"format": abi.F32, "store": 2}, "store: expected 4-byte alignment"),
        ({"format": abi.F32, "source": 0}, "source: expected a pointer"),
    ],
)
def test_append_refusals_name_the_field(fields, says):
    ones = torch.ones(2, 80, device="cuda")
    given = {"source": ones.data_ptr(), "destination": ones.data_ptr(), "store": ones.data_ptr()} | fields
    with pytest.raises(ValueError, match=says):
        abi.call(
            "hs_append", abi.AppendParams(rows=1, dim=80, source_format=abi.F32, store_rows=2, **given), stream()
        )


# -- chunks --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("side", [False, True])
def test_chunks_between_host_and_device(side):
    """Population and backup: scattered pages both ways, done when their event is."""
    page = 64 * 576
    host = random_bytes((20, page), 1, pinned=True)
    device = random_bytes((30, page), 2)
    want_host, want_device = host.clone(), device.cpu()
    up, down = [(3, 7), (19, 0), (4, 29)], [(1, 5), (2, 6)]
    copies = [(device[d].data_ptr(), host[h].data_ptr(), page) for h, d in up]
    copies += [(host[h].data_ptr(), device[d].data_ptr(), page) for h, d in down]
    for h, d in up:
        want_device[d] = host[h]
    for h, d in down:
        want_host[h] = device[d].cpu()
    torch.cuda.synchronize()
    on = torch.cuda.Stream() if side else torch.cuda.default_stream()
    abi.copy_chunks(copies, on.cuda_stream)
    done = torch.cuda.Event()
    done.record(on)
    done.synchronize()
    assert torch.equal(host, want_host)
    assert torch.equal(device.cpu(), want_device)
    abi.copy_chunks([], on.cuda_stream)


def test_chunk_refusals_name_the_field():
    with pytest.raises(ValueError, match=r"src\[i\]: expected a pointer, got null"):
        abi.copy_chunks([(torch.ones(1, device="cuda").data_ptr(), 0, 4)], stream())
