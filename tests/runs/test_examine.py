from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_trainer.adapters import function_program
from jax_trainer.core import CompiledProgram, TrainState, compile_program, with_finite_guard
from jax_trainer.runs.nonfinite import Examination, examine
from jax_trainer.testing import assert_same_bits, linear_program, numbered_data, tiny_program

NORMS = tuple(f"optimizer/{name}" for name in ("grad_global_norm", "grad_global_norm_max", "params_global_norm"))


def stepped(program: CompiledProgram, batches: list[Any]) -> TrainState:
    state = program.init(jax.random.key(0), batches[0])
    buffer = program.train_buffer(state, batches[0], 4)
    for batch in batches:
        state, buffer, _ = program.train_step(state, buffer, batch)
    return state


@pytest.mark.parametrize("debug", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_non_finite_values_of_a_bad_batch_are_named_in_the_order_of_the_tree(debug):
    program = compile_program(with_finite_guard(tiny_program("linen", optax.sgd(0.1), dropout=0.0), 0), debug=debug)
    good, bad = numbered_data(8), numbered_data(8, seed=1)
    bad["x"][3, 2] = np.nan
    state = stepped(program, [good, bad, good])
    before = jax.tree.map(np.array, state)
    found = examine(program, state, bad, 2)
    assert found.metrics == ("loss", *NORMS)
    # the bias of the norm is fine: the slope of relu is 0 where its input is nan
    assert found.gradients == ("hidden.bias", "hidden.kernel", "norm.scale", "out.bias", "out.kernel")
    assert (found.parameters, found.batch) == ((), ("x",))
    assert_same_bits(state, before)
    assert examine(program, state, good, 3) == Examination((), (), (), ())


def spiking(bad_step: int) -> CompiledProgram:
    """A program whose loss is not finite for the random numbers of one step."""
    draw = np.asarray(jax.random.normal(_rng(bad_step)))

    def loss(params, batch, *, rng, train):
        odd = jnp.where(jax.random.normal(rng) == draw, jnp.inf, 1.0)
        return (params["a"] * odd * batch[1]["x"]).sum() + params["b"].sum()

    start = lambda key, batch: {"a": jnp.ones(3), "b": jnp.ones(2)}
    return compile_program(with_finite_guard(function_program(start, loss, optax.sgd(0.1)), 0))


def _rng(step: int) -> jax.Array:
    seen = []

    def loss(params, batch, *, rng, train):
        seen.append(rng)
        return params

    program = function_program(lambda key, batch: jnp.ones(()), loss, optax.sgd(0.1))
    state = program.init(jax.random.key(0), np.ones(1))
    program.train_step(state.replace(step=jnp.int32(step - 1)), np.ones(1))
    return seen[0]


def test_the_step_is_replayed_with_its_own_random_numbers():
    program = spiking(bad_step=3)
    batch = (np.arange(3), {"x": np.ones(3, np.float32)})
    state = stepped(program, [batch] * 5)
    assert int(state.step) == 5
    assert examine(program, state, batch, 3).gradients == ("a",)
    for other in (2, 4):
        assert examine(program, state, batch, other) == Examination((), (), (), ())


def test_a_state_that_a_guard_has_frozen_is_thawed():
    guarded = with_finite_guard(linear_program(), 0)

    def train_step(state, batch):
        new, report = guarded.train_step(state, batch)
        moved = (new.params["bias"] != state.params["bias"]).any()
        return new, report._replace(metrics=report.metrics.adding(moved=jnp.where(moved, jnp.inf, 0.0)))

    program = compile_program(guarded._replace(train_step=train_step))
    good, bad = numbered_data(8), numbered_data(8)
    bad["x"][:] = np.nan
    state = stepped(program, [good, bad, good])
    assert examine(program, state, good, 3).metrics == ("moved",)


def test_parameters_that_were_not_finite_before_are_named():
    program = spiking(bad_step=9)
    state = program.init(jax.random.key(0), None)
    state = state.replace(params={**state.params, "b": jnp.array([1.0, jnp.nan])})
    found = examine(program, state, (np.arange(3), {"x": np.array([1, 2, np.inf], np.float16)}), 1)
    assert found.parameters == ("b",)
    assert found.batch == ("1.x",)
    assert found.metrics[0] == "loss"


def test_a_bare_array_is_called_so():
    loss = lambda params, batch, *, rng, train: (params * batch).sum()
    program = compile_program(function_program(lambda key, batch: jnp.ones(2, jnp.bfloat16), loss, optax.sgd(0.1)))
    state = program.init(jax.random.key(0), np.ones(2, np.float32))
    found = examine(program, state, np.array([1, np.inf], np.float32), 1)
    assert (found.gradients, found.parameters, found.batch) == (("the array",), (), ("the array",))
