"""Models known by name at their real sizes."""

from trtllm_hisparse.errors import ConfigError
from trtllm_hisparse.models.deepseek import DEEPSEEK_V3_2, DEEPSEEK_V4_1_FLASH
from trtllm_hisparse.models.glm import GLM_5, GLM_5_2, GLM_5_3
from trtllm_hisparse.models.spec import ModelSpec

MODELS = {spec.name: spec for spec in (GLM_5, GLM_5_2, GLM_5_3, DEEPSEEK_V3_2, DEEPSEEK_V4_1_FLASH)}


def get(name: str) -> ModelSpec:
    """The spec of model `name`; ConfigError listing the known names."""
    if name not in MODELS:
        raise ConfigError(f"model: expected one of {', '.join(MODELS)}, got {name!r}")
    return MODELS[name]
