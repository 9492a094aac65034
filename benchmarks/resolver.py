"""Time of one step's resolution, the CPU op beside the plain-Python oracle.

    .venv/bin/python benchmarks/resolver.py [--requests 64] [--top-k 2048] [--hot-rows 4096] [--overlap 0.95]

Every step keeps `overlap` of each request's selection and draws the rest anew from its history; `direct` is the
share of pages that are resident. Medians over steps; the oracle runs the same inputs, fewer times.
"""

import argparse
import copy
import statistics
import time
from dataclasses import replace

import numpy as np

from trtllm_hisparse.resolver import ResolveInputs, oracle, resolve

PAGE_ROWS = 64


def inputs(args: argparse.Namespace, rng: np.random.Generator) -> ResolveInputs:
    """A cold hierarchy of `requests` histories, a share of their pages resident."""
    n, pages = args.requests, args.context // PAGE_ROWS
    hot_pages = -(-args.hot_rows // PAGE_ROWS)
    page_map = np.arange(n * pages, dtype=np.int32).reshape(n, pages)
    page_map[rng.random((n, pages)) >= args.direct] = -1
    return ResolveInputs(
        selections=np.zeros((n, args.top_k), np.int32),
        cu_queries=np.arange(n + 1, dtype=np.int32),
        slots=np.arange(n, dtype=np.int32),
        visible=np.full(n, args.context, np.int32),
        page_map=page_map,
        host_map=np.arange(n * pages, dtype=np.int32).reshape(n, pages),
        hot_table=np.arange(n * hot_pages, dtype=np.int32).reshape(n, hot_pages) + n * pages,
        owners=np.full((n, args.hot_rows), -1, np.int32),
        lru=np.tile(np.arange(args.hot_rows, dtype=np.int32), (n, 1)),
        page_rows=PAGE_ROWS,
        stage_base=np.zeros(n, np.int64),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--top-k", type=int, default=2048)
    parser.add_argument("--hot-rows", type=int, default=4096)
    parser.add_argument("--context", type=int, default=65536)
    parser.add_argument("--overlap", type=float, default=0.95)
    parser.add_argument("--steps", type=int, default=50)
    args = parser.parse_args()
    print(f"{args.requests} requests, k={args.top_k}, B={args.hot_rows}, overlap {args.overlap:.0%}")
    print(f"{'direct':>7} {'hot':>7} {'host':>7} {'op ms':>8} {'oracle ms':>10} {'ratio':>7}")
    for direct in (1.0, 0.7, 0.0):
        args.direct = direct
        rng = np.random.default_rng(0)
        state = inputs(args, rng)
        chosen = np.stack([rng.permutation(args.context)[: args.top_k] for _ in range(args.requests)])
        op, plain, shares = [], [], np.zeros(3)
        for step in range(args.steps + 5):
            renew = rng.random(chosen.shape) >= args.overlap
            chosen[renew] = rng.integers(0, args.context, int(renew.sum()))
            now = replace(state, selections=chosen.astype(np.int32))
            before = copy.deepcopy(now) if step >= args.steps + 3 else None
            start = time.perf_counter()
            got = resolve(now)
            elapsed = time.perf_counter() - start
            if step >= 5:
                op.append(elapsed * 1e3)
                shares += (got.counts.direct, got.counts.hot, got.counts.host)
            if before is not None:
                start = time.perf_counter()
                oracle.resolve(before)
                plain.append((time.perf_counter() - start) * 1e3)
        shares /= shares.sum()
        a, b = statistics.median(op), statistics.median(plain)
        print(f"{shares[0]:7.1%} {shares[1]:7.1%} {shares[2]:7.1%} {a:8.2f} {b:10.1f} {b / a:6.0f}x")


if __name__ == "__main__":
    main()
