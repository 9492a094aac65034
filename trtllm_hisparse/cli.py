"""`trtllm-hisparse`: one command per job; a user's mistake is one line on stderr and exit status 2."""

import argparse
import sys
from collections.abc import Sequence

from trtllm_hisparse import __version__, cli_generate, cli_plan, cli_serve, doctor


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    parser = argparse.ArgumentParser(
        prog="trtllm-hisparse",
        description="Load-adaptive KV hierarchy for long-context sparse-attention models.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for command in (cli_generate, cli_serve, cli_plan, doctor):
        command.add_parser(commands)
    args = parser.parse_args(argv)
    try:
        status: int = args.run(args)
    except ValueError as error:  # ConfigError, CheckpointError, RequestError and their like
        print(f"error: {error}", file=sys.stderr)
        return 2
    return status


if __name__ == "__main__":
    sys.exit(main())
