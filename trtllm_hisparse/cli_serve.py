"""`trtllm-hisparse serve`: a Triton Inference Server on a checkpoint, until Ctrl-C or SIGTERM."""

import argparse
import signal
import sys
from pathlib import Path
from typing import Any

from trtllm_hisparse.config import HiSparseConfig
from trtllm_hisparse.serving.server import MODEL_REPOSITORY, ServerError, TritonServer


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `serve` to the command line."""
    parser = subparsers.add_parser(
        "serve", help="serve a checkpoint through Triton Inference Server", description=__doc__
    )
    parser.add_argument("checkpoint", type=Path, help="Hugging Face checkpoint directory")
    parser.add_argument("--config", type=Path, metavar="F.json", help="KV hierarchy settings (JSON object)")
    parser.add_argument("--dtype", default="float32", help="float32 or bfloat16 (default: %(default)s)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--http-port", type=int, default=8000, help="0: a free one (default: %(default)s)")
    parser.add_argument("--grpc-port", type=int, default=8001, help="0: a free one (default: %(default)s)")
    parser.add_argument("--metrics-port", type=int, default=8002, help="0: a free one (default: %(default)s)")
    parser.add_argument("--log-file", type=Path, help="Triton's log (default: a temporary file)")
    parser.add_argument(
        "--model-repository", type=Path, default=MODEL_REPOSITORY, help="templates (default: %(default)s)"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serve until told to stop; the exit status. ConfigError and CheckpointError for a user's mistake."""
    # An end by SIGTERM takes the same way out as Ctrl-C: through the server's `stop`.
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        with TritonServer(
            checkpoint=args.checkpoint,
            config=HiSparseConfig.from_file(args.config) if args.config else HiSparseConfig(),
            dtype=args.dtype,
            host=args.host,
            http_port=args.http_port,
            grpc_port=args.grpc_port,
            metrics_port=args.metrics_port,
            log_file=args.log_file,
            model_repository=args.model_repository,
        ) as server:
            print(f"ready: HTTP {server.http_url}  gRPC {server.grpc_url}  metrics {server.metrics_url}/metrics")
            print(f"log:   {server.log_path}", flush=True)
            status = server.wait()
            print(f"error: tritonserver exited with status {status}\n{server.error()}", file=sys.stderr)
            return 1
    except KeyboardInterrupt:
        return 0
    except ServerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt
