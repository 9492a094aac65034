#!/usr/bin/env python3
"""Start a Triton Inference Server on a checkpoint: `trtllm-hisparse serve`, from a source tree.

Run it with the Python that has the package's dependencies; the server's models use the same one.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from trtllm_hisparse.cli import main

if __name__ == "__main__":
    sys.exit(main(["serve", *sys.argv[1:]]))
