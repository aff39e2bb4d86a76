from functools import cache
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_trainer.adapters import function_program, stateful_program
from jax_trainer.core import StepReport, TrainState
from jax_trainer.testing import assert_close, assert_same_bits, numbered_data, tiny_program


def batch_of(length: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(length)
    x = rng.normal(size=(length, 5)).astype(np.float32)
    return {"x": x, "y": x.sum(-1) ** 2, "mask": (rng.random(length) < 0.6).astype(np.float32)}


def init(key: jax.Array, batch: Any) -> Any:
    rng = np.random.default_rng(0)
    return {
        "a": jnp.asarray(rng.normal(size=(5, 6)).astype(np.float32)),
        "b": jnp.asarray((rng.normal(size=6) / 6).astype(np.float32)),
    }


def errors(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    return (jnp.tanh(x @ params["a"]) @ params["b"] - y) ** 2


def loss(params: Any, batch: Any, *, rng: jax.Array, train: bool) -> Any:
    each, mask = errors(params, batch["x"], batch["y"]), batch["mask"]
    return each.mean(), {
        "mean": each.mean(),
        "sum": {"value": each.sum(), "mode": "sum"},
        "max": {"value": each.max(), "mode": "max"},
        "min": {"value": each.min(), "mode": "min"},
        "single": {"value": batch["x"][-1, 0], "mode": "single"},
        "concat": {"value": batch["x"][:, 0], "mode": "concat"},
        "columns": {"value": batch["x"].mean(0), "mode": "mean"},
        "masked": {"value": (each * mask).sum(), "count": mask.sum()},
    }


def masked_loss(params: Any, batch: Any, *, rng: jax.Array, train: bool) -> Any:
    """A mean over what the mask leaves, as over the tokens of padded text."""
    count = batch["mask"].sum()
    total = (errors(params, batch["x"], batch["y"]) * batch["mask"]).sum()
    return total / count, {"loss": {"value": total, "count": count}}


def one_step(loss: Any, batch: Any, micro_batches: int) -> tuple[TrainState, StepReport]:
    program = function_program(init, loss, optax.sgd(0.1), micro_batches=micro_batches)
    return jax.jit(program.train_step)(program.init(jax.random.key(0), batch), batch)


def values(report: StepReport) -> dict[str, jax.Array]:
    return {name: metric.value for name, metric in report.metrics.by_name.items()}


@cache
def at_once(length: int) -> tuple[TrainState, StepReport]:
    return one_step(loss, batch_of(length), 1)


@pytest.mark.parametrize(("micro_batches", "length"), [pytest.param(4, 32, marks=pytest.mark.slow), (7, 11)])
def test_micro_batches_give_what_the_big_batch_gives(length, micro_batches):
    batch = batch_of(length)
    big, big_report = at_once(length)
    small, small_report = one_step(loss, batch, micro_batches)
    assert_close(small_report.grads, big_report.grads)
    assert_close(small.params, big.params)
    assert_close(values(small_report), values(big_report), rtol=2e-6)
    assert_same_bits(values(small_report)["concat"], batch["x"][:, 0])
    assert int(small_report.metrics.weight_of("loss")) == length
    assert float(small_report.metrics.weight_of("masked")) == batch["mask"].sum()


@pytest.mark.parametrize("length", [pytest.param(32, marks=pytest.mark.slow), 11])
def test_a_loss_with_its_own_count_is_weighted_by_it(length):
    batch = batch_of(length)
    big, big_report = one_step(masked_loss, batch, 1)
    small, small_report = one_step(masked_loss, batch, 2)
    assert_close(small.params, big.params)
    assert_close(values(small_report)["loss"], values(big_report)["loss"])


class Sized(flax.struct.PyTreeNode):
    x: Any
    y: Any
    size: int = flax.struct.field(pytree_node=False)


@pytest.mark.parametrize(("length", "micro_sizes"), [pytest.param(32, {11, 10}, marks=pytest.mark.slow), (12, {4})])
def test_a_static_size_is_that_of_the_micro_batch(length, micro_sizes):
    seen = set()

    def loss(params, batch, *, rng, train):
        seen.add(batch.size)
        assert batch.x.shape[0] == batch.size
        return errors(params, batch.x, batch.y).sum() / batch.size

    arrays = batch_of(length)
    batch = Sized(arrays["x"], arrays["y"], size=length)
    small, report = one_step(loss, batch, 3)
    assert seen == micro_sizes
    assert int(report.metrics.weight_of("loss")) == length
    assert_close(small.params, one_step(loss, batch, 1)[0].params)


@pytest.mark.slow
def test_more_micro_batches_than_examples_use_one_example_each():
    (small, small_report), (big, big_report) = one_step(loss, batch_of(11), 50), at_once(11)
    assert_close(small.params, big.params)
    assert_close(values(small_report), values(big_report), rtol=2e-6)


def test_the_model_state_is_carried_from_micro_batch_to_micro_batch():
    def start(key, batch):
        return init(key, batch), {"last": jnp.zeros(()), "seen": jnp.zeros((), jnp.int32)}

    def loss(params, model_state, batch, *, rng, train):
        x = batch["x"]
        changed = {"last": 0.5 * model_state["last"] + x.mean(), "seen": model_state["seen"] + x.shape[0]}
        return errors(params, x, batch["y"]).mean(), (changed, {})

    batch = batch_of(11)
    program = stateful_program(start, loss, optax.sgd(0.1), micro_batches=4)
    state, _ = jax.jit(program.train_step)(program.init(jax.random.key(0), batch), batch)
    expected = 0.0
    for part in (slice(0, 3), slice(3, 6), slice(6, 9), slice(9, 11)):
        expected = 0.5 * expected + batch["x"][part].mean(dtype=np.float64)
    assert int(state.model_state["seen"]) == 11
    assert_close(state.model_state["last"], expected)


@pytest.mark.slow
def test_batch_norm_sees_the_micro_batches_one_after_the_other(flavour):
    batch = numbered_data(8)
    big = tiny_program(flavour, optax.sgd(0.0), dropout=0.0)
    expected = state = jax.jit(big.init)(jax.random.key(0), batch)
    step = jax.jit(big.train_step)
    for start in range(0, 8, 4):
        expected, _ = step(expected, jax.tree.map(lambda x, start=start: x[start : start + 4], batch))
    accumulated = tiny_program(flavour, optax.sgd(0.0), dropout=0.0, micro_batches=2)
    jax.eval_shape(accumulated.init, jax.random.key(0), batch)  # nnx learns the module's graph here
    found, _ = jax.jit(accumulated.train_step)(state, batch)
    assert_close(found.model_state, expected.model_state)


def test_every_micro_batch_has_its_own_key():
    def loss(params, batch, *, rng, train):
        draw = jax.random.key_data(rng)[-1].astype(jnp.float32)
        return params["b"].sum() * draw, {"draw": {"value": draw, "mode": "concat"}}

    _, report = one_step(loss, batch_of(11), 4)
    assert len(np.unique(values(report)["draw"])) == 4


def test_gradients_are_summed_in_f32_and_handed_out_in_the_type_of_the_parameters():
    def loss(params, batch, *, rng, train):
        return params["b"].sum() * batch["y"].mean()

    batch = {**batch_of(32), "y": np.where(np.arange(32) < 31, 1.0, 0.25).astype(np.float32)}
    program = function_program(init, loss, optax.sgd(0.1), micro_batches=32, precision="bf16_full")
    _, report = jax.jit(program.train_step)(program.init(jax.random.key(0), batch), batch)
    assert_same_bits(report.grads["b"], jnp.full(6, batch["y"].mean(), jnp.bfloat16))


def test_fewer_than_one_micro_batch_is_an_error():
    for micro_batches in [0, -2]:
        with pytest.raises(ValueError, match=rf"`micro_batches`.* 1, got {micro_batches}"):
            function_program(init, loss, optax.sgd(0.1), micro_batches=micro_batches)


def test_arrays_without_a_common_first_axis_are_an_error_that_names_their_shapes():
    for other in [np.zeros(7, np.float32), np.float32(0)]:
        batch = {**batch_of(8), "other": other}
        with pytest.raises(ValueError, match=r"\(8, 5\).*first axis"):
            one_step(masked_loss, batch, 2)


@pytest.mark.parametrize("masked", [2, 8])
def test_a_part_without_examples_changes_nothing(masked, key):
    def loss(params, batch, *, rng, train):
        count = batch["mask"].sum()
        total = ((batch["x"] @ params["w"]) ** 2 * batch["mask"]).sum()
        entry = {"value": total, "count": count}
        return total / jnp.where(train, count, 1), {"loss": entry, "v": entry}

    batch = {"x": jnp.ones((8, 3)), "mask": jnp.arange(8) >= masked}
    results = []
    for micro_batches in (1, 4):
        program = function_program(
            lambda key, batch: {"w": jnp.ones(3)}, loss, optax.sgd(0.1), micro_batches=micro_batches
        )
        state, report = jax.jit(program.train_step)(program.init(key, batch), batch)
        results.append((state.params["w"], report.metrics.by_name["v"]))
    if masked == 8:  # nothing counts at all: the big batch is 0/0, in parts nothing moves
        np.testing.assert_array_equal(results[1][0], np.ones(3))
        assert float(results[1][1].weight) == 0
    else:
        np.testing.assert_allclose(results[1][0], results[0][0], rtol=1e-6)
        np.testing.assert_allclose(results[1][1].value, results[0][1].value, rtol=1e-6)
