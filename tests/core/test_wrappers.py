from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_trainer.adapters import function_program, stateful_program
from jax_trainer.core import (
    MetricWindow,
    NonFiniteError,
    Program,
    TrainState,
    compile_program,
    with_ema,
    with_finite_guard,
)
from jax_trainer.core.metric_accumulator import WindowAccumulator
from jax_trainer.core.wrappers import with_finite_check
from jax_trainer.testing import assert_close, assert_same_bits, numbered_data, tiny_program

GOOD, BAD = np.array([1.0, 2.0], np.float32), np.array([1.0, np.nan], np.float32)


def distance(params: Any, batch: Any, *, rng: jax.Array, train: bool) -> Any:
    return ((params["w"] - batch) ** 2).mean(), {"last": {"value": 5 * batch[-1], "count": 5}}


def fit_mean(tx: optax.GradientTransformation | None = None, loss: Any = distance) -> Program:
    return function_program(lambda key, batch: {"w": jnp.full((), 4.0, jnp.float32)}, loss, tx or optax.sgd(0.1))


def states_and_rows(program: Program, batches: list[np.ndarray]) -> tuple[list[TrainState], MetricWindow]:
    """The states before and after every step, and the metrics of the steps."""
    compiled = compile_program(program, donate=False)
    states = [compiled.init(jax.random.key(0), batches[0])]
    buffer = compiled.train_buffer(states[0], batches[0], 6)  # of one length, so that tests share what is compiled
    fmt = buffer.format
    for batch in batches:
        state, buffer, _ = compiled.train_step(states[-1], buffer, batch)
        states.append(state)
    return states, MetricWindow(1, fmt, np.asarray(buffer.rows)[-len(batches) :])


def test_the_average_follows_the_parameters():
    for warmup in [True, False]:
        for decay in [0.3, 0.99]:
            states, _ = states_and_rows(with_ema(fit_mean(), decay, warmup=warmup), [GOOD] * 6)
            average = float(states[0].params["w"])
            assert float(states[0].extra["ema"]["w"]) == average, (warmup, decay)
            for step, state in enumerate(states[1:], start=1):
                keep = min(decay, (1 + step) / (10 + step)) if warmup else decay
                average = keep * average + (1 - keep) * float(state.params["w"])
                assert_close(state.extra["ema"], {"w": average}, rtol=1e-6, atol=0)


def test_averaging_does_not_change_training():
    averaged, plain = (
        states_and_rows(with_ema(fit_mean(), 0.9), [GOOD] * 3)[0],
        states_and_rows(fit_mean(), [GOOD] * 3)[0],
    )
    assert_close([state.params for state in averaged], [state.params for state in plain])


def test_evaluation_uses_the_averaged_weights_or_the_current_ones():
    for evaluate in [True, False]:
        program = with_ema(fit_mean(), 0.9, warmup=False, evaluate=evaluate)
        state = states_and_rows(program, [GOOD] * 3)[0][-1]
        average, current = float(state.extra["ema"]["w"]), float(state.params["w"])
        assert average != pytest.approx(current, rel=1e-2), evaluate
        evaluated = average if evaluate else current
        assert_close(program.eval_step(state, GOOD).by_name["loss"].value, ((evaluated - GOOD) ** 2).mean())


def test_predictions_come_from_the_averaged_weights_or_the_current_ones():
    for evaluate in [True, False]:
        predicting = fit_mean()._replace(predict_step=lambda state, batch: state.params["w"] * batch)
        program = with_ema(predicting, 0.9, warmup=False, evaluate=evaluate)
        state = states_and_rows(program, [GOOD] * 3)[0][-1]
        assert program.predict_step is not None, evaluate
        weights = state.extra["ema"] if evaluate else state.params
        assert_close(program.predict_step(state, GOOD), float(weights["w"]) * GOOD)
        assert with_ema(fit_mean(), 0.9).predict_step is None, evaluate


def test_init_from_params_includes_the_state_of_wrappers():
    program = with_finite_guard(with_ema(fit_mean(), 0.9))
    assert program.info.init_from_params is not None
    weights_passed = {"w": jnp.float32(7)}
    state = program.info.init_from_params(jax.random.key(0), weights_passed, {})
    fresh = program.init(jax.random.key(0), GOOD)
    assert_same_bits(state, fresh.replace(params=weights_passed, extra={**fresh.extra, "ema": weights_passed}))
    assert with_finite_guard(fit_mean().with_info(init_from_params=None)).info.init_from_params is None


def test_a_decay_outside_0_to_1_is_an_error():
    for decay in [1.0, -0.1, 1.5, float("nan")]:
        with pytest.raises(ValueError, match=rf"`decay` must be at least 0 and below 1, got {decay}"):
            with_ema(fit_mean(), decay)


