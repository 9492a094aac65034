"""The plugin library on any machine: build, symbols, TensorRT's registry, and everything but enqueue."""

import subprocess
from pathlib import Path

import numpy as np
import plugin_host
import pytest
from plugin_host import BF16, FLOAT, INT8, INT32, INT64

RESOLVE_FIELDS = {"page_rows": 64, "stage_rows": 128, "max_width": 4, "row_bytes": 576}
RESOLVE_INPUTS = [INT32, INT32, INT32, INT32, INT64, INT64, INT64, INT32]
RESOLVE_DIMS = [[12, 2048], [4], [3], [12], [3], [10], [5], [1]]
PLAN_TYPES, PLAN_SHAPES = [INT32, INT64, INT64, INT32], [[24576], [24576], [24576], [3]]

# name: fields, input types, input shapes, output types, output shapes, workspace bytes
PLUGINS = {
    "HiSparseAppend": (
        {"source_format": 1, "format": 3, "paged_keys": 0, "page_rows": 64, "scale": 0.5},
        [BF16, INT64, INT64], [[7, 576], [7], [5]], [INT32], [[1]], 0,
    ),
    "HiSparseIndexTopK": (
        {"top_k": 2048, "page_rows": 64, "query_format": 1, "key_format": 2, "scale": 0.125},
        [BF16, FLOAT, INT32, INT32, INT32, INT64, INT32],
        [[12, 32, 128], [12, 32], [3, 100], [4], [12], [5], [1]],
        [INT32, INT8], [[12, 2048], [12]], 12 * 100 * 64 * 4,
    ),
    "HiSparseResolve": (
        RESOLVE_FIELDS, RESOLVE_INPUTS, RESOLVE_DIMS,
        [INT32, *PLAN_TYPES], [[12, 2048], *PLAN_SHAPES], 0,
    ),
    "HiSparseFollow": (
        {"top_k": 2048, "row_bytes": 576, "from_device": 0},
        [INT32, INT64, INT64, INT32, INT64, INT32], [[4], [24576], [24576], [3], [5], [1]], [INT32], [[1]], 0,
    ),
    "HiSparseAttention": (
        {"latent": 64, "query_format": 0, "row_format": 0, "out_format": 1, "scale": 0.25, "row_scale": 1.0},
        [FLOAT, INT32, INT64, INT32], [[12, 16, 80], [12, 300], [5], [1]], [BF16], [[12, 16, 64]],
        12 * 2 * 16 * (8 + 4 * 64),
    ),
    "HiSparseCopyBack": (
        RESOLVE_FIELDS, [*RESOLVE_INPUTS, INT32, *PLAN_TYPES], [*RESOLVE_DIMS, [3], *PLAN_SHAPES],
        PLAN_TYPES, PLAN_SHAPES, 0,
    ),
}  # fmt: skip
EACH = pytest.mark.parametrize("name", PLUGINS)


@pytest.fixture(scope="module")
def host(built_plugins, tmp_path_factory):
    return plugin_host.Host(built_plugins, tmp_path_factory.mktemp("host"))


def fields_of(name):
    return {"abi_version": 1, **PLUGINS[name][0]}


# -- the library -------------------------------------------------------------------------------------------
def test_exports_the_abi_and_nothing_else(built_plugins):
    header = (Path(__file__).parents[1] / "plugins/include/hisparse.h").read_text()
    dynamic = subprocess.run(["nm", "-D", built_plugins], capture_output=True, text=True, check=True).stdout
    symbols = [line.split() for line in dynamic.splitlines()]
    defined = {parts[-1].split("@")[0] for parts in symbols if len(parts) == 3}
    assert {"getCreators", "setLoggerFinder"} <= defined
    functions = {name for name in defined if name.startswith("hs_")}
    assert defined == functions | {"getCreators", "setLoggerFinder"}
    assert all(f"{name}(" in header for name in functions)
    missing = [parts[-1] for parts in symbols if parts[0] == "U"]
    assert not [name for name in missing if "nvinfer" in name.lower() or "getPluginRegistry" in name]


@pytest.fixture(scope="module")
def registry(built_plugins):
    """The plugin registry of TensorRT's lean runtime, the library loaded into it."""
    pytest.importorskip("tensorrt_lean_libs")
    trt = pytest.importorskip("tensorrt_lean_bindings")
    found = trt.get_plugin_registry()
    handle = found.load_library(str(built_plugins))
    yield trt, found
    found.deregister_library(handle)


