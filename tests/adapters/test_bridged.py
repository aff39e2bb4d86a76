"""Linen modules in nnx modules are initialised with the example batch."""

from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

from jax_trainer import TrainerModule
from jax_trainer.adapters import nnx_program
from jax_trainer.adapters.nnx import lacks_variables
from jax_trainer.logger import LoggerConfig
from jax_trainer.styles import fit, train_fn
from jax_trainer.testing import cross_entropy

X, Y = np.ones((8, 3), np.float32), np.zeros(8, np.int32)
DATA = [(X, Y)]


class Inner(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.Dense(4)(x)


class Outer(nnx.Module):
    """Contains a linen module."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.inner, self.out = nnx.bridge.ToNNX(Inner(), rngs=rngs), nnx.Linear(4, 2, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.out(self.inner(x))


MODELS = {
    "with rngs": lambda: nnx.bridge.ToNNX(Inner(), rngs=nnx.Rngs(0)),
    "without rngs": lambda: nnx.bridge.ToNNX(Inner()),
    "inside another": lambda: Outer(nnx.Rngs(0)),
    "built": lambda: Outer,
}


def loss(logits: Any, labels: Any) -> Any:
    return cross_entropy(logits, labels).mean()


def score(model: Any) -> float:
    return float(nnx.jit(lambda model: loss(model(X), Y))(model))


class Classifier(TrainerModule):
    def batch_to_input(self, batch: Any) -> Any:
        return batch[0]

    def loss_function(self, model: Any, batch: Any, train: bool = True) -> Any:
        return loss(model(batch[0]), batch[1]), {}


def with_trainer(model: Any, folder: Any) -> Any:
    options: dict[str, Any] = {"enable_progress_bar": False, "logger": LoggerConfig(log_dir=str(folder))}
    trainer = Classifier(model=model, optimizer=optax.sgd(0.5), exmp_input=DATA[0], train_epochs=2, **options)
    before = score(trainer.bind_model())
    trainer.train_model(DATA)
    return before, score(trainer.bind_model())


def with_fit(model: Any, folder: Any) -> Any:
    model = model(nnx.Rngs(0)) if isinstance(model, type) else model
    options: dict[str, Any] = {"num_epochs": 2, "log_dir": str(folder), "tensorboard": False, "progress": False}
    before = fit(model, DATA, loss_fn=lambda logits, labels: loss(logits, labels), optimizer=optax.sgd(0.0), **options)
    first = score(model)
    fit(model, DATA, loss_fn=lambda logits, labels: loss(logits, labels), optimizer=optax.sgd(0.5), **options)
    assert before.state.params
    return first, score(model)


QUICK = {("built", with_trainer)}


@pytest.mark.parametrize(
    ("model", "train"),
    [
        pytest.param(model, train, marks=[] if (model, train) in QUICK else pytest.mark.slow)
        for model in MODELS
        for train in (with_trainer, with_fit)
    ],
)
def test_a_bridged_module_is_initialised_with_the_example_batch_and_trained(model, train, tmp_path):
    before, after = train(MODELS[model](), tmp_path)
    assert after < before


def test_a_module_that_was_called_keeps_its_weights(tmp_path):
    model = Outer(nnx.Rngs(0))
    nnx.bridge.lazy_init(model, X)
    outputs = model(X)
    trainer = Classifier(model=model, optimizer=optax.sgd(0.5), exmp_input=DATA[0], train_epochs=1)
    np.testing.assert_array_equal(trainer.bind_model()(X), outputs)


def test_without_an_example_the_error_names_the_fix():
    model = MODELS["with rngs"]()
    assert lacks_variables(model)
    with pytest.raises(ValueError, match=r"ToNNX.*nnx.bridge.lazy_init\(model, x\)"):
        nnx_program(model, lambda model, batch, train: loss(model(batch[0]), batch[1]), optax.sgd(0.1))
    step = lambda model, rng_key, batch: 0.0
    train = train_fn(fns=(step, step), n_steps=1, eval_every_n_steps=1, n_eval_batches=1)
    with pytest.raises(ValueError, match=r"ToNNX.*nnx.bridge.lazy_init\(model, x\)"):
        train(jax.random.key(0), model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param), DATA, DATA)
