"""Several losses by name: their weighted sum is minimised, each is reported, and names must agree."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_trainer.adapters import function_program
from jax_trainer.core import Program
from jax_trainer.testing import assert_close, assert_same_bits

BATCH = np.arange(6, dtype=np.float32)
RAMP = optax.linear_schedule(0.0, 1.0, 4)


def init(key: jax.Array, batch: Any) -> Any:
    return {"w": jnp.asarray([1.0, -2.0])}


def parts(params: Any, batch: Any, *, rng: jax.Array, train: bool) -> Any:
    w = params["w"]
    return {"near": ((w[0] - batch) ** 2).mean(), "small": (w**2).sum()}, {"first": w[0]}


def program(loss: Any = parts, **options: Any) -> Program:
    return function_program(init, loss, optax.sgd(0.1), **options)


def after(program: Program, steps: int = 3, batch: Any = BATCH) -> tuple[Any, list[dict[str, float]]]:
    state, metrics, step = program.init(jax.random.key(0), batch), [], jax.jit(program.train_step)
    for _ in range(steps):
        state, report = step(state, batch)
        metrics.append({name: float(one.value) for name, one in report.metrics.by_name.items()})
    return state, metrics


def test_the_weighted_sum_is_minimised_and_every_part_is_reported():
    for weights, at in [
        (None, lambda step: (1.0, 1.0)),
        ({"small": 0.25, "near": 2.0}, lambda step: (2.0, 0.25)),
        ({"near": 1.0, "small": RAMP}, lambda step: (1.0, step / 4)),
        ({"near": 0.0, "small": 1.0}, lambda step: (0.0, 1.0)),
    ]:
        state, metrics = after(program(losses=weights))
        w = np.array([1.0, -2.0])
        for step, found in enumerate(metrics):
            near, small = at(step)
            parts = {"loss/near": ((w[0] - BATCH) ** 2).mean(), "loss/small": (w**2).sum()}
            expected = {**parts, "loss": near * parts["loss/near"] + small * parts["loss/small"], "first": w[0]}
            assert_close({name: found[name] for name in expected}, expected, rtol=1e-5)
            w = w - 0.1 * (near * np.array([2 * (w[0] - BATCH.mean()), 0]) + small * 2 * w)
        assert_close(state.params, {"w": w}, rtol=1e-5)


def test_an_evaluation_uses_the_weights_of_its_step():
    made = program(losses={"near": 1.0, "small": RAMP})
    state = after(made, steps=2)[0]
    found = made.eval_step(state, BATCH)
    parts = {name: float(found.by_name[f"loss/{name}"].value) for name in ("near", "small")}
    assert_close(found.by_name["loss"].value, parts["near"] + 0.5 * parts["small"], rtol=1e-6)
    assert found.weight_of("loss/near") == found.weight_of("loss") == 6


def test_parts_are_merged_over_micro_batches_of_different_sizes():
    ragged = BATCH[:5]
    (whole, expected), (micro, found) = (after(program(micro_batches=n), 2, ragged) for n in (1, 2))
    assert_close(micro.params, whole.params, rtol=1e-5)
    assert_close(found, expected, rtol=1e-5)


def test_parts_are_summed_in_the_output_precision():
    state, metrics = after(program(precision="bf16", losses={"near": 1.0, "small": 1e-3}), 1)
    assert metrics[0]["loss"] == np.float32(metrics[0]["loss/near"]) + np.float32(1e-3 * metrics[0]["loss/small"])
    assert state.params["w"].dtype == jnp.float32


def test_one_loss_gives_the_same_bits_as_a_dict_of_one():
    alone = program(lambda params, batch, *, rng, train: parts(params, batch, rng=rng, train=train)[0]["near"])
    named = program(lambda params, batch, *, rng, train: {"near": ((params["w"][0] - batch) ** 2).mean()})
    assert_same_bits(after(named)[0].params, after(alone)[0].params)


def test_losses_and_weights_that_do_not_agree_are_errors_before_the_first_step():
    for loss, weights, error, match in [
        (parts, {"near": 1.0}, ValueError, "near, small.*weights for near"),
        (parts, {"near": 1.0, "smal": 1.0}, ValueError, "near, small.*near, smal"),
        (lambda p, b, *, rng, train: p["w"].sum(), {"near": 1.0}, ValueError, "near.*one number"),
        (lambda p, b, *, rng, train: {"loss": p["w"].sum()}, None, TypeError, "separately"),
        (lambda p, b, *, rng, train: ({"a": p["w"].sum()}, {"loss": 0.0}), None, TypeError, "`loss` is their sum"),
        (lambda p, b, *, rng, train: ({"a": p["w"].sum()}, p["w"].sum()), None, TypeError, "comes first"),
        (lambda p, b, *, rng, train: {}, None, TypeError, "no loss"),
        (lambda p, b, *, rng, train: {"a": jnp.arange(3)}, None, TypeError, r"\['a'\].*int32"),
        (lambda p, b, *, rng, train: {"a": p["w"]}, None, ValueError, r"'a'.*\(2,\)"),
    ]:
        made = program(loss, losses=weights)
        state = made.init(jax.random.key(0), BATCH)
        with pytest.raises(error, match=match):
            jax.eval_shape(made.train_step, state, BATCH)
