"""Adapters: a linen, nnx or functional model and a loss → `Program`. No other package depends on the model library."""

from jax_trainer.adapters.functions import FunctionModel, function_program, stateful_program
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
    on_inputs,
)
from jax_trainer.adapters.linen import LinenView, flax_state_program, linen_program
from jax_trainer.adapters.nnx import write_back
from jax_trainer.adapters.nnx_handle import nnx_program

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
    "FunctionModel",
    "LinenView",
    "ModelHandle",
    "ModelMode",
    "build_model",
    "flax_state_program",
    "function_program",
    "handle_of",
    "linen_program",
    "nnx_program",
    "on_inputs",
    "stateful_program",
    "write_back",
]
