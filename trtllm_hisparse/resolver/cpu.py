"""The CPU op: the same walk as the oracle, compiled, with request-local scratch.

One pass over the selections, one scan over B owners, one walk over the LRU list; distinct misses are found
with an open-addressing table sized by the request's selections, never by its history.
"""

from typing import Any

import numpy as np
from numba import njit

from trtllm_hisparse.resolver.base import Resolution, ResolveCounts, ResolveInputs

_DIRECT, _HOT, _HOST, _STAGED, _COPIED, _LOST, _CORRUPT = range(7)


def resolve(inputs: ResolveInputs) -> Resolution:
    """Resolve one step of one cache state.

    Updates `owners` and `lru` in place: new LRU = unused evictables (old order) + just filled (miss order)
    + hits (old order). A request whose entries all resolve in place leaves both bit-identical and skips the
    hot scan. Raises ValueError for malformed inputs; `counts.lost` and `counts.corrupt` report broken state.
    """
    inputs.check()
    locations = np.empty(inputs.selections.shape, np.int32)
    widest = int(np.diff(inputs.cu_queries).max(initial=0)) * inputs.selections.shape[1]
    copies = np.empty((2, inputs.selections.size), np.int64)
    counts = np.zeros(7, np.int64)
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
        copies,
        counts,
    )
    n = counts[_COPIED]
    return Resolution(locations, copies[0, :n], copies[1, :n], ResolveCounts(*counts.tolist()))


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
    copies: Any,
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
    order = np.empty(n_hot, np.int32)

    for r in range(slots.size):
        slot = slots[r]
        n_rows = 0
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
        n_victims = 0
        n_order = 0
        for j in range(live):
            h = lru[slot, j]
            if h < 0 or h >= n_hot or not protected[h]:
                order[n_victims] = h
                n_victims += 1
        for j in range(live):
            h = lru[slot, j]
            if h >= 0 and h < n_hot and protected[h]:
                order[n_victims + n_order] = h
                n_order += 1

        # 3, 4. Misses take the oldest unselected slots, then the arena. `order` keeps victims before hits.
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
                h = order[taken]
                taken += 1
                if h < 0 or h >= n_hot:
                    counts[_CORRUPT] += 1
                    continue
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
            at = counts[_COPIED]
            copies[0, at] = host_page * page_rows + row % page_rows
            copies[1, at] = found[u]
            counts[_COPIED] += 1

        # New order: broken values stay in front, then unused victims, just filled, hits.
        at = 0
        for j in range(taken):
            if order[j] < 0 or order[j] >= n_hot:
                lru[slot, at] = order[j]
                at += 1
        for j in range(taken, n_victims):
            lru[slot, at] = order[j]
            at += 1
        for j in range(taken):
            if order[j] >= 0 and order[j] < n_hot:
                lru[slot, at] = order[j]
                at += 1
        for j in range(n_victims, n_victims + n_order):
            lru[slot, at] = order[j]
            at += 1

        # 5. A location for every entry; then leave the scratch clean.
        for t in range(cu_queries[r], cu_queries[r + 1]):
            for i in range(k):
                if locations[t, i] < -1:
                    locations[t, i] = found[-2 - locations[t, i]]
        for u in range(n_rows):
            values[cells[u]] = -1
            if hit_slot[u] >= 0:
                protected[hit_slot[u]] = False
