"""Shared test set-up."""

import os
import sys
from pathlib import Path

import pytest
import torch

from trtllm_hisparse.kernels import abi

sys.path.insert(0, str(Path(__file__).parent))
# Two busy threads on two busy cores spend their time in barriers; the server started by a test inherits this.
os.environ["OMP_NUM_THREADS"] = "1"
torch.set_num_threads(1)


def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: needs a CUDA device and the built kernels (`make plugins`)")


def pytest_collection_modifyitems(items):
    missing = why_no_gpu()
    if missing:
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason=missing))


def why_no_gpu():
    if not torch.cuda.is_available():
        return "no CUDA device"
    try:
        abi.load()
    except RuntimeError as error:
        return str(error)
    return None
