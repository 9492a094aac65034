"""ctypes mirror of `plugins/include/hisparse.h`: same names, same order. Field meanings are documented there."""

import ctypes
import os
from ctypes import POINTER, byref, c_char_p, c_float, c_int32, c_int64, c_size_t, c_void_p
from functools import cache
from pathlib import Path

VERSION = 1
MAX_TOP_K, MAX_WIDTH, MAX_HOT_ROWS, MAX_MEMBERS, MAX_REQUESTS, MAX_CONTEXT = 2048, 16, 32768, 8, 1024, 1 << 20
F32, BF16, FP8, FP8_DS_MLA = range(4)
COUNTERS = ("direct", "hot", "host", "staged", "copied", "lost", "corrupt")
"""Order of the resolver's int64 counters."""

LIBRARY = "libtrtllm_hisparse_plugins.so"
ENVIRONMENT = "TRTLLM_HISPARSE_PLUGINS"

_OK, _BAD_ARGUMENT = 0, 1


class _Params(ctypes.Structure):
    """Pointers are given as integers (`tensor.data_ptr()`); what is not given is 0."""


class Plan(_Params):
    _fields_ = (("row", c_void_p), ("src", c_void_p), ("dst", c_void_p), ("count", c_void_p))


class ResolveParams(_Params):
    _fields_ = (
        ("requests", c_int32),
        ("queries", c_int32),
        ("max_width", c_int32),
        ("top_k", c_int32),
        ("slots", c_int32),
        ("pages", c_int32),
        ("hot_rows", c_int32),
        ("hot_pages", c_int32),
        ("page_rows", c_int32),
        ("stage_rows", c_int32),
        ("selections", c_void_p),
        ("cu_queries", c_void_p),
        ("slot_of", c_void_p),
        ("visible", c_void_p),
        ("page_map", c_void_p),
        ("host_map", c_void_p),
        ("hot_table", c_void_p),
        ("owners", c_void_p),
        ("lru", c_void_p),
        ("stage_base", c_void_p),
        ("locations", c_void_p),
        ("plan", Plan),
        ("counters", c_void_p),
    )


class PromoteParams(_Params):
    _fields_ = (("step", ResolveParams), ("last_query", c_void_p), ("promoted", Plan))


class CopyParams(_Params):
    _fields_ = (
        ("requests", c_int32),
        ("queries", c_int32),
        ("top_k", c_int32),
        ("members", c_int32),
        ("cu_queries", c_void_p),
        ("plan", Plan),
        ("src", c_void_p * MAX_MEMBERS),
        ("dst", c_void_p * MAX_MEMBERS),
        ("row_bytes", c_int32 * MAX_MEMBERS),
        ("src_rows", c_int64),
        ("dst_rows", c_int64),
        ("counters", c_void_p),
    )


class AppendParams(_Params):
    _fields_ = (
        ("rows", c_int32),
        ("dim", c_int32),
        ("source_format", c_int32),
        ("format", c_int32),
        ("paged_keys", c_int32),
        ("page_rows", c_int32),
        ("scale", c_float),
        ("source", c_void_p),
        ("destination", c_void_p),
        ("store", c_void_p),
        ("store_rows", c_int64),
    )


class IndexParams(_Params):
    _fields_ = (
        ("requests", c_int32),
        ("queries", c_int32),
        ("heads", c_int32),
        ("dim", c_int32),
        ("top_k", c_int32),
        ("page_rows", c_int32),
        ("table_pages", c_int32),
        ("query_format", c_int32),
        ("key_format", c_int32),
        ("scale", c_float),
        ("query", c_void_p),
        ("weight", c_void_p),
        ("keys", c_void_p),
        ("key_pages", c_int64),
        ("page_table", c_void_p),
        ("cu_queries", c_void_p),
        ("visible", c_void_p),
        ("selections", c_void_p),
        ("unordered", c_void_p),
        ("workspace", c_void_p),
    )


