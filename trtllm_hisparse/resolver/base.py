"""The data a resolver call reads and writes."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class ResolveInputs:
    """One step of one cache state over a ragged batch. Arrays are C-contiguous.

    selections:  int32 [T, k], row ids in the model's order; -1, and ids at or past the query's visible
                 length (torch.topk returns such ids for short histories), are no entry. Duplicates are legal.
    cu_queries:  int32 [R + 1], request r owns queries cu_queries[r] : cu_queries[r + 1]; queries behind the last
                 request are padding.
    slots:       int32 [R], request slots, all different; -1 = padding, touches no state.
    visible:     int32 [T], rows query t may see.
    page_map:    int32 [N, J], device page of a logical page whose rows may be read in place (tail or ready
                 optional history), else -1.
    host_map:    int32 [N, J], host page whose backup is complete, else -1.
    hot_table:   int32 [N, H], device pages of a slot's hot cache; -1 = the slot has none.
    owners:      int32 [N, B], row id each hot slot holds, -1 = empty. Updated in place.
    lru:         int32 [N, B], hot slots from oldest to newest. Updated in place.
    page_rows:   p, rows per page of all three kinds.
    stage_base:  int64 [R], first device row of each request's staging arena.
    stage_rows:  rows in each arena; 0 = no staging.
    """

    selections: I32
    cu_queries: I32
    slots: I32
    visible: I32
    page_map: I32
    host_map: I32
    hot_table: I32
    owners: I32
    lru: I32
    page_rows: int
    stage_base: I64
    stage_rows: int = 0

    def check(self) -> None:
        """Refuse shapes and indices that would read outside the arrays (ValueError)."""
        queries, _ = _shape("selections", self.selections, np.int32, 2)
        (ends,) = _shape("cu_queries", self.cu_queries, np.int32, 1)
        (requests,) = _shape("slots", self.slots, np.int32, 1)
        n_slots, n_pages = _shape("page_map", self.page_map, np.int32, 2)
        if ends != requests + 1 or self.cu_queries[0] != 0 or self.cu_queries[-1] > queries:
            raise ValueError(
                f"cu_queries: expected {requests + 1} offsets from 0 to at most {queries}, got {self.cu_queries}"
            )
        if (np.diff(self.cu_queries) < 0).any():
            raise ValueError(f"cu_queries: expected ascending offsets, got {self.cu_queries}")
        if _shape("visible", self.visible, np.int32, 1) != (queries,):
            raise ValueError(f"visible: expected [{queries}], got {list(self.visible.shape)}")
        if queries and not 0 <= self.visible.min() <= self.visible.max() <= n_pages * self.page_rows:
            raise ValueError(
                f"visible: expected 0..{n_pages * self.page_rows} rows, got "
                f"{self.visible.min()}..{self.visible.max()}"
            )
        real = self.slots[self.slots != -1]
        if real.size and not 0 <= real.min() <= real.max() < n_slots:
            raise ValueError(f"slots: expected -1..{n_slots - 1}, got {self.slots}")
        if np.unique(real).size != real.size:
            raise ValueError(f"slots: a request may appear once in a step, got {self.slots}")
        if _shape("host_map", self.host_map, np.int32, 2) != (n_slots, n_pages):
            raise ValueError(f"host_map: expected {[n_slots, n_pages]}, got {list(self.host_map.shape)}")
        owners = _shape("owners", self.owners, np.int32, 2)
        if owners[0] != n_slots or _shape("lru", self.lru, np.int32, 2) != owners:
            raise ValueError(
                f"owners, lru: expected [{n_slots}, B] each, got {list(owners)} and {list(self.lru.shape)}"
            )
        hot = _shape("hot_table", self.hot_table, np.int32, 2)
        if hot[0] != n_slots or hot[1] * self.page_rows < owners[1]:
            raise ValueError(
                f"hot_table: expected [{n_slots}, >= {-(-owners[1] // self.page_rows)}], got {list(hot)}"
            )
        if _shape("stage_base", self.stage_base, np.int64, 1) != (requests,):
            raise ValueError(f"stage_base: expected [{requests}], got {list(self.stage_base.shape)}")


def _shape(name: str, array: I32 | I64, dtype: type, ndim: int) -> tuple[int, ...]:
    if array.dtype != dtype or array.ndim != ndim or not array.flags.c_contiguous:
        raise ValueError(
            f"{name}: expected a C-contiguous {np.dtype(dtype).name} array of {ndim} dimensions, got "
            f"{array.dtype} {list(array.shape)}"
        )
    return array.shape


@dataclass
class ResolveCounts:
    """Entries by where they were found, and rows moved.

    direct, hot, host: entries resolved in place, in the hot cache, by a copy from host (`staged` of them
        into the arena); copied: distinct rows copied per member.
    lost:    entries whose row is neither on the device nor on the host, or that no room was left for.
    corrupt: LRU or owner values that cannot be.
    The last two must be zero: the caller stops on them, the op only stays memory-safe.
    """

    direct: int = 0
    hot: int = 0
    host: int = 0
    staged: int = 0
    copied: int = 0
    lost: int = 0
    corrupt: int = 0


@dataclass(frozen=True)
class CopyPlan:
    """Rows to copy, request after request; the same plan serves every member.

    row:      int32 [M], logical rows.
    src, dst: int64 [M], physical row in the source and in the destination store.
    count:    int32 [R], rows of each request.
    """

    row: I32
    src: I64
    dst: I64
    count: I32


@dataclass(frozen=True)
class Resolution:
    """What a call returns.

    locations: int32 [T, k], device row of every entry in the model's order, -1 = no entry.
    plan:      host rows to copy to device rows.
    """

    locations: I32
    plan: CopyPlan
    counts: ResolveCounts
