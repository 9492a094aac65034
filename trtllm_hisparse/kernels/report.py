"""What `doctor` says of the plugin library and the GPU."""

import importlib
from dataclasses import dataclass

import torch

from trtllm_hisparse.kernels import abi

PLUGINS = (
    "HiSparseAppend",
    "HiSparseIndexTopK",
    "HiSparseResolve",
    "HiSparseFollow",
    "HiSparseAttention",
    "HiSparseCopyBack",
)
NAMESPACE = "trtllm_hisparse"
REGISTRIES = ("tensorrt", "tensorrt_lean_bindings")
"""Modules with a plugin registry. The second's library is loaded by a module of its own."""


@dataclass(frozen=True)
class PluginReport:
    """The plugin library.

    path:      where it is; None = none was found.
    version:   of its ABI; None when it does not load.
    headers:   TensorRT version its plugins were compiled for.
    architectures: compute capabilities it holds code for.
    creators:  {plugin: whether the registry has it}; empty when no registry could be asked.
    missing:   what stands in the way of using it, one line each.
    """

    path: str | None
    version: int | None
    headers: str | None
    architectures: tuple[str, ...]
    creators: dict[str, bool]
    missing: tuple[str, ...]


@dataclass(frozen=True)
class GpuReport:
    """The first CUDA device; `missing` says why there is none."""

    name: str | None
    compute_capability: str | None
    memory_bytes: int | None
    missing: str | None


def gpu() -> GpuReport:
    """Look at the first CUDA device."""
    if not torch.cuda.is_available():
        built = torch.version.cuda
        return GpuReport(
            None, None, None, "torch sees no CUDA device" if built else "torch was built without CUDA"
        )
    found = torch.cuda.get_device_properties(0)
    return GpuReport(found.name, f"{found.major}.{found.minor}", found.total_memory, None)


def plugins() -> PluginReport:
    """Load the plugin library, and ask a TensorRT registry for its creators where there is one."""
    file = abi.path()
    where = str(file) if file else None
    try:
        abi.load()
    except RuntimeError as error:
        return PluginReport(where, None, None, (), {}, (str(error),))
    creators, missing = _creators(str(file))
    return PluginReport(where, abi.VERSION, abi.tensorrt_version(), abi.architectures(), creators, missing)


def _creators(library: str) -> tuple[dict[str, bool], tuple[str, ...]]:
    for name in REGISTRIES:
        try:
            if name == "tensorrt_lean_bindings":
                importlib.import_module("tensorrt_lean_libs")
            registry = importlib.import_module(name).get_plugin_registry()
        except (ImportError, AttributeError, OSError, RuntimeError):  # a stub, or libraries that are not there
            continue
        if registry.load_library(library) is None:
            return {}, (f"{library}: the registry of {name} cannot load it",)
        return {p: registry.get_creator(p, "1", NAMESPACE) is not None for p in PLUGINS}, ()
    return {}, (f"no TensorRT registry to load it into: none of {', '.join(REGISTRIES)} can be imported",)