def test_averages_keep_the_dtype_of_their_parameters():
    program = function_program(lambda key, batch: {"w": jnp.zeros(())}, distance, optax.sgd(0.1), precision="bf16_full")
    states, _ = states_and_rows(with_ema(program, 0.9), [GOOD])
    assert states[-1].extra["ema"]["w"].dtype == jnp.bfloat16


def with_running_mean() -> Program:
    """A program whose model keeps a running mean of its input."""

    def init(key, batch):
        return {"w": jnp.ones(8)}, {"mean": jnp.zeros(())}

    def loss(params, model_state, batch, *, rng, train):
        changed = {"mean": 0.9 * model_state["mean"] + 0.1 * batch["x"].mean()}
        return ((batch["x"] @ params["w"]) ** 2).mean(), (changed, {})

    return stateful_program(init, loss, optax.sgd(0.1, momentum=0.9))


@pytest.mark.parametrize(
    "kind", ["running mean", *(pytest.param(name, marks=pytest.mark.slow) for name in ("linen", "nnx"))]
)
def test_a_skipped_step_does_not_change_the_state(kind):
    inner = with_running_mean() if kind == "running mean" else tiny_program(kind)
    program = with_finite_guard(with_ema(inner, 0.9))
    good, bad = numbered_data(8), numbered_data(8, seed=1)
    bad["x"][3, 2] = np.nan
    step = jax.jit(program.train_step)
    before, _ = step(jax.jit(program.init)(jax.random.key(0), good), good)
    after, report = step(before, bad)
    assert np.isnan(report.metrics.by_name["loss"].value)
    assert int(after.step) == int(before.step) + 1
    assert set(after.extra) == {"ema", "skipped_in_a_row"}
    counted = {"ema": before.extra["ema"], "skipped_in_a_row": jnp.int32(1)}
    assert_same_bits(after, before.replace(step=after.step, extra=counted))


def test_a_good_step_is_not_changed_by_the_guard():
    batches = [GOOD, GOOD + 1, GOOD - 1]
    guarded, plain = (
        states_and_rows(with_finite_guard(fit_mean()), batches)[0][-1],
        states_and_rows(fit_mean(), batches)[0][-1],
    )
    assert_close(guarded.params, plain.params)
    assert int(guarded.step) == 3


def test_an_infinite_gradient_is_caught_though_the_loss_is_finite():
    def root(params, batch, *, rng, train):
        return jnp.sqrt(jnp.abs(params["w"] - batch)).sum()  # where both are equal the slope is infinite

    fine, steep = np.array([1.0], np.float32), np.array([4.0], np.float32)
    states, rows = states_and_rows(with_finite_guard(fit_mean(loss=root)), [steep, fine])
    assert rows.columns["loss"].values[0] == 0
    assert_same_bits(states[1].params, states[0].params)
    assert float(states[2].params["w"]) != 4
    np.testing.assert_array_equal(rows.columns["guard/skipped"].values, [1, 0])


def test_skips_are_counted_and_their_metrics_have_weight_0():
    states, rows = states_and_rows(with_finite_guard(fit_mean()), [GOOD, BAD, GOOD, BAD])
    np.testing.assert_array_equal(rows.columns["loss"].weights, [2, 0, 2, 0])
    np.testing.assert_array_equal(rows.columns["last"].weights, [5, 0, 5, 0])
    accumulator = WindowAccumulator()
    accumulator.add_columns(rows.columns)
    epoch = accumulator.compute()
    assert epoch["guard/skipped"] == 2
    assert epoch["guard/in_a_row"] == 1
    good = [((float(states[i].params["w"]) - GOOD) ** 2).mean() for i in (0, 2)]
    assert epoch["loss"] == pytest.approx(np.mean(good), rel=1e-6)


def check(program: Program, rows: MetricWindow) -> None:
    for one in program.info.checks:
        one(rows)


def test_as_many_bad_steps_in_a_row_as_allowed_do_not_end_the_run():
    program = with_finite_guard(fit_mean(), max_consecutive=2)
    states, rows = states_and_rows(program, [BAD, BAD, GOOD, BAD, BAD, GOOD])
    check(program, rows)
    moved = [bool(b.params["w"] != a.params["w"]) for a, b in zip(states, states[1:], strict=False)]
    assert moved == [False, False, True, False, False, True]


def test_one_more_bad_step_in_a_row_freezes_the_state():
    program = with_finite_guard(fit_mean(optax.adam(0.1)), max_consecutive=2)
    states, rows = states_and_rows(program, [GOOD, BAD, BAD, BAD, GOOD, GOOD])
    for state in states[2:]:
        assert_same_bits((state.params, state.opt_state), (states[1].params, states[1].opt_state))
    assert int(states[-1].step) == 6
    np.testing.assert_array_equal(rows.columns["loss"].weights, [2, 0, 0, 0, 0, 0])