def collection(trt, fields):
    kinds = {int: (np.int32, trt.PluginFieldType.INT32), float: (np.float32, trt.PluginFieldType.FLOAT32)}
    return trt.PluginFieldCollection(
        [trt.PluginField(n, np.array([v], kinds[type(v)][0]), kinds[type(v)][1]) for n, v in fields.items()]
    )


@EACH
def test_tensorrts_registry_makes_the_plugin(registry, name):
    trt, found = registry
    creator = found.get_creator(name, "1", "trtllm_hisparse")
    assert [field.name for field in creator.field_names] == list(fields_of(name))
    for phase in (trt.TensorRTPhase.BUILD, trt.TensorRTPhase.RUNTIME):
        plugin = creator.create_plugin("layer", collection(trt, fields_of(name)), phase)
        for capability in ("CORE", "BUILD", "RUNTIME"):
            kind = getattr(trt.PluginCapabilityType, capability)
            assert plugin.get_capability_interface(kind).interface_info.kind == f"PLUGIN_V3ONE_{capability}"
    assert creator.create_plugin("layer", collection(trt, {"abi_version": 1}), phase) is None


# -- through the interfaces ----------------------------------------------------------------------------------
@EACH
def test_serialises_restores_and_clones(host, name):
    plugin = host.create(name, fields_of(name))
    assert plugin.name == name
    assert plugin.fields() == fields_of(name)
    copies = [plugin.clone(), plugin.attach(), host.create(name, plugin.fields(), phase=1)]
    del plugin  # what a copy serialises is its own
    for copy in copies:
        assert copy.fields() == fields_of(name)
        assert copy.outputs == len(PLUGINS[name][3])


@EACH
def test_types_shapes_and_workspace(host, name):
    _, types, dims, out_types, out_shapes, workspace = PLUGINS[name]
    plugin = host.create(name, fields_of(name))
    assert plugin.types(len(types)) == out_types
    assert plugin.shapes(dims) == out_shapes
    assert plugin.workspace(types, dims) == workspace
    assert plugin.configure(types, dims) == 0


@EACH
def test_one_type_in_linear_format_and_nothing_else(host, name):
    _, types, _, out_types, _, _ = PLUGINS[name]
    plugin = host.create(name, fields_of(name))
    for at, wanted in enumerate([*types, *out_types]):
        assert plugin.supported(at, len(types)) == [(wanted, 0)]


@EACH
def test_wrong_ranks_and_counts_are_refused(host, name):
    _, types, dims, _, _, _ = PLUGINS[name]
    plugin = host.create(name, fields_of(name))
    for at in range(len(dims)):
        wrong = [*dims[:at], [*dims[at], 1], *dims[at + 1 :]]
        assert plugin.configure(types, wrong) != 0
        assert "dimensions" in host.log
    assert plugin.configure(types[:-1], dims[:-1]) != 0
    assert f"expected {len(dims)} inputs" in host.log


@EACH
def test_every_field_is_required_typed_and_ranged(host, name):
    fields = fields_of(name)
    assert host.create(name, {**fields, "surprise": 1}) is None
    assert host.log == f"{name}: surprise: no such field"
    for field, value in fields.items():
        rest = {k: v for k, v in fields.items() if k != field}
        assert host.create(name, rest) is None
        assert host.log == f"{name}: {field}: missing"
        other = 1 if isinstance(value, float) else 1.0
        assert host.create(name, {**fields, field: other}) is None
        assert host.log.startswith(
            f"{name}: {field}: expected {'FLOAT32' if isinstance(value, float) else 'INT32'}"
        )
        for bad in (-1.0, float("nan"), float("inf")) if isinstance(value, float) else (-1, -(2**31)):
            assert host.create(name, {**fields, field: bad}) is None
            assert host.log.startswith(f"{name}: {field}: expected ")


def test_another_abi_version_says_what_to_do(host):
    assert host.create("HiSparseFollow", fields_of("HiSparseFollow") | {"abi_version": 2}) is None
    assert host.log == "HiSparseFollow: abi_version: expected 1, got 2; build the engine again"


@pytest.mark.parametrize(
    ("name", "field", "value", "says"),
    [
        ("HiSparseIndexTopK", "top_k", 2049, "top_k: expected 1..2048, got 2049"),
        ("HiSparseResolve", "max_width", 17, "max_width: expected 1..16, got 17"),
        ("HiSparseAttention", "query_format", 2, "query_format: expected 0..1, got 2"),
        ("HiSparseAppend", "scale", 0.0, "scale: expected 1.17549e-38..3.40282e+38, got 0"),
    ],
)
def test_out_of_range_fields_name_the_range(host, name, field, value, says):
    assert host.create(name, fields_of(name) | {field: value}) is None
    assert host.log == f"{name}: {says}"
