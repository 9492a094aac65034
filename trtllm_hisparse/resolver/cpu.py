"""The CPU op: the same walk as the oracle, compiled, with request-local scratch.

One pass over the selections, one scan over B owners, one walk over the LRU list; distinct misses are found
with an open-addressing table sized by the request's selections, never by its history.
"""

from typing import Any

import numpy as np
from numba import njit

from trtllm_hisparse.resolver.base import I32, I64, CopyPlan, Resolution, ResolveCounts, ResolveInputs

_DIRECT, _HOT, _HOST, _STAGED, _COPIED, _LOST, _CORRUPT = range(7)


def resolve(inputs: ResolveInputs) -> Resolution:
    """Resolve one step of one cache state.

    Updates `owners` and `lru` in place: new LRU = unused evictables (old order) + just filled (miss order)
    + hits (old order). A request whose entries all resolve in place leaves both bit-identical and skips the
    hot scan. Raises ValueError for malformed inputs; `counts.lost` and `counts.corrupt` report broken state.
    """
    size = inputs.selections.size
    locations, row = np.empty(inputs.selections.shape, np.int32), np.empty(size, np.int32)
    src, dst = np.empty(size, np.int64), np.empty(size, np.int64)
    count, counters = np.empty(inputs.slots.shape, np.int32), np.zeros(7, np.int64)
    resolve_into(inputs, locations, row, src, dst, count, counters)
    starts = inputs.cu_queries[:-1] * inputs.selections.shape[1]
    used = np.concatenate([np.arange(0), *(start + np.arange(n) for start, n in zip(starts, count, strict=True))])
    plan = CopyPlan(row[used], src[used], dst[used], count)
    return Resolution(locations, plan, ResolveCounts(*counters.tolist()))


def resolve_into(
    inputs: ResolveInputs, locations: I32, row: I32, src: I64, dst: I64, count: I32, counters: I64
) -> None:
    """`resolve` into the caller's arrays: the plan of request r starts at `cu_queries[r] * k`.

    locations: int32 [T, k]; row, src, dst: [T * k], logical row, host row and device row of each copy; count:
    int32 [R]; counters: int64 [7], added to, in the order of `ResolveCounts`.
    """
    inputs.check()
    widest = int(np.diff(inputs.cu_queries).max(initial=0)) * inputs.selections.shape[1]
    _resolve(
        inputs.selections,
        inputs.cu_queries,
        inputs.slots,
        inputs.visible,
        inputs.page_map,
        inputs.host_map,
        inputs.hot_table,
        inputs.owners,
        inputs.lru,
        inputs.page_rows,
        inputs.stage_base,
        inputs.stage_rows,
        widest,
        locations,
        row,
        src,
        dst,
        count,
        counters,
    )


@njit(nogil=True, cache=True)
def _find(keys: Any, values: Any, mask: Any, row: Any) -> Any:
    """Index of `row` in the table, or of the empty cell where it belongs."""
    at = (row * np.int64(2654435761)) & mask
    while values[at] >= 0 and keys[at] != row:
        at = (at + 1) & mask
    return at


