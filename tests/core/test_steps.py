from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_trainer.adapters import function_program, stateful_program
from jax_trainer.core import LogFreq, LogMetricMode, LogMode, Program, TrainState, make_program
from jax_trainer.core.steps import global_norm, reporting
from jax_trainer.testing import assert_close, assert_same_bits, numbered_data, tiny_program

X = np.random.default_rng(0).normal(size=(6, 3)).astype(np.float32)
Y = np.arange(6, dtype=np.float32)
BATCH = {"x": X, "y": Y}


def init(key: jax.Array, batch: Any) -> Any:
    return {"w": jnp.asarray([1.0, -2.0, 0.5])}


def squares(params: Any, batch: Any, *, rng: jax.Array, train: bool) -> jax.Array:
    return ((batch["x"] @ params["w"] - batch["y"]) ** 2).mean()


def noisy(params: Any, batch: Any, *, rng: jax.Array, train: bool) -> Any:
    draw = jax.random.normal(rng)
    return squares(params, batch, rng=rng, train=train) + draw * params["w"].sum(), {"draw": draw}


def in_float64(w: np.ndarray) -> tuple[float, np.ndarray]:
    """The loss and its gradient, in float64."""
    error = X.astype(np.float64) @ w - Y
    return (error**2).mean(), 2 * X.T.astype(np.float64) @ error / len(Y)


W0 = np.array([1.0, -2.0, 0.5])


def test_a_step_follows_the_gradient():
    program = function_program(init, squares, optax.sgd(0.1))
    state, report = program.train_step(program.init(jax.random.key(0), BATCH), BATCH)
    loss, grad = in_float64(W0)
    assert_close(report.grads, {"w": grad}, rtol=1e-5)
    assert_close(state.params, {"w": W0 - 0.1 * grad}, rtol=1e-5)
    assert_close(report.metrics.by_name["loss"].value, loss, rtol=1e-6)
    assert int(state.step) == 1


def test_the_loss_is_weighted_by_the_examples_of_the_batch():
    for run in ["train_step", "eval_step"]:
        program = function_program(init, squares, optax.sgd(0.1))
        state = program.init(jax.random.key(0), BATCH)
        metrics = program.eval_step(state, BATCH) if run == "eval_step" else program.train_step(state, BATCH)[1].metrics
        assert metrics.weight_of("loss") == 6, run


def test_a_loss_metric_is_weighted_by_its_own_count():
    def loss(params, batch, *, rng, train):
        value = squares(params, batch, rng=rng, train=train)
        return value, {"loss": {"value": 99 * value, "count": 99}}

    program = function_program(init, loss, optax.sgd(0.1))
    _, report = program.train_step(program.init(jax.random.key(0), BATCH), BATCH)
    assert report.metrics.weight_of("loss") == 99


@pytest.mark.parametrize("step", ["train_step", "eval_step"])
def test_a_loss_that_is_not_one_number_is_an_error_that_names_its_shape(step):
    def loss(params, batch, *, rng, train):
        return (batch["x"] @ params["w"] - batch["y"]) ** 2

    program = function_program(init, loss, optax.sgd(0.1))
    with pytest.raises(ValueError, match=r"one number, got shape \(6,\) from batch.x \(6, .*mean"):
        getattr(program, step)(program.init(jax.random.key(0), BATCH), BATCH)


def test_optimizers_receive_the_loss():
    program = function_program(init, squares, optax.polyak_sgd(max_learning_rate=10.0))
    state, _ = program.train_step(program.init(jax.random.key(0), BATCH), BATCH)
    loss, grad = in_float64(W0)
    assert_close(state.params, {"w": W0 - loss / (grad @ grad) * grad}, rtol=1e-5)


def test_a_plateau_of_the_loss_lowers_the_learning_rate():
    tx = optax.chain(optax.sgd(0.0), optax.contrib.reduce_on_plateau(factor=0.5, patience=2))
    program = function_program(init, squares, tx)
    state = program.init(jax.random.key(0), BATCH)
    for _ in range(3):
        state, _ = program.train_step(state, BATCH)
    assert float(optax.tree.get(state.opt_state, "scale")) == 0.5


