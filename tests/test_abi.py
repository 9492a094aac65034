"""The ctypes mirror against the C header it mirrors."""

import ctypes
import re
from pathlib import Path

import pytest

from trtllm_hisparse.kernels import abi

HEADER = (Path(__file__).parents[1] / "plugins/include/hisparse.h").read_text()
TYPES = {"int32_t": ctypes.c_int32, "int64_t": ctypes.c_int64, "float": ctypes.c_float, "hs_plan": abi.Plan}
TYPES["hs_resolve_params"] = abi.ResolveParams


def fields(struct):
    """(name, ctypes type) of a C struct, as the header has it."""
    plain = re.sub(r"/\*.*?\*/", "", HEADER, flags=re.S)
    body = re.search(r"typedef struct \{([^}]*)\} " + struct + ";", plain)[1]
    out = []
    for declaration in filter(str.strip, body.split(";")):
        kind, stars, name, size = re.fullmatch(
            r"\s*(?:const )?(\w+)(\*?) (\w+)(?:\[(\w+)\])?\s*", declaration
        ).groups()
        ctype = ctypes.c_void_p if stars else TYPES[kind]
        out.append((name, ctype * getattr(abi, size.removeprefix("HS_")) if size else ctype))
    return out


@pytest.mark.parametrize(
    ("struct", "mirror"),
    [
        ("hs_plan", abi.Plan),
        ("hs_resolve_params", abi.ResolveParams),
        ("hs_promote_params", abi.PromoteParams),
        ("hs_copy_params", abi.CopyParams),
        ("hs_append_params", abi.AppendParams),
        ("hs_index_params", abi.IndexParams),
        ("hs_attention_params", abi.AttentionParams),
    ],
)
def test_structs_have_the_headers_fields_in_its_order(struct, mirror):
    assert list(mirror._fields_) == fields(struct)


def test_constants_are_the_headers():
    defined = dict(re.findall(r"#define HS_(\w+) (\(1 << 20\)|\d+)", HEADER))
    assert defined.pop("MAX_CONTEXT") == "(1 << 20)"
    assert abi.MAX_CONTEXT == 1 << 20
    assert {name: int(value) for name, value in defined.items()} == {name: getattr(abi, name) for name in defined}
    counters = re.search(r"enum hs_counter \{ (.*), HS_COUNTERS \}", HEADER)[1]
    assert tuple(c.removeprefix("HS_").lower() for c in counters.split(", ")) == abi.COUNTERS
    formats = re.search(r"enum hs_format \{ (.*) \}", HEADER)[1]
    for name, value in (pair.split(" = ") for pair in formats.split(", ")):
        assert getattr(abi, name.removeprefix("HS_")) == int(value)


def test_a_missing_library_says_how_to_get_it(monkeypatch, tmp_path):
    monkeypatch.setenv(abi.ENVIRONMENT, str(tmp_path / "none.so"))
    abi.load.cache_clear()
    with pytest.raises(RuntimeError, match=r"none\.so: cannot be loaded"):
        abi.load()
    monkeypatch.delenv(abi.ENVIRONMENT)
    monkeypatch.setattr(abi, "LIBRARY", "not_built.so")
    with pytest.raises(RuntimeError, match="make plugins"):
        abi.load()
    abi.load.cache_clear()
