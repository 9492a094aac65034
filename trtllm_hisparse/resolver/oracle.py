"""The resolver in plain Python: slow, and meant to be obviously right. Tests compare everything with it."""

import numpy as np

from trtllm_hisparse.resolver.base import I32, Resolution, ResolveCounts, ResolveInputs


def resolve(inputs: ResolveInputs) -> Resolution:
    """Same contract as `resolver.resolve`; updates `owners` and `lru` in place."""
    inputs.check()
    locations = np.full(inputs.selections.shape, -1, np.int32)
    plan: list[tuple[int, int]] = []
    counts = ResolveCounts()
    for r, slot in enumerate(inputs.slots.tolist()):
        if slot >= 0:
            _resolve_request(inputs, r, slot, locations, plan, counts)
    counts.copied = len(plan)
    src, dst = (np.array([copy[i] for copy in plan], np.int64) for i in (0, 1))
    return Resolution(locations, src, dst, counts)


def _resolve_request(
    inputs: ResolveInputs,
    r: int,
    slot: int,
    locations: I32,
    plan: list[tuple[int, int]],
    counts: ResolveCounts,
) -> None:
    p = inputs.page_rows
    owners, lru = inputs.owners[slot], inputs.lru[slot]
    hot_slots = len(owners) if inputs.hot_table[slot, 0] >= 0 else 0

    def hot_row(h: int) -> int:
        return int(inputs.hot_table[slot, h // p]) * p + h % p

    # 1. Tail and ready history, in place. What is left is wanted once per row, in order of first mention.
    wanted: dict[int, list[tuple[int, int]]] = {}
    for t in range(inputs.cu_queries[r], inputs.cu_queries[r + 1]):
        for i, row in enumerate(inputs.selections[t].tolist()):
            if not 0 <= row < inputs.visible[t]:
                continue
            page = inputs.page_map[slot, row // p]
            if page >= 0:
                locations[t, i] = page * p + row % p
                counts.direct += 1
            else:
                wanted.setdefault(row, []).append((t, i))
    if not wanted:
        return

    # 2. Hot scan; every selected row is protected.
    held: dict[int, int] = {}
    for h in range(hot_slots):
        if owners[h] >= 0:
            counts.corrupt += int(owners[h]) in held
            held[int(owners[h])] = h
    hits = {row: held[row] for row in wanted if row in held}
    protected = set(hits.values())
    order = lru.tolist()[:hot_slots]
    victims = [h for h in order if h not in protected]
    used: list[int] = []
    broken: list[int] = []

    # 3, 4. Misses take the oldest unselected slots, then the arena.
    found = dict.fromkeys(wanted, -1)
    staged = 0
    for row, entries in wanted.items():
        if row in hits:
            found[row] = hot_row(hits[row])
            counts.hot += len(entries)
            continue
        host_page = inputs.host_map[slot, row // p]
        if host_page < 0:
            counts.lost += len(entries)
            continue
        if victims:
            h = victims.pop(0)
            if not 0 <= h < hot_slots:
                counts.corrupt += 1
                broken.append(h)
                continue
            used.append(h)
            owners[h] = row
            found[row] = hot_row(h)
        elif staged < inputs.stage_rows:
            found[row] = int(inputs.stage_base[r]) + staged
            staged += 1
            counts.staged += len(entries)
        else:
            counts.lost += len(entries)
            continue
        counts.host += len(entries)
        plan.append((int(host_page) * p + row % p, found[row]))
    lru[:hot_slots] = broken + victims + used + [h for h in order if h in protected]

    # 5. A location for every entry.
    for row, entries in wanted.items():
        for t, i in entries:
            locations[t, i] = found[row]
