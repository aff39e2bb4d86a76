"""Image classification with preprocessing and augmentation on the device."""

from dataclasses import dataclass
from typing import Annotated, Literal

import jax
import optax
from compoconf import register

from jax_trainer.core import Batch, stream
from jax_trainer.datasets.transforms import random_crop, random_flip
from jax_trainer.interfaces import (
    BaseAugmentationConfig,
    BaseAugmentationLinen,
    BaseAugmentationNNX,
    BasePreprocessingLinen,
    BasePreprocessingNNX,
    on_inputs,
)
from jax_trainer.settings import AtLeast
from jax_trainer.trainer.img_classifier import ImgClassifierTrainer, ImgClassifierTrainerConfig, one_hot


@dataclass
class CropAndFlipConfig(BaseAugmentationConfig):
    """Random crops and horizontal flips.

    Args:
        padding: maximum shift in pixels.
        flip: flip half of the images horizontally.
    """

    padding: Annotated[int, AtLeast(0)] = 4
    flip: bool = True


@register
class CropAndFlip(BaseAugmentationNNX):
    """Random shift and horizontal flip of every image; for nnx and linen models."""

    config: CropAndFlipConfig  # pyright: ignore[reportIncompatibleVariableOverride]

    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Returns the augmented images."""
        key = self.rngs.augmentation()
        images = random_crop(self.config.padding)(stream(key, "crop"), inputs)
        return random_flip()(stream(key, "flip"), images) if self.config.flip else images


@dataclass
class AugmentedImgClassifierTrainerConfig(ImgClassifierTrainerConfig):
    """How an image classifier is trained with preprocessing and augmentation.

    Args:
        augmentation: applied to images in training.
        augmentation_seed: random seed of the augmentation, in addition to `seed`.
        preprocessing: applied to all images before the augmentation.
        loss_type: cross_entropy for one class per image; binary_cross_entropy for independent classes.
    """

    augmentation: BaseAugmentationNNX.cfgtype | BaseAugmentationLinen.cfgtype | None = None
    augmentation_seed: Annotated[int, AtLeast(0)] = 44
    preprocessing: BasePreprocessingNNX.cfgtype | BasePreprocessingLinen.cfgtype | None = None
    loss_type: Literal["cross_entropy", "binary_cross_entropy"] = "cross_entropy"


@register
class AugmentedImgClassifierTrainer(ImgClassifierTrainer):
    """Trains an image classifier with preprocessing and augmentation inside the compiled step."""

    config: AugmentedImgClassifierTrainerConfig  # pyright: ignore[reportIncompatibleVariableOverride]

    def transform_batch(self, key: jax.Array, batch: Batch, train: bool) -> Batch:
        """Applies the transforms of the dataset, the preprocessing and, in training, the augmentation."""
        batch = super().transform_batch(key, batch, train)
        config, images = self.config, batch.input
        if config.preprocessing is not None:
            images = on_inputs(config.preprocessing, stream(key, "preprocessing"), images)
        if config.augmentation is not None and train:
            augmentation_key = jax.random.fold_in(stream(key, "augmentation"), config.augmentation_seed)
            images = on_inputs(config.augmentation, augmentation_key, images)
        return batch.replace(input=images)

    def loss_of(self, logits: jax.Array, target: jax.Array) -> jax.Array:
        """The loss of every example, by `loss_type`."""
        if self.config.loss_type == "cross_entropy":
            return super().loss_of(logits, target)
        return optax.sigmoid_binary_cross_entropy(logits, one_hot(logits, target)).mean(-1)
