from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_trainer.adapters import function_program
from jax_trainer.core import Precision, TrainState, stream
from jax_trainer.testing import assert_close, assert_same_bits, numbered_data, tiny_program

BATCH = {"x": np.full((4, 3), 2.0, np.float32)}
GRAD_NORM = 2 * np.sqrt(3)


def init(key: jax.Array, batch: Any) -> Any:
    return {"w": jax.random.normal(key, batch["x"].shape[1:])}


def linear(params: Any, batch: Any, *, rng: jax.Array, train: bool) -> jax.Array:
    """A loss whose gradient is 2 everywhere."""
    return (batch["x"] @ params["w"]).mean()


def one_step(**options: Any) -> tuple[TrainState, TrainState, Any]:
    program = function_program(init, linear, optax.sgd(0.5), **options)
    before = program.init(jax.random.key(0), BATCH)
    after, report = program.train_step(before, BATCH)
    return before, after, report


def update_norm(before: TrainState, after: TrainState) -> float:
    return float(jnp.linalg.norm(after.params["w"] - before.params["w"]))


def test_clip_norm_bounds_the_update():
    before, after, _ = one_step(clip_norm=0.1)
    assert update_norm(before, after) == pytest.approx(0.5 * 0.1, rel=1e-4)


def test_clip_norm_does_not_change_smaller_gradients():
    before, after, _ = one_step(clip_norm=10.0)
    assert update_norm(before, after) == pytest.approx(0.5 * GRAD_NORM, rel=1e-4)


def test_the_reported_norm_and_gradients_are_those_before_clipping():
    _, _, report = one_step(clip_norm=0.1)
    assert float(report.metrics.by_name["optimizer/grad_global_norm"].value) == pytest.approx(GRAD_NORM)
    assert_close(report.grads, {"w": np.full(3, 2.0)})


def test_clip_adaptive_bounds_the_update_by_the_norm_of_the_weights():
    before, after, _ = one_step(clip_adaptive=0.1)
    norm = max(float(jnp.linalg.norm(before.params["w"])), 1e-3)
    assert update_norm(before, after) == pytest.approx(0.5 * 0.1 * norm, rel=1e-4)


def test_clipping_that_is_not_above_0_is_an_error():
    for name in ["clip_norm", "clip_adaptive"]:
        for value in [0.0, -1.0, float("nan")]:
            options: Any = {name: value}
            with pytest.raises(ValueError, match=rf"`{name}` must be above 0, got {value}.*None"):
                function_program(init, linear, optax.sgd(0.5), **options)


def test_clipping_does_not_hide_the_loss_from_the_optimizer():
    program = function_program(init, linear, optax.polyak_sgd(max_learning_rate=0.01), clip_norm=1.0)
    before = program.init(jax.random.key(0), BATCH)
    before = before.replace(params={"w": jnp.ones(3)})
    after, _ = program.train_step(before, BATCH)
    assert update_norm(before, after) == pytest.approx(0.01, rel=1e-4)


def test_an_unknown_precision_is_an_error_that_names_the_choices():
    with pytest.raises(ValueError, match=r"'fp8'.*f32, bf16, bf16_full"):
        function_program(init, linear, optax.sgd(0.5), precision="fp8")


def test_precision_decides_how_parameters_are_kept():
    for precision, dtype in [
        ("f32", jnp.float32),
        ("bf16", jnp.float32),
        ("bf16_full", jnp.bfloat16),
        (Precision(param=jnp.float16), "f2"),
    ]:
        before, after, report = one_step(precision=precision)
        kept = {leaf.dtype for leaf in (before.params["w"], after.params["w"], report.grads["w"])}
        assert kept == {jnp.dtype(dtype)}, (precision, dtype)


@cache
def start(flavour: str) -> Any:
    """A compiled `init` of the tiny model on an example batch."""
    return partial(jax.jit(tiny_program(flavour, optax.sgd(0.1)).init), batch=numbered_data(4))


def test_a_new_state_is_at_step_0_and_has_its_key(flavour):
    key = jax.random.key(3)
    state = start(flavour)(key)
    assert int(state.step) == 0
    assert state.extra == {}
    assert_same_bits(state.key, key)


def test_the_same_key_gives_the_same_start(flavour):
    assert_same_bits(start(flavour)(jax.random.key(0)), start(flavour)(jax.random.key(0)))


def test_another_key_gives_another_start(flavour):
    first, second = (start(flavour)(jax.random.key(seed)).params["hidden"]["kernel"] for seed in (0, 1))
    assert not np.allclose(first, second)


def test_parameters_are_initialised_from_their_own_stream():
    program = function_program(init, linear, optax.sgd(0.5))
    state = program.init(jax.random.key(0), BATCH)
    assert_same_bits(state.params, init(stream(jax.random.key(0), "init"), BATCH))


def test_init_equals_init_from_params_with_initial_weights():
    program = function_program(init, linear, optax.adam(0.5), precision="bf16_full")
    fresh, weights = program.init(jax.random.key(3), BATCH), init(stream(jax.random.key(3), "init"), BATCH)
    assert program.info.init_from_params is not None
    assert_same_bits(program.info.init_from_params(jax.random.key(3), weights, {}), fresh)


SLOW_WEIGHTS = optax.GradientTransformation(
    lambda params: {"slow": params}, lambda updates, state, params=None: (updates, state)
)


def test_an_optimizer_that_copies_weights_gets_those_of_init_from_params():
    for tx in [optax.contrib.schedule_free_adamw(0.1), SLOW_WEIGHTS]:
        weights = {"w": jnp.array([1.0, 2.0, 3.0])}
        program = function_program(init, linear, tx)
        assert program.info.init_from_params is not None, tx
        state = program.info.init_from_params(jax.random.key(0), weights, {})
        (copy,) = [leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.shape == (3,) and bool(leaf.any())]
        assert_same_bits(copy, weights["w"])


def test_unknown_modes_of_intermediates_are_an_error():
    with pytest.raises(ValueError, match="`intermediates`.*'median'.*min"):
        function_program(init, linear, optax.sgd(0.5), intermediates=("median",))


def test_an_unknown_option_is_an_error_that_names_it():
    with pytest.raises(TypeError, match="microbatches.*micro_batches"):
        tiny_program("linen", microbatches=3)