class AttentionParams(_Params):
    _fields_ = (
        ("queries", c_int32),
        ("heads", c_int32),
        ("dim", c_int32),
        ("latent", c_int32),
        ("top_k", c_int32),
        ("query_format", c_int32),
        ("row_format", c_int32),
        ("out_format", c_int32),
        ("scale", c_float),
        ("row_scale", c_float),
        ("query", c_void_p),
        ("rows", c_void_p),
        ("store_rows", c_int64),
        ("locations", c_void_p),
        ("out", c_void_p),
        ("workspace", c_void_p),
    )


def path() -> Path | None:
    """The plugin library: `TRTLLM_HISPARSE_PLUGINS`, else beside this package or in the source tree's `build/`."""
    named = os.environ.get(ENVIRONMENT)
    if named:
        return Path(named)
    package = Path(__file__).resolve().parents[1]
    found = (place / LIBRARY for place in (package, package.parent / "build"))
    return next((file for file in found if file.is_file()), None)


@cache
def load() -> ctypes.CDLL:
    """The library; RuntimeError when there is none, it does not load, or its ABI has another version."""
    file = path()
    if file is None:
        raise RuntimeError(f"{LIBRARY}: not found; build it with `make plugins`, or name it in {ENVIRONMENT}")
    try:
        library = ctypes.CDLL(str(file))
    except OSError as error:
        raise RuntimeError(f"{file}: cannot be loaded: {error}") from None
    version = library.hs_version()
    if version != VERSION:
        raise RuntimeError(
            f"{file}: expected ABI version {VERSION}, got {version}; rebuild it with `make plugins`"
        )
    names = (*_CALLS, *_WORKSPACES, "hs_copy_chunks", "hs_architectures", "hs_tensorrt_version")
    missing = [name for name in names if not hasattr(library, name)]
    if missing:
        raise RuntimeError(f"{file}: lacks {', '.join(missing)}; run `make plugins` again")
    for name in ("hs_last_error", "hs_architectures", "hs_tensorrt_version"):
        getattr(library, name).restype = c_char_p
    for name, params in _CALLS.items():
        getattr(library, name).argtypes = (POINTER(params), c_void_p)
    for name, params in _WORKSPACES.items():
        getattr(library, name).argtypes = (POINTER(params),)
        getattr(library, name).restype = c_size_t
    library.hs_copy_chunks.argtypes = (c_int64, POINTER(c_void_p), POINTER(c_void_p), POINTER(c_size_t), c_void_p)
    return library


_CALLS: dict[str, type[_Params]] = {
    "hs_resolve": ResolveParams,
    "hs_promote": PromoteParams,
    "hs_copy_rows": CopyParams,
    "hs_append": AppendParams,
    "hs_index_top_k": IndexParams,
    "hs_attention": AttentionParams,
}
_WORKSPACES: dict[str, type[_Params]] = {
    "hs_index_workspace": IndexParams,
    "hs_attention_workspace": AttentionParams,
}


def architectures() -> tuple[str, ...]:
    """Compute capabilities the library was built for, as "90"."""
    return tuple(load().hs_architectures().decode().split(","))


def tensorrt_version() -> str:
    """Version of the TensorRT headers its plugins were compiled with."""
    return str(load().hs_tensorrt_version().decode())


def call(name: str, params: _Params, stream: int) -> None:
    """Run a call on a CUDA stream (`torch.cuda.Stream.cuda_stream`).

    ValueError, naming the field, for a refused argument; RuntimeError for a CUDA failure.
    """
    _raise(load()[name](byref(params), stream))


def workspace(name: str, params: _Params) -> int:
    """Bytes of workspace a call needs."""
    return int(load()[name](byref(params)))


def copy_chunks(chunks: list[tuple[int, int, int]], stream: int) -> None:
    """Copy `(destination, source, bytes)` chunks between any memories, by the copy engines."""
    n = len(chunks)
    destinations, sources, sizes = zip(*chunks, strict=True) if n else ((), (), ())
    _raise(
        load().hs_copy_chunks(
            n, (c_void_p * n)(*destinations), (c_void_p * n)(*sources), (c_size_t * n)(*sizes), stream
        )
    )


def _raise(status: int) -> None:
    if status == _OK:
        return
    message = load().hs_last_error().decode()
    raise ValueError(message) if status == _BAD_ARGUMENT else RuntimeError(message)
