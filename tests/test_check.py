"""The accounting check itself: every kind of damage it is there for makes it raise."""

import numpy as np
import pytest
from manual_copies import ManualCopyEngine
from pattern_engine import PatternEngine

from trtllm_hisparse.config import HiSparseConfig, Placement
from trtllm_hisparse.errors import InvariantError
from trtllm_hisparse.kv.check import check
from trtllm_hisparse.kv.hierarchy import Device, Host
from trtllm_hisparse.runtime.loop import Runtime
from trtllm_hisparse.runtime.request import Request

SLOT = 0


@pytest.fixture
def kv():
    """One request in fixed placement, decoding: pages in the tail, rows in the hot cache, pages on the host."""
    copies = ManualCopyEngine()
    copies.auto = True
    config = HiSparseConfig(
        placement=Placement.FIXED,
        device_pool_bytes=64 << 10,
        host_pool_bytes=256 << 10,
        hot_rows=8,
        page_rows=4,
        max_requests=2,
        max_context=128,
        prefill_chunk=8,
        max_batch_tokens=16,
    )
    runtime = Runtime(PatternEngine(), config, copies)
    runtime.submit(Request((1,) * 60, 40), lambda event: None)
    for _ in range(30):
        runtime.step()
        copies.complete_all()
    runtime._kv.poll()
    yield runtime._kv
    runtime.close()


def tail_page(kv):
    return kv.pages_in(SLOT, Device.TAIL, Host.DONE)[0]


def hot_slot(kv):
    return int(np.flatnonzero(kv.owners[0][SLOT] >= 0)[0])


def device_row(kv, h):
    return int(kv.hot_table[SLOT, h // 4]) * 4 + h % 4


def unpublish(kv):
    kv.page_map[SLOT, tail_page(kv)] = -1


def publish_absent(kv):
    kv.page_map[SLOT, 0] = 3


def unpublish_backup(kv):
    kv.host_map[SLOT, 0] = -1


def publish_backup_early(kv):
    kv.host_map[SLOT, 31] = 0


def lose_a_page(kv):
    kv.host_state[SLOT, 0] = Host.NONE
    kv.host_map[SLOT, 0] = -1


def spoil_a_tail_row(kv):
    kv.payload[3][kv.device_page[SLOT, tail_page(kv)] * 4 + 1] += 1


def spoil_a_hot_row(kv):
    kv.payload[1][device_row(kv, hot_slot(kv))] += 1


def own_a_row_twice(kv):
    owners = kv.owners[0][SLOT]
    first, second = np.flatnonzero(owners >= 0)[:2]
    owners[second] = owners[first]


def own_an_uncommitted_row(kv):
    kv.owners[1][SLOT, hot_slot(kv)] = kv.slots[SLOT].committed


def own_a_row_without_a_host_copy(kv):
    row = kv.slots[SLOT].committed - 1
    assert kv.host_map[SLOT, row // 4] == -1
    kv.owners[0][SLOT, hot_slot(kv)] = row


def break_the_order(kv):
    kv.lru[1][SLOT, 0] = kv.lru[1][SLOT, 1]


def leak_a_page(kv):
    kv.device_pool.take(1, "optional", SLOT)


def leak_a_host_page(kv):
    kv.host_pool.take(1, "hot", SLOT)


def hold_for_the_wrong_reason(kv):
    kv.device_pool.retag(int(kv.device_page[SLOT, tail_page(kv)]), "optional", SLOT)


def use_a_page_twice(kv):
    kv.slots[SLOT].hot.append(kv.slots[SLOT].hot[0])


def promise_more_than_there_is(kv):
    kv.slots[SLOT].tail_limit = kv.device_pool.capacity


def leave_something_in_a_free_slot(kv):
    kv.owners[1][1, 2] = 5


def forget_a_free_page(kv):
    kv.device_pool._free.pop()


DAMAGE = [
    (unpublish, "I2: slot 0 page"),
    (publish_absent, "I2: slot 0 page 0 is ABSENT on -1, published 3"),
    (unpublish_backup, "I2: slot 0 page 0 backup is DONE, published -1"),
    (publish_backup_early, "I2: slot 0 page 31 backup is NONE, published 0"),
    (lose_a_page, "I1: slot 0 page 0 is neither on the device nor backed up"),
    (spoil_a_tail_row, "I6: slot 0 page .* layer 3 differs"),
    (spoil_a_hot_row, "I6: slot 0 state 0 hot cache: layer 1 differs"),
    (own_a_row_twice, "I5: slot 0 state 0"),
    (own_an_uncommitted_row, "I5: slot 0 state 1"),
    (own_a_row_without_a_host_copy, "state 0: a hot row has no host copy"),
    (break_the_order, "state 1: the LRU order is not a permutation"),
    (leak_a_page, "device payload page .* leaked"),
    (leak_a_host_page, "host page .* leaked"),
    (hold_for_the_wrong_reason, "is TAIL but held for optional of 0"),
    (use_a_page_twice, "are in two places"),
    (promise_more_than_there_is, "I4: .* required"),
    (leave_something_in_a_free_slot, "I7: free slot 1 still has entries in its owners of state 1"),
    (forget_a_free_page, "device payload pool: .* free"),
]


@pytest.mark.parametrize(("damage", "says"), DAMAGE, ids=lambda x: getattr(x, "__name__", ""))
def test_damage_is_named(kv, damage, says):
    check(kv)
    saved = [array.copy() for array in (kv.page_map, kv.host_map, kv.host_state, *kv.owners, *kv.lru)]
    state, hot = kv.slots[SLOT], list(kv.slots[SLOT].hot)
    limit = state.tail_limit
    damage(kv)
    with pytest.raises(InvariantError, match=says):
        check(kv)
    # Undone as far as the fixture's own close needs it.
    for array, before in zip((kv.page_map, kv.host_map, kv.host_state, *kv.owners, *kv.lru), saved, strict=True):
        array[:] = before
    state.hot, state.tail_limit = hot, limit
