"""`trtllm-hisparse plan`: what a session of a model costs, and how many fit on one GPU."""

import argparse
import json
from typing import Any

from rich.console import Console
from rich.table import Table

from trtllm_hisparse.capacity import CapacityPlan, plan
from trtllm_hisparse.config import GIB
from trtllm_hisparse.errors import ConfigError
from trtllm_hisparse.models import registry
from trtllm_hisparse.models.spec import ModelSpec


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command. Its defaults are GLM-5.3 with the DFlash2 drafter (Section 3.4)."""
    parser = subparsers.add_parser(
        "plan",
        help="memory per session and sessions per GPU of a model",
        description="Memory per session and sessions per GPU of a model, from its real sizes; nothing is loaded.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--model", required=True, help=f"one of {', '.join(registry.MODELS)}")
    parser.add_argument("--context", type=int, required=True, help="token positions of one session")
    parser.add_argument("--hot-rows", type=int, default=4096, help="hot-cache rows per session and cache state")
    parser.add_argument("--page-rows", type=int, default=64, help="rows per page")
    parser.add_argument("--slots", type=int, default=35, help="request slots per GPU")
    parser.add_argument("--max-width", type=int, default=8, help="widest verification round, anchor included")
    parser.add_argument("--drafter-window", type=int, default=2048, help="positions the drafter reads")
    parser.add_argument("--drafter-row-bytes", type=int, default=12288, help="bytes of one draft row, all layers")
    parser.add_argument("--device-gib", type=float, help="GiB of one GPU left for sessions, after weights")
    parser.add_argument("--host-gib", type=float, help="GiB of host memory left for backup")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the plan. ConfigError for values that cannot work."""
    spec = registry.get(args.model)
    result = plan(
        spec,
        context=args.context,
        hot_rows=args.hot_rows,
        page_rows=args.page_rows,
        slots=args.slots,
        max_width=args.max_width,
        drafter_window=args.drafter_window,
        drafter_row_bytes=args.drafter_row_bytes,
        device_bytes=_bytes("device_gib", args.device_gib),
        host_bytes=_bytes("host_gib", args.host_gib),
    )
    if args.json:
        print(json.dumps(_figures(spec, result)))
    else:
        console = Console()
        console.print(_session_table(spec, args.context, result))
        console.print(_gpu_table(spec, result))
    return 0


def _bytes(name: str, gib: float | None) -> int | None:
    if gib is None:
        return None
    if not 0 < gib < float("inf"):
        raise ConfigError(f"{name}: expected a finite number above 0, got {gib}")
    return int(gib * GIB)


def _figures(spec: ModelSpec, result: CapacityPlan) -> dict[str, Any]:
    """The plan as plain numbers, unrounded. Session counts are null unless a budget was given."""
    return {
        "model": spec.name,
        "resident_gib_per_session": result.resident / GIB,
        "adaptive_gib_per_session": result.adaptive / GIB,
        "resident_gib_per_session_speculative": result.resident_speculative / GIB,
        "adaptive_gib_per_session_speculative": result.adaptive_speculative / GIB,
        "ring_rows": result.ring_rows,
        "ring_gib": result.ring / GIB,
        "staging_gib": result.staging / GIB,
        "staging_gib_dedicated": result.staging_dedicated / GIB,
        "host_gib_per_session": result.host / GIB,
        "resolver_calls": spec.resolver_calls,
        "follower_copies": spec.follower_copies,
        "chi": spec.chi,
        "sessions_resident": result.sessions(result.resident),
        "sessions_adaptive": result.sessions(result.adaptive),
        "sessions_resident_speculative": result.sessions(result.resident_speculative),
        "sessions_adaptive_speculative": result.sessions(result.adaptive_speculative),
        "sessions_host": result.host_sessions,
    }


def _session_table(spec: ModelSpec, context: int, result: CapacityPlan) -> Table:
    """Rows: placements. Session counts only where a device budget was given."""
    table = Table(title=f"{spec.name}, {context:,} positions: one session", title_justify="left")
    table.add_column("placement")
    columns = ["GPU GiB", "with drafter GiB", "host GiB"]
    if result.device_bytes is not None:
        columns += ["sessions per GPU", "with drafter"]
    for column in columns:
        table.add_column(column, justify="right")
    for placement, plain, speculative, host in (
        ("resident", result.resident, result.resident_speculative, 0),
        ("adaptive", result.adaptive, result.adaptive_speculative, result.host),
    ):
        sessions = (result.sessions(plain), result.sessions(speculative))
        counts = (f"{count:,}" for count in sessions if count is not None)
        table.add_row(placement, _gib(plain), _gib(speculative), _gib(host), *counts)
    table.add_row(
        "ratio",
        f"{result.resident / result.adaptive:.1f}x",
        f"{result.resident_speculative / result.adaptive_speculative:.1f}x",
    )
    return table


def _gpu_table(spec: ModelSpec, result: CapacityPlan) -> Table:
    table = Table(title=f"one GPU, {result.slots} slots", title_justify="left", show_header=False)
    table.add_column("what")
    table.add_column("value", justify="right")
    table.add_row("draft ring, rows per slot", f"{result.ring_rows:,}")
    table.add_row("draft rings, GiB", _gib(result.ring))
    table.add_row(f"staging, {spec.chi} arenas, GiB", _gib(result.staging))
    table.add_row(f"staging if dedicated, {len(spec.payload_owners)} arenas, GiB", _gib(result.staging_dedicated))
    table.add_row("resolver calls per step", str(spec.resolver_calls))
    table.add_row("follower copies per step", str(spec.follower_copies))
    if result.host_sessions is not None:
        table.add_row("sessions the host can back", f"{result.host_sessions:,}")
    return table


def _gib(size: int) -> str:
    return f"{size / GIB:.3f}"