def test_the_norms_of_gradients_and_parameters_are_reported():
    program = function_program(init, squares, optax.sgd(0.1))
    state, report = program.train_step(program.init(jax.random.key(0), BATCH), BATCH)
    norms = {name: m for name, m in report.metrics.by_name.items() if name.startswith("optimizer/")}
    grad_norm = np.linalg.norm(in_float64(W0)[1])
    assert_close(
        {name: metric.value for name, metric in norms.items()},
        {
            "optimizer/grad_global_norm": grad_norm,
            "optimizer/grad_global_norm_max": grad_norm,
            "optimizer/params_global_norm": np.linalg.norm(state.params["w"]),
        },
        rtol=1e-5,
    )
    assert {metric.log_mode for metric in norms.values()} == {LogMode.TRAIN}
    worst = norms["optimizer/grad_global_norm_max"]
    assert (worst.mode, worst.log_freq) == (LogMetricMode.MAX, LogFreq.EPOCH)


def test_norms_can_be_disabled():
    program = function_program(init, squares, optax.sgd(0.1), log_norms=False)
    _, report = program.train_step(program.init(jax.random.key(0), BATCH), BATCH)
    assert set(report.metrics.by_name) == {"loss"}


def test_the_loss_sees_parameters_and_batch_in_the_compute_type():
    seen = []

    def loss(params, batch, *, rng, train):
        seen.append((params["w"].dtype, batch["x"].dtype, batch["id"].dtype))
        return squares(params, batch, rng=rng, train=train)

    batch = {**BATCH, "id": np.arange(6, dtype=np.int32)}
    program = function_program(init, loss, optax.sgd(0.1), precision="bf16")
    state = program.init(jax.random.key(0), batch)
    program.train_step(state, batch)
    program.eval_step(state, batch)
    assert seen == [(jnp.bfloat16, jnp.bfloat16, jnp.int32)] * 2


def test_bf16_computing_keeps_f32_weights_and_reports_in_f32():
    def loss(params, batch, *, rng, train):
        value = squares(params, batch, rng=rng, train=train)
        return value, {"again": value, "nested": {"value": value, "mode": "max"}, "correct": (batch["y"] > 0).sum()}

    program = function_program(init, loss, optax.adam(0.1), precision="bf16")
    state, report = program.train_step(program.init(jax.random.key(0), BATCH), BATCH)
    assert state.params["w"].dtype == report.grads["w"].dtype == jnp.float32
    assert {leaf.dtype for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim} == {jnp.dtype(jnp.float32)}
    reported = {name: report.metrics.by_name[name].value.dtype for name in ("loss", "again", "nested")}
    assert set(reported.values()) == {jnp.dtype(jnp.float32)}
    assert report.metrics.by_name["correct"].value.dtype == jnp.int32


def test_bf16_computing_does_not_round_small_updates_away():
    def loss(params, batch, *, rng, train):
        return params["w"].sum()

    program = function_program(init, loss, optax.sgd(1e-4), precision="bf16")
    state, _ = program.train_step(program.init(jax.random.key(0), BATCH), BATCH)
    assert_close(state.params, {"w": W0 - 1e-4}, rtol=1e-6, atol=0)


def test_running_statistics_keep_their_type():
    def start(key, batch):
        return init(key, batch), {"mean": jnp.ones(()), "seen": jnp.zeros((), jnp.int32)}

    def loss(params, model_state, batch, *, rng, train):
        changed = {"mean": batch["x"].mean(), "seen": model_state["seen"] + 1}
        assert changed["mean"].dtype == jnp.bfloat16
        return squares(params, batch, rng=rng, train=train), (changed, {})

    program = stateful_program(start, loss, optax.sgd(0.1), precision="bf16")
    before = program.init(jax.random.key(0), BATCH)
    after, _ = jax.jit(program.train_step)(before, BATCH)
    assert before.model_state["mean"].dtype == after.model_state["mean"].dtype == jnp.float32
    assert after.model_state["seen"].dtype == jnp.int32


@cache
def noisy_step(kind: str) -> tuple[TrainState, Any]:
    """A fresh state of a noisy loss or of a model with dropout, and a step on one batch."""
    tx = optax.sgd(0.1)
    if kind == "noise":
        program, batch = function_program(init, noisy, tx), BATCH
    else:
        program, batch = tiny_program(kind, tx, dropout=0.5), numbered_data(8)
    state = jax.jit(program.init)(jax.random.key(0), batch)
    return state, jax.jit(lambda state: program.train_step(state, batch))


NOISY = ["noise", *(pytest.param(name, marks=pytest.mark.slow) for name in ("linen", "nnx"))]


