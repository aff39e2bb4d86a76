"""Configurations that derive from compoconf's own `ConfigInterface`, as document 000 lets people write them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from compoconf import ConfigInterface, register
from flax import linen as nn
from flax import nnx

from jax_trainer import fit
from jax_trainer.adapters import BaseModelLinen, BaseModelNNX
from jax_trainer.optimizer import OptimizerInterface, SGDConfig
from jax_trainer.testing import numbered_loader
from tests.trainer.trainer_runs import EXAMPLE, STEPS, Plain, first_examples, settings, waves

FEATURES, CLASSES = EXAMPLE["x"].shape[-1], 4


@dataclass
class PlainNetConfig(ConfigInterface):
    width: int = 8


@register
class PlainNet(BaseModelNNX):
    config: PlainNetConfig

    def __init__(self, config: PlainNetConfig, *, rngs: nnx.Rngs) -> None:
        self.hidden = nnx.Linear(FEATURES, config.width, kernel_init=waves, rngs=rngs)
        self.out = nnx.Linear(config.width, CLASSES, kernel_init=waves, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.out(nnx.relu(self.hidden(x)))


@dataclass
class PlainDenseConfig(ConfigInterface):
    width: int = 8


@register
class PlainDense(BaseModelLinen):
    config: PlainDenseConfig

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        return nn.Dense(CLASSES, kernel_init=waves)(nn.Dense(self.config.width, kernel_init=waves)(x))


@dataclass
class PlainDescentConfig(ConfigInterface):
    rate: float = 0.1


@register
class PlainDescent(OptimizerInterface):
    config: PlainDescentConfig

    def build(self, total_steps: int | None = None) -> Any:
        return optax.with_extra_args_support(optax.sgd(self.config.rate))


@dataclass
class PlainUnbuiltConfig(ConfigInterface):
    rate: float = 0.1


@register
class PlainUnbuilt(OptimizerInterface):
    config: PlainUnbuiltConfig


@dataclass
class PlainOrphan(ConfigInterface):
    """Belongs to nothing."""


def trained(folder: Path, model: Any, optimizer: Any) -> Any:
    return Plain(model_config=model, optimizer_config=optimizer, exmp_input=EXAMPLE, **settings(folder))


@pytest.mark.parametrize(
    "model",
    [pytest.param(PlainNetConfig(), id="nnx"), pytest.param(PlainDenseConfig(), id="linen", marks=pytest.mark.slow)],
)
def test_a_model_and_an_optimizer_with_plain_configurations_are_trained_and_stored(tmp_path: Path, model: Any):
    trainer = trained(tmp_path, model, PlainDescentConfig())
    trainer.train_model(numbered_loader(32 * STEPS), first_examples(64))
    text = (trainer.folder.path / "config.yaml").read_text()
    assert f"class_name: {model.class_name}" in text and "class_name: PlainDescent" in text and "rate: 0.1" in text
    trainer.save_model()
    again = Plain.load_from_checkpoint(trainer.folder.path, EXAMPLE, which="latest")
    assert again.model_config == model


def test_fit_takes_a_plain_configuration_of_an_optimizer(tmp_path: Path):
    x = np.zeros((4, 2), np.float32)
    options: dict[str, Any] = {"log_dir": tmp_path, "progress": False, "tensorboard": False, "num_epochs": 1}
    result = fit(nnx.Linear(2, 1, rngs=nnx.Rngs(0)), (x, x[:, :1]), loss_fn=lambda y, t: ((y - t) ** 2).mean(),
                 optimizer=PlainDescentConfig(), **options)  # fmt: skip
    assert int(result.state.step) == 1


def test_an_unregistered_or_incomplete_config_is_refused_with_the_fix(tmp_path: Path):
    with pytest.raises(ValueError, match=r"PlainOrphan.*@register.*config: PlainOrphan"):
        trained(tmp_path, PlainOrphan(), SGDConfig())
    with pytest.raises(TypeError, match=r"PlainOrphan.*@register.*config: PlainOrphan"):
        trained(tmp_path, PlainNetConfig(), PlainOrphan())
    with pytest.raises(TypeError, match=r"PlainUnbuilt .*BaseOptimizerConfig.*PlainUnbuiltConfig.*build"):
        trained(tmp_path, PlainNetConfig(), PlainUnbuiltConfig())
