"""The interfaces of models, preprocessing and augmentation that users implement, and `build_model`."""

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
    "ModelMode",
    "build_model",
    "model_mode",
    "on_inputs",
]