@pytest.mark.parametrize("kind", NOISY)
def test_a_step_replayed_gives_the_same_bits(kind):
    state, step = noisy_step(kind)
    assert_same_bits(step(state), step(state))


@pytest.mark.parametrize("kind", NOISY)
def test_different_steps_draw_differently(kind):
    state, step = noisy_step(kind)
    reports = [step(state.replace(step=jnp.int32(at)))[1] for at in range(3)]
    assert len({float(report.metrics.by_name["loss"].value) for report in reports}) == 3


@pytest.mark.parametrize("kind", NOISY)
def test_different_seeds_draw_differently(kind):
    state, step = noisy_step(kind)
    reports = [step(state.replace(rng=jax.random.key_data(jax.random.key(seed))))[1] for seed in range(3)]
    assert len({float(report.metrics.by_name["loss"].value) for report in reports}) == 3


def drawn(program: Program, state: TrainState, steps: int, *, evaluate: bool) -> tuple[TrainState, list[float]]:
    train, evaluated, draws = jax.jit(program.train_step), jax.jit(program.eval_step), []
    for _ in range(steps):
        if evaluate:
            evaluated(state, BATCH)
        state, report = train(state, BATCH)
        draws.append(float(report.metrics.by_name["draw"].value))
    return state, draws


def test_evaluation_does_not_disturb_training():
    program = function_program(init, noisy, optax.sgd(0.1))
    state = program.init(jax.random.key(0), BATCH)
    alone, alone_draws = drawn(program, state, 3, evaluate=False)
    evaluated, evaluated_draws = drawn(program, state, 3, evaluate=True)
    assert_same_bits(evaluated, alone)
    assert evaluated_draws == alone_draws
    assert len(set(alone_draws)) == 3


def test_evaluation_draws_the_same_numbers_at_every_step_and_others_than_training():
    program = function_program(init, noisy, optax.sgd(0.1))
    state = program.init(jax.random.key(0), BATCH)
    later, draws = drawn(program, state, 2, evaluate=False)
    first = program.eval_step(state, BATCH).by_name["draw"].value
    assert_same_bits(program.eval_step(later, BATCH).by_name["draw"].value, first)
    assert float(first) not in draws


def test_the_loss_receives_train():
    received = []

    def loss(params, model_state, batch, rng, *, train):
        received.append(train)
        return params["w"].sum(), (model_state, {})

    program = make_program(lambda key, batch: (init(key, batch), {}), loss, optax.sgd(0.1))
    state = program.init(jax.random.key(0), BATCH)
    program.train_step(state, BATCH)
    program.eval_step(state, BATCH)
    assert received == [True, False]


def test_the_global_norm_is_that_of_all_elements():
    rng = np.random.default_rng(0)
    tree = {"small": rng.normal(size=7), "large": rng.normal(size=(200, 200)) + 3}
    of_types = [
        {name: np.asarray(x * (1 + 1j) if dtype == jnp.complex64 else x, dtype) for name, x in tree.items()}
        for dtype in (jnp.float32, jnp.bfloat16, jnp.complex64)
    ]
    found = jax.jit(lambda trees: [global_norm(tree) for tree in trees])(of_types)
    for one, norm in zip(of_types, found, strict=True):
        flat = np.concatenate([np.asarray(x, np.complex128).ravel() for x in one.values()])
        assert float(norm) == pytest.approx(np.linalg.norm(flat), rel=1e-6)
    assert global_norm({}) == 0


def test_a_report_of_the_state_is_a_metric_of_the_step():
    for is_wrapped in [False, True]:
        program = function_program(init, squares, optax.sgd(0.1))
        step: Any = partial(program.train_step) if is_wrapped else program.train_step
        reported = reporting(
            reporting(step, lambda before, after, report: {"w": after.params["w"][0]}),
            lambda before, after, report: {"at": after.step},
        )
        start = program.init(jax.random.key(0), BATCH)
        (plain, before), (state, after) = program.train_step(start, BATCH), reported(start, BATCH)
        assert [*after.metrics.by_name] == [*before.metrics.by_name, "w", "at"], is_wrapped
        assert_same_bits(
            (state, after.grads, after.metrics.by_name["w"].value), (plain, before.grads, plain.params["w"][0])
        )
        assert int(after.metrics.by_name["at"].value) == 1, is_wrapped
