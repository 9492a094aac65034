"""`make demo`: a served request, end to end, on a machine without a GPU.

Makes a small GLM-DSA checkpoint of random weights, starts a real Triton server on loopback with a device pool too
small for all histories, streams several long prompts at once over gRPC, shows what the hierarchy did, and compares
every token with a run that keeps everything resident. The last line printed is one JSON object.
"""

import importlib.util
import json
import re
import sys
import threading
import time
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from trtllm_hisparse.cli_generate import generate
from trtllm_hisparse.config import MIB, HiSparseConfig, Placement
from trtllm_hisparse.models.config import load_config
from trtllm_hisparse.models.synthetic import write_checkpoint
from trtllm_hisparse.runtime.build import load_runtime
from trtllm_hisparse.runtime.request import Request, SamplingParams
from trtllm_hisparse.serving.client import TextStream
from trtllm_hisparse.serving.metrics import METRICS
from trtllm_hisparse.serving.server import TritonServer
from trtllm_hisparse.serving.tokenizer import Tokenizer

BUILD = Path("build/demo")
PROMPTS = (
    ("textwrap", 6000),
    ("heapq", 4500),
    ("queue", 5200),
    ("shlex", 3100),
    ("string", 5700),
    ("sched", 2049),
    ("copy", 4800),
    ("contextlib", 3900),
)
"""Modules of the standard library whose source is a prompt, and how many characters of it."""
MAX_TOKENS = 96
FIRST_WAVE = 4
"""Clients that start at once; the others arrive when these are decoding and their history fills the pool."""

CONFIG = HiSparseConfig(
    placement=Placement.ADAPTIVE,
    device_pool_bytes=36 * MIB,
    host_pool_bytes=160 * MIB,
    hot_rows=256,
    page_rows=32,
    max_requests=8,
    max_context=6144,
    prefill_chunk=128,
    max_batch_tokens=256,
)


@dataclass
class Client:
    """One prompt, its sampling, and what came back."""

    name: str
    prompt: str
    sampling: SamplingParams
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    error: Exception | None = None
    answered: threading.Event = field(default_factory=threading.Event)


def main() -> int:
    """Run the demo; 0 when every token is as it must be."""
    console = Console()
    checkpoint = write_checkpoint(BUILD / "checkpoint", seed=0)
    clients = [_client(n, module, length) for n, (module, length) in enumerate(PROMPTS)]

    console.rule("streaming from a Triton server")
    with TritonServer(checkpoint=checkpoint, config=CONFIG) as server:
        about = server.metadata()
        console.print(f"{about['name']} {about['version']} on {server.grpc_url}, checkpoint {checkpoint}")
        _stream_all(console, server.grpc_url, clients)
        metrics = _final_metrics(server.metrics_url)
    failed = [client for client in clients if client.error is not None]
    for client in failed:
        console.print(f"{client.name}: {client.error}", style="red")

    console.rule("the same requests, everything resident")
    equal = not failed and _resident_tokens(checkpoint, clients) == [client.tokens for client in clients]
    spec = load_config(checkpoint).spec(torch.float32)
    row_bytes = spec.row_bytes_per_token + spec.index_bytes_per_token
    rows = sum(len(client.prompt.encode()) + len(client.tokens) for client in clients)  # a token is a byte
    report = _report(metrics, len(clients), int(rows * row_bytes), equal, f"{about['name']} {about['version']}")
    console.print(_table(metrics, report))
    console.print("tokens equal the resident run's" if equal else "tokens DIFFER from the resident run's")
    print(json.dumps(report))
    return 0 if equal else 1


def _client(n: int, module: str, length: int) -> Client:
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    text = Path(spec.origin).read_text(encoding="utf-8")[:length]
    # Half of them greedy, half sampled: both must repeat to the last token.
    return Client(f"{module}.py", text, SamplingParams(temperature=0.8 * (n % 2), seed=n))


