"""An optimizer that evaluates the loss again, by `value_fn`, trains in every style, and to the same weights."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

from jax_trainer import TrainerModule
from jax_trainer.logger import LoggerConfig
from jax_trainer.styles import TrainLoop, TrainTask, fit, train_fn

X = np.random.default_rng(0).standard_normal((16, 3)).astype(np.float32)
Y = X @ np.array([1.0, -2.0, 0.5], np.float32)
DATA, STEPS = [(X, Y)] * 3, 3
TX = optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(5))  # a smaller program than L-BFGS


def loss(predictions: Any, targets: Any) -> Any:
    return ((predictions[:, 0] - targets) ** 2).mean()


class Line(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.Dense(1, kernel_init=nn.initializers.zeros)(x)


def nnx_line() -> nnx.Linear:
    return nnx.Linear(3, 1, kernel_init=nnx.initializers.zeros, rngs=nnx.Rngs(0))


class Regression(TrainerModule):
    def batch_to_input(self, batch: Any) -> Any:
        return batch[0]

    def loss_function(self, model: Any, batch: Any, train: bool = True) -> Any:
        return loss(model(batch[0]), batch[1]), {}

    def loss_function_linen(self, params: Any, state: Any, batch: Any, rng: Any, train: bool = True) -> Any:
        outputs, mutable = self.model_linen_apply(params, state, batch[0], rng, train=train)
        return loss(outputs, batch[1]), (mutable, {})


def with_trainer(model: Any, folder: Any) -> Any:
    options: dict[str, Any] = {"enable_progress_bar": False, "logger": LoggerConfig(log_dir=str(folder))}
    trainer = Regression(model=model, optimizer=TX, exmp_input=DATA[0], train_epochs=1, **options)
    trainer.train_model(DATA)
    return trainer.state.params


def with_fit(model: Any, folder: Any) -> Any:
    options: dict[str, Any] = {"num_epochs": 1, "log_dir": str(folder), "tensorboard": False, "progress": False}
    return fit(model, DATA, loss_fn=lambda logits, labels: loss(logits, labels), optimizer=TX, **options)


def with_train_fn(model: Any, folder: Any) -> Any:
    def train_step(model: Any, rng_key: Any, batch: Any) -> Any:
        return nnx.value_and_grad(lambda model: loss(model(batch[0]), batch[1]))(model)

    fns = (train_step, lambda model, rng_key, batch: 0.0)
    train = train_fn(fns=fns, n_steps=STEPS, eval_every_n_steps=STEPS, n_eval_batches=1, progress=False)
    train(jax.random.key(0), model, nnx.Optimizer(model, TX, wrt=nnx.Param), DATA, DATA)
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))


def with_loop(model: Any, folder: Any) -> Any:
    task = TrainTask(apply=model.apply, optimizer=TX, loss=loss, data=iter(DATA))
    return list(TrainLoop(model.init, task, n_steps=STEPS, stdout=False))[-1].model_params


STYLES = {
    "TrainerModule, linen": (with_trainer, Line),
    "TrainerModule, nnx": (with_trainer, nnx_line),
    "fit": (lambda model, folder: with_fit(model, folder).state.params, nnx_line),
    "train_fn": (with_train_fn, nnx_line),
    "TrainLoop": (with_loop, Line),
}


@cache
def hand_written() -> Any:
    params = {"bias": jnp.zeros(1), "kernel": jnp.zeros((3, 1))}
    value_fn = lambda params: loss(X @ params["kernel"] + params["bias"], Y)

    @jax.jit
    def step(params: Any, state: Any) -> Any:
        value, grad = jax.value_and_grad(value_fn)(params)
        updates, state = TX.update(grad, state, params, value=value, grad=grad, value_fn=value_fn)
        return optax.apply_updates(params, updates), state

    state = TX.init(params)
    for _ in range(STEPS):
        params, state = step(params, state)
    return params


@pytest.mark.parametrize(
    "style", [pytest.param(style, marks=() if style in ("fit", "train_fn") else pytest.mark.slow) for style in STYLES]
)
def test_a_line_search_in_every_style_matches_a_hand_written_loop(style, tmp_path):
    train, model = STYLES[style]
    found = jax.tree.leaves(train(model(), tmp_path))
    assert all(np.allclose(a, b, atol=1e-5) for a, b in zip(found, jax.tree.leaves(hand_written()), strict=True))


@pytest.mark.slow
def test_gradients_are_accumulated_by_multi_steps_of_optax(tmp_path):
    tx = optax.MultiSteps(optax.sgd(0.1), every_k_schedule=2)
    options: dict[str, Any] = {"num_epochs": 1, "tensorboard": False, "progress": False, "loss_fn": loss}
    fitted = fit(nnx_line(), DATA[:2], optimizer=tx, log_dir=str(tmp_path), **options)
    settings: dict[str, Any] = {"enable_progress_bar": False, "logger": LoggerConfig(log_dir=str(tmp_path))}
    trainer = Regression(model=nnx_line(), optimizer=tx, exmp_input=DATA[0], train_epochs=1, **settings)
    trainer.train_model(DATA[:2])
    x, y = (jnp.concatenate(parts) for parts in zip(*DATA[:2], strict=True))
    grads = jax.grad(lambda kernel: loss(x @ kernel, y))(jnp.zeros((3, 1)))
    for state in (fitted.state, trainer.state):
        np.testing.assert_allclose(state.params["kernel"], -0.1 * grads, atol=1e-6)
