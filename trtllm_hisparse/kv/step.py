"""One engine step over the hierarchy: where new rows go, and where selected rows are (implements KVStep)."""

from collections.abc import Sequence
from dataclasses import astuple, dataclass

import numpy as np
import torch

from trtllm_hisparse.engine.base import IndexPages, StepBatch
from trtllm_hisparse.errors import InvariantError
from trtllm_hisparse.kv.hierarchy import CopyKind, KVHierarchy
from trtllm_hisparse.resolver import Resolution, ResolveCounts, ResolveInputs, resolve
from trtllm_hisparse.resolver.base import I32, I64, CopyPlan


@dataclass(frozen=True)
class Block:
    """The next tokens of one request: `tokens` sit at positions committed .. committed + len(tokens) - 1.

    logits: how many of the last queries need logits.
    """

    slot: int
    tokens: Sequence[int]
    logits: int = 1


class HierarchyStep:
    """A step in progress. Open the tails first, then construct, run the engine, `end`, and commit.

    Every resolution is carried out for all members of its cache state before the step ends: a member whose
    bytes were not brought would hold another row than the owner table says.
    """

    def __init__(self, kv: KVHierarchy, blocks: Sequence[Block]) -> None:
        self._kv = kv
        slots = np.array([block.slot for block in blocks], np.int32)
        counts = [len(block.tokens) for block in blocks]
        cu = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        for block in blocks:
            if not kv.is_open(block.slot) or kv.slots[block.slot].imports:
                raise InvariantError(f"slot {block.slot} is not ready to be stepped")
            if not block.tokens or not 0 <= block.logits <= len(block.tokens):
                raise ValueError(f"slot {block.slot}: {block.logits} logits of {len(block.tokens)} tokens")
        positions = np.concatenate(
            [kv.slots[b.slot].committed + np.arange(n) for b, n in zip(blocks, counts, strict=True)]
        )
        owner = np.repeat(slots, counts)
        self._tail_rows = self._rows_of(kv.page_map, owner, positions, "tail")
        self._index_rows = self._rows_of(kv.index_map, owner, positions, "index")
        self._slots = slots
        self._cu = cu
        self._visible = (positions + 1).astype(np.int32)
        self._stage_base = np.zeros(len(slots), np.int64)
        wanted = [np.arange(end - b.logits, end) for b, end in zip(blocks, cu[1:], strict=True)]
        self.batch = StepBatch(
            torch.tensor([token for block in blocks for token in block.tokens], dtype=torch.int64),
            torch.from_numpy(positions.astype(np.int64)),
            torch.from_numpy(cu),
            torch.from_numpy(slots),
            torch.from_numpy(np.concatenate(wanted).astype(np.int64)),
        )
        pages = int((self._visible.max() - 1) // kv.layout.config.page_rows) + 1
        self._index_table = torch.from_numpy(np.ascontiguousarray(kv.index_map[slots, :pages]))
        self._selections: dict[int, I32] = {}
        self._plans: dict[int, tuple[int, Resolution, set[int]]] = {}
        self._id = kv.begin_step()

    def _rows_of(self, table: I32, slot: I32, position: I64, what: str) -> torch.Tensor:
        p = self._kv.layout.config.page_rows
        pages = table[slot, position // p].astype(np.int64)
        if (pages < 0).any():
            at = int(np.argmin(pages))
            raise InvariantError(f"slot {slot[at]}: no {what} page is open for row {position[at]}")
        return torch.from_numpy(pages * p + position % p)

    # -- KVStep ---------------------------------------------------------------------------------------
    def append(self, layer: int, rows: torch.Tensor) -> None:
        self._kv.payload[layer][self._tail_rows] = rows

    def append_index(self, layer: int, keys: torch.Tensor) -> None:
        self._kv.index[layer][self._index_rows] = keys

    def index_pages(self, layer: int) -> IndexPages:
        source = self._kv.layout.spec.layers[layer].index_keys
        keys = self._kv.index[layer if source is None else source]
        return IndexPages(keys.view(-1, self._kv.layout.config.page_rows, keys.shape[1]), self._index_table)

    def resolve(self, layer: int, selections: torch.Tensor) -> None:
        self._selections[layer] = np.ascontiguousarray(selections.numpy())

    def locations(self, layer: int) -> torch.Tensor:
        """Resolves on the first use of a selection in a cache state; later layers inherit or follow."""
        spec = self._kv.layout.spec
        index, owner = spec.layers[layer].index, spec.layers[layer].payload
        if index is None or owner is None:
            raise ValueError(f"layer {layer} reads no history")
        if index not in self._selections:
            raise ValueError(f"layer {layer} needs the selection of layer {index}, which has not been resolved")
        state = spec.state_of_payload[owner]
        if state not in self._plans or self._plans[state][0] != index:
            self._settle(state)
            self._plans[state] = (index, self._resolve(state, self._selections[index]), set())
        _, resolution, served = self._plans[state]
        if owner not in served:
            served.add(owner)
            self._gather(owner, resolution.plan)
        return torch.from_numpy(resolution.locations)

    def payload(self, layer: int) -> torch.Tensor:
        owner = self._kv.layout.spec.layers[layer].payload
        if owner is None:
            raise ValueError(f"layer {layer} reads no history")
        return self._kv.payload[owner]

    def end(self) -> None:
        """The last reader has finished; raises InvariantError when a member was left without its rows."""
        self._kv.end_step(self._id)
        for state in self._plans:
            self._settle(state)

    # -- inside ----------------------------------------------------------------------------------------
    def _resolve(self, state: int, selections: I32) -> Resolution:
        kv = self._kv
        plan = resolve(
            ResolveInputs(
                selections,
                self._cu,
                self._slots,
                self._visible,
                kv.page_map,
                kv.host_map,
                kv.hot_table,
                kv.owners[state],
                kv.lru[state],
                kv.layout.config.page_rows,
                self._stage_base,
            )
        )
        if plan.counts.lost or plan.counts.corrupt:
            raise InvariantError(
                f"cache state {state}: {plan.counts.lost} entries have no row on device or host, "
                f"{plan.counts.corrupt} slots are corrupt"
            )
        total = kv.census[state]
        kv.census[state] = ResolveCounts(
            *(a + b for a, b in zip(astuple(total), astuple(plan.counts), strict=True))
        )
        return plan

    def _gather(self, owner: int, plan: CopyPlan) -> None:
        """The plan's misses for one member: host rows straight into their device rows."""
        if not len(plan.src):
            return
        rows = self._kv.backup_rows[owner][torch.from_numpy(plan.src)]
        self._kv.payload[owner][torch.from_numpy(plan.dst)] = rows
        self._kv.moved_bytes[CopyKind.GATHER] += rows.nbytes

    def _settle(self, state: int) -> None:
        """Before a plan is replaced, every member must have run it."""
        if state not in self._plans:
            return
        index, resolution, served = self._plans[state]
        left = set(self._kv.layout.spec.cache_states[state].members) - served
        if left and len(resolution.plan.src):
            raise InvariantError(f"layers {sorted(left)} did not run the plan of layer {index}")
