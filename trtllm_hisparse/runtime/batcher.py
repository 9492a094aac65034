"""Which tokens run in the next step."""

from dataclasses import dataclass

from trtllm_hisparse.kv.hierarchy import KVHierarchy
from trtllm_hisparse.kv.step import Block
from trtllm_hisparse.residency.manager import Admission
from trtllm_hisparse.runtime.request import Request, Sink


@dataclass(eq=False)
class Active:
    """A request in the loop. `tokens` is prompt + output; those past the committed rows are still to be run."""

    id: int
    request: Request
    sink: Sink
    admission: Admission
    tokens: list[int]

    @property
    def produced(self) -> int:
        """Output tokens so far."""
        return len(self.tokens) - len(self.request.prompt)


def next_batch(kv: KVHierarchy, running: list[Active]) -> list[tuple[Active, Block]]:
    """Every decoding request, then prompt chunks in admission order, within `max_batch_tokens`.

    A request sits the step out while its imports are in flight or its tail waits for a backup. A chunk of a
    prompt whose history is partly on the host is no longer than the hot cache can resolve at once.
    """
    config = kv.layout.config
    budget = config.max_batch_tokens
    batch = []
    for active in sorted(running, key=lambda a: a.produced == 0):
        slot = active.admission.slot
        assert slot is not None
        if kv.slots[slot].imports:
            continue
        todo = active.tokens[kv.slots[slot].committed :]
        count = _open_chunk(kv, slot, min(len(todo), config.prefill_chunk, budget))
        if count:
            budget -= count
            batch.append((active, Block(slot, todo[:count], int(count == len(todo)))))
    return batch


def _open_chunk(kv: KVHierarchy, slot: int, most: int) -> int:
    """Tokens the slot can run now, their tail pages open; 0 = not now."""
    count = most if kv.direct(slot) else min(most, kv.layout.block)
    if not count or not kv.open_tail(slot, count):
        return 0
    # Opening a page may have retired an older one.
    return count if kv.direct(slot) else min(count, kv.layout.block)
