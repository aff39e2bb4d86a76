"""Adapters: a linen, nnx or functional model and a loss → `Program`. No other package depends on the model library."""

from jax_trainer.adapters.functions import (
    FunctionHandle,
    FunctionModel,
    PureLoss,
    StatefulLoss,
    function_program,
    stateful_program,
)
from jax_trainer.adapters.handle import ModelHandle
from jax_trainer.adapters.handles import handle_of
from jax_trainer.adapters.interfaces import (
    BaseAugmentationConfig,
    BaseAugmentationLinen,
    BaseAugmentationLinenConfig,
    BaseAugmentationNNX,
    BaseModelConfig,
    BaseModelFunction,
    BaseModelLinen,
    BaseModelNNX,
    BasePreprocessingConfig,
    BasePreprocessingLinen,
    BasePreprocessingLinenConfig,
    BasePreprocessingNNX,
    ModelMode,
    build_model,
    model_mode,
    on_inputs,
)
from jax_trainer.adapters.linen import LinenLoss, LinenView, flax_state_program, linen_program
from jax_trainer.adapters.linen_handle import LinenHandle
from jax_trainer.adapters.nnx import NnxLoss, write_back
from jax_trainer.adapters.nnx_handle import NnxHandle, nnx_program

__all__ = [
    "BaseAugmentationConfig",
    "BaseAugmentationLinen",
    "BaseAugmentationLinenConfig",
    "BaseAugmentationNNX",
    "BaseModelConfig",
    "BaseModelFunction",
    "BaseModelLinen",
    "BaseModelNNX",
    "BasePreprocessingConfig",
    "BasePreprocessingLinen",
    "BasePreprocessingLinenConfig",
    "BasePreprocessingNNX",
    "FunctionHandle",
    "FunctionModel",
    "LinenHandle",
    "LinenLoss",
    "LinenView",
    "ModelHandle",
    "ModelMode",
    "NnxHandle",
    "NnxLoss",
    "PureLoss",
    "StatefulLoss",
    "build_model",
    "flax_state_program",
    "function_program",
    "handle_of",
    "linen_program",
    "model_mode",
    "nnx_program",
    "on_inputs",
    "stateful_program",
    "write_back",
]
