import itertools
import logging
import os
import re
import signal
from importlib import import_module
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_trainer.adapters import flax_nnx, nnx_program
from jax_trainer.core import NonFiniteError, compile_program
from jax_trainer.datasets import DataError
from jax_trainer.engine import Plan, run
from jax_trainer.styles.checkpointer import get_default_checkpointer
from jax_trainer.styles.functional import train_fn
from jax_trainer.styles.hooks import get_ema_hook
from jax_trainer.testing import assert_same_bits, nnx_loss
from tests.styles.functional.functional_runs import (
    KEY,
    STEPS,
    TX,
    Calls,
    Net,
    arrays,
    data,
    fresh,
    straight,
    train_step,
    trained,
    val_step,
)


def test_it_does_what_the_engine_does_with_the_same_loss_bit_for_bit():
    compiled = compile_program(nnx_program(Net(nnx.Rngs(0)), nnx_loss, TX))
    state = run(compiled, compiled.init(KEY, next(iter(data()))), data(), Plan(max_steps=STEPS))
    weights, _, step = straight()
    assert_same_bits({"norm": {}, **weights}["out"], jax.tree.map(np.asarray, state.params["out"]))
    assert_same_bits(weights["norm"]["mean"], np.asarray(state.model_state["norm"]["mean"]))
    assert step == STEPS


