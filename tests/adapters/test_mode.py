"""A model receives the mode under the parameter name of its call."""

from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import linen as nn

from jax_trainer import TrainLoop, TrainTask, fit, testing
from jax_trainer.adapters.calls import mode_flags
from tests.trainer.trainer_runs import waves

X, Y = np.ones((8, 4), np.float32), np.arange(8) % 3
SEEN: list[Any] = []


class Training(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, training: bool = False) -> jax.Array:
        SEEN.append(training)
        return nn.Dense(3, kernel_init=waves)(x)


class IsTraining(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, is_training: bool) -> jax.Array:
        SEEN.append(is_training)
        return nn.Dense(3, kernel_init=waves)(x)


class Deterministic(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, deterministic: bool) -> jax.Array:
        SEEN.append(not deterministic)
        return nn.Dense(3, kernel_init=waves)(x)


def cross_entropy(logits: Any, labels: Any) -> Any:
    return testing.cross_entropy(logits, labels).mean()


@pytest.mark.parametrize("kind", [Training, IsTraining, Deterministic])
@pytest.mark.parametrize("style", ["fit", "TrainLoop"])
def test_a_call_receives_the_mode(kind: type[nn.Module], style: str, tmp_path: Any):
    SEEN.clear()
    model, tx = kind(), optax.sgd(0.1)
    if style == "fit":
        options = {"num_epochs": 1, "progress": False, "tensorboard": False, "log_dir": tmp_path}
        fit(model, (X, Y), (X, Y), loss_fn=cross_entropy, optimizer=tx, **options)
    else:
        task = TrainTask(apply=model.apply, optimizer=tx, loss=cross_entropy, data=[(X, Y)])
        list(TrainLoop(init=model.init, task=task, n_steps=1, stdout=False))
    assert {*SEEN} == {True, False}


def test_required_mode_parameters_are_passed_to_init():
    assert mode_flags(Training().init, train=False, only_required=True) == {}
    assert mode_flags(Deterministic().init, train=False, only_required=True) == {"deterministic": True}
