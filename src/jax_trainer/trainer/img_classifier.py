"""Image classification, also with preprocessing and augmentation on the device."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import optax
from compoconf import register

from jax_trainer.adapters import (
    BaseAugmentationConfig,
    BaseAugmentationLinen,
    BaseAugmentationNNX,
    BasePreprocessingLinen,
    BasePreprocessingNNX,
    on_inputs,
)
from jax_trainer.callbacks import ConfusionMatrixConfig
from jax_trainer.config.settings import AtLeast, Problem, SettingsError, listed
from jax_trainer.core import Batch, PyTree, masked_mean, masked_sum, stream
from jax_trainer.datasets import SupervisedBatch
from jax_trainer.datasets.transforms import random_crop, random_flip
from jax_trainer.diagnostics.suggestions import suggestion
from jax_trainer.metrics import ConfusionMatrix
from jax_trainer.trainer.trainer import TrainerConfig, TrainerModule

CONFUSION = "conf_matrix"  # the metric of `ConfusionMatrixCallback`
Weight = Annotated[float, AtLeast(0)]


@dataclass
class ImgClassifierTrainerConfig(TrainerConfig):
    """How an image classifier is trained.

    Args:
        num_classes: number of classes.
        class_weights: weights of the classes in the loss: a list, or by index or class name of the dataset (others: 1).
    """

    num_classes: Annotated[int, AtLeast(2)] = 10  # pyright: ignore[reportIncompatibleVariableOverride]
    class_weights: list[Weight] | dict[str, Weight] | dict[int, Weight] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.class_weights, Mapping):  # in a file, keys are text
            self.class_weights = {str(name): weight for name, weight in self.class_weights.items()}
        super().__post_init__()

    def problems(self) -> Iterator[Problem]:
        """Yields weights that are too few, too many, or all 0."""
        yield from super().problems()
        weights = self.class_weights
        if isinstance(weights, list) and len(weights) != self.num_classes:
            yield "class_weights", f"`class_weights` has {len(weights)} weights for {self.num_classes} classes."
        elif isinstance(weights, list) and not any(weights):
            yield "class_weights", "All `class_weights` are 0, so nothing would be trained."

    def weights_by_class(self, class_names: Sequence[str] = ()) -> list[float] | None:
        """The weight of every class; None: all are equal.

        Args:
            class_names: names of the classes, by index.
        """
        weights = self.class_weights
        if weights is None or isinstance(weights, list):
            return weights
        names = {str(name): index for index, name in [*enumerate(range(self.num_classes)), *enumerate(class_names)]}
        unknown = [str(name) for name in weights if str(name) not in names]
        if unknown:
            known = f"0 to {self.num_classes - 1}" + (f", {listed(class_names)}" if class_names else "")
            text = f"{unknown[0]!r} is no class. Classes: {known}.{suggestion(unknown[0], names)}"
            raise SettingsError([(f"trainer.class_weights.{unknown[0]}", text)])
        chosen = {names[str(name)]: weight for name, weight in weights.items()}
        return [float(chosen.get(index, 1.0)) for index in range(self.num_classes)]


class SupervisedTrainer(TrainerModule):
    """Calls the model with the input of a `SupervisedBatch`; a subclass evaluates the outputs."""

    def evaluated(self, outputs: Any, batch: Any, train: bool) -> tuple[jax.Array, dict[str, Any]]:
        """The loss of the model's outputs, and a dict of metrics."""
        raise NotImplementedError

    def batch_to_input(self, batch: SupervisedBatch) -> Any:
        return batch.input

    def loss_function(self, model: Any, batch: Any, train: bool = True) -> tuple[jax.Array, dict[str, Any]]:
        return self.evaluated(self.model_apply(model, batch.input, train=train), batch, train)

    def loss_function_linen(
        self, params: PyTree, state: Any, batch: Any, rng: jax.Array, train: bool = True
    ) -> tuple[jax.Array, tuple[PyTree, dict[str, Any]]]:
        logits, mutable = self.model_linen_apply(params, state, batch.input, rng, train=train)
        loss, metrics = self.evaluated(logits, batch, train)
        return loss, (mutable, metrics)


@register
class ImgClassifierTrainer(SupervisedTrainer):
    """Trains an image classifier; reports `acc`, and its standard deviation and maximum over batches.

    Labels are integers or class probabilities. A batch's `mask` selects or weights examples, also in its `metrics`.
    With `class_weights` the loss is a weighted mean, as in torch: the sum of the weighted losses over the sum of the
    weights, in training and in evaluations; accuracies are not weighted by class. With a `ConfusionMatrixCallback`,
    evaluations report `conf_matrix`.
    """

    config: ImgClassifierTrainerConfig  # pyright: ignore[reportIncompatibleVariableOverride]
    respects_mask = True

    def loss_of(self, logits: jax.Array, target: jax.Array) -> jax.Array:
        """The loss of every example: cross entropy."""
        if _is_soft(logits, target):
            return optax.softmax_cross_entropy(logits, target)
        return optax.softmax_cross_entropy_with_integer_labels(logits, target)

    def evaluated(self, outputs: jax.Array, batch: Any, train: bool) -> tuple[jax.Array, dict[str, Any]]:
        logits, expected = outputs, self.config.num_classes
        target, mask = batch.target, getattr(batch, "mask", None)
        if logits.shape[-1] != expected:
            text = f"The model has {logits.shape[-1]} outputs, but `trainer.num_classes` is {expected}. "
            text += "Make them equal, e.g. with `num_classes: ${trainer.num_classes}` in the model's section."
            raise SettingsError([("trainer.num_classes", text)])
        label = target.argmax(-1) if _is_soft(logits, target) else target
        acc = masked_mean(logits.argmax(-1) == label, mask)
        own: dict[str, Any] = {
            "acc": acc,
            "acc_std": {"value": acc, "mode": "std", "log_mode": "eval"},
            "acc_max": {"value": acc, "mode": "max", "log_freq": "epoch", "log_mode": "train"},
        }
        if self._shows_confusion and not train and CONFUSION not in self.config.metrics:
            own[CONFUSION] = ConfusionMatrix(log_mode="eval")(logits, label, mask)
        losses, weights = self.loss_of(logits, target), self._class_weights
        if weights is None:
            return masked_mean(losses, mask), self._with_metrics(own, logits, label, mask)
        of_class = jnp.asarray(weights, losses.dtype)
        of_class = (target * of_class).sum(-1) if _is_soft(logits, target) else of_class.take(label, mode="clip")
        total, weight = masked_sum(losses, of_class if mask is None else of_class * mask)
        own["loss"] = {"value": total, "count": weight}  # a batch counts by the sum of its weights
        return total / jnp.where(weight > 0, weight, 1), self._with_metrics(own, logits, label, mask)

    @property
    def _class_weights(self) -> list[float] | None:
        return self.config.weights_by_class(() if self.dataset is None else self.dataset.class_names)

    @property
    def _shows_confusion(self) -> bool:
        return any(isinstance(one, ConfusionMatrixConfig) for one in self.config.callbacks.values())


def _is_soft(logits: jax.Array, target: jax.Array) -> bool:
    return target.ndim == logits.ndim


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
    respects_mask = True

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
        soft = target if _is_soft(logits, target) else jax.nn.one_hot(target, logits.shape[-1])
        return optax.sigmoid_binary_cross_entropy(logits, soft).mean(-1)
