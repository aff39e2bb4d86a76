from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_trainer.adapters import function_program
from jax_trainer.core import FlaxState, make_program
from jax_trainer.core.state import hyperparameters_in, with_hyperparameters
from jax_trainer.optimizer import AdamWConfig, OptimizerInterface
from jax_trainer.optimizer.reported import rates_in, with_learning_rate, with_learning_rate_scale
from jax_trainer.testing import assert_same_bits
from tests.rows import noted_row

SCHEDULE: Any = optax.linear_schedule(0.1, 0.0, 10)
CONFIGURED = AdamWConfig(learning_rate=0.25).instantiate(OptimizerInterface).build(10)
PARAMS = {name: jnp.asarray(np.ones(2, np.float32)) for name in "ab"}
BATCH = np.arange(4, dtype=np.float32)


def quadratic(params, model_state, batch, rng, *, train):
    loss = ((batch[:2] - params["a"]) ** 2).mean() + ((batch[2:] - params["b"]) ** 4).mean()
    return loss, (model_state, {})


def test_rates_are_found_wherever_the_optimizer_keeps_them():
    for tx, names in [
        (optax.inject_hyperparams(optax.adam)(SCHEDULE), {"optimizer/lr": 0.1}),
        (optax.chain(optax.clip(1.0), optax.inject_hyperparams(optax.sgd)(0.5)), {"optimizer/lr": 0.5}),
        (CONFIGURED, {"optimizer/lr": 0.25}),
        (optax.adam(SCHEDULE), {}),
        (
            optax.multi_transform(
                {"a": optax.inject_hyperparams(optax.sgd)(0.5), "b": optax.inject_hyperparams(optax.sgd)(0.25)},
                {"a": "a", "b": "b"},
            ),
            {"optimizer/lr": 0.5, "optimizer/lr_2": 0.25},
        ),
    ]:
        with noted_row(tx, names):
            program = make_program(lambda key, batch: (PARAMS, {}), quadratic, tx)
            state = program.init(jax.random.key(0), BATCH)
            assert {name: float(rate) for name, rate in rates_in(state).items()} == pytest.approx(names)
            scalable = with_learning_rate_scale(program).init(jax.random.key(0), BATCH)
            if "learning_rate_scale" not in hyperparameters_in(scalable):  # its one rate can be set
                assert len(hyperparameters_in(scalable)["learning_rate"]) == 1
                continue
            scaled = with_hyperparameters(scalable, {"learning_rate_scale": 0.5})
            expected = {name: rate / 2 for name, rate in names.items()} or {"optimizer/lr_scale": 0.5}
            assert {name: float(rate) for name, rate in rates_in(scaled).items()} == pytest.approx(expected)


def test_steps_report_the_rate_they_used_and_do_the_same_as_without():
    batch = jnp.arange(4.0)
    program = function_program(
        lambda key, batch: jnp.zeros(()),
        lambda params, batch, *, rng, train: ((batch - params) ** 2).mean(),
        optax.inject_hyperparams(optax.sgd)(SCHEDULE),
    )
    state = program.init(jax.random.key(0), batch)
    plain, telling = jax.jit(program.train_step), jax.jit(with_learning_rate(program).train_step)
    for step in range(3):
        expected, _ = plain(state, batch)
        state, report = telling(state, batch)
        assert_same_bits(state, expected)
        metric = report.metrics.by_name["optimizer/lr"]
        assert float(metric.value) == pytest.approx(float(SCHEDULE(step)))


def after(program, scale=None, steps=5):
    state = program.init(jax.random.key(0), BATCH)
    state = state if scale is None else with_hyperparameters(state, {"learning_rate_scale": scale})
    step = jax.jit(program.train_step)
    for _ in range(steps):
        state, _ = step(state, BATCH)
    return state


OPTIMIZERS = {
    "sgd": optax.sgd,
    "adamw": lambda rate: optax.adamw(rate, weight_decay=0.1),
    "lion": optax.lion,
    "configured": lambda rate: AdamWConfig(learning_rate=rate).instantiate(OptimizerInterface).build(10),
    "MultiSteps": lambda rate: optax.MultiSteps(optax.adam(rate), 2).gradient_transformation(),
}
SOME = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ("sgd", "MultiSteps") else pytest.mark.slow) for name in OPTIMIZERS]
)


@SOME
def test_the_scale_acts_like_the_learning_rate_of_any_optimizer(name):
    make = lambda rate: make_program(lambda key, batch: (PARAMS, {}), quadratic, OPTIMIZERS[name](rate))
    scaled, expected = after(with_learning_rate_scale(make(0.08)), 0.25), after(make(0.02))
    for path in PARAMS:
        np.testing.assert_allclose(scaled.params[path], expected.params[path], rtol=1e-5)
        assert (scaled.params[path] != PARAMS[path]).any()


@SOME
def test_a_scale_of_one_changes_nothing_but_how_a_product_is_rounded(name):
    program = make_program(lambda key, batch: (PARAMS, {}), quadratic, OPTIMIZERS[name](0.08))
    for scaled, plain in zip(
        *map(jax.tree.leaves, (after(with_learning_rate_scale(program)).params, after(program).params)), strict=True
    ):
        np.testing.assert_allclose(scaled, plain, rtol=1e-6)


def test_apply_gradients_is_scaled_too():
    tx = optax.sgd(1.0)

    def train_step(state, batch):
        state = FlaxState(**vars(state), apply_fn=print, tx=tx)
        return state.apply_gradients(grads=PARAMS).plain(), None

    program = make_program(lambda key, batch: (PARAMS, {}), quadratic, tx)._replace(train_step=train_step)
    assert after(with_learning_rate_scale(program), 0.5, steps=1).params["a"].tolist() == [0.5, 0.5]


@pytest.mark.parametrize(("tx", "fails"), [(optax.sgd(0.1), True), (optax.inject_hyperparams(optax.sgd)(0.1), False)])
def test_a_step_that_updates_the_parameters_itself_cannot_be_scaled(tx, fails):
    program = make_program(lambda key, batch: (PARAMS, {}), quadratic, tx)

    def train_step(state, batch):
        return state.replace(params=jax.tree.map(lambda leaf: leaf - 1, state.params)), None

    own = with_learning_rate_scale(program._replace(train_step=train_step))
    if fails:
        with pytest.raises(TypeError, match="apply_gradients.*inject_hyperparams"):
            after(own)
    else:  # its learning rate can be set in the state
        assert after(own, steps=1).params["a"].tolist() == [0.0, 0.0]
