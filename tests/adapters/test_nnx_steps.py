from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jax_trainer.adapters import nnx_program
from jax_trainer.adapters.nnx import nnx_state, nnx_step_program
from jax_trainer.adapters.nnx_objects import NnxObjects
from jax_trainer.core import compile_program
from jax_trainer.engine import evaluate
from jax_trainer.testing import TinyNNX, assert_close, assert_same_bits, nnx_loss, numbered_data, short_run

DATA = numbered_data(48)
EXAMPLE = {name: array[:32] for name, array in DATA.items()}
LABELS = lambda params: jax.tree_util.tree_map_with_path(lambda path, _: "a" if "hidden" in str(path) else "b", params)

TRANSFORMATIONS = {
    "adam": optax.adam(1e-2),
    "sgd with momentum": optax.sgd(0.1, momentum=0.9),
    "a chain, a schedule, a mask": optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(
            optax.cosine_decay_schedule(0.1, 10), mask=lambda params: jax.tree.map(lambda x: jnp.ndim(x) > 1, params)
        ),
    ),
    "injected hyperparameters": optax.inject_hyperparams(optax.adam)(learning_rate=optax.linear_schedule(1e-2, 0, 9)),
    "groups": optax.multi_transform({"a": optax.adam(1e-2), "b": optax.sgd(0.1, momentum=0.9)}, LABELS),
}


def train_step(model: Any, rng_key: jax.Array, batch: Any) -> Any:
    return nnx.value_and_grad(lambda model: nnx_loss(model, batch, True), has_aux=True)(model)


def val_step(model: Any, rng_key: jax.Array, batch: Any) -> Any:
    return nnx_loss(model, batch, False)


def subject(tx: optax.GradientTransformation, **options: Any) -> tuple[TinyNNX, nnx.Optimizer]:
    model = TinyNNX(nnx.Rngs(0), **options)
    return model, nnx.Optimizer(model, tx, wrt=nnx.Param)


SOME = [name if name == "sgd with momentum" else pytest.param(name, marks=pytest.mark.slow) for name in TRANSFORMATIONS]


@pytest.mark.parametrize("name", SOME)
def test_the_same_loss_is_bit_identical_to_nnx_program(name):
    tx = TRANSFORMATIONS[name]
    mine, seen = short_run(nnx_step_program(*subject(tx), train_step, val_step))
    other, seen_other = short_run(nnx_program(TinyNNX(nnx.Rngs(0)), nnx_loss, tx))
    assert_same_bits(mine, other)
    assert seen.steps == seen_other.steps


def test_the_state_of_an_optimizer_is_that_of_its_transformation_and_is_written_back():
    for name in TRANSFORMATIONS:
        tx = TRANSFORMATIONS[name]
        model, optimizer = subject(tx)
        state = nnx_state(model, optimizer, jax.random.key(0))
        assert_same_bits(state.opt_state, tx.init(state.params))
        other = jax.tree.map(lambda leaf: (np.asarray(leaf) + 7).astype(leaf.dtype), state.replace(rng=None))
        NnxObjects.of(model, optimizer).update(other)
        assert_same_bits(nnx_state(model, optimizer, jax.random.key(0)).replace(rng=None), other)


@pytest.mark.slow
@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_a_step_program_continues_from_the_optimizer_and_writes_back_its_state(name):
    batch = jax.tree.map(jnp.asarray, EXAMPLE)

    @nnx.jit
    def hand_written(model: Any, optimizer: nnx.Optimizer) -> None:
        model.train()
        optimizer.update(model, train_step(model, jax.random.key(0), batch)[1])

    def ours(model: Any, optimizer: nnx.Optimizer) -> None:
        program = nnx_step_program(model, optimizer, train_step)
        state, _ = jax.jit(program.train_step)(program.init(jax.random.key(0), batch), batch)
        NnxObjects.of(model, optimizer).update(state)

    mixed, straight = subject(TRANSFORMATIONS[name], dropout=0.0), subject(TRANSFORMATIONS[name], dropout=0.0)
    for step in (hand_written, ours, hand_written):
        step(*mixed)
        hand_written(*straight)
    a, b = (nnx_state(*both, jax.random.key(0)) for both in (mixed, straight))
    assert int(a.step) == int(mixed[1].step.get_value()) == 3
    assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_the_callers_arrays_are_neither_deleted_nor_changed():
    model, optimizer = subject(optax.adam(1e-2))
    before = jax.tree.map(np.array, nnx_state(model, optimizer, jax.random.key(0)))
    compile_program(nnx_step_program(model, optimizer, train_step)).init(jax.random.key(0), EXAMPLE).params["out"][
        "bias"
    ].delete()
    assert_same_bits(jax.tree.map(np.array, nnx_state(model, optimizer, jax.random.key(0))), before)


