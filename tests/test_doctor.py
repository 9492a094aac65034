"""`trtllm-hisparse doctor`: judgements on machines we do not have, and a look at the one we have."""

import dataclasses
import json
import subprocess
import sys

import numpy
import pytest
import torch

from trtllm_hisparse import doctor
from trtllm_hisparse.cli import main
from trtllm_hisparse.config import GIB, MIB, HiSparseConfig
from trtllm_hisparse.kernels import report
from trtllm_hisparse.kernels.report import GpuReport, PluginReport
from trtllm_hisparse.memory import available_bytes

SERVER = doctor.Machine(
    python="3.11.9",
    torch="2.13.0",
    cuda="13.0",
    gpu=GpuReport("a GPU", "9.0", 100 * GIB, None),
    plugins=PluginReport("plugins.so", 1, "10.14.1", ("80", "90"), {"HiSparseResolve": True}, ()),
    packages=dict.fromkeys(doctor.PACKAGES, "1.26.4"),
    tritonserver="/opt/tritonserver/bin/tritonserver",
    triton_stub=True,
    nvcc="/usr/local/cuda/bin/nvcc",
    available_bytes=64 * GIB,
)


def missing(**changes):
    """{capability: what is missing} on SERVER with changes; packages given by name replace single entries."""
    packages = dict(SERVER.packages) | changes.pop("packages", {})
    machine = dataclasses.replace(SERVER, packages=packages, **changes)
    found = doctor.capabilities(machine, HiSparseConfig())
    return {c.name: c.missing for c in found if not c.available}


NOT_BUILT = {"serving on a GPU": ("this version serves on the CPU; its kernels are called by tests alone",)}


def test_a_full_machine_runs_all_there_is():
    assert missing() == NOT_BUILT


def test_kernels_need_a_gpu_and_code_for_it():
    none = GpuReport(None, None, None, "torch was built without CUDA")
    assert missing(gpu=none, cuda=None) == NOT_BUILT | {"CUDA kernels": ("GPU: torch was built without CUDA",)}
    for capability, runs in {"7.5": False, "8.0": True, "8.9": True, "9.0": True, "12.0": True}.items():
        gpu = dataclasses.replace(SERVER.gpu, compute_capability=capability)
        assert ("CUDA kernels" not in missing(gpu=gpu)) == runs
    newer = dataclasses.replace(SERVER.plugins, architectures=("100", "120"))
    [why] = missing(plugins=newer)["CUDA kernels"]
    assert why == "plugins: built for 100, 120, this GPU is 90; run `make plugins ARCH=90`"


def test_a_library_that_is_not_built():
    none = PluginReport(None, None, None, (), {}, ("not found; build it with `make plugins`",))
    assert missing(plugins=none) == NOT_BUILT | dict.fromkeys(("CUDA kernels", "TensorRT plugins"), none.missing)


def test_without_a_registry_the_plugins_cannot_be_asked_for():
    unasked = dataclasses.replace(SERVER.plugins, creators={}, missing=("no TensorRT registry",))
    assert missing(plugins=unasked) == NOT_BUILT | {"TensorRT plugins": ("no TensorRT registry",)}


def test_the_built_library_is_reported_with_its_creators(built_plugins):
    pytest.importorskip("tensorrt_lean_bindings")
    code = "import json, dataclasses; from trtllm_hisparse.kernels import report;"
    code += "print(json.dumps(dataclasses.asdict(report.plugins())))"
    run = [sys.executable, "-c", code]  # a process of its own: TensorRT's registry holds a library once
    found = json.loads(subprocess.run(run, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
    assert found["path"] == str(built_plugins)
    assert found["version"] == 1
    assert found["headers"].startswith("1")
    assert found["creators"] == dict.fromkeys(report.PLUGINS, True)
    assert found["missing"] == []


def test_a_missing_client():
    assert missing(packages={"tritonclient": None}) == NOT_BUILT | {
        "Triton client": ("tritonclient: not installed (pip install 'trtllm-hisparse[client]')",)
    }


def test_a_system_server_needs_no_wheel():
    assert missing(packages={"pytriton": None, "numpy": "2.4.6"}, triton_stub=False) == NOT_BUILT


def test_conditions_of_the_wheels_server():
    assert missing(tritonserver=None) == NOT_BUILT
    [why] = missing(tritonserver=None, packages={"pytriton": None})["Triton server"]
    assert "trtllm-hisparse[server]" in why
    stub, numpy_2 = missing(tritonserver=None, triton_stub=False, packages={"numpy": "2.4.6"})["Triton server"]
    assert "no Python backend stub for Python 3.11.9" in stub
    assert "needs 1.x, found 2.4.6" in numpy_2


def test_too_little_memory_for_the_pools():
    config = HiSparseConfig()
    need = config.device_pool_bytes + config.host_pool_bytes
    assert missing(available_bytes=need) == NOT_BUILT
    [why] = missing(available_bytes=need - 1)["torch engine on the CPU, embedded"]
    assert "need 1.25 GiB" in why


@pytest.fixture
def system(tmp_path):
    """A /proc with 8 GiB available, and an empty cgroup folder."""
    proc, cgroup = tmp_path / "proc", tmp_path / "cgroup"
    proc.mkdir()
    (cgroup / "memory").mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemTotal: 16777216 kB\nMemAvailable: {8 * MIB} kB\nHugePages_Total: 0\n")
    return proc, cgroup


def test_memory_without_a_container(system):
    assert available_bytes(*system) == 8 * GIB


@pytest.mark.parametrize(
    ("limit", "usage", "expected"),
    [("max", 5 * GIB, 8 * GIB), (6 * GIB, 2 * GIB, 4 * GIB), (GIB, 2 * GIB, 0), (1 << 62, GIB, 8 * GIB)],
)
@pytest.mark.parametrize(
    "names", [("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes")]
)
def test_memory_limited_by_a_container(system, names, limit, usage, expected):
    for name, value in zip(names, (limit, usage), strict=True):
        (system[1] / name).write_text(f"{value}\n")
    assert available_bytes(*system) == expected


def test_this_machine(capsys):
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["machine"]["torch"] == torch.__version__
    assert found["machine"]["packages"]["numpy"] == numpy.__version__
    assert found["machine"]["available_bytes"] > 0
    assert (found["gpu"]["missing"] is None) == torch.cuda.is_available()
    assert (found["plugins"]["version"] is None) == (found["plugins"]["architectures"] == [])
    able = {c["name"]: c["available"] for c in found["capabilities"]}
    assert able["torch engine on the CPU, embedded"] is True
    assert able["serving on a GPU"] is False


def test_table(capsys):
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "torch engine on the CPU, embedded" in text
    assert torch.__version__ in text
