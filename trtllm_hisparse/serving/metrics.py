"""RuntimeStats as Prometheus metrics: one table, no client library."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from trtllm_hisparse.runtime.stats import RuntimeStats


class MetricKind(StrEnum):
    """Prometheus types in use. A counter never decreases while the process lives."""

    COUNTER = "counter"
    GAUGE = "gauge"


@dataclass(frozen=True)
class Metric:
    """One metric family.

    label:  name of its only label; None for a family of one series.
    fields: {label value: `RuntimeStats` field}; the key is "" when there is no label.
    """

    name: str
    description: str
    kind: MetricKind
    label: str | None
    fields: Mapping[str, str]

    def samples(self, stats: RuntimeStats) -> Iterator[tuple[dict[str, str], int]]:
        """(labels, value) of each series."""
        for value, field in self.fields.items():
            yield ({self.label: value} if self.label else {}, getattr(stats, field))


def _counter(name: str, description: str, fields: Mapping[str, str], label: str | None = None) -> Metric:
    return Metric(f"hisparse_{name}_total", description, MetricKind.COUNTER, label, fields)


def _gauge(name: str, description: str, fields: Mapping[str, str], label: str | None = None) -> Metric:
    return Metric(f"hisparse_{name}", description, MetricKind.GAUGE, label, fields)


METRICS: tuple[Metric, ...] = (
    _counter(
        "rows",
        "Selected rows by the tier they were found in",
        {"direct": "direct_rows", "hot": "hot_rows", "host": "host_rows"},
        label="tier",
    ),
    _counter("staged_rows", "Rows placed in the staging arena", {"": "staged_rows"}),
    _counter("copied_rows", "Rows copied from host to device for attention", {"": "copied_rows"}),
    _counter(
        "bytes_moved",
        "Bytes copied between host and device",
        {"gather": "copied_bytes", "backup": "backup_bytes", "population": "populated_bytes"},
        label="kind",
    ),
    _counter("steps", "Engine steps", {"": "steps"}),
    _counter("tokens", "Tokens computed", {"prompt": "prompt_tokens", "output": "output_tokens"}, label="kind"),
    _counter("admissions", "Requests given device memory", {"": "admissions"}),
    _counter("waits", "Admissions put off for want of pages", {"": "waits"}),
    _counter("reclaims", "Requests whose optional history was reclaimed", {"": "reclaims"}),
    _counter("reclaimed_pages", "Optional pages given back by reclaims", {"": "reclaimed_pages"}),
    _counter("populated_pages", "Optional pages brought back from the host", {"": "populated_pages"}),
    _counter(
        "unserved_requests",
        "Requests that did not run to their end",
        {"refused": "refused", "cancelled": "cancelled", "failed": "failed"},
        label="reason",
    ),
    _gauge("queue_depth", "Requests waiting for admission", {"": "queue_depth"}),
    _gauge("requests_running", "Admitted requests", {"": "running"}),
    _gauge(
        "pages",
        "Device pages by state",
        {
            "free": "pages_free",
            "required": "pages_required",
            "optional": "pages_optional",
            "pending": "pages_pending",
        },
        label="state",
    ),
    _gauge(
        "pool_bytes",
        "Capacity of a pool",
        {"device": "device_pool_bytes", "host": "host_pool_bytes"},
        label="pool",
    ),
    _gauge(
        "pool_used_bytes",
        "Bytes in use in a pool",
        {"device": "device_used_bytes", "host": "host_used_bytes"},
        label="pool",
    ),
    _gauge("pool_peak_bytes", "Most bytes ever in use in a pool", {"device": "device_peak_bytes"}, label="pool"),
)
