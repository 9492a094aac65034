"""Shared test set-up."""

import os
import shutil
import subprocess
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


@pytest.fixture(scope="session")
def built_plugins():
    """Path of the plugin library, built from this source for one compute capability if need be."""
    tools = {name: shutil.which(name) for name in ("nvcc", "cmake", "c++")}
    tools["nvcc"] = tools["nvcc"] or shutil.which("nvcc", path="/usr/local/cuda/bin")
    missing = [name for name, path in tools.items() if path is None]
    if missing:
        pytest.skip(f"cannot build the plugins: no {', '.join(missing)}")
    root = Path(__file__).parents[1]
    arch = os.environ.get("ARCH") or ",".join(built_for()) or "90"
    done = subprocess.run(
        ["build_scripts/plugins.sh"],
        check=False,
        cwd=root,
        env=os.environ | {"ARCH": arch},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return root / "build" / abi.LIBRARY


def built_for():
    """Compute capabilities of the library that is there; none when it does not load."""
    try:
        return abi.architectures()
    except RuntimeError:
        return ()
    finally:
        abi.load.cache_clear()


def why_no_gpu():
    if not torch.cuda.is_available():
        return "no CUDA device"
    try:
        abi.load()
    except RuntimeError as error:
        return str(error)
    return None
