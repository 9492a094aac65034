"""Residency: who is admitted, whose optional pages go, whose come back (Section 3.1, 3.2).

Runs between steps and moves page states only. One pass of `advance`:

    completions  ->  retire what may go  ->  admit in arrival order, reclaiming for the head  ->  populate

M_req is what the hierarchy reserves for open slots, M_opt the optional pages they hold. M_res is the
admission reserve: optional history never takes the last `admission_reserve_pages` free pages, a new admission
may. M_req + M_opt never exceeds the pool (I4).
"""

from collections import deque
from dataclasses import dataclass, field

from trtllm_hisparse.config import Placement
from trtllm_hisparse.kv.hierarchy import Device, Host, KVHierarchy
from trtllm_hisparse.kv.layout import Cost
from trtllm_hisparse.kv.pool import PageKind
from trtllm_hisparse.residency.reclaim import covering_prefix
from trtllm_hisparse.runtime.request import ImportedHistory


@dataclass(eq=False)
class Admission:
    """A request as residency sees it, from arrival to release.

    total, prompt: positions of the whole context, and of the prompt in it.
    history:       rows computed elsewhere, if any; dropped once imported.
    slot:          set when admitted.
    """

    total: int
    prompt: int
    cost: Cost
    history: ImportedHistory | None = None
    slot: int | None = None
    waited: bool = False
    yielding: bool = field(default=False)
    """Its optional pages are on their way out: none are added until they are gone."""


@dataclass
class ResidencyCounts:
    """Cumulative; waits counts admissions that could not be served on arrival."""

    admissions: int = 0
    waits: int = 0
    reclaims: int = 0
    reclaimed_pages: int = 0


