"""Executables are shared by programs with the same lowered text, and by no others."""

import gc
import weakref
from concurrent.futures import Future
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_trainer.adapters import function_program
from jax_trainer.core import RecompileWarning, TrainState, compile, compile_program

BATCH = {"x": np.arange(24, dtype=np.float32).reshape(8, 3), "y": np.ones(8, np.float32)}


@pytest.fixture(autouse=True)
def kept(monkeypatch):
    """The cache of executables, initially empty."""
    monkeypatch.setattr(compile, "_kept", type(compile._kept)())
    return compile._kept


def after_two_steps(
    *, rate: float = 0.1, weights: Any = 1.0, width: int = 3, batch: Any = BATCH, callback: Any = None, **options: Any
) -> TrainState:
    """The state after two steps of a new program."""
    weights = jnp.asarray(weights)

    def loss(params: Any, batch: Any, *, rng: jax.Array, train: bool) -> jax.Array:
        if callback is not None:
            jax.debug.callback(callback, batch["y"].sum())
        return (weights * (batch["x"] @ params["w"] - batch["y"][:, None]) ** 2).mean()

    program = function_program(lambda key, batch: {"w": jnp.ones((3, width))}, loss, optax.sgd(rate))
    compiled = compile_program(program, **options)
    state = compiled.init(jax.random.key(0), batch)
    buffer = compiled.train_buffer(state, batch, 2)
    for _ in range(2):
        state, buffer, _ = compiled.train_step(state, buffer, batch)
    jax.effects_barrier()
    return state


def done(executable: Any) -> Future:
    future = Future()
    future.set_result(executable)
    return future


def test_an_identical_new_program_is_compiled_once(kept):
    first = after_two_steps()
    count = len(kept)
    assert count == 2  # `init` and a step
    again = after_two_steps()
    assert len(kept) == count
    np.testing.assert_array_equal(first.params["w"], again.params["w"])


OTHERS: dict[str, dict[str, Any]] = {
    "another rate": {"rate": 0.3},
    "another constant": {"weights": np.linspace(0, 1, 8).reshape(8, 1)},
    "another shape": {"width": 2},
    "another batch": {"batch": {name: leaf[:4] for name, leaf in BATCH.items()}},
    "nothing donated": {"donate": False},
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_a_different_program_has_its_own_executable(other, kept, monkeypatch):
    after_two_steps()
    shared = after_two_steps(**other)
    count = len(kept)
    assert count > 2
    monkeypatch.setattr(compile, "_shared", lambda key, lowered, pool: done(lowered.compile()))
    np.testing.assert_array_equal(after_two_steps(**other).params["w"], shared.params["w"])


def test_large_constants_that_differ_in_one_number_are_distinguished():
    weights = np.ones((8, 3000), np.float32)
    first = after_two_steps(weights=weights, width=3000)
    weights[7, 2999] = 2.0
    assert not np.array_equal(after_two_steps(weights=weights, width=3000).params["w"], first.params["w"])


def test_a_state_that_is_not_donated_stays(kept):
    program = function_program(lambda key, batch: {"w": jnp.ones((3, 3))}, lambda *_, **__: jnp.zeros(()), optax.sgd(1))
    for donate in (True, False):
        compiled = compile_program(program, donate=donate)
        state = compiled.init(jax.random.key(0), BATCH)
        buffer = compiled.train_buffer(state, BATCH, 2)
        compiled.train_step(state, buffer, BATCH)
        assert state.params["w"].is_deleted() == donate


def test_a_callback_belongs_to_its_own_program():
    calls: dict[str, list[float]] = {"first": [], "second": []}
    for name in calls:
        after_two_steps(callback=lambda value, name=name: calls[name].append(float(value)))
    assert calls == {"first": [8.0, 8.0], "second": [8.0, 8.0]}


@pytest.mark.slow  # clears the caches of JAX: all later tests would compile again
def test_the_cache_keeps_no_reference_to_the_program(kept):
    class Scale:
        def __call__(self, w: jax.Array) -> jax.Array:
            return w * 2

    def use(scale: Any) -> None:
        def loss(params: Any, batch: Any, *, rng: jax.Array, train: bool) -> jax.Array:
            return scale(params["w"]).mean()

        compiled = compile_program(function_program(lambda key, batch: {"w": jnp.ones(3)}, loss, optax.sgd(0.1)))
        state = compiled.init(jax.random.key(0), BATCH)
        buffer = compiled.train_buffer(state, BATCH, 2)
        compiled.train_step(state, buffer, BATCH)

    scale = Scale()
    use(scale)
    alive = weakref.ref(scale)
    del scale
    jax.clear_caches()
    gc.collect()
    assert len(kept) == 2 and alive() is None


def test_the_cache_is_bounded_and_drops_the_least_recently_used(kept, monkeypatch):
    monkeypatch.setattr(compile, "MOST", 3)
    for rate in (0.1, 0.2, 0.3, 0.4):
        after_two_steps(rate=rate)
        after_two_steps(rate=0.1)
    assert len(kept) == 3


def test_arrays_on_another_device_are_computed_there():
    loss: Any = lambda params, batch, *, rng, train: (batch["x"] @ params["w"]).mean()
    compiled = compile_program(function_program(lambda key, batch: {"w": jnp.ones((3, 2))}, loss, optax.sgd(0.1)))
    state = compiled.init(jax.random.key(0), BATCH)
    for device in jax.devices()[:2]:
        here = jax.device_put(jax.tree.map(jnp.copy, state), device)
        buffer = compiled.train_buffer(here, BATCH, 2)
        with pytest.warns(RecompileWarning) if device == jax.devices()[1] else nullcontext():
            here, _, _ = compiled.train_step(here, jax.device_put(buffer, device), BATCH)
        assert here.params["w"].devices() == {device}
