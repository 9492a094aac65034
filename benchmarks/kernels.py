"""Times of the CUDA kernels against the floor: bytes over the rates measured in the same run.

    python benchmarks/kernels.py [--quick] [--json FILE]

Each point is the median over CUDA-graph replays; the floor is the larger of host bytes over the rate of a pinned
bulk copy and device bytes over the rate of an elementwise kernel. Every resolver point is compared with the CPU op
before it is timed. `resolve` is hs_resolve and hs_copy_rows for one member; a repetition starts from the same
state, whose restoring is timed apart and taken off. All queries of a request select the same rows in different
orders.
"""

import argparse
import itertools
import json
import statistics
import sys
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from trtllm_hisparse.kernels import abi, ops
from trtllm_hisparse.resolver import ResolveInputs, resolve

TOP_K, PAGE_ROWS, CONTEXT = 2048, 64, 65536
FORMATS = {"bf16": (abi.BF16, 1152), "fp8": (abi.FP8, 576), "fp8_ds_mla": (abi.FP8_DS_MLA, 656)}


def median_us(run, repeats=15, inner=10):
    """Median time of `run`, which only launches."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(inner):
            run()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / inner)
    return statistics.median(times)


@dataclass
class Rates:
    """Bytes per microsecond, measured here."""

    host: float = 0.0
    device: float = 0.0
    records: list[dict] = field(default_factory=list)

    def measure(self):
        size = 1 << 28
        pinned = torch.empty(size, dtype=torch.uint8).pin_memory()
        copy = torch.empty_like(pinned, device="cuda")
        self.host = size / median_us(lambda: copy.copy_(pinned, non_blocking=True), inner=1)
        a = torch.ones(1 << 30, device="cuda")
        b = torch.empty_like(a)
        self.device = 2 * a.nbytes / median_us(lambda: torch.add(a, 1, out=b), inner=1)

    def add(self, name, us, host_bytes, device_bytes, **point):
        floor = max(host_bytes / self.host, device_bytes / self.device)
        self.records.append(
            {
                "kernel": name,
                **point,
                "us": round(us, 2),
                "floor_us": round(floor, 2),
                "ratio": round(us / floor, 2),
            }
        )
        print("  ".join(f"{key} {value}" for key, value in self.records[-1].items()), flush=True)


def state(requests, width, hot_rows, miss_rate, seed=0):
    """Hot caches that hold all but `miss_rate` of what every query of their request selects."""
    rng = np.random.default_rng(seed)
    pages, hot_pages = CONTEXT // PAGE_ROWS, hot_rows // PAGE_ROWS
    stage = max(0, TOP_K - hot_rows)
    selections = np.empty((requests * width, TOP_K), np.int32)
    owners = np.empty((requests, hot_rows), np.int32)
    misses = round(miss_rate * TOP_K)
    for r in range(requests):
        rows = rng.permutation(CONTEXT).astype(np.int32)
        chosen = np.concatenate([rows[hot_rows : hot_rows + misses], rows[: TOP_K - misses]])
        owners[r] = rng.permutation(rows[:hot_rows])
        for t in range(width):
            selections[r * width + t] = rng.permutation(chosen)
    return ResolveInputs(
        selections=selections,
        cu_queries=np.arange(requests + 1, dtype=np.int32) * width,
        slots=np.arange(requests, dtype=np.int32),
        visible=np.full(requests * width, CONTEXT, np.int32),
        page_map=np.full((requests, pages), -1, np.int32),
        host_map=np.arange(requests * pages, dtype=np.int32).reshape(requests, pages) % 2048,
        hot_table=np.arange(requests * hot_pages, dtype=np.int32).reshape(requests, hot_pages),
        owners=owners,
        lru=np.tile(rng.permutation(hot_rows).astype(np.int32), (requests, 1)),
        page_rows=PAGE_ROWS,
        stage_base=np.full(requests, requests * hot_rows, np.int64),
        stage_rows=stage,
    )


def bench_resolve(rates, backup, requests, width, hot_rows, miss_rate, row_bytes):
    x = state(requests, width, hot_rows, miss_rate)
    names = ("selections", "cu_queries", "slots", "visible", "page_map", "host_map", "hot_table", "owners", "lru")
    t = {name: torch.from_numpy(getattr(x, name).copy()).cuda() for name in (*names, "stage_base")}
    owners, lru = t["owners"].clone(), t["lru"].clone()
    counters = torch.zeros(7, dtype=torch.int64, device="cuda")
    store = torch.empty(requests * hot_rows + TOP_K, row_bytes, dtype=torch.uint8, device="cuda")
    host = backup.view(-1)[: len(backup) * backup.shape[1] // row_bytes * row_bytes].view(-1, row_bytes)

    def restore():
        t["owners"].copy_(owners)
        t["lru"].copy_(lru)

    def step():
        restore()
        plan = ops.resolve(*t.values(), counters, PAGE_ROWS, x.stage_rows, width)
        ops.copy_rows(plan, t["cu_queries"], TOP_K, [host], [store], counters)
        return plan

    got = step()
    want = resolve(x)
    if not np.array_equal(got.locations.cpu().numpy(), want.locations) or counters[5:].any():
        raise SystemExit(f"resolve {requests} x {width}, B={hot_rows}: locations differ from the CPU op's")
    us = median_us(step) - median_us(restore)
    entries, copied = x.selections.size, want.counts.copied
    # selections, page map, locations; owners and LRU read, LRU written; copied rows written.
    device = entries * 12 + 3 * x.owners.nbytes + copied * row_bytes
    rates.add(
        "resolve", us, copied * row_bytes, device, requests=requests, width=width, top_k=TOP_K,
        hot_rows=hot_rows, miss_rate=miss_rate, row_bytes=row_bytes,
    )  # fmt: skip


def bench_gather(rates, backup, rows, row_bytes):
    requests = rows // TOP_K
    n = backup.numel() // row_bytes
    host = backup.view(-1)[: n * row_bytes].view(n, row_bytes)
    store = torch.empty(4 * rows, row_bytes, dtype=torch.uint8, device="cuda")
    src, dst = torch.randint(0, n, (rows,), device="cuda"), torch.randperm(4 * rows, device="cuda")[:rows]
    count = torch.full((requests,), TOP_K, dtype=torch.int32, device="cuda")
    cu = torch.arange(requests + 1, dtype=torch.int32, device="cuda")
    counters = torch.zeros(7, dtype=torch.int64, device="cuda")
    plan = ops.Plan(count, count, src, dst, count)
    us = median_us(lambda: ops.copy_rows(plan, cu, TOP_K, [host], [store], counters))
    rates.add("gather", us, rows * row_bytes, rows * row_bytes, rows=rows, row_bytes=row_bytes)


def bench_attention(rates, queries, heads, name):
    fmt, row_bytes = FORMATS[name]
    n = 200_000
    if fmt == abi.BF16:
        rows = torch.randn(n, 576, device="cuda").bfloat16()
    else:  # small e4m3 values; scales and rotary parts of fp8_ds_mla are small numbers too
        rows = torch.randint(0, 48, (n, row_bytes), dtype=torch.uint8, device="cuda")
    query = torch.randn(queries, heads, 576, device="cuda").bfloat16()
    locations = torch.randint(0, n, (queries, TOP_K), dtype=torch.int32, device="cuda")
    out = torch.empty(queries, heads, 512, device="cuda")
    params = abi.AttentionParams(
        queries=queries, heads=heads, dim=576, latent=512, top_k=TOP_K, query_format=abi.BF16, row_format=fmt,
        out_format=abi.F32, scale=0.06, row_scale=1.0, query=query.data_ptr(), rows=rows.data_ptr(), store_rows=n,
        locations=locations.data_ptr(), out=out.data_ptr(),
    )  # fmt: skip
    space = torch.empty(abi.workspace("hs_attention_workspace", params), dtype=torch.uint8, device="cuda")
    params.workspace = space.data_ptr()
    us = median_us(lambda: abi.call("hs_attention", params, torch.cuda.current_stream().cuda_stream))
    device = queries * TOP_K * row_bytes + query.nbytes + out.nbytes
    rates.add("attention", us, 0, device, queries=queries, heads=heads, top_k=TOP_K, rows=name)


def bench_index(rates, queries, context):
    pages = context // PAGE_ROWS
    keys = torch.randn(queries * pages, PAGE_ROWS, 128, device="cuda", dtype=torch.bfloat16)
    query = torch.randn(queries, 32, 128, device="cuda").bfloat16()
    weight = torch.randn(queries, 32, device="cuda")
    table = torch.randperm(queries * pages, device="cuda").int().view(queries, pages)
    cu = torch.arange(queries + 1, dtype=torch.int32, device="cuda")
    visible = torch.full((queries,), context, dtype=torch.int32, device="cuda")
    us = median_us(lambda: ops.index_top_k(query, weight, keys, table, cu, visible, TOP_K, 128**-0.5), inner=2)
    rates.add("index", us, 0, queries * context * 256, queries=queries, heads=32, context=context, top_k=TOP_K)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few points of each grid")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write one record per point")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("kernels.py: no CUDA device")
    rates = Rates()
    rates.measure()
    print(f"pinned bulk copy {rates.host / 1e3:.1f} GB/s, device {rates.device / 1e3:.0f} GB/s read + written")
    backup = torch.empty(2048 * PAGE_ROWS, 1152, dtype=torch.uint8).pin_memory()
    quick = args.quick
    for row_bytes, rows in itertools.product((576, 656, 1152), (2048, 32768)):
        bench_gather(rates, backup, rows, row_bytes)
    for queries, heads, name in itertools.product((1, 8, 64), (16, 64, 128), FORMATS):
        if not quick or (heads < 128 and name != "fp8"):
            bench_attention(rates, queries, heads, name)
    for queries, context in itertools.product((1, 8, 64), (32768, 131072)):
        bench_index(rates, queries, context)
    grid = itertools.product(
        (1, 8, 64) if quick else (1, 8, 32, 64, 128),
        (1, 8) if quick else (1, 4, 8),
        (4096,) if quick else (2048, 4096, 8192),
        (0.0, 0.01, 1.0) if quick else (0.0, 0.0005, 0.01, 0.05, 1.0),
    )
    for requests, width, hot_rows, miss_rate in grid:
        bench_resolve(rates, backup, requests, width, hot_rows, miss_rate, 576)
    if args.json:
        args.json.write_text(json.dumps(rates.records, indent=1))


if __name__ == "__main__":
    main()
