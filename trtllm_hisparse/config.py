"""HiSparseConfig: every knob with its unit, default and check, in one frozen dataclass."""

import json
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import Any

from trtllm_hisparse.errors import ConfigError

MIB = 1 << 20
GIB = 1 << 30


class Placement(StrEnum):
    """Where a request's history may live on the device. The tokens are the same under each (I8)."""

    RESIDENT = "resident"
    """The whole context on the device, reserved at admission; no host copy."""
    FIXED = "fixed"
    """HiSparse: hot cache and tail only; complete pages go to the host as they fill."""
    ADAPTIVE = "adaptive"
    """Hot cache and tail, and optional history pages while the pool has room."""


@dataclass(frozen=True)
class HiSparseConfig:
    """Settings of one engine replica. Sizes in the unit their name ends with.

    placement:             see `Placement`.
    device_pool_bytes:     everything the hierarchy keeps on the device: payload pages, index keys, maps.
    host_pool_bytes:       payload backup; unused by `resident`.
    hot_rows:              B, hot-cache rows per request and cache state; at least `max_width * top_k`.
    page_rows:             p, rows per page.
    max_requests:          N, request slots.
    max_context:           longest prompt + output, in tokens.
    max_width:             K_max, target queries of one request in one decode step.
    admission_reserve_pages: pages optional history leaves free, so that the next admission need not wait.
    population_pages:      pages one population attempt may start.
    prefill_chunk:         prompt tokens of one request in one step.
    max_batch_tokens:      tokens of all requests in one step.
    debug_checks:          verify the invariants after every step (slow).
    """

    placement: Placement = Placement.ADAPTIVE
    device_pool_bytes: int = 256 * MIB
    host_pool_bytes: int = GIB
    hot_rows: int = 4096
    page_rows: int = 64
    max_requests: int = 16
    max_context: int = 32768
    max_width: int = 1
    admission_reserve_pages: int = 0
    population_pages: int = 4
    prefill_chunk: int = 256
    max_batch_tokens: int = 512
    debug_checks: bool = False

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "placement", Placement(self.placement))
        except ValueError:
            raise ConfigError(
                f"placement: expected one of {', '.join(Placement)}, got {self.placement!r}"
            ) from None
        if not isinstance(self.debug_checks, bool):
            raise ConfigError(f"debug_checks: expected true or false, got {self.debug_checks!r}")
        may_be_zero = ("host_pool_bytes", "admission_reserve_pages", "population_pages")
        for name, value in asdict(self).items():
            if name in ("placement", "debug_checks"):
                continue
            least = 0 if name in may_be_zero else 1
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(f"{name}: expected a whole number of at least {least}, got {value!r}")
        if self.max_batch_tokens < self.max_requests * self.max_width:
            raise ConfigError(
                f"max_batch_tokens={self.max_batch_tokens} is below one decode step of all requests: "
                f"max_requests={self.max_requests} x max_width={self.max_width}"
            )

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "HiSparseConfig":
        """Build from a mapping; an unknown key is an error, never dropped."""
        known = {field.name for field in fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ConfigError(f"unknown setting {', '.join(unknown)}; known: {', '.join(sorted(known))}")
        return cls(**values)

    @classmethod
    def from_file(cls, path: str | Path) -> "HiSparseConfig":
        """Read a JSON object of settings."""
        try:
            values = json.loads(Path(path).read_text())
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
        except json.JSONDecodeError as error:
            raise ConfigError(f"{path}:{error.lineno}: not JSON: {error.msg}") from None
        if not isinstance(values, dict):
            raise ConfigError(f"{path}: expected a JSON object, got {type(values).__name__}")
        return cls.from_dict(values)

    def to_dict(self) -> dict[str, Any]:
        """The settings as plain JSON values."""
        return asdict(self) | {"placement": self.placement.value}
