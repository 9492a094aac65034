"""`trtllm-hisparse generate`: prompts from files, text to the terminal, no server."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from trtllm_hisparse.config import MIB, HiSparseConfig, Placement
from trtllm_hisparse.errors import ConfigError, RequestError
from trtllm_hisparse.runtime.build import DTYPES, load_runtime
from trtllm_hisparse.runtime.loop import Runtime
from trtllm_hisparse.runtime.request import Event, Request, SamplingParams
from trtllm_hisparse.runtime.stats import RuntimeStats
from trtllm_hisparse.serving.tokenizer import Tokenizer


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command."""
    parser = subparsers.add_parser("generate", help="generate from prompt files, without a server")
    parser.add_argument("checkpoint", type=Path, help="Hugging Face checkpoint directory")
    parser.add_argument(
        "--prompt-file",
        type=Path,
        action="append",
        required=True,
        metavar="F",
        help="UTF-8 text; repeat it for requests that run together",
    )
    parser.add_argument("--placement", type=Placement, choices=list(Placement), default=Placement.ADAPTIVE)
    parser.add_argument("--device-pool-mib", type=float, default=256.0, help="device pool (default: %(default)s)")
    parser.add_argument("--host-pool-mib", type=float, default=1024.0, help="host pool (default: %(default)s)")
    parser.add_argument("--hot-rows", type=int, default=4096, help="hot-cache rows B (default: %(default)s)")
    parser.add_argument("--page-rows", type=int, default=64, help="rows per page (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=64, help="output tokens (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 = greedy (default)")
    parser.add_argument("--top-k", type=int, default=0, help="0 = all tokens (default)")
    parser.add_argument("--top-p", type=float, default=1.0, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--dtype", choices=list(DTYPES), default="float32", help="default: %(default)s")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


@dataclass
class Output:
    """What one request has produced."""

    tokens: list[int] = field(default_factory=list)
    reason: str | None = None
    error: str | None = None


def run(args: argparse.Namespace) -> int:
    """Generate and print; 1 when a request failed while it ran."""
    tokenizer = Tokenizer(args.checkpoint)
    prompts = [tokenizer.encode(_read(path)) for path in args.prompt_file]
    longest = max(len(prompt) for prompt in prompts) + max(args.max_tokens, 1)
    config = HiSparseConfig(
        placement=args.placement,
        device_pool_bytes=int(args.device_pool_mib * MIB),
        host_pool_bytes=int(args.host_pool_mib * MIB),
        hot_rows=args.hot_rows,
        page_rows=args.page_rows,
        max_requests=len(prompts),
        max_context=longest,
        max_batch_tokens=max(512, len(prompts)),
    )
    sampling = SamplingParams(args.temperature, args.top_k, args.top_p, args.seed)
    requests = [Request(prompt, args.max_tokens, sampling, tokenizer.eos_ids) for prompt in prompts]
    runtime = load_runtime(str(args.checkpoint), config, args.dtype)
    try:
        outputs, stats = generate(runtime, requests, quiet=args.json)
    finally:
        runtime.close()
    texts = [tokenizer.decode(output.tokens) for output in outputs]
    if args.json:
        print(json.dumps(_figures(outputs, texts, stats)))
    else:
        console = Console()
        for path, output, text in zip(args.prompt_file, outputs, texts, strict=True):
            console.rule(f"{path} ({output.error or output.reason})")
            console.print(text, markup=False, highlight=False)
        console.print(stats_table(stats))
    return 1 if any(output.error for output in outputs) else 0


def generate(
    runtime: Runtime, requests: Sequence[Request], *, quiet: bool = False
) -> tuple[list[Output], RuntimeStats]:
    """Run requests together to their ends, with a progress bar on stderr unless `quiet`."""
    outputs = [Output() for _ in requests]
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=quiet or not console.is_terminal) as progress:
        bars = [
            progress.add_task(f"request {n}", total=len(request.prompt) + request.max_tokens)
            for n, request in enumerate(requests)
        ]

        def sink_of(n: int) -> Any:
            def sink(event: Event) -> None:
                outputs[n].tokens += event.tokens
                outputs[n].reason, outputs[n].error = event.reason, event.error
                done = len(requests[n].prompt) + len(outputs[n].tokens)
                progress.update(bars[n], completed=done)

            return sink

        for n, request in enumerate(requests):
            runtime.submit(request, sink_of(n))
        runtime.run_until_idle()
    return outputs, runtime.stats()


def _read(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise RequestError(
            f"{path}: not UTF-8 text: byte {error.start} is {error.object[error.start]:#04x}"
        ) from None
    if not text:
        raise RequestError(f"{path}: the prompt is empty")
    return text


def _figures(outputs: list[Output], texts: list[str], stats: RuntimeStats) -> dict[str, Any]:
    return {
        "outputs": [output.tokens for output in outputs],
        "texts": texts,
        "finish_reasons": [output.reason for output in outputs],
        "errors": [output.error for output in outputs],
        "census": {"direct": stats.direct_rows, "hot": stats.hot_rows, "host": stats.host_rows},
        "pool": {
            "device_pool_bytes": stats.device_pool_bytes,
            "device_peak_bytes": stats.device_peak_bytes,
            "host_pool_bytes": stats.host_pool_bytes,
            "copied_bytes": stats.copied_bytes,
            "backup_bytes": stats.backup_bytes,
            "populated_bytes": stats.populated_bytes,
            "populated_pages": stats.populated_pages,
            "admissions": stats.admissions,
            "waits": stats.waits,
            "reclaims": stats.reclaims,
            "reclaimed_pages": stats.reclaimed_pages,
        },
    }


def stats_table(stats: RuntimeStats) -> Table:
    """The tier census, traffic and memory of a run."""
    rows = stats.direct_rows + stats.hot_rows + stats.host_rows
    table = Table("tier", "selected rows", "share", "bytes copied", title="census")
    for tier, count, moved in (
        ("direct", stats.direct_rows, 0),
        ("hot", stats.hot_rows, 0),
        ("host", stats.host_rows, stats.copied_bytes),
    ):
        table.add_row(tier, f"{count:,}", f"{count / max(rows, 1):.2%}", f"{moved:,}")
    table.caption = (
        f"admissions {stats.admissions}, waits {stats.waits}, reclaims {stats.reclaims} "
        f"({stats.reclaimed_pages} pages), populated {stats.populated_pages} pages\n"
        f"backed up {stats.backup_bytes:,} B, populated {stats.populated_bytes:,} B\n"
        f"device peak {stats.device_peak_bytes:,} of {stats.device_pool_bytes:,} B"
    )
    return table