def _stream_all(console: Console, url: str, clients: Sequence[Client]) -> None:
    """Two waves of clients, each on a stream of its own; their text as it arrives."""

    def stream(client: Client) -> None:
        try:
            with TextStream(
                url,
                client.prompt,
                MAX_TOKENS,
                temperature=client.sampling.temperature,
                seed=client.sampling.seed,
            ) as pieces:
                line = ""
                for piece in pieces:
                    client.answered.set()
                    client.tokens += piece.tokens
                    client.text += piece.text
                    line += piece.text
                    if len(line) >= 32 or piece.reason is not None:
                        console.print(Text(f"{client.name:>14} | ", "cyan") + Text(repr(line)), soft_wrap=True)
                        line = ""
        except Exception as error:  # shown, and the demo fails
            client.error = error
            client.answered.set()

    threads = [threading.Thread(target=stream, args=(client,)) for client in clients]
    for thread in threads[:FIRST_WAVE]:
        thread.start()
    for client in clients[:FIRST_WAVE]:
        client.answered.wait()
    for thread in threads[FIRST_WAVE:]:
        thread.start()
    for thread in threads:
        thread.join()


def _resident_tokens(checkpoint: Path, clients: Sequence[Client]) -> list[list[int]]:
    """The tokens of a run without any hierarchy: the whole context of every request on the device."""
    tokenizer = Tokenizer(checkpoint)
    config = replace(
        CONFIG,
        placement=Placement.RESIDENT,
        device_pool_bytes=512 * MIB,
        max_requests=len(clients),
    )
    runtime = load_runtime(str(checkpoint), config)
    try:
        requests = [
            Request(tokenizer.encode(client.prompt), MAX_TOKENS, client.sampling, tokenizer.eos_ids)
            for client in clients
        ]
        outputs, _ = generate(runtime, requests)
    finally:
        runtime.close()
    return [output.tokens for output in outputs]


def _final_metrics(url: str) -> dict[str, int]:
    """The metrics once the model has published that nothing runs any more (it does so a few times a second)."""
    for _ in range(100):
        metrics = read_metrics(url)
        if metrics["hisparse_requests_running"] == 0:
            break
        time.sleep(0.1)
    return metrics


def read_metrics(url: str) -> dict[str, int]:
    """Our series of a server's `/metrics`: {`name` or `name.label value`: value}."""
    with urllib.request.urlopen(f"http://{url}/metrics", timeout=10) as response:
        page = response.read().decode()
    values = {}
    for metric in METRICS:
        for labels, value in re.findall(rf"^{metric.name}(?:\{{(.*)\}})? (\S+)$", page, re.MULTILINE):
            of = re.search(rf'{metric.label}="([^"]*)"', labels) if metric.label else None
            values[f"{metric.name}.{of[1]}" if of else metric.name] = int(float(value))
    return values


def _report(
    metrics: Mapping[str, int], requests: int, history_bytes: int, equal: bool, server: str
) -> dict[str, object]:
    return {
        "requests": requests,
        "tokens": metrics["hisparse_tokens_total.output"],
        "tokens_equal_resident": equal,
        "census": {tier: metrics[f"hisparse_rows_total.{tier}"] for tier in ("direct", "hot", "host")},
        "admissions": metrics["hisparse_admissions_total"],
        "waits": metrics["hisparse_waits_total"],
        "reclaims": metrics["hisparse_reclaims_total"],
        "populated_pages": metrics["hisparse_populated_pages_total"],
        "device_pool_bytes": metrics["hisparse_pool_bytes.device"],
        "device_peak_bytes": metrics["hisparse_pool_peak_bytes.device"],
        "history_bytes": history_bytes,
        "server": server,
    }


def _table(metrics: Mapping[str, int], report: Mapping[str, object]) -> Table:
    """What the hierarchy did while it served."""
    table = Table("counter", "value", title="the hierarchy, from /metrics")
    table.columns[1].justify = "right"
    rows = sum(metrics[f"hisparse_rows_total.{tier}"] for tier in ("direct", "hot", "host"))
    for name, value in metrics.items():
        share = f"{value / max(rows, 1):8.2%}" if name.startswith("hisparse_rows_total") else ""
        table.add_row(name.removeprefix("hisparse_"), f"{value:,}{share}")
    table.add_row("history of all requests, bytes", f"{report['history_bytes']:,}")
    return table


if __name__ == "__main__":
    sys.exit(main())
