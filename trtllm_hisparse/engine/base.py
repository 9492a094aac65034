"""The seam between an engine and the KV hierarchy: what a step gets, and how it reaches rows.

An engine never sees pages, tiers or placement. It writes the new rows, asks for locations, and reads payload
only at those locations.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from trtllm_hisparse.models.spec import ModelSpec


@dataclass(frozen=True)
class StepBatch:
    """A ragged batch: request r owns queries `cu_queries[r] : cu_queries[r + 1]`, in position order.

    token_ids:   int64 [T].
    positions:   int64 [T], 0-based.
    cu_queries:  int32 [R + 1].
    slots:       int32 [R], request slots, all different.
    logit_rows:  int64 [L], the queries whose logits are wanted, ascending.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    cu_queries: torch.Tensor
    slots: torch.Tensor
    logit_rows: torch.Tensor


@dataclass(frozen=True)
class IndexPages:
    """The index keys one producer scores, paged.

    keys:        [pages, page_rows, index_dim] in the model's dtype.
    page_table:  int32 [R, J], page of each request's logical page; entries past its length are -1.
    """

    keys: torch.Tensor
    page_table: torch.Tensor


class KVStep(Protocol):
    """The hierarchy during one step. `layer` is always the model-wide layer number."""

    @property
    def batch(self) -> StepBatch: ...

    def append(self, layer: int, rows: torch.Tensor) -> None:
        """Write the step's new payload rows `[T, row]` of a payload owner to the tail."""

    def append_index(self, layer: int, keys: torch.Tensor) -> None:
        """Write the step's new index keys `[T, index_dim]` of a layer that stores keys."""

    def index_pages(self, layer: int) -> IndexPages:
        """The keys producer `layer` scores, this step's included."""

    def resolve(self, layer: int, selections: torch.Tensor) -> None:
        """Resolve producer `layer`'s ordered selections, int32 `[T, k]`; -1 and ids past the query are none.

        Brings every missing row to the device for the producer's own payload store.
        """

    def locations(self, layer: int) -> torch.Tensor:
        """Locations int32 `[T, k]` for attention of `layer`, -1 = no entry.

        Call once per attention layer, in layer order, after the resolution of its producer; a follower's
        rows are brought here. Valid until the next resolution in the same cache state.
        """

    def payload(self, layer: int) -> torch.Tensor:
        """The device payload store `layer` reads, `[rows, row]` in the model's dtype."""


class Engine(Protocol):
    """One model, loaded."""

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def dtype(self) -> torch.dtype:
        """dtype of payload rows and index keys."""

    @property
    def vocab_size(self) -> int: ...

    def step(self, kv: KVStep) -> torch.Tensor:
        """Run the batch and return float32 logits `[L, vocab]` of its `logit_rows`."""
