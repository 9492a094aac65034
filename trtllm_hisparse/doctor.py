"""`trtllm-hisparse doctor`: what this machine can run, and what keeps it from running the rest.

Packages are looked up, not loaded, apart from torch, the plugin library and, to ask it for the plugins, a TensorRT
runtime.
"""

import argparse
import importlib.util
import json
import os
import platform
import shutil
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from trtllm_hisparse.config import GIB, HiSparseConfig
from trtllm_hisparse.kernels import report
from trtllm_hisparse.kernels.report import GpuReport, PluginReport
from trtllm_hisparse.memory import available_bytes

PACKAGES = ("numpy", "tensorrt", "tensorrt_rtx", "tensorrt_llm", "pytriton", "tritonclient")
DISTRIBUTIONS = {"pytriton": "nvidia-pytriton"}
"""Where the distribution's name is not the module's."""


@dataclass(frozen=True)
class Machine:
    """What was found. A package, tool or device that is not there is None.

    packages:         {module: version}, for each of `PACKAGES`.
    gpu:              the first CUDA device, or why there is none.
    plugins:          the plugin library, or why it cannot be used.
    cuda:             CUDA version torch was built with.
    triton_stub:      the nvidia-pytriton wheel has a Python stub for this Python.
    available_bytes:  memory this process may still take, container limits included.
    """

    python: str
    torch: str
    cuda: str | None
    gpu: GpuReport
    plugins: PluginReport
    packages: Mapping[str, str | None]
    tritonserver: str | None
    triton_stub: bool
    nvcc: str | None
    available_bytes: int


@dataclass(frozen=True)
class Capability:
    """One thing this package does. missing: what stands in the way, one line each; empty = it runs here."""

    name: str
    missing: tuple[str, ...]

    @property
    def available(self) -> bool:
        """Whether it runs here."""
        return not self.missing


# -- looking ----------------------------------------------------------------------------------------------
def inspect() -> Machine:
    """Look at this machine."""
    return Machine(
        python=platform.python_version(),
        torch=torch.__version__,
        cuda=torch.version.cuda,
        gpu=report.gpu(),
        plugins=report.plugins(),
        packages={name: _version(name) for name in PACKAGES},
        tritonserver=shutil.which("tritonserver"),
        triton_stub=_triton_stub(),
        nvcc=_nvcc(),
        available_bytes=available_bytes(),
    )


def _version(module: str) -> str | None:
    if importlib.util.find_spec(module) is None:
        return None
    try:
        return version(DISTRIBUTIONS.get(module, module))
    except PackageNotFoundError:  # a build of one's own on sys.path
        return "unknown"


def _triton_stub() -> bool:
    spec = importlib.util.find_spec("pytriton")
    if spec is None or not spec.submodule_search_locations:
        return False
    stubs = Path(spec.submodule_search_locations[0]) / "tritonserver" / "python_backend_stubs"
    return (stubs / f"{sys.version_info.major}.{sys.version_info.minor}").is_dir()


def _nvcc() -> str | None:
    """nvcc of the PATH, else of CUDA_HOME, else of the usual place."""
    home = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin"
    return shutil.which("nvcc") or shutil.which("nvcc", path=str(home))


# -- judging ----------------------------------------------------------------------------------------------
def capabilities(machine: Machine, config: HiSparseConfig) -> tuple[Capability, ...]:
    """What `machine` can run with pools as in `config`, in the order one would try them."""
    return (
        Capability("torch engine on the CPU, embedded", _short_of(machine, config)),
        Capability("Triton server", _why_no_server(machine)),
        Capability("Triton client", _without(machine.packages, "tritonclient", "trtllm-hisparse[client]")),
        Capability("CUDA kernels", _why_no_kernels(machine)),
        Capability("TensorRT plugins", machine.plugins.missing),
        Capability("serving on a GPU", ("this version serves on the CPU; its kernels are called by tests alone",)),
    )


