"""What one session costs and how many fit: the sizes of Section 3 as pure functions.

Bytes are exact whole numbers. Device figures count payload rows, index keys, draft ring and staging. Page
maps, LRU state, allocator rounding and a drafter's weights come on top; so does what a tail holds while more
than one page of it is in flight.
"""

from dataclasses import dataclass

from trtllm_hisparse.errors import ConfigError
from trtllm_hisparse.models.spec import ModelSpec


def pages(rows: int, page_rows: int) -> int:
    """Pages of `page_rows` rows that hold `rows` rows."""
    return -(-rows // page_rows)


# -- speculation: equations 8, 11, 12, 13 -----------------------------------------------------------------
def staging_rows(max_width: int, top_k: int) -> int:
    """Equation 8: rows that `max_width` disjoint selections of one live request and source can need."""
    return max_width * top_k


def ring_rows(drafter_window: int, max_width: int, page_rows: int) -> int:
    """Equation 11, R_d: rows of one request's draft ring, a whole number of pages.

    They hold the visible window, the current block and what page alignment can add.
    """
    return page_rows * pages(drafter_window + max_width + page_rows - 1, page_rows)


def ring_address(slot: int, position: int, rows: int) -> int:
    """Equation 11, phi: physical ring row of draft `position` of request `slot`; `rows` is R_d."""
    return slot * rows + position % rows


def staging_bytes(spec: ModelSpec, slots: int, max_width: int) -> int:
    """Equation 12: arenas for the largest layer group, reused by one group after the other."""
    live = max((sum(map(spec.row_bytes_of, s.members)) for s in spec.cache_states), default=0)
    return slots * staging_rows(max_width, spec.top_k) * live


def staging_bytes_dedicated(spec: ModelSpec, slots: int, max_width: int) -> int:
    """What equation 12 would be with an arena of its own for every payload store."""
    return slots * staging_rows(max_width, spec.top_k) * sum(map(spec.row_bytes_of, spec.payload_owners))


def speculation_pays(sessions_spec: int, sessions_plain: int, load: int, tpot_ratio: float) -> bool:
    """Equation 13: the share of sessions speculation keeps exceeds its time per output token over plain's.

    sessions_spec, sessions_plain: sessions that fit with and without speculation.
    load:                          sessions offered; slots beyond it change nothing.
    tpot_ratio:                    TPOT(speculative) / TPOT(plain), measured at this load.
    """
    for name, value in (("sessions_spec", sessions_spec), ("sessions_plain", sessions_plain), ("load", load)):
        _at_least(name, value, 1)
    if not tpot_ratio > 0:
        raise ConfigError(f"tpot_ratio: expected a number above 0, got {tpot_ratio!r}")
    return min(sessions_spec, load) / min(sessions_plain, load) > tpot_ratio


# -- one session's memory ---------------------------------------------------------------------------------
def stored_rows(spec: ModelSpec, owner: int, context: int, page_rows: int) -> int:
    """Rows the store of layer `owner` holds for `context` token positions, in whole pages."""
    return page_rows * pages(pages(context, spec.tokens_per_row_of(owner)), page_rows)


def index_bytes(spec: ModelSpec, context: int, page_rows: int) -> int:
    """Index keys of the whole context; they stay on the device under every placement."""
    return spec.index_row_bytes * sum(stored_rows(spec, i, context, page_rows) for i in spec.index_stores)


def payload_bytes(spec: ModelSpec, context: int, page_rows: int) -> int:
    """Payload rows of the whole context: on the device if resident, on the host if not."""
    owners = spec.payload_owners
    return sum(spec.row_bytes_of(i) * stored_rows(spec, i, context, page_rows) for i in owners)


def required_payload_bytes(spec: ModelSpec, context: int, hot_rows: int, page_rows: int) -> int:
    """Payload rows an offloaded session must keep: hot cache and one tail page per store (Section 3.1).

    A store whose whole context is smaller keeps just that.
    """
    reserve = page_rows * (pages(hot_rows, page_rows) + 1)
    return sum(
        spec.row_bytes_of(i) * min(reserve, stored_rows(spec, i, context, page_rows)) for i in spec.payload_owners
    )


@dataclass(frozen=True)
class CapacityPlan:
    """Memory of one GPU's sessions at one setting. Build with `plan`. Bytes.

    resident:            device bytes of a session with its whole context resident.
    adaptive:            device bytes a session requires with its history offloaded: index, hot cache, tail.
    host:                host bytes reserved for that history.
    slots:               N, request slots the ring and staging serve.
    ring_rows:           R_d, rows of one draft ring.
    ring:                draft rings of all slots.
    staging:             staging arenas of all slots.
    staging_dedicated:   the same with one arena per payload store.
    device_bytes:        device memory left for sessions; None = not asked.
    host_bytes:          host memory left for backup; None = not asked.
    """

    resident: int
    adaptive: int
    host: int
    slots: int
    ring_rows: int
    ring: int
    staging: int
    staging_dedicated: int
    device_bytes: int | None
    host_bytes: int | None

    @property
    def resident_speculative(self) -> int:
        """Device bytes of a resident session with a drafter: plus its ring."""
        return self.resident + self.ring // self.slots

    @property
    def adaptive_speculative(self) -> int:
        """Device bytes of an offloaded session with a drafter: plus its ring and its share of staging."""
        return self.adaptive + (self.ring + self.staging) // self.slots

    @property
    def host_sessions(self) -> int | None:
        """Sessions whose history fits in `host_bytes`."""
        return None if self.host_bytes is None else self.host_bytes // self.host

    def sessions(self, session_bytes: int) -> int | None:
        """Sessions of `session_bytes` device bytes each that fit in `device_bytes`."""
        return None if self.device_bytes is None else self.device_bytes // session_bytes


def plan(
    spec: ModelSpec,
    *,
    context: int,
    hot_rows: int,
    page_rows: int,
    slots: int,
    max_width: int,
    drafter_window: int,
    drafter_row_bytes: int,
    device_bytes: int | None = None,
    host_bytes: int | None = None,
) -> CapacityPlan:
    """Memory per session and per GPU, without and with speculation (Table 1, Section 3.4).

    context:           token positions of one session.
    hot_rows:          B, hot-cache rows per session and cache state.
    page_rows:         p, rows per page.
    slots:             N, request slots per GPU.
    max_width:         K_max, target queries of one round, anchor included.
    drafter_window:    W, positions the drafter reads.
    drafter_row_bytes: bytes of one draft row over all its layers.

    ConfigError names a value that cannot work and what could.
    """
    for name, value in (
        ("page_rows", page_rows),
        ("slots", slots),
        ("max_width", max_width),
        ("drafter_window", drafter_window),
        ("drafter_row_bytes", drafter_row_bytes),
    ):
        _at_least(name, value, 1)
    if not 1 <= context <= spec.max_context:
        raise ConfigError(f"context: expected 1 to {spec.max_context} ({spec.name}), got {context}")
    if hot_rows < spec.top_k:
        raise ConfigError(f"hot_rows: expected at least top_k = {spec.top_k} ({spec.name}), got {hot_rows}")
    for name, budget in (("device_bytes", device_bytes), ("host_bytes", host_bytes)):
        if budget is not None:
            _at_least(name, budget, 1)
    index, payload = index_bytes(spec, context, page_rows), payload_bytes(spec, context, page_rows)
    ring = ring_rows(drafter_window, max_width, page_rows)
    return CapacityPlan(
        resident=index + payload,
        adaptive=index + required_payload_bytes(spec, context, hot_rows, page_rows),
        host=payload,
        slots=slots,
        ring_rows=ring,
        ring=slots * ring * drafter_row_bytes,
        staging=staging_bytes(spec, slots, max_width),
        staging_dedicated=staging_bytes_dedicated(spec, slots, max_width),
        device_bytes=device_bytes,
        host_bytes=host_bytes,
    )


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ConfigError(f"{name}: expected at least {least}, got {value}")
