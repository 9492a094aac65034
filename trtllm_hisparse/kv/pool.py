"""Memory with a capacity: byte arenas that tensors are carved from, and page pools that hand out ids."""

from collections import Counter
from enum import StrEnum

import torch

from trtllm_hisparse.errors import ConfigError, InvariantError
from trtllm_hisparse.kv.layout import ALIGN
from trtllm_hisparse.memory import available_bytes


class Arena:
    """One allocation of exactly the configured size; everything in a pool is a piece of it.

    Fresh memory holds 0xFF bytes (NaN in every float format), so that a row nobody wrote cannot pass for zeros.
    """

    def __init__(self, name: str, capacity: int) -> None:
        """ConfigError, before anything is allocated, when it would take over 95 % of the available memory."""
        available = available_bytes()
        if capacity > available * 95 // 100:
            raise ConfigError(
                f"{name}_pool_bytes: the {name} pool takes {capacity} bytes, more than 95 % of the {available} "
                f"bytes of memory available"
            )
        self.name = name
        self.capacity = capacity
        self.used = 0
        self._bytes = torch.full((capacity,), 0xFF, dtype=torch.uint8)

    def carve(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor of its own, disjoint from every other (ConfigError when the pool is too small)."""
        start = -(-self.used // ALIGN) * ALIGN
        size = torch.Size(shape).numel() * dtype.itemsize
        if start + size > self.capacity:
            raise ConfigError(
                f"{self.name} pool of {self.capacity} bytes: {size} more bytes do not fit after {start}"
            )
        self.used = start + size
        return self._bytes[start : start + size].view(dtype).view(shape)


class PageKind(StrEnum):
    """What a page is held for; the first two are required memory."""

    HOT = "hot"
    TAIL = "tail"
    OPTIONAL = "optional"
    DRAINING = "draining"
    """Its request is gone, a copy or a reader is not."""


class PagePool:
    """Page ids of one pool and who holds them. Ids are opaque: only the pool makes and takes them."""

    def __init__(self, name: str, capacity: int) -> None:
        self.name = name
        self.capacity = capacity
        self.peak = 0
        self._free = list(range(capacity - 1, -1, -1))
        self._holder: dict[int, tuple[PageKind, int]] = {}
        self._held: Counter[tuple[PageKind, int]] = Counter()
        self._by_kind: Counter[PageKind] = Counter()

    @property
    def free(self) -> int:
        """Pages nobody holds."""
        return len(self._free)

    @property
    def used(self) -> int:
        """Pages somebody holds."""
        return len(self._holder)

    def held(self, kind: PageKind, slot: int | None = None) -> int:
        """Pages held for `kind`, by one slot or by all."""
        return self._by_kind[kind] if slot is None else self._held[kind, slot]

    def holder(self, page: int) -> tuple[PageKind, int] | None:
        """(kind, slot) that holds a page, None when it is free."""
        return self._holder.get(page)

    def take(self, count: int, kind: PageKind, slot: int) -> list[int] | None:
        """`count` pages, or None when fewer are free."""
        if count > len(self._free):
            return None
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._holder[page] = (kind, slot)
        self._count(kind, slot, count)
        self.peak = max(self.peak, self.used)
        return pages

    def retag(self, page: int, kind: PageKind, slot: int) -> None:
        """Change what a held page is held for."""
        self._count(*self._owner(page), -1)
        self._holder[page] = (kind, slot)
        self._count(kind, slot, 1)

    def give(self, pages: list[int]) -> None:
        """Return pages; each must be held."""
        for page in pages:
            self._count(*self._owner(page), -1)
            del self._holder[page]
            self._free.append(page)

    def _owner(self, page: int) -> tuple[PageKind, int]:
        if page not in self._holder:
            raise InvariantError(f"{self.name} pool: page {page} is not held")
        return self._holder[page]

    def _count(self, kind: PageKind, slot: int, change: int) -> None:
        self._held[kind, slot] += change
        self._by_kind[kind] += change

    def check(self) -> None:
        """free + held = capacity, no id twice (InvariantError)."""
        ids = set(self._free) | set(self._holder)
        if len(self._free) + len(self._holder) != self.capacity or len(ids) != self.capacity:
            raise InvariantError(
                f"{self.name} pool: {len(self._free)} free + {len(self._holder)} held of {self.capacity}, "
                f"{len(ids)} distinct"
            )
