from functools import cache
from typing import Any

import jax
import numpy as np
import optax
import pytest

from jax_trainer.core import StepReport, with_finite_guard, with_gradients, with_layer_norms
from jax_trainer.testing import assert_same_bits, linear_program, short_run, tiny_program

KINDS = ("param_norm", "grad_norm", "update_norm")


def norm(*arrays: Any) -> float:
    return float(np.sqrt(sum((np.asarray(one, np.float64) ** 2).sum() for one in arrays)))


def linear_step(**options: Any) -> tuple[Any, Any, StepReport]:
    wrapped = with_layer_norms(linear_program(optax.sgd(0.125), clip_norm=0.01), **options)
    batch = {"x": np.ones((4, 8), np.float32), "y": np.zeros(4, np.int32)}
    state = wrapped.init(jax.random.key(0), batch)
    state = state.replace(params=jax.tree.map(lambda leaf: leaf + 0.5, state.params))  # it begins with zeros
    after, report = jax.jit(wrapped.train_step)(state, batch)
    return state, after, report


def values(report: StepReport) -> dict[str, float]:
    found = report.metrics.by_name
    return {name: float(one.value) for name, one in found.items() if name.startswith(KINDS)}


def test_norms_are_those_of_parameters_after_gradients_before_clipping_and_what_was_added():
    state, after, report = linear_step()
    expected = {}
    for name in state.params:
        expected[f"param_norm/{name}"] = norm(after.params[name])
        expected[f"grad_norm/{name}"] = norm(report.grads[name])
        expected[f"update_norm/{name}"] = norm(after.params[name] - state.params[name])
    assert values(report) == pytest.approx(expected, rel=1e-5)
    assert norm(*report.grads.values()) > 0.01  # it was clipped


def test_a_layer_is_a_module_with_its_arrays_and_only_floats_count():
    wrapped = with_layer_norms(tiny_program("linen"))
    batch = {"x": np.ones((4, 8), np.float32), "y": np.zeros(4, np.int32)}
    state = jax.eval_shape(wrapped.init, jax.random.key(0), batch)
    _, report = jax.eval_shape(wrapped.train_step, state, batch)
    layers = {name.partition("/")[2] for name in report.metrics.by_name if name.startswith(KINDS)}
    assert layers == {*state.params} and len(layers) < len(jax.tree.leaves(state.params))


def test_only_the_chosen_norms_are_reported():
    for kind in KINDS:
        chosen = {name: name == kind.removesuffix("_norm") + "s" for name in ("params", "grads", "updates")}
        assert {name.partition("/")[0] for name in values(linear_step(**chosen)[2])} == {kind}, kind


def test_without_statistics_to_log_the_program_is_unchanged():
    bare = linear_program()
    assert with_layer_norms(bare, params=False, grads=False, updates=False) is bare


@cache
def trained(kind: str, *, has_norms: bool) -> Any:
    tx = optax.adamw(0.01)
    bare = linear_program(tx) if kind == "linear" else tiny_program(kind, tx)
    return short_run(with_finite_guard(with_layer_norms(bare) if has_norms else bare), 8)[0]


@pytest.mark.parametrize("kind", ["linear", *(pytest.param(one, marks=pytest.mark.slow) for one in ("linen", "nnx"))])
def test_norms_change_no_trained_bit(kind: str):
    assert_same_bits(trained(kind, has_norms=True), trained(kind, has_norms=False))


@pytest.mark.parametrize("wrap", [with_layer_norms, lambda program: with_gradients(program, "histograms")])
def test_a_step_without_gradients_is_refused_when_it_is_traced(wrap: Any):
    bare = linear_program()

    def train_step(state: Any, batch: Any) -> Any:
        state, report = bare.train_step(state, batch)
        return state, report._replace(grads=None)

    wrapped = wrap(bare._replace(train_step=train_step))
    batch = {"x": np.ones((4, 8), np.float32), "y": np.zeros(4, np.int32)}
    with pytest.raises(TypeError, match="no gradients.*`grads: false`"):
        jax.eval_shape(wrapped.train_step, jax.eval_shape(wrapped.init, jax.random.key(0), batch), batch)
