"""ctypes over host.cpp: a plugin as TensorRT sees it."""

import ctypes
import struct
import subprocess
from pathlib import Path

FLOAT, HALF, INT8, INT32, BOOL, UINT8, FP8, BF16, INT64 = range(9)
"""nvinfer1::DataType."""
DATA_TYPES = range(12)
FORMATS = range(13)
FIELD_FLOAT32, FIELD_INT32 = 1, 5
"""nvinfer1::PluginFieldType."""

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


class Host:
    """The compiled host and the plugin library it loads."""

    def __init__(self, library, out):
        includes = (ROOT / "build/plugins/include_directories.txt").read_text().split()
        built = Path(out) / "host.so"
        compiler = ["c++", "-std=c++17", "-O1", "-shared", "-fPIC", *(f"-isystem{path}" for path in includes)]
        subprocess.run([*compiler, str(HERE / "host.cpp"), "-o", str(built), "-ldl"], check=True)
        self.library = str(library).encode()
        self.c = ctypes.CDLL(str(built))
        for name in ("host_create", "host_clone", "host_attach"):
            getattr(self.c, name).restype = ctypes.c_void_p
        self.c.host_log.restype = self.c.host_name.restype = ctypes.c_char_p
        self.c.host_workspace.restype = ctypes.c_size_t

    def create(self, name, fields, phase=0):
        """The plugin, or None; fields {name: int or float, or (field type, bytes)}."""
        raw = [
            v
            if isinstance(v, tuple)
            else (FIELD_FLOAT32, struct.pack("f", v))
            if isinstance(v, float)
            else (FIELD_INT32, struct.pack("i", v))
            for v in fields.values()
        ]
        n = len(raw)
        names = (ctypes.c_char_p * n)(*(k.encode() for k in fields))
        types = (ctypes.c_int * n)(*(t for t, _ in raw))
        data = (ctypes.c_char_p * n)(*(d for _, d in raw))
        handle = self.c.host_create(self.library, name.encode(), phase, n, names, types, data)
        return Plugin(self, handle) if handle else None

    @property
    def log(self):
        """The last message the library logged."""
        return self.c.host_log().decode()


class Plugin:
    """One IPluginV3."""

    def __init__(self, host, handle):
        self.host, self.c, self.handle = host, host.c, ctypes.c_void_p(handle)

    def __del__(self):
        self.c.host_destroy(self.handle)

    def clone(self):
        return Plugin(self.host, self.c.host_clone(self.handle))

    def attach(self):
        return Plugin(self.host, self.c.host_attach(self.handle))

    @property
    def name(self):
        return self.c.host_name(self.handle).decode()

    @property
    def outputs(self):
        return self.c.host_outputs(self.handle)

    def fields(self):
        """What would be serialised, {name: int or float}."""
        names, types = (ctypes.c_char_p * 16)(), (ctypes.c_int * 16)()
        data = (ctypes.c_void_p * 16)()
        n = self.c.host_fields(self.handle, names, types, data)
        unpack = {FIELD_FLOAT32: "f", FIELD_INT32: "i"}
        return {
            names[i].decode(): struct.unpack(unpack[types[i]], ctypes.string_at(data[i], 4))[0] for i in range(n)
        }

    def types(self, inputs):
        out = (ctypes.c_int * self.outputs)()
        assert self.c.host_types(self.handle, inputs, out) == 0
        return list(out)

    def shapes(self, dims):
        n = self.outputs
        ranks, flat = (ctypes.c_int * n)(), (ctypes.c_int64 * (8 * n))()
        assert self.c.host_shapes(self.handle, len(dims), *shape_arrays(dims), ranks, flat) == 0
        return [list(flat[8 * i : 8 * i + ranks[i]]) for i in range(n)]

    def supported(self, at, inputs):
        """Every (type, format) the tensor at `at` may have."""
        return [
            (t, f)
            for t in DATA_TYPES
            for f in FORMATS
            if self.c.host_supports(self.handle, at, inputs, self.outputs, t, f)
        ]

    def workspace(self, types, dims):
        return self.c.host_workspace(self.handle, len(dims), int_array(types), *shape_arrays(dims))

    def configure(self, types, dims):
        return self.c.host_configure(self.handle, len(dims), int_array(types), *shape_arrays(dims))

    def enqueue(self, types, inputs, outputs, workspace, stream):
        """inputs, outputs: torch tensors."""
        dims = [list(t.shape) for t in inputs]
        ins = (ctypes.c_void_p * len(inputs))(*(t.data_ptr() for t in inputs))
        outs = (ctypes.c_void_p * len(outputs))(*(t.data_ptr() for t in outputs))
        return self.c.host_enqueue(
            self.handle,
            len(inputs),
            int_array(types),
            *shape_arrays(dims),
            ins,
            outs,
            ctypes.c_void_p(workspace),
            ctypes.c_void_p(stream),
        )


def int_array(values):
    return (ctypes.c_int * len(values))(*values)


def shape_arrays(dims):
    flat = [d for shape in dims for d in shape]
    return int_array([len(shape) for shape in dims]), (ctypes.c_int64 * len(flat))(*flat)
