#!/usr/bin/env python3
"""Stream a completion from a running server over gRPC. Ctrl-C cancels the request."""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from trtllm_hisparse.serving.client import InferenceServerException, TextStream


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompt", help="the prompt, or - to read it from standard input")
    parser.add_argument("--url", default="127.0.0.1:8001", help="gRPC address (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=128, help="output tokens (default: %(default)s)")
    parser.add_argument("--temperature", type=float, help="0 or not given: greedy")
    parser.add_argument("--seed", type=int, help="of the draws, with a temperature")
    parser.add_argument("--stop", action="append", default=[], help="string that ends the output; repeatable")
    args = parser.parse_args()
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    with TextStream(
        args.url,
        prompt,
        args.max_tokens,
        temperature=args.temperature,
        seed=args.seed,
        stop=args.stop,
    ) as stream:
        try:
            for piece in stream:
                print(piece.text, end="", flush=True)
        except InferenceServerException as error:
            print(f"error: {error.message()}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            print("\ncancelled", file=sys.stderr)
            return 130
    print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
