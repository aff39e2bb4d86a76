"""The dynamic loss scale of float16: as torch's, and a step that overflows changes nothing else."""

from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_trainer.adapters import function_program, stateful_program
from jax_trainer.core import (
    LossScale,
    NonFiniteError,
    Precision,
    Program,
    TrainState,
    compile_program,
    with_ema,
    with_finite_guard,
)
from jax_trainer.core.loss_scale import METRIC, OVERFLOWS
from jax_trainer.core.wrappers import with_finite_check
from jax_trainer.datasets import ArrayLoader
from jax_trainer.engine import Plan, StepMetrics, run
from jax_trainer.testing import assert_same_bits

SCALE = LossScale(initial=2.0**12, interval=3)
F16 = Precision(param=jnp.float32, compute=jnp.float16, output=jnp.float32, loss_scale=SCALE)
FINE, LARGE = 0.5, 6e4  # the gradient of a batch; times any scale above 1, `LARGE` overflows


def program(precision: Any = F16, **options: Any) -> Program:
    """A program whose gradient is the mean of its batch; its model state counts the steps that were not skipped."""
    return stateful_program(
        init=lambda key, batch: (jnp.float32(0.0), {"seen": jnp.int32(0)}),
        loss=lambda params, model_state, batch, *, rng, train: (
            (params * batch).mean(),
            ({"seen": model_state["seen"] + 1}, {}),
        ),
        tx=optax.adam(0.1),
        precision=precision,
        **options,
    )


@cache
def stepping(**options: Any) -> tuple[Any, TrainState]:
    made = with_ema(program(**options), 0.9)
    return jax.jit(made.train_step), made.init(jax.random.key(0), np.full(4, FINE, np.float32))


def batch(value: float) -> np.ndarray:
    return np.full(4, value, np.float32)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.booleans(), max_size=12))
def test_the_scale_is_that_of_torch(overflows):
    torch = pytest.importorskip("torch")
    step, state = stepping()
    scale, tracker = torch.tensor(SCALE.initial), torch.tensor(0, dtype=torch.int32)
    for overflow in overflows:
        state, report = step(state, batch(LARGE if overflow else FINE))
        assert float(report.metrics.by_name[METRIC].value) == float(scale)
        assert int(report.metrics.by_name[OVERFLOWS].value) == overflow
        options = (SCALE.growth, SCALE.backoff, SCALE.interval)
        torch.ops.aten._amp_update_scale_(scale, tracker, torch.tensor(float(overflow)), *options)
        assert float(state.extra["loss_scale"]["scale"]) == float(scale)
    assert int(state.step) == len(overflows)


def test_a_step_that_overflows_changes_the_step_and_the_scale_only():
    for options in [{}, {"micro_batches": 2}, {"clip_norm": 0.1}]:
        step, state = stepping(**options)
        for value in (FINE, LARGE, FINE):
            state, _ = step(state, batch(value))
        expected = stepping(**options)[1]
        for value in (FINE, FINE):
            expected, _ = step(expected, batch(value))
        assert int(state.step) == 3, options
        kept = lambda one: (one.params, one.opt_state, one.model_state)
        assert_same_bits(kept(state), kept(expected))
        after, _ = step(state, batch(LARGE))
        assert_same_bits(after.extra["ema"], state.extra["ema"])


def test_gradients_that_would_vanish_are_kept():
    for scale in [None, SCALE]:
        small = function_program(
            init=lambda key, batch: jnp.float32(1.0),
            loss=lambda params, batch, *, rng, train: ((params * batch).astype(jnp.float32) * 1e-8).mean(),
            tx=optax.sgd(0.1),
            precision=replace(F16, loss_scale=scale),
        )
        grads = small.train_step(small.init(jax.random.key(0), batch(FINE)), batch(FINE))[1].grads
        assert float(grads) == (0 if scale is None else pytest.approx(FINE * 1e-8, rel=0.01)), scale


def test_clipping_sees_unscaled_gradients_and_an_overflow_is_not_logged_as_a_norm():
    step, state = stepping(clip_norm=0.1)
    metrics = step(state, batch(FINE))[1].metrics
    assert float(metrics.by_name["optimizer/grad_global_norm"].value) == pytest.approx(FINE, rel=1e-3)
    skipped = step(state, batch(LARGE))[1].metrics
    assert float(skipped.weight_of("optimizer/grad_global_norm")) == float(skipped.weight_of("loss")) == 0
    assert np.isfinite(float(skipped.by_name["optimizer/params_global_norm"].value))


# in runs


class Rows:
    def __init__(self) -> None:
        self.rows: dict[str, list[float]] = {}

    def handle(self, event: Any) -> None:
        if isinstance(event, StepMetrics):
            for name in event.rows.format.metrics:
                self.rows.setdefault(name, []).extend(event.rows.values_of(name).tolist())


def trained(values: list[float], wrap: Any, steps_per_call: int = 1) -> tuple[TrainState, Rows]:
    compiled, rows = compile_program(wrap(program())), Rows()
    data = ArrayLoader(np.repeat(np.array(values, np.float32), 4), 4)
    state = compiled.init(jax.random.key(0), next(iter(data)))
    plan = Plan(max_epochs=1, steps_per_call=steps_per_call)
    return run(compiled, state, data, plan, [rows]), rows


CHECKS = {"default": with_finite_check, "guard": lambda one: with_finite_guard(one, 0)}


@pytest.mark.parametrize(
    ("check", "steps_per_call"),
    [
        *(("default", 3), ("guard", 1)),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("default", 1), ("guard", 3))),
    ],
)
def test_an_overflow_is_not_a_failure_and_is_counted(check, steps_per_call):
    state, rows = trained([LARGE, FINE, LARGE, FINE, FINE, FINE], CHECKS[check], steps_per_call)
    assert rows.rows[OVERFLOWS] == [1, 0, 1, 0, 0, 0]
    assert rows.rows[METRIC] == [4096, 2048, 2048, 1024, 1024, 1024]
    assert int(state.model_state["seen"]) == 4 and np.isfinite(float(state.params))


def test_a_loss_that_is_not_finite_still_is_one():
    for check in CHECKS:
        with pytest.raises(NonFiniteError, match="Step 2"):
            trained([FINE, np.nan, FINE], CHECKS[check])


def test_gradients_that_overflow_at_any_scale_end_the_run():
    broken = function_program(
        init=lambda key, batch: jnp.float32(0.0),
        loss=lambda params, batch, *, rng, train: 1 + jnp.sqrt(params * 0) * batch.mean(),  # its gradient is nan
        tx=optax.sgd(0.1),
        precision=F16,
    )
    compiled, data = compile_program(with_finite_check(broken)), ArrayLoader(np.full(40, FINE, np.float32), 1)
    with pytest.raises(NonFiniteError, match="Step 34.*loss scale"):
        run(compiled, compiled.init(jax.random.key(0), next(iter(data))), data, Plan(max_epochs=1))
