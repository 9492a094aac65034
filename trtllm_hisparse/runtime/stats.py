"""Counters and gauges of one runtime: the census and everything `/metrics` shows."""

from dataclasses import dataclass

from trtllm_hisparse.kv.hierarchy import CopyKind, Device, KVHierarchy
from trtllm_hisparse.kv.pool import PageKind
from trtllm_hisparse.residency.manager import Residency


@dataclass
class LoopCounts:
    """What the serving loop itself counts, cumulative."""

    steps: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    refused: int = 0
    cancelled: int = 0
    failed: int = 0


@dataclass(frozen=True)
class RuntimeStats:
    """A snapshot. Rows are selected entries over all cache states; bytes and pages as named; `*_rows`, `*_bytes`
    moved, and the counts up to `failed` are cumulative, the rest are gauges."""

    direct_rows: int
    hot_rows: int
    host_rows: int
    staged_rows: int
    copied_rows: int
    copied_bytes: int
    backup_bytes: int
    populated_bytes: int
    steps: int
    prompt_tokens: int
    output_tokens: int
    admissions: int
    waits: int
    reclaims: int
    reclaimed_pages: int
    populated_pages: int
    refused: int
    cancelled: int
    failed: int
    queue_depth: int
    running: int
    pages_free: int
    pages_required: int
    pages_optional: int
    pages_pending: int
    device_pool_bytes: int
    device_used_bytes: int
    device_peak_bytes: int
    host_pool_bytes: int
    host_used_bytes: int


def snapshot(kv: KVHierarchy, residency: Residency, counts: LoopCounts) -> RuntimeStats:
    """Read everything; called between steps by the thread that owns the hierarchy."""
    return RuntimeStats(
        direct_rows=sum(c.direct for c in kv.census),
        hot_rows=sum(c.hot for c in kv.census),
        host_rows=sum(c.host for c in kv.census),
        staged_rows=sum(c.staged for c in kv.census),
        copied_rows=sum(c.copied for c in kv.census),
        copied_bytes=kv.moved_bytes[CopyKind.GATHER],
        backup_bytes=kv.moved_bytes[CopyKind.BACKUP],
        populated_bytes=kv.moved_bytes[CopyKind.POPULATE],
        steps=counts.steps,
        prompt_tokens=counts.prompt_tokens,
        output_tokens=counts.output_tokens,
        admissions=residency.counts.admissions,
        waits=residency.counts.waits,
        reclaims=residency.counts.reclaims,
        reclaimed_pages=residency.counts.reclaimed_pages,
        populated_pages=kv.populated_pages,
        refused=counts.refused,
        cancelled=counts.cancelled,
        failed=counts.failed,
        queue_depth=len(residency.waiting),
        running=len(residency.admitted),
        pages_free=kv.device_pool.free,
        pages_required=kv.required_pages(),
        pages_optional=kv.device_pool.held(PageKind.OPTIONAL),
        pages_pending=int((kv.device_state == Device.PENDING).sum()),
        device_pool_bytes=kv.device_arena.capacity,
        device_used_bytes=kv.device_used_bytes(),
        device_peak_bytes=kv.device_used_bytes(peak=True),
        host_pool_bytes=kv.layout.config.host_pool_bytes,
        host_used_bytes=kv.host_pool.used * kv.layout.page_bytes,
    )
