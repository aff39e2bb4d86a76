from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_trainer.adapters import function_program
from jax_trainer.core import LogMode, Program, StepReport, TrainState, with_ema, with_finite_guard
from jax_trainer.core.wrappers import with_statistics
from jax_trainer.diagnostics.leaves import STATISTICS
from jax_trainer.testing import assert_close, assert_same_bits, linear_program, short_run, tiny_program

BATCH = np.array([[1.0, 2.0], [3.0, -4.0]], np.float32)


def init(key: jax.Array, batch: Any) -> Any:
    return {"w": jnp.array([0.5, -1.5]), "b": jnp.zeros(()), "n": jnp.ones(2)}


def loss(params: Any, batch: Any, *, rng: jax.Array, train: bool) -> Any:
    return ((batch @ params["w"] + params["b"]) ** 2).mean() + 0 * params["n"].sum()


def fit(**options: Any) -> Program:
    return function_program(init, loss, optax.sgd(0.1), **options)


@cache
def one_step() -> tuple[TrainState, StepReport]:
    program = with_statistics(fit(clip_norm=0.01), params=("min", "max", "val"), grads=("mean", "std"))
    return jax.jit(lambda: program.train_step(program.init(jax.random.key(0), BATCH), BATCH))()


def values(report: StepReport, prefix: str) -> dict[str, float]:
    return {
        name: float(metric.value) for name, metric in report.metrics.by_name.items() if name.startswith(f"{prefix}/")
    }


def test_parameters_are_those_after_the_step():
    state, report = one_step()
    w = np.asarray(state.params["w"])
    expected = {"param/w_min": w.min(), "param/w_max": w.max(), "param/b_val": float(state.params["b"])}
    assert values(report, "param") == pytest.approx({**expected, "param/n_min": 1, "param/n_max": 1})


def test_gradients_are_those_before_clipping():
    errors = BATCH.astype(np.float64) @ [0.5, -1.5]
    w, b = (errors[:, None] * BATCH).mean(0) * 2, errors.mean() * 2
    assert values(one_step()[1], "grad") == pytest.approx(
        {
            "grad/w_mean": w.mean(),
            "grad/w_std": w.std(),
            "grad/b_mean": b,
            "grad/b_std": 0,
            "grad/n_mean": 0,
            "grad/n_std": 0,
        },
        rel=1e-6,
    )


def test_statistics_are_logged_in_training_only():
    for name, metric in one_step()[1].metrics.by_name.items():
        assert name == "loss" or metric.log_mode is LogMode.TRAIN
    state, seen = short_run(with_statistics(linear_program(), params=("max",)), 3)
    assert seen.steps[3]["param/kernel_max"] == float(state.params["kernel"].max()) > 0


def test_without_modes_the_program_is_unchanged():
    program = fit()
    assert with_statistics(program) is program


def test_an_unknown_mode_is_an_error():
    for name in ["params", "grads"]:
        with pytest.raises(ValueError, match=f"`{name}`.*'norm'.*min, max"):
            with_statistics(fit(), **{name: ("norm",)})


def program_of(kind: str, **options: Any) -> Program:
    tx = optax.sgd(0.1, momentum=0.9)
    return linear_program(tx, **options) if kind == "linear" else tiny_program(kind, tx, **options)


@cache
def bare(kind: str, micro_batches: int) -> TrainState:
    return short_run(program_of(kind, micro_batches=micro_batches), 8)[0]


@pytest.mark.parametrize(
    ("kind", "micro_batches"),
    [("linear", 4), *(pytest.param(*each, marks=pytest.mark.slow) for each in (("linen", 1), ("nnx", 4)))],
)
def test_statistics_and_guard_do_not_change_training(kind, micro_batches):
    sown = {} if kind == "linear" else {"intermediates": STATISTICS}
    program = program_of(kind, micro_batches=micro_batches, log_norms=False, **sown)
    wrapped = with_finite_guard(with_statistics(program, params=STATISTICS, grads=STATISTICS), 3)
    state, _ = short_run(wrapped, 8)
    assert_same_bits(state.replace(extra={}), bare(kind, micro_batches))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["params", "grads", "guard", "ema"])
def test_each_wrapper_alone_does_not_change_training(name):
    linear = program_of("linear")
    wrapped = {
        "params": lambda: with_statistics(linear, params=STATISTICS),
        "grads": lambda: with_statistics(linear, grads=STATISTICS),
        "guard": lambda: with_finite_guard(linear),
        "ema": lambda: with_ema(linear, 0.9),
    }[name]()
    assert_same_bits(short_run(wrapped, 8)[0].replace(extra={}), bare("linear", 1))


def test_statistics_of_a_skipped_step_have_weight_0():
    program = with_finite_guard(with_statistics(fit(), params=("max",)))
    state, step = program.init(jax.random.key(0), BATCH), jax.jit(program.train_step)
    _, report = step(state, np.full_like(BATCH, np.nan))
    assert int(report.metrics.weight_of("param/w_max")) == 0
    assert_close(step(state, BATCH)[1].metrics.weight_of("param/w_max"), 2)
