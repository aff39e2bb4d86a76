"""Image classification on images that are changed on the device before the model sees them."""

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
    """How far images are shifted.

    Args:
        padding: by how many pixels at most.
        flip: mirror half of them.
    """

    padding: Annotated[int, AtLeast(0)] = 4
    flip: bool = True


@register
class CropAndFlip(BaseAugmentationNNX):
    """Shifts every image a little, and mirrors half of them; for models of nnx and of linen."""

    config: CropAndFlipConfig  # pyright: ignore[reportIncompatibleVariableOverride]

    def __call__(self, inputs: jax.Array) -> jax.Array:
        """The images, changed."""
        key = self.rngs.augmentation()
        images = random_crop(self.config.padding)(stream(key, "crop"), inputs)
        return random_flip()(stream(key, "flip"), images) if self.config.flip else images


@dataclass
class AugmentedImgClassifierTrainerConfig(ImgClassifierTrainerConfig):
    """How an image classifier is trained on changed images.

    Args:
        augmentation: what is done to images in training.
        augmentation_seed: decides, with `seed`, what is random in it; nothing else depends on it.
        preprocessing: what is done to all images before that.
        loss_type: cross_entropy for one class per image, binary_cross_entropy judges every class by itself.
    """

    augmentation: BaseAugmentationNNX.cfgtype | BaseAugmentationLinen.cfgtype | None = None
    augmentation_seed: Annotated[int, AtLeast(0)] = 44
    preprocessing: BasePreprocessingNNX.cfgtype | BasePreprocessingLinen.cfgtype | None = None
    loss_type: Literal["cross_entropy", "binary_cross_entropy"] = "cross_entropy"


@register
class AugmentedImgClassifierTrainer(ImgClassifierTrainer):
    """Trains an image classifier on images that a preprocessing and an augmentation change inside the compiled step."""

    config: AugmentedImgClassifierTrainerConfig  # pyright: ignore[reportIncompatibleVariableOverride]

    def transform_batch(self, key: jax.Array, batch: Batch, train: bool) -> Batch:
        """What the dataset does, then the preprocessing, then, in training, the augmentation."""
        batch = super().transform_batch(key, batch, train)
        config, images = self.config, batch.input
        if config.preprocessing is not None:
            images = on_inputs(config.preprocessing, stream(key, "preprocessing"), images)
        if config.augmentation is not None and train:
            own = jax.random.fold_in(stream(key, "augmentation"), config.augmentation_seed)
            images = on_inputs(config.augmentation, own, images)
        return batch.replace(input=images)

    def loss_of(self, logits: jax.Array, target: jax.Array) -> jax.Array:
        """The loss of every example, as `loss_type` says."""
        if self.config.loss_type == "cross_entropy":
            return super().loss_of(logits, target)
        return optax.sigmoid_binary_cross_entropy(logits, one_hot(logits, target)).mean(-1)
