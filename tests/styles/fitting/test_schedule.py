import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_trainer.styles.learning_rate import lr_schedule as typed

lr_schedule: Any = typed  # what optax calls a schedule may return anything


def expected_rate(step, peak, warmup, total):
    if step < warmup:
        return peak / 10 + (peak - peak / 10) * step / warmup
    share = min(1.0, (step - warmup) / (total - warmup))
    return peak / 100 + (peak - peak / 100) * (1 + math.cos(math.pi * share)) / 2


def test_linear_warmup_and_cosine_decay(subtests):
    for warmup in [0, 1, 5, 2.5]:
        with subtests.test(warmup=warmup):
            schedule = lr_schedule(base_lr=1e-3, steps_per_epoch=4, epochs=20, warmup_epochs=warmup)
            expected = [expected_rate(step, 1e-3, 4 * warmup, 80) for step in range(100)]
            np.testing.assert_allclose([float(schedule(step)) for step in range(100)], expected, rtol=1e-5)


def test_a_hundredth_is_reached_exactly_at_the_end_and_not_before():
    schedule = lr_schedule(0.5, 10, epochs=20)
    assert schedule(200) == jnp.float32(0.005)
    assert schedule(10_000) == jnp.float32(0.005)
    assert schedule(199) > 0.005
    assert schedule(0) == jnp.float32(0.05)
    assert schedule(50) == jnp.float32(0.5)


def test_both_spellings_are_the_same_schedule():
    a = lr_schedule(base_lr=0.1, steps_per_epoch=3, epochs=9, warmup_epochs=2)
    b = lr_schedule(lr=0.1, steps_per_epoch=3, epochs=9, warmup=2)
    assert [float(a(step)) for step in range(30)] == [float(b(step)) for step in range(30)]


def test_optax_takes_it_with_and_without_injected_hyperparameters():
    schedule, params = lr_schedule(0.1, 3, epochs=9, warmup_epochs=2), {"w": jnp.ones(2)}
    plain, injected = optax.sgd(schedule), optax.inject_hyperparams(optax.sgd)(schedule)
    states = plain.init(params), injected.init(params)
    for step in range(4):
        updates, states = zip(
            *(tx.update(params, state, params) for tx, state in zip((plain, injected), states, strict=True)),
            strict=True,
        )
        np.testing.assert_array_equal(updates[0]["w"], updates[1]["w"])
        np.testing.assert_allclose(updates[0]["w"], -float(schedule(step)), rtol=1e-6)


def test_it_can_be_compiled():
    schedule = lr_schedule(0.1, 3, epochs=9, warmup_epochs=2)
    assert jax.jit(schedule)(jnp.int32(27)) == jnp.float32(0.001)


def test_wrong_arguments_are_refused(subtests):
    for arguments, message in [
        ({"steps_per_epoch": 3}, "Pass `base_lr`"),
        ({"base_lr": 0.1, "lr": 0.1, "steps_per_epoch": 3}, "alias"),
        ({"base_lr": 0.1, "steps_per_epoch": 3, "warmup": 1, "warmup_epochs": 1}, "alias"),
        ({"base_lr": 0.1}, "`steps_per_epoch` must be at least 1, got 0"),
        ({"base_lr": 0.1, "steps_per_epoch": 3, "epochs": 5}, "below `epochs`, got 5 of 5 epochs"),
        ({"base_lr": -0.1, "steps_per_epoch": 3}, "`base_lr` must be above 0, got -0.1"),
    ]:
        with (
            subtests.test(arguments=arguments, message=message),
            pytest.raises((TypeError, ValueError), match=message),
        ):
            lr_schedule(**arguments)
