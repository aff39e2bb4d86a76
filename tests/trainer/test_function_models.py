"""A trainer takes models of plain functions and of Equinox as it takes those of Flax."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compoconf import register

from jax_trainer.adapters import BaseModelConfig, BaseModelFunction, FunctionModel
from jax_trainer.callbacks import ModelCheckpointConfig
from jax_trainer.config.settings import SettingsError
from jax_trainer.testing import assert_close, assert_same_bits, numbered_loader
from jax_trainer.trainer.experiment import build, load_experiment
from tests.trainer.trainer_runs import EXAMPLE, STEPS, Plain, first_examples, settings, waves

FEATURES, CLASSES = EXAMPLE["x"].shape[-1], 4


def init(key: jax.Array, x: Any) -> Any:
    return {"kernel": waves(key, (x.shape[-1], CLASSES)), "bias": jnp.zeros(CLASSES)}


def apply(params: Any, x: Any) -> jax.Array:
    return x @ params["kernel"] + params["bias"]


def batched(model: Any, x: Any, key: jax.Array) -> jax.Array:
    return jax.vmap(model)(x, key=jax.random.split(key, len(x)))


class Net(eqx.Module):
    """Has a function and a rate among its leaves, and dropout; takes one example."""

    layer: eqx.nn.MLP
    dropout: eqx.nn.Dropout

    def __init__(self, key: jax.Array) -> None:
        self.layer, self.dropout = eqx.nn.MLP(FEATURES, CLASSES, 4, 0, key=key), eqx.nn.Dropout(0.1)

    def __call__(self, x: jax.Array, *, key: jax.Array | None = None) -> jax.Array:
        return self.dropout(self.layer(x), key=key)


class Batched(eqx.Module):
    """Takes a batch."""

    layer: eqx.nn.Linear

    def __call__(self, x: jax.Array) -> jax.Array:
        return jax.vmap(self.layer)(x)


KINDS: dict[str, Any] = {
    "functions": FunctionModel(init, apply),
    "Equinox in a function": FunctionModel(lambda key, x: Net(key), batched),
    "an Equinox module": Batched(eqx.nn.Linear(FEATURES, CLASSES, key=jax.random.key(0))),
}


def trainer_of(model: Any, folder: Path, kind: Any = Plain, **changes: Any) -> Any:
    options = {**settings(folder), "train_epochs": 2, **changes}
    return kind(model=model, optimizer=optax.sgd(0.1), exmp_input=EXAMPLE, **options)


def train(trainer: Any, **options: Any) -> Any:
    return trainer.train_model(numbered_loader(32 * STEPS), first_examples(64), **options)


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=pytest.mark.slow if "function" in kind and "Eq" in kind else ()) for kind in KINDS],
)
def test_a_function_model_is_trained_bound_tabulated_and_saved(kind, tmp_path):
    saver = {"saver": ModelCheckpointConfig()}
    trainer = trainer_of(KINDS[kind], tmp_path, callbacks=saver, ema=0.9)
    assert trainer.model_mode == "function"
    results = train(trainer)
    assert results[2]["val/loss"] < results[1]["val/loss"]
    bound = trainer.bind_model(which="last")
    predicted = trainer.predict([EXAMPLE], which="last")
    np.testing.assert_allclose(bound(EXAMPLE["x"]), predicted, rtol=1e-5, atol=1e-6)
    count = sum(leaf.size for leaf in jax.tree.leaves(trainer.state.params))
    assert f"{count:,}" in trainer.tabulate() and "Total" not in trainer.tabulate_params()
    loaded = Plain.load_from_checkpoint(
        trainer.folder.path, EXAMPLE, model=KINDS[kind], optimizer=optax.sgd(0.1), which="latest"
    )
    assert_same_bits((loaded.state.params, loaded.state.extra), (trainer.state.params, trainer.state.extra))
    np.testing.assert_array_equal(loaded.predict([EXAMPLE]), predicted)


def test_a_module_that_was_passed_keeps_its_weights_and_training_begins_from_them(tmp_path):
    module = KINDS["an Equinox module"]
    trainer, before = trainer_of(module, tmp_path), np.asarray(module.layer.weight)
    assert_same_bits(trainer.state.params.layer.weight, before)
    train(trainer)
    assert_same_bits(module.layer.weight, before)
    assert (np.asarray(trainer.bind_model().layer.weight) != before).any()


class Overridden(Plain):
    """Starts from zeros."""

    def run_model_init(self, exmp_input: Any, init_rng: jax.Array) -> Any:
        return jax.tree.map(jnp.zeros_like, super().run_model_init(exmp_input, init_rng))


def test_run_model_init_can_be_overridden(tmp_path):
    trainer = trainer_of(FunctionModel(init, apply), tmp_path, kind=Overridden)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(trainer.state.params))


class OwnStep(Plain):
    """The default step, written by hand."""

    def create_training_function(self) -> Any:
        def train_step(state: Any, batch: Any) -> Any:
            def loss_fn(params: Any) -> Any:
                return self._evaluate(state.apply(params, batch["x"])[0], batch)

            (loss, metrics), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
            return state.apply_gradients(grads=grads), {"loss": loss, **metrics}

        return train_step

    def create_evaluation_function(self) -> Any:
        def eval_step(state: Any, batch: Any) -> Any:
            loss, metrics = self._evaluate(state.model(batch["x"]), batch)
            return {"loss": loss, **metrics}

        return eval_step


def test_a_custom_step_matches_the_default_step(tmp_path):
    model = FunctionModel(init, apply)
    own, ours = (trainer_of(model, tmp_path, kind=kind, log_grad_norm=False) for kind in (OwnStep, Plain))
    results = train(own), train(ours)
    assert_close(own.state, ours.state, rtol=1e-5)
    assert results[0][2]["val/loss"] == pytest.approx(results[1][2]["val/loss"], rel=1e-5)


def test_another_model_mode_than_that_of_the_model_is_refused(tmp_path):
    with pytest.raises(SettingsError, match="`model_mode` is nnx.*FunctionModel"):
        trainer_of(FunctionModel(init, apply), tmp_path, model_mode="nnx")


@dataclass
class EquinoxNetConfig(BaseModelConfig):
    """A linear classifier of Equinox.

    Args:
        classes: how many.
    """

    classes: int = 4


@register
class EquinoxNet(BaseModelFunction):
    """Flattens images."""

    config: EquinoxNetConfig

    def init(self, key: jax.Array, *inputs: jax.Array) -> eqx.nn.Linear:
        layer = jax.eval_shape(lambda: eqx.nn.Linear(inputs[0][0].size, self.config.classes, key=key))
        return jax.tree.map(lambda leaf: 0.01 * waves(key, leaf.shape), layer)

    def apply(self, params: Any, x: jax.Array) -> jax.Array:
        return jax.vmap(params)(x.reshape(len(x), -1))


@pytest.mark.slow
def test_a_registered_function_model_is_trained_from_a_file(tmp_path):
    file = tmp_path / "experiment.yaml"
    file.write_text(
        "trainer:\n  class_name: ImgClassifierTrainer\n  train_epochs: 2\n  enable_progress_bar: false\n"
        f"  logger:\n    log_dir: {tmp_path}\n  callbacks:\n    ModelCheckpoint: {{}}\n"
        "model:\n  class_name: EquinoxNet\n  classes: 10\n"
        "optimizer:\n  class_name: SGD\n  learning_rate: 0.01\n"
        "dataset:\n  class_name: DigitsDataset\n  limit_train_size: 256\n"
    )
    trainer = build(load_experiment(file).value)
    data = trainer.dataset
    results = trainer.train_model(data.train_loader, data.val_loader)
    assert trainer.model_mode == "function"
    stored = type(trainer).load_from_checkpoint(trainer.folder.path, next(iter(data.train_loader)), which="latest")
    assert_same_bits(stored.state.params, trainer.state.params)
    assert results[2]["val/loss"] < results[1]["val/loss"]
