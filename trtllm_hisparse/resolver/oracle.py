"""The resolver in plain Python: slow, and meant to be obviously right. Tests compare everything with it."""

import numpy as np

from trtllm_hisparse.resolver.base import I32, CopyPlan, Resolution, ResolveCounts, ResolveInputs


def resolve(inputs: ResolveInputs) -> Resolution:
    """Same contract as `resolver.resolve`; updates `owners` and `lru` in place."""
    inputs.check()
    locations = np.full(inputs.selections.shape, -1, np.int32)
    plans: list[list[tuple[int, int, int]]] = []
    counts = ResolveCounts()
    for r, slot in enumerate(inputs.slots.tolist()):
        plans.append([])
        if slot >= 0:
            _resolve_request(inputs, r, slot, locations, plans[r], counts)
    counts.copied = sum(map(len, plans))
    return Resolution(locations, _copy_plan(plans), counts)


def promote(inputs: ResolveInputs, plan: CopyPlan, last_query: I32) -> CopyPlan:
    """Copy-back: make staged rows of a resolution hot; updates `owners` and `lru` in place.

    inputs, plan: of the resolution that staged them. last_query: int32 [R], row of `selections` of each request's
    last accepted query, -1 = promote nothing for it. Candidates are the rows that query selected, in its order,
    then the others, latest first. They take the oldest slots whose rows that query did not select. Returns the
    copies, arena rows to hot rows. (Section 3.4)
    """
    ends = np.cumsum(plan.count)
    plans: list[list[tuple[int, int, int]]] = []
    for r, slot in enumerate(inputs.slots.tolist()):
        part = slice(ends[r] - plan.count[r], ends[r])
        base, t = int(inputs.stage_base[r]), int(last_query[r])
        staged = {
            row: dst
            for row, dst in zip(plan.row[part].tolist(), plan.dst[part].tolist(), strict=True)
            if base <= dst < base + inputs.stage_rows
        }
        plans.append([])
        if slot >= 0 and t >= 0 and staged:
            _promote_request(inputs, slot, t, staged, plans[r])
    return _copy_plan(plans)


def _promote_request(
    inputs: ResolveInputs, slot: int, t: int, staged: dict[int, int], plan: list[tuple[int, int, int]]
) -> None:
    p, owners, lru = inputs.page_rows, inputs.owners[slot], inputs.lru[slot]
    hot_slots = len(owners) if inputs.hot_table[slot, 0] >= 0 else 0
    chosen = [row for row in inputs.selections[t].tolist() if 0 <= row < inputs.visible[t]]
    order = [h for h in lru.tolist()[:hot_slots] if 0 <= h < hot_slots]
    victims = [h for h in order if owners[h] not in chosen]
    hits = [h for h in order if owners[h] in chosen]
    first = [row for row in dict.fromkeys(chosen) if row in staged]
    used: list[int] = []
    for row in first + [row for row in reversed(staged) if row not in chosen]:
        if not victims:
            break
        h = victims.pop(0)
        used.append(h)
        owners[h] = row
        plan.append((row, staged[row], int(inputs.hot_table[slot, h // p]) * p + h % p))
    lru[:hot_slots] = [-1] * (hot_slots - len(order)) + victims + used + hits


def _copy_plan(plans: list[list[tuple[int, int, int]]]) -> CopyPlan:
    copies = [copy for plan in plans for copy in plan]
    row, src, dst = (np.array([copy[i] for copy in copies], np.int64) for i in range(3))
    return CopyPlan(row.astype(np.int32), src, dst, np.array([len(plan) for plan in plans], np.int32))


def _resolve_request(
    inputs: ResolveInputs,
    r: int,
    slot: int,
    locations: I32,
    plan: list[tuple[int, int, int]],
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
    order = [h for h in lru.tolist()[:hot_slots] if 0 <= h < hot_slots]
    broken = hot_slots - len(order)
    counts.corrupt += broken
    victims = [h for h in order if h not in protected]
    used: list[int] = []

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
        plan.append((row, int(host_page) * p + row % p, found[row]))
    lru[:hot_slots] = [-1] * broken + victims + used + [h for h in order if h in protected]

    # 5. A location for every entry.
    for row, entries in wanted.items():
        for t, i in entries:
            locations[t, i] = found[row]