class Residency:
    """Admission queue and optional history of one engine replica."""

    def __init__(self, kv: KVHierarchy) -> None:
        self.kv = kv
        self.counts = ResidencyCounts()
        self.waiting: deque[Admission] = deque()
        self.admitted: list[Admission] = []
        """In admission order, which is the reclaim order: the longest-served requests yield first."""
        self._free_slots = list(range(len(kv.slots) - 1, -1, -1))
        self._turn = 0

    # -- arrivals and departures ------------------------------------------------------------------------
    def price(self, total: int, prompt: int, history: ImportedHistory | None = None) -> Admission:
        """What a request would need; `layout.why_never(admission.cost)` tells whether it can ever run."""
        computed = prompt - (history.length if history else 0)
        return Admission(total, prompt, self.kv.layout.cost(total, computed), history)

    def enqueue(self, admission: Admission) -> None:
        """Join the queue; served in arrival order."""
        self.waiting.append(admission)

    def leave(self, admission: Admission) -> None:
        """The request is over, wherever it is: its place in the queue, or its slot and pages, are given up."""
        if admission.slot is None:
            self.waiting.remove(admission)
            return
        self.kv.release(admission.slot)
        self._free_slots.append(admission.slot)
        self.admitted.remove(admission)

    # -- one pass ---------------------------------------------------------------------------------------
    def advance(self) -> list[Admission]:
        """Take completions into account and move what may move; returns the newly admitted, in order."""
        self.kv.poll()
        for admission in self.admitted:
            self._retire(admission)
        admitted = self._admit()
        self._populate()
        return admitted

    def committed(self, admission: Admission, pages: list[int]) -> None:
        """Logical pages that verified rows just completed: keep them in place, or start their backup.

        Prompt pages stay on the device while the pool has room and back up when they must (adaptive), or stay
        for the rest of the prefill (fixed). Decoded pages always go to the host through the tail.
        """
        assert admission.slot is not None
        if not admission.cost.hot:
            return
        for page in pages:
            of_prompt = page < admission.prompt // self.kv.layout.config.page_rows
            kept = of_prompt and self._may_hold_more(admission)
            if kept:
                self.kv.keep(admission.slot, page)
            if not kept or self.kv.layout.config.placement is Placement.FIXED:
                self.kv.backup(admission.slot, page)

    def prefilled(self, admission: Admission) -> None:
        """The prompt is done: the tail reservation shrinks, and in fixed placement the hot cache takes over."""
        assert admission.slot is not None
        if not admission.cost.hot:
            return
        layout = self.kv.layout
        self.kv.slots[admission.slot].tail_limit = layout.tail_pages(layout.config.max_width)
        if layout.config.placement is Placement.FIXED:
            self._yield(admission)

    # -- reclaim ----------------------------------------------------------------------------------------
    def _yield(self, admission: Admission) -> None:
        """Start giving up all optional pages: back up what has no copy; `_retire` does the rest."""
        assert admission.slot is not None
        admission.yielding = True
        for page in self.kv.pages_in(admission.slot, Device.READY, Host.NONE):
            self.kv.backup(admission.slot, page)

    def _retire(self, admission: Admission) -> None:
        """Free a yielding request's backed-up pages, and tail pages beyond a reservation that has shrunk."""
        slot = admission.slot
        assert slot is not None
        if not admission.cost.hot:
            return
        over = self.kv.device_pool.held(PageKind.TAIL, slot) - self.kv.slots[slot].tail_limit
        for page in self.kv.pages_in(slot, Device.TAIL, Host.DONE)[: max(over, 0)]:
            self.kv.retire(slot, page)
        if not admission.yielding:
            return
        for page in self.kv.pages_in(slot, Device.READY, Host.NONE):  # arrived since: an import that landed
            self.kv.backup(slot, page)
        for page in self.kv.pages_in(slot, Device.READY, Host.DONE):
            self.kv.retire(slot, page)
        fixed = self.kv.layout.config.placement is Placement.FIXED
        admission.yielding = fixed or self.kv.device_pool.held(PageKind.OPTIONAL, slot) > 0

    # -- admission --------------------------------------------------------------------------------------
    def _admit(self) -> list[Admission]:
        admitted = []
        while self.waiting and self._fits(self.waiting[0]):
            admission = self.waiting.popleft()
            admission.slot = self._free_slots.pop()
            self.kv.open(admission.slot, admission.cost)
            self.admitted.append(admission)
            self.counts.admissions += 1
            if admission.history is not None:
                self._import(admission, admission.slot, admission.history)
                admission.history = None
            admitted.append(admission)
        for admission in self.waiting:
            self.counts.waits += not admission.waited
            admission.waited = True
        return admitted

    def _fits(self, admission: Admission) -> bool:
        """Whether everything the request needs is free now; if only payload pages lack, reclaim for it."""
        kv, cost = self.kv, admission.cost
        if not self._free_slots or kv.index_pool.free < cost.index or kv.host_pool.free < cost.host:
            return False
        deficit = cost.payload - self._unclaimed()
        if deficit > 0:
            held = [kv.device_pool.held(PageKind.OPTIONAL, a.slot) for a in self.admitted]
            coming = kv.device_pool.held(PageKind.DRAINING)
            coming += sum(h for a, h in zip(self.admitted, held, strict=True) if a.yielding)
            rest = [(a, h) for a, h in zip(self.admitted, held, strict=True) if not a.yielding]
            chosen = covering_prefix(range(len(rest)), [h for _, h in rest], deficit - coming)
            for victim, pages in [rest[i] for i in chosen or ()]:
                self.counts.reclaims += 1
                self.counts.reclaimed_pages += pages
                self._yield(victim)
        return deficit <= 0

    def _unclaimed(self) -> int:
        """M - M_req - M_opt."""
        return (
            self.kv.device_pool.capacity - self.kv.required_pages() - self.kv.device_pool.held(PageKind.OPTIONAL)
        )

    def _may_hold_more(self, admission: Admission) -> bool:
        """Whether one more optional page of this request leaves the admission reserve whole."""
        reserve = self.kv.layout.config.admission_reserve_pages
        return not admission.yielding and not self.waiting and self._unclaimed() > reserve

    # -- imported history and population ------------------------------------------------------------------
    def _import(self, admission: Admission, slot: int, history: ImportedHistory) -> None:
        """Bring complete pages to the device while it has room, else to the host; the rest to the tail."""
        kv, p = self.kv, self.kv.layout.config.page_rows
        kv.import_index(slot, history.length, history.index_keys)
        adaptive = kv.layout.config.placement is Placement.ADAPTIVE
        for page in range(kv.layout.pages(history.length)):
            rows = {i: stored[page * p : (page + 1) * p] for i, stored in history.rows.items()}
            if not admission.cost.hot or (page + 1) * p > history.length:
                kv.import_page(slot, page, rows, PageKind.TAIL)
            elif not (
                adaptive and self._may_hold_more(admission) and kv.import_page(slot, page, rows, PageKind.OPTIONAL)
            ):
                kv.import_page(slot, page, rows, None)

    def _populate(self) -> None:
        """Bring history back, round-robin over requests, the newest pages of each first."""
        if self.kv.layout.config.placement is not Placement.ADAPTIVE or not self.admitted:
            return
        budget = self.kv.layout.config.population_pages
        start, self._turn = self._turn, self._turn + 1
        for n in range(len(self.admitted)):
            admission = self.admitted[(start + n) % len(self.admitted)]
            assert admission.slot is not None
            if not admission.cost.hot or admission.yielding:
                continue
            limit = admission.prompt // self.kv.layout.config.page_rows
            absent = [j for j in self.kv.pages_in(admission.slot, Device.ABSENT, Host.DONE) if j < limit]
            for page in reversed(absent):
                if budget == 0 or not self._may_hold_more(admission):
                    return
                if not self.kv.populate(admission.slot, page):
                    return
                budget -= 1
