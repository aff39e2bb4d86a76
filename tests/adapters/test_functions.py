from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_trainer.adapters import function_program, stateful_program
from jax_trainer.testing import cross_entropy, numbered_data, numbered_loader, short_run

EXAMPLE = {name: array[:32] for name, array in numbered_data().items()}


def test_a_loss_of_plain_parameters_trains_like_a_hand_written_loop():
    tx = optax.adam(1e-2)

    def init(key, batch):
        return {"w": jnp.zeros((batch["x"].shape[-1], 4))}

    def loss(params, batch, *, rng, train):
        return cross_entropy(batch["x"] @ params["w"], batch["y"]).mean()

    params: Any = init(None, EXAMPLE)
    opt_state = tx.init(params)

    @jax.jit
    def step(params, opt_state, batch):
        grads = jax.grad(lambda params: loss(params, batch, rng=None, train=True))(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    for batch, _ in zip(numbered_loader().epoch(1), range(5), strict=False):
        params, opt_state = step(params, opt_state, batch)
    state, _ = short_run(function_program(init, loss, tx))
    np.testing.assert_allclose(state.params["w"], params["w"], rtol=1e-5, atol=1e-7)


def test_a_loss_may_return_metrics():
    def loss(params, batch, *, rng, train):
        return params**2, {"half": params / 2}

    _, seen = short_run(function_program(lambda key, batch: jnp.ones(()), loss, optax.sgd(0.1)), 1)
    assert seen.steps[1]["half"] == 0.5


def test_a_model_state_is_carried():
    def loss(params, model_state, batch, *, rng, train):
        return (params * model_state) ** 2, (model_state + 1, {"state": model_state})

    program = stateful_program(lambda key, batch: (jnp.ones(()), jnp.zeros(())), loss, optax.sgd(0.0))
    state, seen = short_run(program, 4)
    assert float(state.model_state) == 4
    assert [seen.steps[step]["state"] for step in (1, 2, 3, 4)] == [0, 1, 2, 3]


@pytest.mark.slow
def test_an_equinox_module_trains():
    make = lambda key: eqx.nn.Linear(8, 4, key=key)
    static = eqx.filter_eval_shape(make, jax.random.key(0))
    static = eqx.partition(static, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))[1]

    def init(key, batch):
        return eqx.filter(make(key), eqx.is_inexact_array)

    def loss(params, batch, *, rng, train):
        logits = jax.vmap(eqx.combine(params, static))(batch["x"])
        value = cross_entropy(logits, batch["y"]).mean()
        return value, {"acc": (logits.argmax(-1) == batch["y"]).mean()}

    state, seen = short_run(function_program(init, loss, optax.sgd(0.5)), 30)
    assert isinstance(state.params, eqx.nn.Linear)
    assert seen.steps[30]["loss"] < 0.6 * seen.steps[1]["loss"]