def _short_of(machine: Machine, config: HiSparseConfig) -> tuple[str, ...]:
    """On a CPU the device pool is ordinary memory too."""
    need = config.device_pool_bytes + config.host_pool_bytes
    if machine.available_bytes >= need:
        return ()
    return (f"memory: the default pools need {need / GIB:.2f} GiB, {machine.available_bytes / GIB:.2f} available",)


def _why_no_kernels(machine: Machine) -> tuple[str, ...]:
    if machine.plugins.version is None:
        return machine.plugins.missing
    if machine.gpu.compute_capability is None:
        return (f"GPU: {machine.gpu.missing}",)
    have = int(machine.gpu.compute_capability.replace(".", ""))
    built = [int(name) for name in machine.plugins.architectures]
    # Machine code runs within its major version; the newest is there as PTX too.
    if max(built) <= have or any(code // 10 == have // 10 and code <= have for code in built):
        return ()
    return (
        f"plugins: built for {', '.join(map(str, built))}, this GPU is {have}; run `make plugins ARCH={have}`",
    )


def _why_no_server(machine: Machine) -> tuple[str, ...]:
    """A system tritonserver brings its own Python backend; the wheel's has conditions."""
    if machine.tritonserver:
        return ()
    if machine.packages["pytriton"] is None:
        return ("tritonserver: none on PATH, and no nvidia-pytriton (pip install 'trtllm-hisparse[server]')",)
    missing = []
    if not machine.triton_stub:
        missing.append(f"nvidia-pytriton: has no Python backend stub for Python {machine.python}")
    numpy = machine.packages["numpy"]
    if numpy is None or int(numpy.split(".")[0]) >= 2:
        missing.append(f"numpy: the Python backend of nvidia-pytriton needs 1.x, found {numpy}")
    return tuple(missing)


def _without(packages: Mapping[str, str | None], name: str, remedy: str) -> tuple[str, ...]:
    return () if packages[name] else (f"{name}: not installed (pip install '{remedy}')",)


# -- telling ----------------------------------------------------------------------------------------------
def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command."""
    text = "what this machine can run and why not"
    parser = subparsers.add_parser("doctor", help=text, description=text)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print what was found and what runs. Returns 1 when not even the embedded engine does."""
    machine = inspect()
    found = capabilities(machine, HiSparseConfig())
    if args.json:
        able = [{"name": c.name, "available": c.available, "missing": c.missing} for c in found]
        machine_without = asdict(machine)
        parts = {name: machine_without.pop(name) for name in ("gpu", "plugins")}
        print(json.dumps({"machine": machine_without, **parts, "capabilities": able}))
    else:
        console = Console()
        console.print(_machine_table(machine))
        console.print(_capability_table(found))
    return 0 if found[0].available else 1


def _machine_table(machine: Machine) -> Table:
    table = Table(title="this machine", title_justify="left", show_header=False)
    rows = {
        "Python": machine.python,
        "torch": f"{machine.torch}, {f'CUDA {machine.cuda}' if machine.cuda else 'no CUDA'}",
        "GPU": machine.gpu.name and f"{machine.gpu.name}, compute capability {machine.gpu.compute_capability}",
        "plugin library": machine.plugins.path,
        "plugins built for": ", ".join(machine.plugins.architectures),
        **machine.packages,
        "tritonserver on PATH": machine.tritonserver,
        "nvcc": machine.nvcc,
        "available memory": f"{machine.available_bytes / GIB:.1f} GiB",
    }
    for what, value in rows.items():
        table.add_row(what, (value or "none").replace("[", r"\["))
    return table


def _capability_table(found: tuple[Capability, ...]) -> Table:
    table = Table(title="what it can run", title_justify="left", show_header=False)
    for capability in found:
        mark = "[green]yes[/]" if capability.available else "[red]no[/]"
        table.add_row(capability.name, mark, "\n".join(capability.missing).replace("[", r"\["))
    return table
