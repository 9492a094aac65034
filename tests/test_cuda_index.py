"""The indexer on the GPU: the CPU op's selections, bit for bit where the arithmetic is the same or exact."""

import pytest
import torch

from trtllm_hisparse.engine.index_cpu import index_top_k
from trtllm_hisparse.kernels import abi

pytestmark = pytest.mark.gpu

DTYPES = {abi.F32: torch.float32, abi.BF16: torch.bfloat16}


class Case:
    """A ragged batch over shuffled pages; memory behind the histories holds NaN. CPU tensors."""

    def __init__(self, lengths, widths, *, heads=4, dim=128, page_rows=64, draw=torch.randn, seed=0, spare=0):
        g = torch.Generator().manual_seed(seed)
        pages = [-(-n // page_rows) for n in lengths]
        order = torch.randperm(sum(pages) + 3, generator=g)
        self.keys = torch.full((sum(pages) + 3, page_rows, dim), torch.nan)
        self.table = torch.full((len(lengths), max(pages) + spare), -1, dtype=torch.int32)
        used = 0
        for r, (n, count) in enumerate(zip(lengths, pages, strict=True)):
            at = order[used : used + count]
            used += count
            self.table[r, :count] = at.int()
            plain = torch.full((count * page_rows, dim), torch.nan)
            plain[:n] = draw(n, dim, generator=g)
            self.keys[at] = plain.view(count, page_rows, dim)
        self.cu = torch.tensor([0, *widths]).cumsum(0).int()
        seen = [torch.arange(n - w, n) + 1 for n, w in zip(lengths, widths, strict=True)]
        self.visible = torch.cat(seen).int()
        self.query = draw(len(self.visible), heads, dim, generator=g)
        self.weight = draw(len(self.visible), heads, generator=g)

    def on_cpu(self, top_k):
        return index_top_k(self.query, self.weight, self.keys, self.table, self.cu, self.visible, top_k)

    def exactly(self, top_k, scale):
        """The formula in float64, for values whose sums are exact; lowest positions first among equals."""
        out = torch.full((len(self.visible), top_k), -1, dtype=torch.int32)
        for t, n in enumerate(self.visible.tolist()):
            r = int((self.cu <= t).sum()) - 1
            keys = self.keys[self.table[r].long()].flatten(0, 1)[:n].double()
            score = self.weight[t].double() @ (self.query[t].double() @ keys.T * scale).relu()
            order = score.sort(descending=True, stable=True).indices[:top_k]
            out[t, : len(order)] = order.int()
        return out

    def on_gpu(self, top_k, key_format=abi.F32, query_format=abi.F32, padding=0, scale=None):
        keys = fp8_pages(self.keys) if key_format == abi.FP8 else self.keys.to(DTYPES[key_format])
        self.t = {
            "query": self.query.to(DTYPES[query_format]),
            "weight": self.weight,
            "keys": keys,
            "page_table": self.table,
            "cu_queries": self.cu,
            "visible": torch.cat([self.visible, torch.full((padding,), 5, dtype=torch.int32)]),
        }
        if padding:
            self.t["query"] = torch.cat([self.t["query"], self.t["query"][:padding]])
            self.t["weight"] = torch.cat([self.weight, self.weight[:padding]])
        self.t = {name: tensor.contiguous().cuda() for name, tensor in self.t.items()}
        queries = len(self.t["visible"])
        self.out = torch.full((queries, top_k), -77, dtype=torch.int32, device="cuda")
        self.unordered = torch.full((queries,), 77, dtype=torch.uint8, device="cuda")
        self.params = abi.IndexParams(
            requests=len(self.table),
            queries=queries,
            heads=self.query.shape[1],
            dim=self.query.shape[2],
            top_k=top_k,
            page_rows=self.keys.shape[1],
            table_pages=self.table.shape[1],
            query_format=query_format,
            key_format=key_format,
            scale=scale or self.query.shape[2] ** -0.5,
            key_pages=len(self.keys),
            selections=self.out.data_ptr(),
            unordered=self.unordered.data_ptr(),
            **{name: tensor.data_ptr() for name, tensor in self.t.items()},
        )
        size = abi.workspace("hs_index_workspace", self.params)
        self.space = torch.full((size,), 0xFF, dtype=torch.uint8, device="cuda")
        self.params.workspace = self.space.data_ptr()
        self.run()
        return self.out.cpu(), self.unordered.cpu()

    def run(self):
        abi.call("hs_index_top_k", self.params, torch.cuda.current_stream().cuda_stream)

    def agree(self, top_k, **formats):
        selections, unordered = self.on_cpu(top_k)
        got, flags = self.on_gpu(top_k, **formats)
        assert torch.equal(got[: len(selections)], selections)
        assert flags[: len(unordered)].tolist() == unordered.int().tolist()
        assert (got[len(selections) :] == -1).all()


def fp8_pages(keys):
    """Page layout of FP8 keys with scales of 1 and 2 in turn."""
    pages, rows, _ = keys.shape
    scale = torch.tensor([1.0, 2.0]).repeat(pages, rows)[:, :rows].contiguous()
    fp8 = (keys / scale[..., None]).to(torch.float8_e4m3fn).view(torch.uint8).reshape(pages, -1)
    return torch.cat([fp8, scale.view(torch.uint8).reshape(pages, -1)], 1)


def small_integers(*shape, generator):
    """Even, so that e4m3 holds them with a scale of 2 too; sums of products are exact in any order."""
    return 2.0 * torch.randint(-2, 3, shape, generator=generator)


@pytest.mark.parametrize("key_format", [abi.F32, abi.BF16])
@pytest.mark.parametrize(("heads", "dim"), [(4, 128), (3, 8), (32, 64), (1, 5)])
def test_float32_queries_give_the_cpu_ops_selections(heads, dim, key_format):
    case = Case([500, 64, 1, 63, 700], [1, 3, 1, 2, 4], heads=heads, dim=dim)
    case.keys = case.keys.to(DTYPES[key_format]).float()
    case.agree(33, key_format=key_format)


@pytest.mark.parametrize("top_k", [1, 31, 64, 500, 2047, 2048])
def test_ties_take_the_lowest_positions(top_k):
    """Scores of few values: nearly every selection is cut inside a run of equals."""
    case = Case([3000, 2500], [2, 1], heads=2, dim=4, page_rows=7, draw=small_integers)
    case.agree(top_k)


def test_zeros_of_either_sign_are_equal():
    case = Case([300], [1], heads=1, dim=1)
    case.query[:], case.weight[:] = 1, -1
    case.keys = torch.where(case.keys.isnan(), case.keys, torch.where(case.keys > 0.5, -1.0, 0.0))  # 0 and -0
    case.agree(40)


@pytest.mark.parametrize("key_format", [abi.BF16, abi.FP8])
@pytest.mark.parametrize("heads", [1, 8, 20, 32, 64])
def test_tensor_core_scores_of_exact_values(heads, key_format):
    case = Case([1000, 64, 1, 130], [1, 2, 1, 3], heads=heads, draw=small_integers)
    got, unordered = case.on_gpu(100, key_format=key_format, query_format=abi.BF16, scale=2.0**-4)
    assert torch.equal(got, case.exactly(100, 2.0**-4))
    assert not unordered.any()


@pytest.mark.parametrize("key_format", [abi.BF16, abi.FP8])
def test_other_dims_with_bfloat16_queries(key_format):
    case = Case([300, 65], [2, 1], heads=5, dim=24, draw=small_integers)
    got, _ = case.on_gpu(50, key_format=key_format, query_format=abi.BF16, scale=2.0**-4)
    assert torch.equal(got, case.exactly(50, 2.0**-4))


def test_selections_do_not_depend_on_the_batch():
    """Scores of random bfloat16 values: a request alone gives what it gave among others."""
    together = Case([900, 400, 1500], [2, 1, 4], heads=32)
    got, _ = together.on_gpu(128, key_format=abi.BF16, query_format=abi.BF16)
    alone = Case([900, 400, 1500], [2, 1, 4], heads=32)
    alone.query, alone.weight = together.query[3:], together.weight[3:]
    alone.table, alone.visible = together.table[2:], together.visible[3:]
    alone.cu = torch.tensor([0, 4]).int()
    assert torch.equal(alone.on_gpu(128, key_format=abi.BF16, query_format=abi.BF16)[0], got[3:])


def test_a_visible_nan_is_reported_and_an_invisible_one_is_not():
    case = Case([200, 200], [3, 1])
    case.keys[case.table[0, 198 // 64], 198 % 64] = torch.nan  # seen by the second and third query only
    _, unordered = case.on_cpu(16)
    assert unordered.tolist() == [False, True, True, False]
    case.agree(16)
    got, flags = case.on_gpu(16, key_format=abi.BF16, query_format=abi.BF16)
    assert flags.tolist() == [0, 1, 1, 0]
    assert (got[1:3] == -1).all()


def test_a_page_that_does_not_exist_is_not_read():
    case = Case([200, 200], [1, 1])
    case.table[0, 1], case.table[1, 2] = len(case.keys), -5
    for formats in ({}, {"key_format": abi.BF16, "query_format": abi.BF16}):
        got, flags = case.on_gpu(16, **formats)
        assert flags.tolist() == [1, 1]
        assert (got == -1).all()


def test_padding_behind_the_last_request():
    case = Case([200, 100], [2, 2])
    case.agree(16, padding=3)


def test_long_context():
    case = Case([200_000], [2], heads=2, dim=16, draw=small_integers)
    case.agree(2048)
    case.agree(2048, key_format=abi.BF16, query_format=abi.BF16)


def test_graph_replay_with_growing_lengths():
    case = Case([640, 640], [1, 1], heads=8, spare=5)
    case.on_gpu(32)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        case.run()
    for lengths in ([1, 640], [639, 30], [33, 32], [0, 5]):
        case.visible = torch.tensor(lengths).int()
        case.t["visible"].copy_(case.visible)
        case.out.fill_(-77)
        graph.replay()
        assert torch.equal(case.out.cpu(), case.on_cpu(32)[0])


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"top_k": 2049}, r"top_k: expected 1\.\.2048, got 2049"),
        ({"dim": 257}, r"dim: expected 1\.\.256"),
        ({"heads": 129}, r"heads: expected 1\.\.128"),
        ({"table_pages": 16385}, r"table_pages: expected 1\.\.16384, got 16385"),
        ({"key_format": abi.FP8_DS_MLA}, "key_format: expected HS_F32, HS_BF16 or HS_FP8, got 3"),
        ({"key_format": abi.FP8, "page_rows": 7}, r"page_rows % 2: expected 0\.\.0, got 1"),
        ({"keys": 0}, "keys: expected a pointer, got null"),
        ({"weight": 2}, "weight: expected 4-byte alignment"),
        ({"workspace": 16}, "workspace: expected 256-byte alignment"),
    ],
)
def test_refusals_name_the_field(fields, says):
    pointers = (
        "query",
        "weight",
        "keys",
        "page_table",
        "cu_queries",
        "visible",
        "selections",
        "unordered",
        "workspace",
    )
    given = {"top_k": 8, "dim": 128, "heads": 1, "table_pages": 1, "page_rows": 64} | dict.fromkeys(
        pointers, 1 << 20
    )
    params = abi.IndexParams(requests=1, queries=1, key_pages=1, **(given | fields))
    with pytest.raises(ValueError, match=says):
        abi.call("hs_index_top_k", params, 0)
