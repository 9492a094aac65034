"""Every size the hierarchy needs, resolved once from a ModelSpec and a HiSparseConfig."""

import logging
from dataclasses import dataclass
from functools import cached_property

import torch

from trtllm_hisparse.config import HiSparseConfig, Placement
from trtllm_hisparse.errors import ConfigError
from trtllm_hisparse.models.spec import ModelSpec

log = logging.getLogger(__name__)

ALIGN = 64
"""Bytes each carved tensor is aligned to."""


@dataclass(frozen=True)
class Cost:
    """What one request needs before it can run, in pages of each pool.

    payload: device payload pages reserved for it (hot cache and tail, or its whole context).
    hot:     of these, its hot cache; 0 = it is served resident.
    tail:    of these, the most its tail may hold during prefill.
    index:   index-key pages.
    host:    host pages, its whole history.
    """

    payload: int
    hot: int
    tail: int
    index: int
    host: int


@dataclass(frozen=True)
class KVLayout:
    """Pools in pages. Build with `resolve`.

    device_pages, index_pages, host_pages: capacity of the payload, index-key and host pools.
    """

    spec: ModelSpec
    config: HiSparseConfig
    dtype: torch.dtype
    device_pages: int
    index_pages: int
    host_pages: int

    @classmethod
    def resolve(cls, spec: ModelSpec, config: HiSparseConfig, dtype: torch.dtype) -> "KVLayout":
        """Split the configured pools; ConfigError with the figures when one request could not run.

        The index pool is sized so that sessions of `max_context` run out of index keys and of payload pages
        together (never more than the host can back, or than all slots need); payload takes the rest.
        """
        if not spec.payload_owners:
            raise ConfigError(f"{spec.name}: no layer keeps history, there is nothing to place")
        packed = [i for i in spec.payload_owners if spec.tokens_per_row_of(i) != 1]
        if packed:
            raise ConfigError(f"{spec.name}: compressed rows (m > 1, layers {packed}) cannot be served yet")
        if spec.max_context < config.max_context:
            raise ConfigError(f"max_context={config.max_context} exceeds the model's {spec.max_context} positions")
        need = config.max_width * spec.top_k
        if config.placement is not Placement.RESIDENT and config.hot_rows < need:
            raise ConfigError(
                f"hot_rows={config.hot_rows} cannot hold one step's selections: at least max_width x top_k = "
                f"{config.max_width} x {spec.top_k} = {need}"
            )
        draft = cls(spec, config, dtype, 0, 0, 0)
        slots, pages = config.max_requests, draft.pages_per_slot
        room = config.device_pool_bytes - draft.map_bytes - draft.slack_bytes
        payload, index = draft.page_bytes, draft.index_page_bytes
        if config.placement is Placement.RESIDENT:
            each = min(max(room, 0) // (payload + index), slots * pages)
            sized = cls(spec, config, dtype, each, each, 0)
        else:
            whole = draft.cost(config.max_context, config.max_context)
            host = config.host_pool_bytes // payload
            sessions = min(slots, max(room, 0) / (whole.payload * payload + pages * index))
            # A pool below one full session still takes shorter ones: at least a page of each kind.
            index_pages = max(min(int(sessions * pages), max(host, whole.payload), (room - payload) // index), 1)
            device = min(max(room - index_pages * index, 0) // payload, slots * pages)
            sized = cls(spec, config, dtype, device, index_pages, min(host, slots * pages))
        sized._check_one_request()
        wasted = sized.hot_pages * config.page_rows - config.hot_rows
        if wasted > 0:
            log.warning(
                "hot_rows=%d is not a multiple of page_rows=%d: %d rows of every slot's hot cache are never used",
                config.hot_rows,
                config.page_rows,
                wasted,
            )
        return sized

    def _check_one_request(self) -> None:
        """A pool that cannot run a one-page request is a configuration mistake."""
        least = self.cost(1, self.config.page_rows)
        if self.device_pages < least.payload or self.index_pages < least.index:
            need = self.map_bytes + self.slack_bytes + least.payload * self.page_bytes
            raise ConfigError(
                f"device_pool_bytes={self.config.device_pool_bytes} cannot run one request: maps take "
                f"{self.map_bytes}, and one page of {self.config.page_rows} rows takes {self.page_bytes} payload "
                f"and {self.index_page_bytes} index bytes; at least {need + least.index * self.index_page_bytes}"
            )
        if self.device_pages * self.config.page_rows > 2**31 - 1:
            raise ConfigError(
                f"device_pool_bytes={self.config.device_pool_bytes}: {self.device_pages} pages of "
                f"{self.config.page_rows} rows exceed int32 locations"
            )

    # -- sizes ----------------------------------------------------------------------------------------
    @property
    def pages_per_slot(self) -> int:
        """J: logical pages of the longest context."""
        return self.pages(self.config.max_context)

    @property
    def hot_pages(self) -> int:
        """Pages of one slot's hot cache; 0 in resident placement."""
        return 0 if self.config.placement is Placement.RESIDENT else self.pages(self.config.hot_rows)

    @property
    def hot_rows(self) -> int:
        """B as the maps hold it; 1 (unused) in resident placement, so that no array is empty."""
        return 1 if self.config.placement is Placement.RESIDENT else self.config.hot_rows

    @property
    def block(self) -> int:
        """Queries of one request whose selections the hot cache can hold at once."""
        return max(1, self.config.hot_rows // self.spec.top_k)

    @cached_property
    def page_bytes(self) -> int:
        """Payload bytes of one page over all stores."""
        return self.config.page_rows * sum(self.spec.row_bytes_of(i) for i in self.spec.payload_owners)

    @cached_property
    def index_page_bytes(self) -> int:
        """Index-key bytes of one page over all stores."""
        return self.config.page_rows * self.spec.index_row_bytes * len(self.spec.index_stores)

    @cached_property
    def map_bytes(self) -> int:
        """Page maps, hot owners and LRU order of all slots (int32), part of the device pool."""
        maps = 3 * self.pages_per_slot + max(self.hot_pages, 1)
        return 4 * self.config.max_requests * (maps + 2 * self.hot_rows * len(self.spec.cache_states))

    @property
    def slack_bytes(self) -> int:
        """Upper bound of alignment losses when the pool is carved."""
        spec = self.spec
        tables = 4 + 2 * len(spec.cache_states)  # three page maps, the hot table; owners and LRU order
        return ALIGN * (tables + len(spec.payload_owners) + len(spec.index_stores))

    def pages(self, rows: int) -> int:
        """Pages that hold `rows` rows."""
        return -(-rows // self.config.page_rows)

    def tail_pages(self, block: int) -> int:
        """Most pages a tail holds for blocks of `block` rows: those a block can touch when it starts at the
        last row of a page, and one whose backup is in flight."""
        return self.pages(self.config.page_rows - 1 + block) + 1

    # -- cost of one request --------------------------------------------------------------------------
    def cost(self, total: int, prompt: int) -> Cost:
        """Pages a request of `total` positions, `prompt` of them computed in prefill, must have to run.

        A request whose whole context fits in what it would reserve is served resident: no hot cache, no
        host copy.
        """
        whole = self.pages(total)
        block = max(min(self.config.prefill_chunk, prompt), self.config.max_width)
        tail = self.tail_pages(block)
        if self.config.placement is Placement.RESIDENT or whole <= self.hot_pages + tail:
            return Cost(whole, 0, whole, whole, 0)
        return Cost(self.hot_pages + tail, self.hot_pages, tail, whole, whole)

    def why_never(self, cost: Cost) -> str | None:
        """Why a request of this cost could not run even on an idle server, with figures; None if it could."""
        for what, need, have, knob in (
            ("device payload", cost.payload, self.device_pages, "device_pool_bytes"),
            ("host", cost.host, self.host_pages, "host_pool_bytes"),
            ("index", cost.index, self.index_pages, "device_pool_bytes"),
        ):
            if need > have:
                return (
                    f"needs {need} {what} pages of {self.config.page_rows} rows, the pool has {have} "
                    f"({knob}={getattr(self.config, knob)})"
                )
        return None
