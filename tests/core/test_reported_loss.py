"""The name `loss` is that of the loss, in every style."""

from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx

from jax_trainer import fit, train_fn

X = np.ones((16, 3), np.float32)


def fitted(folder: Any, loss_fn: Any) -> Any:
    options = {"log_dir": folder, "progress": False, "tensorboard": False, "save": False, "num_epochs": 1}
    model = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
    return fit(model, (X, X), (X, X), loss_fn=loss_fn, optimizer=optax.sgd(0.1), **options)


@pytest.mark.parametrize(
    "entry", [lambda value: value, lambda value: {"value": value, "mode": "mean"}], ids=["plain", "with options"]
)
def test_a_metric_that_would_replace_the_loss_is_refused(tmp_path, entry):
    def loss_fn(outputs: Any, targets: Any) -> Any:
        loss = ((outputs - targets) ** 2).mean()
        return loss, {"loss": entry(-loss)}

    with pytest.raises(ValueError, match="metric `loss`"):
        fitted(tmp_path, loss_fn)


@pytest.mark.parametrize("name", ["train/loss", "val/loss", "test/loss", "val_shifted/loss"])
def test_a_metric_with_the_full_name_of_a_loss_is_refused(tmp_path, name):
    def loss_fn(outputs: Any, targets: Any) -> Any:
        loss = ((outputs - targets) ** 2).mean()
        return loss, {name: -loss}

    with pytest.raises(ValueError, match=f"metric `{name}`"):
        fitted(tmp_path, loss_fn)


@pytest.mark.parametrize("decorate", [lambda function: function, jax.jit], ids=["plain", "compiled"])
def test_the_loss_itself_may_be_among_its_metrics(tmp_path, decorate):
    def loss_fn(outputs: Any, targets: Any) -> Any:
        loss = ((outputs - targets) ** 2).mean()
        return loss, {"loss": loss}

    def with_options(outputs: Any, targets: Any) -> Any:
        loss = ((outputs - targets) ** 2).mean()
        return loss, {"loss": {"value": loss, "log_freq": "epoch"}}

    for one in (loss_fn, with_options):
        assert fitted(tmp_path, decorate(one)).history[1]["val/loss"] > 0


def test_a_step_of_train_fn_is_refused_alike():
    def loss_fn(model: Any, batch: Any) -> Any:
        loss = ((model(batch) - batch) ** 2).mean()
        return loss, {"loss": -loss}

    def step(model: Any, rng_key: Any, batch: Any) -> Any:
        return nnx.value_and_grad(loss_fn, has_aux=True)(model, batch)

    model = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
    options = {"n_steps": 1, "eval_every_n_steps": 1, "n_eval_batches": 1, "progress": False}
    train = train_fn(fns=(step, lambda model, rng_key, batch: loss_fn(model, batch)[0]), **options)
    with pytest.raises(ValueError, match="metric `loss`"):
        train(jax.random.key(0), model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param), [X], None)
