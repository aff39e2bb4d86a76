from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_trainer.adapters import function_program
from jax_trainer.core import compile_program, with_finite_guard
from jax_trainer.optimizer import (
    SGD,
    AdamW,
    AdamWConfig,
    GroupConfig,
    LinearScheduleConfig,
    SGDConfig,
    WarmupCosineDecayScheduleConfig,
    learning_rate,
    learning_rates,
)
from jax_trainer.testing import assert_same_bits
from tests.rows import noted_row

STEPS = 12
WARMUP = AdamWConfig(learning_rate=WarmupCosineDecayScheduleConfig(peak_value=0.1, warmup_steps=4))


def rates(states) -> list[float]:
    return [float(learning_rate(state)) for _, state in states]


def test_the_state_has_the_rate_of_the_last_update_and_before_the_first_that_of_the_first(applied):
    optimizer = AdamW(WARMUP)
    schedule: Any = optimizer.schedule(STEPS)
    expected = [float(schedule(count)) for count in (0, *range(STEPS))]
    np.testing.assert_allclose(rates(applied(optimizer.build(STEPS))), expected, rtol=1e-6)


def test_the_recorded_rate_is_the_rate_that_was_used(applied, gradients):
    config = SGDConfig(learning_rate=LinearScheduleConfig(init_value=0.5, end_value=0.1))
    states = applied(SGD(config).build(STEPS))
    for index, grads in enumerate(gradients):
        (before, _), (after, state) = states[index : index + 2]
        change = after["head"]["kernel"] - before["head"]["kernel"]
        np.testing.assert_allclose(change, -float(learning_rate(state)) * grads["head"]["kernel"], rtol=1e-3, atol=1e-6)


def test_a_run_that_resumes_from_a_saved_state_has_the_same_rates_and_parameters(applied):
    full = applied(AdamW(WARMUP).build(STEPS))
    for cut in (1, 4, 7):
        params, state = jax.tree.map(np.asarray, full[cut])  # as from a checkpoint: the same tree
        resumed = applied(AdamW(WARMUP).build(STEPS), params, state, first=cut)
        assert_same_bits(resumed, full[cut:])


def batches(count: int) -> list[np.ndarray]:
    return list(np.random.default_rng(0).normal(size=(count, 6)).astype(np.float32))


def distance(params, batch, *, rng, train):
    return ((params["w"]["kernel"] - batch) ** 2).mean(), {}


def program_states(tx, data, guard=False, **options):
    make = lambda key, batch: {"w": {"kernel": jnp.full((), 4.0)}}
    program = function_program(make, distance, tx, **options)
    compiled = compile_program(with_finite_guard(program) if guard else program, donate=False)
    states = [compiled.init(jax.random.key(0), data[0])]
    buffer = compiled.train_buffer(states[0], data[0], len(data))
    for batch in data:
        state, buffer, _ = compiled.train_step(states[-1], buffer, batch)
        states.append(state)
    return states


def test_accumulating_gradients_does_not_move_the_schedule():
    optimizer = AdamW(WARMUP)
    runs = [program_states(optimizer.build(8), batches(8), micro_batches=parts) for parts in (1, 3)]
    full, parts = ([float(learning_rate(state.opt_state)) for state in run] for run in runs)
    assert full == parts
    assert len(set(full)) == 8


def test_a_skipped_update_does_not_move_the_schedule():
    data = batches(6)
    data[2] = np.full_like(data[2], np.nan)
    states = program_states(AdamW(WARMUP).build(8), data, guard=True)
    rates = [float(learning_rate(state.opt_state)) for state in states[1:]]
    schedule: Any = AdamW(WARMUP).schedule(8)
    np.testing.assert_allclose(rates, [float(schedule(count)) for count in (0, 1, 1, 2, 3, 4)], rtol=1e-6)
    assert int(states[-1].step) == 6


def test_the_rate_is_found_inside_a_chain_and_inside_a_complete_state():
    state = program_states(AdamW(WARMUP).build(8), batches(1), clip_norm=1.0)[-1]
    assert float(learning_rate(state.opt_state)) == float(learning_rate(state)) == 0.0


def test_groups_have_their_own_rates(params):
    config = SGDConfig(learning_rate=0.5, groups={"head": GroupConfig("head", learning_rate_factor=0.25)})
    state = SGD(config).build().init(params)
    assert {name: float(rate) for name, rate in learning_rates(state).items()} == {"default": 0.5, "head": 0.125}
    assert float(learning_rate(state)) == 0.5


def test_a_state_that_was_built_elsewhere_is_an_error(params):
    for tx in [optax.adamw(0.1), optax.identity()]:
        with noted_row(tx), pytest.raises(ValueError, match="Build the optimizer"):
            learning_rate(tx.init(params))


def test_two_optimizers_in_one_state_are_an_error(params):
    two = optax.chain(SGD(SGDConfig()).build(), SGD(SGDConfig()).build())
    with pytest.raises(ValueError, match="records 2"):
        learning_rate(two.init(params))


def test_the_state_keeps_its_types_so_that_a_step_is_compiled_once(params, gradients):
    tx = AdamW(WARMUP).build(STEPS)
    state = tx.init(params)
    _, after = jax.eval_shape(tx.update, gradients[0], state, params)
    described = lambda tree: jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype, leaf.weak_type), tree)
    assert described(jax.eval_shape(lambda: state)) == described(after)
