"""Weights of a Hugging Face checkpoint directory, read one tensor at a time and checked on the way."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from trtllm_hisparse.errors import CheckpointError
from trtllm_hisparse.models import fp8
from trtllm_hisparse.models.config import Fields, weight_block

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
DEFAULT_BLOCK = (128, 128)


class Checkpoint:
    """The tensors of `model.safetensors`, or of the shards `model.safetensors.index.json` names.

    Opening reads headers only; each tensor is read when asked for. Tensors nobody asks for (MTP layers) are
    never read. Raises CheckpointError naming file and tensor for whatever is missing, truncated or misshapen.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            raise CheckpointError(f"{self.path}: expected a checkpoint directory, found none")
        self._block = weight_block(Fields.read(self.path / "config.json")) or DEFAULT_BLOCK
        self._handles: dict[Path, Any] = {}
        self._names: dict[Path, frozenset[str]] = {}
        self._file_of = self._files()

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Tensor `name`, which must have `shape`, in `dtype`; FP8 weights come back scaled."""
        file = self._locate(name)
        value = self._read(file, name, shape)
        if value.dtype == fp8.DTYPE:
            value = self._scaled(file, name, value)
        elif value.dtype not in FLOATS:
            supported = ", ".join(str(d) for d in (*FLOATS, fp8.DTYPE))
            raise CheckpointError(f"{file}: {name}: expected dtype {supported}, got {value.dtype}")
        return value.to(dtype)

    def scope(self, prefix: str, dtype: torch.dtype) -> "Scope":
        """The tensors whose names start with `prefix`."""
        return Scope(self, prefix, dtype)

    # -- FP8 ------------------------------------------------------------------------------------------
    def _scaled(self, file: Path, name: str, value: torch.Tensor) -> torch.Tensor:
        if value.dim() < 2:
            raise CheckpointError(f"{file}: {name}: expected an FP8 matrix, got shape {list(value.shape)}")
        scale_name = f"{name}_scale_inv"
        if scale_name not in self:
            raise CheckpointError(f"{file}: {name}: expected FP8 scales {scale_name}, found none")
        scale_file = self._locate(scale_name)
        scale = self._read(scale_file, scale_name, fp8.scale_shape(tuple(value.shape), self._block))
        if not scale.dtype.is_floating_point:
            raise CheckpointError(f"{scale_file}: {scale_name}: expected floating point, got {scale.dtype}")
        return fp8.dequantise(value, scale, self._block)

    # -- files ----------------------------------------------------------------------------------------
    def _files(self) -> dict[str, Path]:
        """{tensor: the file that should hold it}."""
        single, index = self.path / SINGLE, self.path / INDEX
        if single.is_file():
            return dict.fromkeys(self._open(single), single)
        if not index.is_file():
            raise CheckpointError(f"{self.path}: expected {SINGLE} or {INDEX}, found neither")
        fields = Fields.read(index)
        files = {}
        for name, shard in fields.section("weight_map").raw.items():
            if not isinstance(shard, str) or Path(shard).name != shard:
                raise fields.fail(f"weight_map[{name}]", "a file name", shard)
            files[name] = self.path / shard
        if not files:
            raise fields.fail("weight_map", "an object naming the shard of every tensor", {})
        for shard_file in sorted(set(files.values())):
            if not shard_file.is_file():
                raise CheckpointError(f"{index}: expected shard {shard_file.name} beside it, found none")
            self._open(shard_file)
        return files

    def _open(self, file: Path) -> frozenset[str]:
        """Open `file` and return its tensors' names."""
        try:
            handle: Any = safe_open(file, framework="pt")
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file}: expected a complete safetensors file, got: {error}") from error
        self._handles[file] = handle
        self._names[file] = frozenset(handle.keys())
        return self._names[file]

    def _locate(self, name: str) -> Path:
        if name not in self._file_of:
            raise CheckpointError(f"{self.path}: expected tensor {name}, found none")
        file = self._file_of[name]
        if name not in self._names[file]:
            raise CheckpointError(f"{file}: expected tensor {name}, which {INDEX} places here, found none")
        return file

    def _read(self, file: Path, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        stored = tuple(self._handles[file].get_slice(name).get_shape())
        if stored != shape:
            raise CheckpointError(f"{file}: {name}: expected shape {list(shape)}, got {list(stored)}")
        try:
            value: torch.Tensor = self._handles[file].get_tensor(name)
        except SafetensorError as error:
            raise CheckpointError(f"{file}: {name}: expected readable data, got: {error}") from error
        return value


@dataclass(frozen=True)
class Scope:
    """Part of a checkpoint: names under a prefix, wanted in one dtype."""

    checkpoint: Checkpoint
    prefix: str
    dtype: torch.dtype

    def under(self, name: str) -> "Scope":
        """The names under `prefix + name`."""
        return replace(self, prefix=self.prefix + name)

    def has(self, name: str) -> bool:
        """Whether the checkpoint holds `prefix + name`."""
        return self.prefix + name in self.checkpoint

    def tensor(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Tensor `prefix + name`, which must have `shape`."""
        return self.checkpoint.tensor(self.prefix + name, shape, dtype or self.dtype)