@njit(nogil=True, cache=True)
def _resolve(
    selections: Any,
    cu_queries: Any,
    slots: Any,
    visible: Any,
    page_map: Any,
    host_map: Any,
    hot_table: Any,
    owners: Any,
    lru: Any,
    page_rows: Any,
    stage_base: Any,
    stage_rows: Any,
    widest: Any,
    locations: Any,
    plan_row: Any,
    plan_src: Any,
    plan_dst: Any,
    plan_count: Any,
    counts: Any,
) -> None:
    k = selections.shape[1]
    n_hot = owners.shape[1]
    size = 16
    while size < 2 * widest:
        size *= 2
    mask = np.int64(size - 1)
    keys = np.empty(size, np.int32)  # row id -> position in `rows`
    values = np.full(size, -1, np.int32)
    cells = np.empty(widest, np.int64)  # cells in use, to clear them
    rows = np.empty(widest, np.int32)  # distinct unresolved rows in order of first mention
    mentions = np.empty(widest, np.int32)
    found = np.empty(widest, np.int64)
    hit_slot = np.empty(widest, np.int32)
    protected = np.zeros(n_hot, np.bool_)
    victims = np.empty(n_hot, np.int32)
    hits = np.empty(n_hot, np.int32)

    locations[cu_queries[-1] :] = -1  # padding behind the last request
    for r in range(slots.size):
        slot = slots[r]
        n_rows = 0
        plan_count[r] = 0
        # 1. Tail and ready history, in place; the rest is remembered as -2 - (position in `rows`).
        for t in range(cu_queries[r], cu_queries[r + 1]):
            for i in range(k):
                row = selections[t, i]
                if slot < 0 or row < 0 or row >= visible[t]:
                    locations[t, i] = -1
                    continue
                page = page_map[slot, row // page_rows]
                if page >= 0:
                    locations[t, i] = page * page_rows + row % page_rows
                    counts[_DIRECT] += 1
                    continue
                at = _find(keys, values, mask, row)
                u = values[at]
                if u < 0:
                    u = n_rows
                    keys[at] = row
                    values[at] = u
                    cells[u] = at
                    rows[u] = row
                    mentions[u] = 0
                    hit_slot[u] = -1
                    n_rows += 1
                mentions[u] += 1
                locations[t, i] = -2 - u
        if n_rows == 0:
            continue

        # 2. Hot scan; every selected row is protected.
        live = n_hot if hot_table[slot, 0] >= 0 else 0
        for h in range(live):
            row = owners[slot, h]
            if row < 0:
                continue
            u = values[_find(keys, values, mask, row)]
            if u >= 0:
                if hit_slot[u] >= 0:
                    counts[_CORRUPT] += 1
                    protected[hit_slot[u]] = False
                hit_slot[u] = h
                protected[h] = True
        n_broken = 0  # values that cannot be: never used, kept in front as -1
        n_victims = 0
        n_hits = 0
        for j in range(live):
            h = lru[slot, j]
            if h < 0 or h >= n_hot:
                n_broken += 1
            elif protected[h]:
                hits[n_hits] = h
                n_hits += 1
            else:
                victims[n_victims] = h
                n_victims += 1
        counts[_CORRUPT] += n_broken

        # 3, 4. Misses take the oldest unselected slots, then the arena.
        taken = 0
        staged = 0
        for u in range(n_rows):
            row = rows[u]
            if hit_slot[u] >= 0:
                h = hit_slot[u]
                found[u] = np.int64(hot_table[slot, h // page_rows]) * page_rows + h % page_rows
                counts[_HOT] += mentions[u]
                continue
            found[u] = -1
            host_page = np.int64(host_map[slot, row // page_rows])
            if host_page < 0:
                counts[_LOST] += mentions[u]
                continue
            if taken < n_victims:
                h = victims[taken]
                taken += 1
                owners[slot, h] = row
                found[u] = np.int64(hot_table[slot, h // page_rows]) * page_rows + h % page_rows
            elif staged < stage_rows:
                found[u] = stage_base[r] + staged
                staged += 1
                counts[_STAGED] += mentions[u]
            else:
                counts[_LOST] += mentions[u]
                continue
            counts[_HOST] += mentions[u]
            at = np.int64(cu_queries[r]) * k + plan_count[r]
            plan_row[at] = row
            plan_src[at] = host_page * page_rows + row % page_rows
            plan_dst[at] = found[u]
            plan_count[r] += 1
            counts[_COPIED] += 1

        # New order: unused victims, just filled, hits.
        lru[slot, :n_broken] = -1
        for j in range(n_victims):
            lru[slot, n_broken + j] = victims[(taken + j) % n_victims]
        for j in range(n_hits):
            lru[slot, n_broken + n_victims + j] = hits[j]

        # 5. A location for every entry; then leave the scratch clean.
        for t in range(cu_queries[r], cu_queries[r + 1]):
            for i in range(k):
                if locations[t, i] < -1:
                    locations[t, i] = found[-2 - locations[t, i]]
        for u in range(n_rows):
            values[cells[u]] = -1
            if hit_slot[u] >= 0:
                protected[hit_slot[u]] = False
