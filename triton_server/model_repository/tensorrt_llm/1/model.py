"""Token ids in, token ids out. The work is done in `trtllm_hisparse.serving.token_model`."""

from typing import Any

import triton_python_backend_utils as pb_utils

from trtllm_hisparse.errors import CheckpointError, ConfigError
from trtllm_hisparse.serving.token_model import TokenModel


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        try:
            self._model = TokenModel.load(pb_utils, args["model_config"])
        except (CheckpointError, ConfigError) as error:
            raise pb_utils.TritonModelException(str(error)) from None

    def execute(self, requests: list[Any]) -> None:
        self._model.execute(requests)

    def finalize(self) -> None:
        self._model.close()
