"""Optimizers receive extra arguments according to the signature of `update`."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_trainer.adapters import function_program
from jax_trainer.core import TrainState
from jax_trainer.core.extra_args import by_signature
from jax_trainer.testing import assert_close

BATCH = {"x": np.arange(12, dtype=np.float32).reshape(6, 2) / 10, "y": np.ones(6, np.float32)}


def loss(params: Any, batch: Any, *, rng: jax.Array, train: bool) -> jax.Array:
    return ((batch["x"] @ params["w"] - batch["y"]) ** 2).mean()


def init(key: jax.Array, batch: Any) -> Any:
    return {"w": jnp.array([1.0, -1.0])}


def of(value: Any) -> jax.Array:
    return loss(value, BATCH, rng=jax.random.key(0), train=True)


def recording(update: Any, kind: Any = optax.GradientTransformationExtraArgs) -> optax.GradientTransformation:
    return kind(lambda params: {"seen": jnp.zeros(())}, update)


def velo(updates: Any, state: Any, params: Any = None, *, extra_args: Any = None) -> Any:
    return updates, {"seen": extra_args["loss"]}


def strict(updates: Any, state: Any, params: Any = None, *, value: Any) -> Any:
    return updates, {"seen": value}


def named_loss(updates: Any, state: Any, params: Any, loss: Any) -> Any:
    return updates, {"seen": loss}


def of_value_fn(updates: Any, state: Any, params: Any = None, *, value_fn: Any, **more: Any) -> Any:
    return updates, {"seen": value_fn(params)}


def of_grad_fn(updates: Any, state: Any, params: Any = None, *, grad_fn: Any) -> Any:
    value, grad = jax.value_and_grad(of)(params)
    same = jnp.abs(grad_fn(params, 0)["w"] - grad["w"]).max() < 1e-6
    return updates, {"seen": jnp.where(same, value, jnp.nan)}


def of_grad(updates: Any, state: Any, params: Any = None, *, grad: Any, value: Any, **more: Any) -> Any:
    same = jnp.abs(grad["w"] - updates["w"]).max() < 1e-6
    return updates, {"seen": jnp.where(same, value, jnp.nan)}


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_an_update_receives_the_extra_arguments_that_it_has_parameters_for(micro_batches):
    kinds = (optax.GradientTransformation, optax.GradientTransformationExtraArgs)
    updates = (velo, strict, named_loss, of_value_fn, of_grad_fn, of_grad)

    @jax.jit  # all of them at once: most of the time would be compiling
    def seen_by_each() -> dict[str, jax.Array]:
        found = {}
        for update, kind in itertools.product(updates, kinds):
            program = function_program(init, loss, recording(update, kind), micro_batches=micro_batches)
            state, _ = program.train_step(program.init(jax.random.key(0), BATCH), BATCH)
            found[f"{update.__name__} {kind.__name__}"] = state.opt_state["seen"]
        return found

    expected = np.asarray(of(init(jax.random.key(0), BATCH)))
    found = seen_by_each()
    assert len(found) == 12
    assert_close(found, dict.fromkeys(found, expected), rtol=1e-5)


def test_clipping_does_not_hide_the_loss_from_the_optimizer():
    program = function_program(init, loss, recording(velo), clip_norm=1.0)
    state, _ = jax.jit(program.train_step)(program.init(jax.random.key(0), BATCH), BATCH)
    assert_close(optax.tree.get(state.opt_state, "seen"), of(init(jax.random.key(0), BATCH)), rtol=1e-5)


@pytest.mark.parametrize(
    "tx",
    [
        pytest.param(optax.lbfgs(), marks=pytest.mark.slow),
        optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(9)),
    ],
)
def test_a_line_search_can_evaluate_the_loss_again(tx):
    program = function_program(init, loss, tx)
    state, step = program.init(jax.random.key(0), BATCH), jax.jit(program.train_step)
    params, opt_state = state.params, tx.init(state.params)
    for _ in range(3):
        value, grad = jax.value_and_grad(of)(params)
        updates, opt_state = tx.update(grad, opt_state, params, value=value, grad=grad, value_fn=of)
        params = optax.apply_updates(params, updates)
        state, _ = step(state, BATCH)
    assert_close(state.params, params, rtol=1e-4, atol=1e-4)


def test_an_unknown_required_argument_is_an_error_before_the_first_step():
    def update(updates: Any, state: Any, params: Any = None, *, hessian: Any) -> Any:
        return updates, state

    with pytest.raises(TypeError, match=r"`hessian`.*value_fn"):
        function_program(init, loss, recording(update))


def test_apply_gradients_passes_extra_arguments_to_the_update():
    params = init(jax.random.key(0), BATCH)
    state = TrainState.create(apply_fn=lambda variables: 0, params=params, tx=recording(velo))
    after = state.apply_gradients(grads=params, value=jnp.asarray(3.0))
    assert float(after.opt_state["seen"]) == 3
    assert by_signature(optax.sgd(0.1)).update(params, optax.sgd(0.1).init(params), params, value=1)[0]
