"""The accounting check: every page in exactly one place, every map true, every copy byte-exact (I1-I7).

Slow and complete. Runs after every step with `debug_checks`, and after every test.
"""

from collections import Counter

import numpy as np
import torch

from trtllm_hisparse.errors import InvariantError
from trtllm_hisparse.kv.hierarchy import Device, Host, KVHierarchy
from trtllm_hisparse.kv.pool import PageKind, PagePool
from trtllm_hisparse.resolver.base import I32, I64


def check(kv: KVHierarchy) -> None:
    """Raise InvariantError naming the first thing that does not hold."""
    for pool in (kv.device_pool, kv.index_pool, kv.host_pool):
        pool.check()
    required, optional = kv.required_pages(), kv.device_pool.held(PageKind.OPTIONAL)
    if required + optional > kv.device_pool.capacity:
        raise InvariantError(f"I4: {required} required + {optional} optional pages > {kv.device_pool.capacity}")
    claims: dict[str, Counter[int]] = {p.name: Counter() for p in (kv.device_pool, kv.index_pool, kv.host_pool)}
    for slot in range(len(kv.slots)):
        if kv.is_open(slot):
            _check_open(kv, slot, claims)
        else:
            _check_free(kv, slot)
    for pool in (kv.device_pool, kv.index_pool, kv.host_pool):
        twice = [page for page, count in claims[pool.name].items() if count > 1]
        if twice:
            raise InvariantError(f"{pool.name} pages {twice} are in two places")
        _check_draining(kv, pool, set(claims[pool.name]))


def _check_free(kv: KVHierarchy, slot: int) -> None:
    """I7: a free slot holds nothing of its former owner."""
    for name, table in (
        ("page map", kv.page_map),
        ("host map", kv.host_map),
        ("index map", kv.index_map),
        ("hot table", kv.hot_table),
        ("device pages", kv.device_page),
        ("host pages", kv.host_page),
        *((f"owners of state {n}", owners) for n, owners in enumerate(kv.owners)),
    ):
        if (table[slot] != -1).any():
            raise InvariantError(f"I7: free slot {slot} still has entries in its {name}")


def _check_draining(kv: KVHierarchy, pool: PagePool, claimed: set[int]) -> None:
    """A held page that no open slot claims must be on its way out."""
    leaving = {page for _, p, pages in kv._quarantine if p is pool for page in pages}
    leaving |= {page for flight in kv._flights.values() for p, page in flight.holds if p is pool}
    for page in range(pool.capacity):
        if pool.holder(page) is not None and page not in claimed and page not in leaving:
            raise InvariantError(f"{pool.name} page {page} leaked: held for {pool.holder(page)}")


def _check_open(kv: KVHierarchy, slot: int, claims: dict[str, Counter[int]]) -> None:
    state, p = kv.slots[slot], kv.layout.config.page_rows
    where = f"slot {slot}"
    claims[kv.index_pool.name].update(state.index)
    claims[kv.host_pool.name].update(state.host)
    claims[kv.device_pool.name].update(state.hot)
    for page in range(kv.layout.pages_per_slot):
        device, at = Device(kv.device_state[slot, page]), int(kv.device_page[slot, page])
        host = Host(kv.host_state[slot, page])
        readable = device in (Device.TAIL, Device.READY)
        if (device is Device.ABSENT) != (at < 0) or kv.page_map[slot, page] != (at if readable else -1):
            raise InvariantError(
                f"I2: {where} page {page} is {device.name} on {at}, published {kv.page_map[slot, page]}"
            )
        if at >= 0:
            claims[kv.device_pool.name][at] += 1
            kind, holder = kv.device_pool.holder(at) or (None, None)
            kinds = {
                Device.TAIL: (PageKind.TAIL,),
                Device.READY: (PageKind.OPTIONAL,),
                Device.PENDING: (PageKind.OPTIONAL, PageKind.TAIL),
            }[device]
            if kind not in kinds or holder != slot:
                raise InvariantError(f"{where} page {page} is {device.name} but held for {kind} of {holder}")
        expected = kv.host_page[slot, page] if host is Host.DONE else -1
        if kv.host_map[slot, page] != expected:
            raise InvariantError(
                f"I2: {where} page {page} backup is {host.name}, published {kv.host_map[slot, page]}"
            )
        if page * p < state.committed and not state.imports and not readable and host is not Host.DONE:
            raise InvariantError(f"I1: {where} page {page} is neither on the device nor backed up")
        if readable and host is Host.DONE:
            _same(
                kv,
                f"I6: {where} page {page}",
                at * p + np.arange(p),
                kv.host_map[slot, page] * p + np.arange(p),
            )
    held = kv.device_pool.held(PageKind.TAIL, slot)
    if state.cost and held > state.cost.tail:
        raise InvariantError(f"{where}: tail holds {held} of {state.cost.tail} reserved pages")
    if state.hot:
        for n in range(len(kv.owners)):
            _check_hot(kv, slot, n)


def _check_hot(kv: KVHierarchy, slot: int, n: int) -> None:
    """Owners are committed, distinct and hold their host rows' bytes in every member; LRU is a permutation."""
    p, owners = kv.layout.config.page_rows, kv.owners[n][slot]
    if not np.array_equal(np.sort(kv.lru[n][slot]), np.arange(len(owners))):
        raise InvariantError(f"slot {slot} state {n}: the LRU order is not a permutation")
    hot = np.flatnonzero(owners >= 0)
    rows = owners[hot]
    if len(np.unique(rows)) != len(rows) or (rows >= kv.slots[slot].committed).any():
        raise InvariantError(f"I5: slot {slot} state {n}: hot rows {rows} of {kv.slots[slot].committed} committed")
    host_pages = kv.host_map[slot, rows // p].astype(np.int64)
    if (host_pages < 0).any():
        raise InvariantError(f"slot {slot} state {n}: a hot row has no host copy")
    device = kv.hot_table[slot, hot // p].astype(np.int64) * p + hot % p
    members = kv.layout.spec.cache_states[n].members
    _same(kv, f"I6: slot {slot} state {n} hot cache", device, host_pages * p + rows % p, members)


def _same(
    kv: KVHierarchy, what: str, device: I32 | I64, host: I32 | I64, members: tuple[int, ...] | None = None
) -> None:
    """Device rows equal host rows byte for byte (eq. 14)."""
    for i in kv.layout.spec.payload_owners if members is None else members:
        a = kv.payload[i][torch.from_numpy(device)].view(torch.uint8)
        b = kv.backup_rows[i][torch.from_numpy(host)].view(torch.uint8)
        if not torch.equal(a, b):
            raise InvariantError(f"{what}: layer {i} differs from its host copy")