@pytest.fixture
def wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """wandb with an active run, which writes to files."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    for name in ("CACHE", "CONFIG", "DATA", "ARTIFACT"):
        monkeypatch.setenv(f"WANDB_{name}_DIR", str(tmp_path / name))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    wandb = import_module("wandb")
    wandb.init(mode="offline", dir=str(tmp_path), settings=wandb.Settings(silent=True))
    yield wandb
    wandb.finish()
    wandb.teardown()


def test_hooks_wandb_and_validation_change_nothing_of_what_is_trained(wandb, monkeypatch):
    rows = []
    monkeypatch.setattr(type(wandb.run), "log", _noting(type(wandb.run).log, rows))
    model, optimizer = fresh()
    ema, _ = get_ema_hook(model, 0.9)
    calls = Calls(3)
    trained((model, optimizer), hooks=[calls, ema], log_to_wandb=True)
    assert_same_bits(arrays((model, optimizer)), straight())
    assert_same_bits(arrays(trained(val=None, fns=(train_step, lambda *given: 1 / 0))), straight())
    assert [step for step, _ in rows] == [4, 8, 10]
    assert {"train/loss", "val/loss", "train/acc", "val/acc"} < set(rows[0][1])
    logged = dict(wandb.run.summary)["val/loss"]  # of a row that wandb has processed
    assert logged in [values["val/loss"] for _, values in rows]
    assert list(calls.metrics) == [3, 6, 9]


def _noting(log: Any, rows: list[Any]) -> Any:
    def noting(run: Any, values: dict[str, Any], step: int) -> None:
        rows.append((step, values))
        log(run, values, step=step)

    return noting


def test_without_a_run_of_wandb_there_is_an_error_before_anything_is_trained():
    subject = fresh()
    with pytest.raises(ValueError, match="active run of wandb"):
        trained(subject, log_to_wandb=True)
    assert int(subject[1].step.get_value()) == 0


def constant(value: float) -> Any:
    def loss_fn(model: Any) -> jax.Array:
        return value + 0 * model.out.bias[...].sum()

    return loss_fn


def test_training_and_validation_losses_are_kept_apart(caplog):
    caplog.set_level(logging.INFO, "jax_trainer")
    calls = Calls(4)
    fns = (
        lambda model, rng_key, batch: nnx.value_and_grad(constant(10.0))(model),
        lambda model, rng_key, batch: constant(0.0)(model),
    )
    trained(n_steps=8, fns=fns, hooks=[calls])
    assert [(metrics["train/loss"], metrics["val/loss"]) for metrics in calls.metrics.values()] == [(10.0, 0.0)] * 2
    assert "step 4: train/loss 10, val/loss 0" in caplog.messages


def test_the_training_loss_is_the_mean_since_the_evaluation_before():
    def step(model: Any, rng_key: jax.Array, batch: Any) -> Any:
        _, grads = train_step(model, rng_key, batch)
        return (jnp.float32(1.0), {"number": batch["x"].mean()}), grads

    source = [{**batch, "x": np.full((32, 8), number, np.float32)} for number, batch in enumerate(data().epoch(1))]
    calls = Calls(2)
    trained(n_steps=6, source=source, fns=(step, val_step), hooks=[calls])
    assert {at: metrics["train/number"] for at, metrics in calls.metrics.items()} == {2: 0.5, 4: 1.5, 6: 4.5}


def test_steps_are_counted_by_the_optimizer_and_a_finished_training_warns(caplog):
    subject = trained(n_steps=6)  # an epoch
    trained(subject, n_steps=STEPS, source=itertools.islice(itertools.cycle([*data().epoch(2)]), 6))
    assert_same_bits(arrays(subject), straight())
    before = arrays(subject)
    trained(subject, n_steps=STEPS)
    assert_same_bits(arrays(subject), before)
    assert re.search("step 10.*`n_steps=10`", caplog.text)


def test_an_optimizer_that_knows_its_model_is_enough(subtests):
    for kind in [nnx.ModelAndOptimizer, flax_nnx.Optimizer]:
        with subtests.test(kind=kind):
            model = Net(nnx.Rngs(0))
            optimizer = kind(model, TX)
            train = train_fn(
                fns=(train_step, val_step), n_steps=STEPS, eval_every_n_steps=4, n_eval_batches=2, progress=False
            )
            train(KEY, optimizer, data(), data())
            assert_same_bits(arrays((model, optimizer)), straight())


def test_several_steps_per_call_and_generators_give_the_same_bits():
    calls = Calls(3)
    assert_same_bits(arrays(trained(steps_per_call=4, hooks=[calls])), straight())
    assert list(calls.metrics) == [3, 6, 9]
    endless = (batch for epoch in itertools.count(1) for batch in data().epoch(epoch))
    assert_same_bits(arrays(trained(source=endless, val=itertools.cycle(data()))), straight())


@pytest.mark.slow
def test_validation_data_may_have_another_structure():
    evaluated = [{"x": batch["x"], "y": batch["y"]} for batch in data()]
    assert_same_bits(arrays(trained(val=evaluated)), straight())
    with pytest.raises(KeyError):
        trained(val=[{"x": batch["x"]} for batch in data()])


def test_the_mode_of_every_part_is_as_it_was():
    model, optimizer = fresh()
    model.train()
    model.norm.use_running_average = True
    trained((model, optimizer), n_steps=1)
    assert (model.dropout.deterministic, model.norm.use_running_average) == (False, True)


class At:
    """Batches, at one of which something happens."""

    def __init__(self, number: int, act: Any) -> None:
        self.number, self.act = number, act

    def __iter__(self) -> Any:
        for number, batch in enumerate(data().epoch(1), 1):
            if number == self.number:
                self.act()
            yield batch


def fail() -> None:
    raise OSError("the disk is gone")


def test_however_training_ends_the_caller_has_the_newest_weights(subtests):
    for act, error in [(lambda: signal.raise_signal(signal.SIGINT), KeyboardInterrupt), (fail, OSError)]:
        with subtests.test(act=act, error=error):
            subject = fresh()
            with pytest.raises(error):
                trained(subject, source=At(4, act))
            done = int(subject[1].step.get_value())
            assert 1 <= done < 6  # batches are made ahead
            assert_same_bits(arrays(subject), arrays(trained(n_steps=done)))


@pytest.mark.parametrize("detect_nans", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_loss_that_is_not_finite_ends_training_and_with_detection_the_weights_are_those_before(detect_nans):
    def step(model: Any, rng_key: jax.Array, batch: Any) -> Any:
        (loss, more), grads = train_step(model, rng_key, batch)
        return (jnp.where(batch["bad"].any(), jnp.nan, loss), more), grads

    source = [{**batch, "bad": np.full(32, number == 3)} for number, batch in enumerate(data().epoch(1))]
    subject = fresh()
    with pytest.raises(NonFiniteError, match="Step 4"):
        trained(subject, source=source, fns=(step, val_step), val=None, detect_nans=detect_nans)
    if detect_nans:
        assert int(subject[1].step.get_value()) == 3
        assert_same_bits(arrays(subject), arrays(trained(n_steps=3)))


def test_a_mistake_in_a_step_is_reported_before_anything_is_written(tmp_path):
    save, *_ = get_default_checkpointer(tmp_path / "none", save_every_n_steps=2)

    def wrong(model: Any, rng_key: jax.Array, batch: Any) -> Any:
        return model(batch["nothing"])

    with pytest.raises(KeyError) as caught:
        trained(fns=(train_step, wrong), hooks=[save])
    assert "in wrong" in caught.value.__notes__[0]
    assert not (tmp_path / "none").exists()


def test_data_that_is_empty_is_an_error():
    with pytest.raises(DataError, match="'train' data is empty"):
        trained(source=[])


def test_what_cannot_be_is_refused_when_the_function_is_made(subtests):
    for options, message in [
        ({"n_steps": 0}, "`n_steps` must be .* of at least 1, got 0"),
        ({"eval_every_n_steps": 1.5}, "`eval_every_n_steps` .* got 1.5"),
        ({"n_eval_batches": True}, "`n_eval_batches` .* got True"),
        ({"fns": (train_step,)}, "the two functions"),
        ({"hooks": [3]}, "got a int"),
    ]:
        with (
            subtests.test(options=options, message=message),
            pytest.raises((TypeError, ValueError), match=message),
        ):
            trained(**options)


def test_what_cannot_be_trained_is_refused():
    model, optimizer = fresh()
    train = train_fn(fns=(train_step, val_step), n_steps=1, eval_every_n_steps=1, n_eval_batches=1)
    with pytest.raises(TypeError, match=r"must be an nnx.Optimizer, got .*GradientTransformation"):
        train(KEY, model, TX, data(), data())
    with pytest.raises(TypeError, match="`optimizer` has no model"):
        train(KEY, optimizer, data(), data())
    with pytest.raises(TypeError, match="`train_itr` is None"):
        train(KEY, model, optimizer)
    with pytest.raises(ValueError, match="another model"):
        train(KEY, model, nnx.ModelAndOptimizer(fresh()[0], TX), data(), data())


def test_a_missing_key_is_refused():
    train = train_fn(fns=(train_step, val_step), n_steps=2, eval_every_n_steps=2, n_eval_batches=1)
    with pytest.raises(TypeError, match=r"`train`.*`jax.random.key\(0\)`"):
        train(*fresh(), data(), data())
