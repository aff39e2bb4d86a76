from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import optax
import pytest
from compoconf import register
from flax import nnx

from jax_trainer.adapters import (
    BaseAugmentationLinen,
    BaseAugmentationLinenConfig,
    BasePreprocessingConfig,
    BasePreprocessingNNX,
)
from jax_trainer.config import load_config
from jax_trainer.testing import digest
from jax_trainer.trainer import (
    AugmentedImgClassifierTrainer,
    AugmentedImgClassifierTrainerConfig,
    CropAndFlip,
    CropAndFlipConfig,
)
from tests.trainer.trainer_runs import LINEAR, SGD, digits, settings, values


@dataclass
class InvertConfig(BasePreprocessingConfig):
    """Nothing to set."""


@register
class Invert(BasePreprocessingNNX):
    """Turns light into dark."""

    config: InvertConfig  # pyright: ignore[reportIncompatibleVariableOverride]

    def __call__(self, inputs: Any) -> Any:
        return -inputs


@dataclass
class NoiseConfig(BaseAugmentationLinenConfig):
    """How much.

    Args:
        scale: of the noise.
    """

    scale: float = 0.1


@register
class Noise(BaseAugmentationLinen):
    """Adds noise."""

    config: NoiseConfig  # pyright: ignore[reportIncompatibleVariableOverride]

    def __call__(self, inputs: Any) -> Any:
        return inputs + self.config.scale * jax.random.normal(self.make_rng("augmentation"), inputs.shape)


def trainer_with(flavour: str, folder: Any, **changes: Any) -> Any:
    config = AugmentedImgClassifierTrainerConfig(**settings(folder, **{"train_epochs": 2, **changes}))
    model, data = LINEAR[flavour](num_classes=10), digits()
    return AugmentedImgClassifierTrainer(config, model, SGD, dataset=data)


@pytest.mark.parametrize(
    ("flavour", "augmentation"), [("nnx", NoiseConfig()), ("linen", CropAndFlipConfig(padding=1))], ids=["nnx", "linen"]
)
@pytest.mark.slow
def test_models_train_with_augmentations_of_the_other_flavour(flavour, augmentation, tmp_path):
    short = {"train_epochs": 1, "max_steps": 2, "check_val_every_n_epoch": 0}
    augmented, plain = (trainer_with(flavour, tmp_path, augmentation=one, **short) for one in (augmentation, None))
    for trainer in (augmented, plain):
        trainer.train_model(digits().train_loader)
    assert digest(augmented.state.params) != digest(plain.state.params)


def test_augmentation_is_for_training_and_preprocessing_for_all(tmp_path):
    trainer = trainer_with("nnx", tmp_path, augmentation=NoiseConfig(), preprocessing=InvertConfig())
    batch, key = digits().train[:4], jax.random.key(0)
    as_in_the_dataset = digits().transforms.apply(key, batch, train=False).input
    np.testing.assert_array_equal(trainer.transform_batch(key, batch, False).input, -as_in_the_dataset)
    noisy = jax.jit(lambda batch: trainer.transform_batch(key, batch, True))(batch).input
    assert 0 < np.abs(noisy + np.asarray(as_in_the_dataset)).max() < 1


def test_the_seed_of_the_augmentation_decides_it_and_nothing_else(tmp_path):
    def seen(**changes: Any) -> tuple[str, str]:
        trainer = trainer_with("nnx", tmp_path, augmentation=NoiseConfig(), **changes)
        batch = jax.jit(lambda batch: trainer.transform_batch(jax.random.key(1), batch, True))(digits().train[:4])
        return digest(batch), digest(trainer.state)

    (images, state), again, (others, same) = seen(), seen(), seen(augmentation_seed=45)
    assert (images, state) == again
    assert images != others and state == same


def test_images_keep_their_shape_and_type_when_shifted():
    images: Any = np.arange(2 * 8 * 8, dtype=np.uint8).reshape(2, 8, 8)
    changed = jax.eval_shape(lambda x: CropAndFlip(CropAndFlipConfig(padding=2), rngs=nnx.Rngs(0))(x), images)
    assert (changed.shape, changed.dtype) == (images.shape, images.dtype)
    same = CropAndFlip(CropAndFlipConfig(padding=0, flip=False), rngs=nnx.Rngs(0))(images)
    np.testing.assert_array_equal(same, images)


def test_binary_cross_entropy_treats_every_class_independently(tmp_path):
    trainer = trainer_with("nnx", tmp_path, loss_type="binary_cross_entropy")
    logits, labels = np.array([[2.0, -1.0, 0.5] + [0.0] * 7], np.float32), np.array([2])
    share, loss_of = np.eye(10, dtype=np.float32)[labels], jax.jit(trainer.loss_of)
    expected = jax.jit(optax.sigmoid_binary_cross_entropy)(logits, share).mean(-1)
    np.testing.assert_allclose(loss_of(logits, labels), expected, rtol=1e-6)
    np.testing.assert_allclose(loss_of(logits, share), expected, rtol=1e-6)
    trainer.train_model(digits().train_loader, num_epochs=1)
    (loss,) = values(trainer, "train/loss_epoch")
    assert 0.3 < loss < 2  # a mean over ten classes


def test_a_file_names_them_by_class(tmp_path):
    file = tmp_path / "augmented.yaml"
    file.write_text("augmentation: {class_name: CropAndFlip, padding: 2}\npreprocessing: {class_name: Invert}\n")
    config = load_config(file, AugmentedImgClassifierTrainerConfig).value
    assert config.augmentation == CropAndFlipConfig(padding=2)
    assert isinstance(config.preprocessing, InvertConfig)
