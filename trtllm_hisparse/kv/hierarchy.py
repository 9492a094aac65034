"""The state of every row: which pages hold it, which of them may be read, which copies are under way.

Mechanism only: each method makes one transition, checks that it is legal, and never decides whether it is
wanted (that is `residency/`). A logical page of a slot has a device side and a host side:

    device   ABSENT -> TAIL (open_tail) -> READY (keep) -> ABSENT (retire)
             ABSENT -> PENDING (populate, import) -> READY or TAIL when the copy completed
    host     NONE -> COPYING (backup, import) -> DONE when the copy completed

Readable: TAIL and READY pages in place, DONE pages through the hot cache. A complete page may be retired only
when DONE, so every committed row is always readable one way or the other (I1). A page leaves its pool only
when no copy and no running step can still touch it (I3).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum

import numpy as np
import torch

from trtllm_hisparse.errors import InvariantError
from trtllm_hisparse.kv.copies import CopyEngine, Ticket
from trtllm_hisparse.kv.layout import Cost, KVLayout
from trtllm_hisparse.kv.pool import Arena, PageKind, PagePool
from trtllm_hisparse.resolver import ResolveCounts
from trtllm_hisparse.resolver.base import I32


class Device(IntEnum):
    """Device side of a logical page."""

    ABSENT = 0
    PENDING = 1
    TAIL = 2
    READY = 3


class Host(IntEnum):
    """Host side of a logical page."""

    NONE = 0
    COPYING = 1
    DONE = 2


class CopyKind(StrEnum):
    """Why bytes moved; the keys of `KVHierarchy.moved_bytes`."""

    BACKUP = "backup"
    POPULATE = "populate"
    IMPORT = "import"
    GATHER = "gather"


@dataclass(frozen=True)
class _Flight:
    """One submitted copy: whom it is for, and the pages it reads or writes until it completes.

    page:    the slot's logical page; None for imported index keys.
    becomes: device state to publish, None when the copy fills the host side.
    holds:   pages that may not be used for anything else meanwhile.
    """

    kind: CopyKind
    slot: int
    generation: int
    page: int | None
    becomes: Device | None
    holds: tuple[tuple[PagePool, int], ...]


@dataclass
class SlotState:
    """One request's share of the hierarchy.

    generation: counts the slot's owners, so that a late copy of a former one is recognised.
    cost:       what was reserved at admission; None = the slot is free.
    committed:  rows of committed history.
    tail_limit: pages the tail may hold.
    imports:    import copies in flight; the slot may not be stepped before they complete.
    """

    generation: int = 0
    cost: Cost | None = None
    committed: int = 0
    tail_limit: int = 0
    imports: int = 0
    hot: list[int] = field(default_factory=list)
    index: list[int] = field(default_factory=list)
    host: list[int] = field(default_factory=list)


class KVHierarchy:
    """Pools, maps and transitions of one engine replica. Not thread-safe: the serving loop owns it."""

    def __init__(self, layout: KVLayout, copies: CopyEngine) -> None:
        spec, config = layout.spec, layout.config
        self.layout = layout
        self.copies = copies
        p, n, pages = config.page_rows, config.max_requests, layout.pages_per_slot
        states, item = len(spec.cache_states), layout.dtype.itemsize
        self.device_arena = Arena("device", config.device_pool_bytes)
        self.host_arena = Arena("host", layout.host_pages * layout.page_bytes + layout.slack_bytes)

        def store(arena: Arena, count: int, row_bytes: int) -> torch.Tensor:
            return arena.carve((count * p, row_bytes // item), layout.dtype)

        def table(*shape: int) -> I32:
            array: I32 = self.device_arena.carve(shape, torch.int32).numpy()
            array.fill(-1)
            return array

        self.page_map = table(n, pages)
        self.host_map = table(n, pages)
        self.index_map = table(n, pages)
        self.hot_table = table(n, max(layout.hot_pages, 1))
        self.owners = [table(n, layout.hot_rows) for _ in range(states)]
        self.lru = [table(n, layout.hot_rows) for _ in range(states)]
        self.fixed_bytes = self.device_arena.used
        self.payload = {
            i: store(self.device_arena, layout.device_pages, spec.row_bytes_of(i)) for i in spec.payload_owners
        }
        self.index = {
            i: store(self.device_arena, layout.index_pages, spec.index_row_bytes) for i in spec.index_stores
        }
        self.backup_rows = {
            i: store(self.host_arena, layout.host_pages, spec.row_bytes_of(i)) for i in spec.payload_owners
        }

        self.device_pool = PagePool("device payload", layout.device_pages)
        self.index_pool = PagePool("index", layout.index_pages)
        self.host_pool = PagePool("host", layout.host_pages)
        self.device_page = np.full((n, pages), -1, np.int32)
        self.device_state = np.zeros((n, pages), np.int8)
        self.host_page = np.full((n, pages), -1, np.int32)
        self.host_state = np.zeros((n, pages), np.int8)
        self.slots = [SlotState() for _ in range(n)]

        self.census = [ResolveCounts() for _ in range(states)]
        self.moved_bytes = dict.fromkeys(CopyKind, 0)
        self.populated_pages = 0
        self._flights: dict[Ticket, _Flight] = {}
        self._steps: set[int] = set()
        self._next_step = 0
        self._quarantine: list[tuple[set[int], PagePool, list[int]]] = []

    # -- slots ----------------------------------------------------------------------------------------
    def open(self, slot: int, cost: Cost) -> None:
        """Give a free slot its hot cache, index pages and host pages, all empty (I7).

        The caller has checked that they fit; InvariantError when they do not.
        """
        state = self._slot(slot, is_open=False)
        taken = [
            self.device_pool.take(cost.hot, PageKind.HOT, slot),
            self.index_pool.take(cost.index, PageKind.HOT, slot),
            self.host_pool.take(cost.host, PageKind.HOT, slot),
        ]
        if any(pages is None for pages in taken):
            raise InvariantError(f"slot {slot}: admitted without room for {cost}")
        hot, index, host = (pages or [] for pages in taken)
        self.slots[slot] = SlotState(state.generation + 1, cost, 0, cost.tail, 0, hot, index, host)
        self.hot_table[slot, : len(hot)] = hot
        self.index_map[slot, : len(index)] = index
        self.host_page[slot, : len(host)] = host
        for lru in self.lru:
            lru[slot] = np.arange(lru.shape[1])

    def release(self, slot: int) -> None:
        """Close a slot at any point. Pages under a copy or a running step are freed when that has ended."""
        state = self._slot(slot)
        flying = {
            (pool.name, page)
            for flight in self._flights.values()
            if (flight.slot, flight.generation) == (slot, state.generation)
            for pool, page in flight.holds
        }
        for _, pool, pages in self._quarantine:  # retired already, but a reader has not ended
            for page in pages:
                if (pool.holder(page) or (None, None))[1] == slot:
                    pool.retag(page, PageKind.DRAINING, slot)
        device = [*state.hot, *self.device_page[slot][self.device_page[slot] >= 0].tolist()]
        for pool, pages in (
            (self.device_pool, device),
            (self.index_pool, state.index),
            (self.host_pool, state.host),
        ):
            for page in pages:
                pool.retag(page, PageKind.DRAINING, slot)
            self._free_after_readers(pool, [page for page in pages if (pool.name, page) not in flying])
        for array in (self.page_map, self.host_map, self.index_map, self.hot_table, *self.owners):
            array[slot] = -1
        self.device_page[slot] = self.host_page[slot] = -1
        self.device_state[slot] = Device.ABSENT
        self.host_state[slot] = Host.NONE
        self.slots[slot] = SlotState(state.generation)

    # -- tail -----------------------------------------------------------------------------------------
    def open_tail(self, slot: int, rows: int) -> bool:
        """Make the pages of the next `rows` rows writable, within the slot's tail reservation.

        Returns False (not now) when the reservation is used up; tail pages whose backup is complete are
        retired oldest first to make room, so that recent rows stay on the device as long as possible.
        """
        state = self._slot(slot)
        assert state.cost is not None
        first = state.committed // self.layout.config.page_rows
        last = (state.committed + rows - 1) // self.layout.config.page_rows
        if last >= state.cost.index:
            raise InvariantError(
                f"slot {slot}: row {state.committed + rows - 1} is past its {state.cost.index} pages"
            )
        wanted = [j for j in range(first, last + 1) if self.device_state[slot, j] == Device.ABSENT]
        over = self.device_pool.held(PageKind.TAIL, slot) + len(wanted) - state.tail_limit
        if over > 0:
            for j in self.pages_in(slot, Device.TAIL, Host.DONE)[:over]:
                self.retire(slot, j)
            over = self.device_pool.held(PageKind.TAIL, slot) + len(wanted) - state.tail_limit
        if over > 0:
            return False
        pages = self.device_pool.take(len(wanted), PageKind.TAIL, slot)
        if pages is None:
            raise InvariantError(f"slot {slot}: its reserved tail pages were given away")
        for j, page in zip(wanted, pages, strict=True):
            self._place(slot, j, page, Device.TAIL)
        return True

    def commit(self, slot: int, rows: int) -> list[int]:
        """Append `rows` verified rows to the committed history; returns the logical pages this completed.

        Rows written past them stay in the tail, invisible, until the next block overwrites them (I5).
        """
        state = self._slot(slot)
        old, state.committed = state.committed, state.committed + rows
        p = self.layout.config.page_rows
        return list(range(old // p, state.committed // p))

    # -- transitions of one page ----------------------------------------------------------------------
    def keep(self, slot: int, page: int) -> None:
        """TAIL -> READY: a complete page becomes optional history, its bytes where they are."""
        self._expect(slot, page, Device.TAIL, complete=True)
        self.device_pool.retag(int(self.device_page[slot, page]), PageKind.OPTIONAL, slot)
        self.device_state[slot, page] = Device.READY

    def backup(self, slot: int, page: int) -> None:
        """Start copying a complete device page to its host page."""
        self._expect(slot, page, Device.TAIL, Device.READY, complete=True)
        if self.host_state[slot, page] != Host.NONE:
            raise InvariantError(f"slot {slot} page {page}: backup started twice")
        self.host_state[slot, page] = Host.COPYING
        device, host = int(self.device_page[slot, page]), self._host_page(slot, page)
        self._copy(
            CopyKind.BACKUP,
            [(self._rows(self.payload[i], device), self._rows(self.backup_rows[i], host)) for i in self.payload],
            slot,
            page,
            None,
            ((self.device_pool, device), (self.host_pool, host)),
        )

    def retire(self, slot: int, page: int) -> None:
        """TAIL or READY -> ABSENT: unpublish a backed-up page and free it after its last reader."""
        self._expect(slot, page, Device.TAIL, Device.READY, complete=True)
        if self.host_state[slot, page] != Host.DONE:
            raise InvariantError(f"slot {slot} page {page}: retired before its backup completed")
        device = int(self.device_page[slot, page])
        self.page_map[slot, page] = self.device_page[slot, page] = -1
        self.device_state[slot, page] = Device.ABSENT
        self._free_after_readers(self.device_pool, [device])

    def populate(self, slot: int, page: int) -> bool:
        """ABSENT -> PENDING: start copying a backed-up page to the device. False when no page is free."""
        self._expect(slot, page, Device.ABSENT, complete=True)
        if self.host_state[slot, page] != Host.DONE:
            raise InvariantError(f"slot {slot} page {page}: populated without a complete host copy")
        taken = self.device_pool.take(1, PageKind.OPTIONAL, slot)
        if taken is None:
            return False
        device, host = taken[0], self._host_page(slot, page)
        self._place(slot, page, device, Device.PENDING)
        self.populated_pages += 1
        self._copy(
            CopyKind.POPULATE,
            [(self._rows(self.backup_rows[i], host), self._rows(self.payload[i], device)) for i in self.payload],
            slot,
            page,
            Device.READY,
            ((self.device_pool, device), (self.host_pool, host)),
        )
        return True

    # -- imported history -----------------------------------------------------------------------------
    def import_index(self, slot: int, length: int, keys: dict[int, torch.Tensor]) -> None:
        """Take over `length` rows computed elsewhere: sets the committed frontier and copies the index keys."""
        state = self._slot(slot)
        if state.committed or state.imports:
            raise InvariantError(f"slot {slot}: history imported into a slot that holds {state.committed} rows")
        state.committed = length
        p = self.layout.config.page_rows
        pairs = [
            (keys[i][j * p : (j + 1) * p], self._rows(self.index[i], state.index[j])[: length - j * p])
            for i in self.index
            for j in range(self.layout.pages(length))
        ]
        state.imports += 1
        holds = tuple((self.index_pool, page) for page in state.index)
        self._copy(CopyKind.IMPORT, pairs, slot, None, None, holds)

    def import_page(self, slot: int, page: int, rows: dict[int, torch.Tensor], kind: PageKind | None) -> bool:
        """Copy one logical page of imported rows to the device (`kind` optional or tail) or, None, to the host.

        rows: {payload owner: [rows of this page, row]}. False when no device page is free.
        """
        state = self._slot(slot)
        self._expect(slot, page, Device.ABSENT, complete=kind is not PageKind.TAIL)
        becomes = None
        if kind is None:
            pool, target, at = self.host_pool, self.backup_rows, self._host_page(slot, page)
            self.host_state[slot, page] = Host.COPYING
        else:
            pool, target = self.device_pool, self.payload
            taken = pool.take(1, kind, slot)
            if taken is None:
                return False
            at = taken[0]
            becomes = Device.TAIL if kind is PageKind.TAIL else Device.READY
            self._place(slot, page, at, Device.PENDING)
        pairs = [(rows[i], self._rows(target[i], at)[: len(rows[i])]) for i in target]
        state.imports += 1
        self._copy(CopyKind.IMPORT, pairs, slot, page, becomes, ((pool, at),))
        return True

    # -- completion -----------------------------------------------------------------------------------
    def poll(self) -> None:
        """Publish what the completed copies brought; free what only they held."""
        for ticket in self.copies.poll():
            flight = self._flights.pop(ticket)
            state = self.slots[flight.slot]
            if state.cost is None or state.generation != flight.generation:
                for pool, page in flight.holds:
                    self._free_after_readers(pool, [page])
                continue
            state.imports -= flight.kind is CopyKind.IMPORT
            if flight.page is None:
                continue
            if flight.becomes is not None:
                device = int(self.device_page[flight.slot, flight.page])
                self._place(flight.slot, flight.page, device, flight.becomes)
            else:
                self.host_state[flight.slot, flight.page] = Host.DONE
                self.host_map[flight.slot, flight.page] = self.host_page[flight.slot, flight.page]

    @property
    def copying(self) -> bool:
        """Whether a copy is in flight."""
        return bool(self._flights)

    # -- steps: the readers ---------------------------------------------------------------------------
    def begin_step(self) -> int:
        """A step that may read everything published now; pages unpublished later wait for its end."""
        step, self._next_step = self._next_step, self._next_step + 1
        self._steps.add(step)
        return step

    def end_step(self, step: int) -> None:
        """The step's last reader finished."""
        self._steps.remove(step)
        waiting = self._quarantine
        self._quarantine = []
        for readers, pool, pages in waiting:
            readers.discard(step)
            if readers:
                self._quarantine.append((readers, pool, pages))
            else:
                pool.give(pages)

    def _free_after_readers(self, pool: PagePool, pages: list[int]) -> None:
        if self._steps and pages:
            self._quarantine.append((set(self._steps), pool, pages))
        else:
            pool.give(pages)

    # -- looking ---------------------------------------------------------------------------------------
    def is_open(self, slot: int) -> bool:
        """Whether a request owns the slot."""
        return self.slots[slot].cost is not None

    def pages_in(self, slot: int, device: Device, host: Host | None = None) -> list[int]:
        """Complete logical pages in a device state (and host state), in order."""
        complete = self.slots[slot].committed // self.layout.config.page_rows
        found = self.device_state[slot, :complete] == device
        if host is not None:
            found &= self.host_state[slot, :complete] == host
        pages: list[int] = np.flatnonzero(found).tolist()
        return pages

    def direct(self, slot: int) -> bool:
        """Whether every committed row may be read in place, so that no selection can miss."""
        used = self.layout.pages(self.slots[slot].committed)
        return bool((self.page_map[slot, :used] >= 0).all())

    def required_pages(self) -> int:
        """M_req: device payload pages reserved for open slots, and those that released slots still hold."""
        reserved = sum(
            len(state.hot) + max(state.tail_limit, self.device_pool.held(PageKind.TAIL, slot))
            for slot, state in enumerate(self.slots)
            if state.cost is not None
        )
        return reserved + self.device_pool.held(PageKind.DRAINING)

    def device_used_bytes(self, *, peak: bool = False) -> int:
        """Bytes of the device pool in use now (or at most so far): maps, payload and index pages."""
        payload, index = (pool.peak if peak else pool.used for pool in (self.device_pool, self.index_pool))
        return self.fixed_bytes + payload * self.layout.page_bytes + index * self.layout.index_page_bytes

    # -- inside ----------------------------------------------------------------------------------------
    def _slot(self, slot: int, *, is_open: bool = True) -> SlotState:
        if self.is_open(slot) != is_open:
            raise InvariantError(f"slot {slot} is {'free' if is_open else 'in use'}")
        return self.slots[slot]

    def _expect(self, slot: int, page: int, *allowed: Device, complete: bool) -> None:
        state = Device(self.device_state[slot, page])
        if state not in allowed:
            raise InvariantError(f"slot {slot} page {page}: {state.name}, expected {[a.name for a in allowed]}")
        if complete and (page + 1) * self.layout.config.page_rows > self._slot(slot).committed:
            raise InvariantError(f"slot {slot} page {page}: holds rows that are not committed")

    def _host_page(self, slot: int, page: int) -> int:
        host = int(self.host_page[slot, page])
        if host < 0:
            raise InvariantError(f"slot {slot} page {page}: no host page was reserved")
        return host

    def _place(self, slot: int, page: int, device: int, state: Device) -> None:
        self.device_page[slot, page] = device
        self.device_state[slot, page] = state
        self.page_map[slot, page] = device if state in (Device.TAIL, Device.READY) else -1

    def _rows(self, store: torch.Tensor, page: int) -> torch.Tensor:
        p = self.layout.config.page_rows
        return store[page * p : (page + 1) * p]

    def _copy(
        self,
        kind: CopyKind,
        pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
        slot: int,
        page: int | None,
        becomes: Device | None,
        holds: tuple[tuple[PagePool, int], ...],
    ) -> None:
        self.moved_bytes[kind] += sum(source.nbytes for source, _ in pairs)
        ticket = self.copies.submit(pairs)
        self._flights[ticket] = _Flight(kind, slot, self.slots[slot].generation, page, becomes, holds)
