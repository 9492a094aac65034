"""From a checkpoint on disk to a runtime."""

import torch

from trtllm_hisparse.config import HiSparseConfig
from trtllm_hisparse.engine.torch_engine import TorchEngine
from trtllm_hisparse.errors import ConfigError
from trtllm_hisparse.runtime.loop import Runtime

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

SMALL_HIDDEN = 1024
"""Hidden size up to which a second thread costs more in barriers than it saves (on two busy cores, 25 times)."""


def load_runtime(checkpoint: str, config: HiSparseConfig, dtype: str = "float32") -> Runtime:
    """Load a Hugging Face checkpoint into the torch engine. CheckpointError or ConfigError say what is wrong.

    A small model runs torch on one thread, for the whole process.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"dtype: expected one of {', '.join(DTYPES)}, got {dtype!r}")
    engine = TorchEngine.load(checkpoint, DTYPES[dtype])
    if engine.config.hidden_size <= SMALL_HIDDEN:
        torch.set_num_threads(1)
    return Runtime(engine, config)