def test_a_step_has_its_own_key_derived_from_the_seed():
    def noisy(model: Any, rng_key: jax.Array, batch: Any) -> Any:
        (loss, _), grads = train_step(model, rng_key, batch)
        return (loss, {"draw": jax.random.uniform(rng_key)}), grads

    def draws() -> list[float]:
        model = nnx.Linear(8, 4, kernel_init=nnx.initializers.zeros, rngs=nnx.Rngs(0))
        program = nnx_step_program(model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param), noisy)
        step, state, found = jax.jit(program.train_step), program.init(jax.random.key(0), EXAMPLE), []
        for _ in range(3):
            state, report = step(state, EXAMPLE)
            found.append(float(report.metrics.by_name["draw"].value))
        return found

    first = draws()
    assert len(set(first)) == 3
    assert draws() == first


def test_evaluation_uses_evaluation_mode_and_weights_by_examples():
    model, optimizer = subject(optax.sgd(0.1))
    compiled = compile_program(nnx_step_program(model, optimizer, train_step, val_step))
    state = compiled.init(jax.random.key(0), EXAMPLE)
    parts = [{name: array[rows] for name, array in DATA.items()} for rows in (slice(0, 32), slice(32, 48))]
    found = evaluate(compiled, state, {"val": parts})["val"]
    model.eval()
    loss, reported = nnx.jit(lambda model: nnx_loss(model, DATA, False))(model)
    np.testing.assert_allclose((found["loss"], found["acc"]), (loss, reported["acc"]), rtol=1e-6)


def test_a_val_step_may_return_a_loss_metrics_or_both():
    for result, expected in [
        (lambda loss: loss, {"loss"}),
        (lambda loss: (loss, {"two": 2}), {"loss", "two"}),
        (lambda loss: {"a": 1}, {"a"}),
    ]:
        program = nnx_step_program(
            *subject(optax.sgd(0.1)), train_step, lambda model, rng_key, batch, of=result: of(jnp.float32(1.0))
        )
        state = program.init(jax.random.key(0), EXAMPLE)
        assert set(jax.eval_shape(program.eval_step, state, EXAMPLE).by_name) == expected, (result, expected)


def test_only_what_the_optimizer_names_is_trained():
    def only_out(path: Any, value: Any) -> bool:
        return "out" in path and isinstance(value, nnx.Param)

    model = TinyNNX(nnx.Rngs(0), dropout=0.0)
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=only_out)
    start = nnx_state(model, optimizer, jax.random.key(0))
    state, _ = jax.jit(nnx_step_program(model, optimizer, train_step).train_step)(start, EXAMPLE)
    assert set(state.params) == {"out"}
    assert_same_bits(state.model_state["hidden"], start.model_state["hidden"])


def grads_of(model: Any, batch: Any) -> Any:
    return train_step(model, jax.random.key(0), batch)[1]


def test_a_wrong_return_value_of_a_train_step_is_an_error():
    for step, message in [
        (lambda model, key, batch: jnp.float32(1.0), "must return the loss and the gradients"),
        (lambda model, key, batch: (1.0, {"out": 1.0}), "nnx.value_and_grad`, got a dict"),
        (lambda model, key, batch: ((1.0, 2.0), grads_of(model, batch)), "tuple of float, float.*a dict of metrics"),
        (lambda model, key, batch: ({"a": 1.0}, grads_of(model, batch)), "`loss`, only a"),
        (lambda model, key, batch: (jnp.ones(3), grads_of(model, batch)), r"one number, got shape \(3,\)"),
        (
            lambda model, key, batch: (1.0, nnx.state(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), nnx.Param)),
            "bias is .* not one of them",
        ),
    ]:
        program = nnx_step_program(*subject(optax.sgd(0.1)), step)
        state = program.init(jax.random.key(0), EXAMPLE)
        with pytest.raises((TypeError, ValueError), match=message):
            jax.eval_shape(program.train_step, state, EXAMPLE)
        with pytest.raises(ValueError, match="without a `val_step`"):
            program.eval_step(state, EXAMPLE)