def test_a_frozen_run_ends_with_an_error_that_names_the_step():
    for first in [1, 101]:
        program = with_finite_guard(fit_mean(), max_consecutive=2)
        _, rows = states_and_rows(program, [GOOD, BAD, BAD, BAD, GOOD])
        with pytest.raises(NonFiniteError, match=rf"Step {first + 3}: .* 3 times.*`max_consecutive` is 2"):
            check(program, replace(rows, first=first))
        check(program, rows.split(3)[0])


def test_a_run_may_allow_no_bad_step_at_all():
    program = with_finite_guard(fit_mean(), max_consecutive=0)
    states, rows = states_and_rows(program, [GOOD, BAD, GOOD])
    assert_same_bits(states[-1].params, states[1].params)
    with pytest.raises(NonFiniteError, match=r"Step 2\b"):
        check(program, rows)


def test_a_checked_run_ends_with_an_error_that_names_the_first_bad_step_and_its_loss():
    for first in [1, 101]:
        program = with_finite_check(fit_mean())
        states, rows = states_and_rows(program, [GOOD, GOOD, BAD, BAD])
        check(program, replace(rows.split(2)[0], first=first))
        with pytest.raises(NonFiniteError, match=rf"Step {first + 2}: the loss was nan") as caught:
            check(program, replace(rows, first=first))
        assert (caught.value.step, caught.value.batch) == (first + 2, None), first
        plain, _ = states_and_rows(fit_mean(), [GOOD, GOOD, BAD, BAD])
        assert_same_bits(states[-1], plain[-1])


def test_weights_that_are_not_finite_end_a_checked_run_though_the_loss_is():
    """The last step of a run, or before a checkpoint, has no later loss that shows it."""

    def bad_gradient(params: Any, batch: Any, *, rng: jax.Array, train: bool) -> Any:
        return params["w"] + jnp.sqrt((params["w"] - params["w"]) ** 2), {}

    program = with_finite_check(fit_mean(loss=bad_gradient))
    states, rows = states_and_rows(program, [GOOD])
    assert not np.isfinite(states[-1].params["w"])
    with pytest.raises(NonFiniteError, match=r"Step 1: .*parameters.*nan") as caught:
        check(program, rows)
    assert caught.value.step == 1


def test_the_error_has_the_step_and_no_batch_yet():
    program = with_finite_guard(fit_mean(), max_consecutive=1)
    _, rows = states_and_rows(program, [GOOD, BAD, BAD, BAD])
    with pytest.raises(NonFiniteError) as caught:
        check(program, replace(rows, first=11))
    assert (caught.value.step, caught.value.batch) == (13, None)


@pytest.mark.parametrize(
    ("watched", "kept", "message"),
    [
        (("loss", "last"), [True, False, False], "the loss, the last or a gradient"),
        (("last",), [True, False, False], "the last or a gradient"),
        ((), [True, True, False], "a gradient"),
        (("loss",), [True, True, False], "the loss or a gradient"),
    ],
)
def test_watched_metrics_must_be_finite_too(watched, kept, message):
    def loss(params, batch, *, rng, train):
        value, _ = distance(params, batch[:2], rng=rng, train=train)
        return value, {"last": batch[-1]}

    program = with_finite_guard(fit_mean(loss=loss), 1, watched=watched)
    fine, odd, bad = (np.array([*xs, x], np.float32) for xs, x in [(GOOD, 0), (GOOD, np.inf), (BAD, np.inf)])
    states, _ = states_and_rows(program, [fine, odd, bad])
    assert [bool(a.params["w"] != b.params["w"]) for a, b in zip(states, states[1:], strict=False)] == kept
    _, rows = states_and_rows(program, [bad, bad, bad])
    with pytest.raises(NonFiniteError, match=rf"Step 2: {message} was not finite 2 times"):
        check(program, rows)


def test_watching_an_unknown_training_metric_is_an_error_that_lists_the_known_ones():
    def loss(params, batch, *, rng, train):
        return params["w"] ** 2, {"evaluated": {"value": 1.0, "log_mode": "eval"}, "acc": 0.5}

    for name in ("los", "evaluated", "train/loss"):
        program = with_finite_guard(fit_mean(loss=loss), watched=("loss", name))
        with pytest.raises(ValueError, match=rf"'{name}'.*`watched`.*acc, loss, optimizer"):
            states_and_rows(program, [GOOD])
    with pytest.raises(TypeError, match=r"got 'loss'. Write `watched=\('loss',\)`"):
        with_finite_guard(fit_mean(), watched="loss")


def test_only_a_guarded_program_has_its_batches_kept():
    assert not with_ema(fit_mean(), 0.9).info.keeps_batches
    assert with_ema(with_finite_guard(fit_mean()), 0.9).info.keeps_batches


def test_checks_of_inner_programs_are_kept():
    def inner(rows: MetricWindow) -> None:
        raise AssertionError("called")

    program = with_finite_guard(fit_mean().with_info(checks=(inner,)))
    assert program.info.checks[0] is inner
    assert len(program.info.checks) == 2
