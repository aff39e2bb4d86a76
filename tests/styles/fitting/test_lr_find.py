"""`lr_find`: the sweep works with every optimizer, on a copy, and its suggestion trains."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx

from jax_trainer import ArrayLoader, DataError, fit, lr_find
from jax_trainer.optimizer import SGDConfig, WarmupCosineDecayScheduleConfig
from jax_trainer.testing import assert_same_bits

X = np.random.default_rng(0).normal(size=(256, 8)).astype(np.float32)
W = np.random.default_rng(1).normal(size=(8, 1)).astype(np.float32)
DATA = (X, X @ W)


def loss(out: jax.Array, target: jax.Array) -> jax.Array:
    return ((out - target) ** 2).mean()


def line() -> nnx.Linear:
    return nnx.Linear(8, 1, rngs=nnx.Rngs(0))


def found(optimizer: Any, data: Any = DATA, model: Any = None, **options: Any) -> Any:
    return lr_find(model or line(), data, loss_fn=loss, optimizer=optimizer, min_lr=1e-6, max_lr=10.0, **options)


RECORDED = {
    "hyperparameters": lambda: optax.inject_hyperparams(optax.sgd)(learning_rate=123.0),
    "configured": lambda: SGDConfig(learning_rate=123.0),
    "a warmup from 0": lambda: SGDConfig(
        learning_rate=WarmupCosineDecayScheduleConfig(peak_value=0.5, warmup_steps=20, init_value=0.0)
    ),
}


def test_the_sweep_is_in_learning_rates_whatever_the_optimizer_has(subtests):
    for name in RECORDED:
        with subtests.test(name=name):
            result = found(RECORDED[name]())
            assert result.suggestion is not None and not result.is_relative
            assert 1e-3 < result.suggestion < 1.0, str(result)
            assert result.rates[0] == 1e-6 and result.losses[0] > 10 * result.losses.min()
            assert len(result.losses) < 100  # it ends when the loss explodes


def test_without_a_known_rate_it_is_in_factors_of_it():
    known, unknown = found(RECORDED["configured"]()), found(optax.sgd(1.0))
    assert unknown.is_relative and "factor" in str(unknown)
    assert unknown.suggestion == pytest.approx(known.suggestion)


def test_the_model_stays_as_it_is_and_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model, untouched = line(), line()
    found(optax.adam(1e-3), model=model)
    assert_same_bits(nnx.state(model), nnx.state(untouched))
    assert not list(Path(tmp_path).iterdir())


def test_a_loader_is_not_consumed_and_an_iterator_is_refused_before_it_is_read():
    loader = ArrayLoader(DATA, 32, shuffle=True)
    found(optax.sgd(1.0), loader, num_training=20)
    assert_same_bits(next(loader.epoch(1)), next(ArrayLoader(DATA, 32, shuffle=True).epoch(1)))
    batches = iter([DATA] * 3)
    with pytest.raises(DataError, match="only once"):
        found(optax.sgd(1.0), batches)
    assert len(list(batches)) == 3


def test_the_suggestion_trains(tmp_path):
    rate = found(RECORDED["configured"]()).suggestion
    result = fit(
        line(),
        DATA,
        DATA,
        loss_fn=loss,
        optimizer=optax.sgd(rate),
        num_epochs=3,
        log_dir=str(tmp_path),
        tensorboard=False,
        progress=False,
    )
    assert result.history[3]["val/loss"] < 0.2 * result.history[1]["val/loss"]


def test_a_loss_that_cannot_fall_has_no_suggestion():
    noise = (X, np.random.default_rng(2).normal(size=(256, 1)).astype(np.float32))
    result = found(SGDConfig(learning_rate=0.1), noise, batch_size=4)
    assert result.suggestion is None, str(result)


def test_arguments_that_make_no_sense_are_refused(subtests):
    for options, named in [
        ({"min_lr": 0.0}, "min_lr.*0.0"),
        ({"min_lr": 1.0, "max_lr": 0.1}, "max_lr.*1.0.*0.1"),
        ({"num_training": 5}, "num_training.*5"),
        ({"num_trainin": 50}, "num_trainin`.*`num_training"),
    ]:
        with subtests.test(options=options, named=named), pytest.raises((TypeError, ValueError), match=named):
            lr_find(line(), DATA, loss_fn=loss, optimizer=optax.sgd(0.1), **options)
