import json
import math
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jax_trainer import Edit, LambdaCallback, LogMetrics, fit, testing
from jax_trainer.callbacks import (
    LearningRateMonitor,
    ModelCheckpoint,
    ModelCheckpointConfig,
    ProgressBar,
    ReduceLROnPlateau,
    ReduceLROnPlateauConfig,
)
from jax_trainer.config.settings import SettingsError
from jax_trainer.core import FlatState, TrainState
from jax_trainer.core.state import hyperparameters_in, new_state, with_hyperparameters
from jax_trainer.engine import EvalRoundEnd, Every, Plan
from jax_trainer.logger import JsonlWriter
from jax_trainer.optimizer import CosineScheduleConfig, SGDConfig
from jax_trainer.testing import numbered_data
from tests.callbacks.callback_runs import fit as run_with
from tests.callbacks.callback_runs import matrix_program, run_in
from tests.rows import noted_row

RATE = 0.5
INJECTED = optax.inject_hyperparams(optax.sgd)(learning_rate=RATE)


def of_torch(values, mode, **options) -> list[float]:
    """The learning rate after each value, by torch's scheduler of this name."""
    torch = pytest.importorskip("torch")
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=RATE)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode=mode, **options)
    rates = []
    for value in values:
        scheduler.step(value)
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


def watched(callback: ReduceLROnPlateau, state: TrainState, values: list[float], first: int = 1) -> Any:
    """The state after evaluations with these values, and the learning rate after each."""
    rates = []
    for step, value in enumerate(values, first):
        event = EvalRoundEnd(step, step, FlatState.of(state), {"val": {"loss": value}}, [])
        edit = callback.handle(event)
        state = state if edit is None else with_hyperparameters(state, edit.hyperparameters)
        rates.append(float(hyperparameters_in(state)["learning_rate"][0]))
    return state, rates


def fresh(tx: Any = INJECTED) -> TrainState:
    return new_state({"w": jnp.zeros(2)}, {}, tx, jax.random.key(0))


VALUES = st.lists(st.one_of(st.sampled_from([1.0, 0.5, 0.25, math.nan]), st.floats(-4, 4)), max_size=30)
OPTIONS = st.fixed_dictionaries(
    {
        "factor": st.sampled_from([0.1, 0.5, 0.9]),
        "patience": st.integers(0, 4),
        "threshold": st.sampled_from([0.0, 1e-4, 0.1]),
        "cooldown": st.integers(0, 3),
        "min_lr": st.sampled_from([0.0, 0.01, 0.2]),
    }
)


@settings(deadline=None, max_examples=50)
@given(VALUES, st.sampled_from(["min", "max"]), OPTIONS)
@example([1.0, 1.1], "max", {"factor": 0.5, "patience": 0, "threshold": 0.1, "cooldown": 0, "min_lr": 0.0})
@example([-1.0, -1.0, -0.95], "min", {"factor": 0.5, "patience": 0, "threshold": 0.1, "cooldown": 0, "min_lr": 0.0})
@example([1.0] * 30, "min", {"factor": 0.1, "patience": 0, "threshold": 0.0, "cooldown": 1, "min_lr": 0.0})
def test_the_rate_is_reduced_exactly_when_torch_does(values, mode, options):
    callback = ReduceLROnPlateau(mode=mode, **options)
    _, rates = watched(callback, fresh(), values)
    assert rates == pytest.approx(of_torch(values, mode, **options), rel=1e-5)


def test_a_change_by_exactly_the_threshold_is_no_improvement():
    for values, mode, steps in [
        ([1.0, 1.1], "max", [RATE, RATE / 2]),
        ([1.0, 1.2, 1.2], "max", [RATE, RATE, RATE / 2]),
    ]:
        with noted_row(values, mode, steps):
            callback = ReduceLROnPlateau(mode=mode, patience=0, threshold=0.1, factor=0.5)
            assert watched(callback, fresh(), values)[1] == pytest.approx(steps)


@settings(deadline=None, max_examples=50)
@given(VALUES, OPTIONS, st.integers(0, 30))
def test_a_resumed_one_continues_counting(values, options, cut):
    _, expected = watched(whole := ReduceLROnPlateau(**options), fresh(), values)
    first = ReduceLROnPlateau(**options)
    state, before = watched(first, fresh(), values[:cut])
    second = ReduceLROnPlateau(**options)
    second.load_state_dict(json.loads(json.dumps(first.state_dict(), allow_nan=False)))
    _, rates = watched(second, state, values[cut:], 1 + len(values[:cut]))
    assert before + rates == expected
    assert second.state_dict() == whole.state_dict()


def test_the_same_evaluation_counts_once():
    callback = ReduceLROnPlateau(patience=1)
    state, _ = watched(callback, fresh(), [1.0, 1.0])
    _, rates = watched(callback, state, [1.0], first=2)
    assert rates == [RATE]


def test_settings_that_make_no_sense_are_refused():
    for options, named in [
        ({"factor": 1.0}, "factor.*1.0"),
        ({"factor": 0.0}, "factor.*0.0"),
        ({"patience": -1}, "patience.*-1"),
        ({"cooldown": -1}, "cooldown.*-1"),
        ({"min_lr": -1.0}, "min_lr.*-1.0"),
        ({"monitor": "val/score"}, "val/score"),
    ]:
        with noted_row(options, named), pytest.raises(SettingsError, match=named):
            ReduceLROnPlateauConfig(**options)


def test_a_run_without_validation_is_refused_unless_training_metrics_are_monitored(tmp_path):
    with run_in(tmp_path, validates=False) as run:
        with pytest.raises(ValueError, match="val/loss"):
            ReduceLROnPlateau(run=run)
        ReduceLROnPlateau(monitor="train/loss", check_on_train_epoch_end=True).attach(run)


# in runs


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(4, kernel_init=nn.initializers.zeros)(x)


def cross_entropy(logits, labels):
    return testing.cross_entropy(logits, labels).mean()


NUMBERS = {name: array[:128] for name, array in numbered_data().items()}
ARRAYS = (NUMBERS["x"], NUMBERS["y"])
# nothing improves by that much: a reduction after the third, the fifth … evaluation
PLATEAU: dict[str, Any] = {"patience": 1, "threshold": 100.0, "factor": 0.5}


def fitted(folder: Path, *callbacks: Any, optimizer: Any = None, epochs: int = 5, **options: Any) -> Any:
    optimizer = optax.sgd(3e-3) if optimizer is None else optimizer
    shared: dict[str, Any] = {"log_dir": str(folder), "tensorboard": False, "progress": False}
    shared |= {"loss_fn": cross_entropy, "optimizer": optimizer, "num_epochs": epochs, "callbacks": callbacks}
    shared |= {"test_ds": ARRAYS, **options}
    return fit(Net(), ARRAYS, **shared)


def rows_of(result: Any) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (result.folder / "metrics.jsonl").read_text().splitlines()]


SCHEDULED = SGDConfig(learning_rate=CosineScheduleConfig(init_value=1e-2, steps=20))
KINDS = {
    "plain": (lambda: optax.sgd(3e-3), "learning_rate_scale", [0.5, 0.25]),
    "schedule": (lambda: optax.sgd(optax.linear_schedule(1e-2, 0.0, 20)), "learning_rate_scale", [0.5, 0.25]),
    "configured": (lambda: SCHEDULED, "learning_rate_scale", [0.5, 0.25]),
    "inject_hyperparams": (
        lambda: optax.inject_hyperparams(optax.sgd)(learning_rate=3e-3),
        "learning_rate",
        [1.5e-3, 7.5e-4],
    ),
}


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind == "plain" else pytest.mark.slow) for kind in KINDS]
)
def test_fit_reduces_the_learning_rate_of_any_optimizer_and_logs_it(tmp_path, kind):
    make, name, values = KINDS[kind]
    reduced = fitted(tmp_path, ReduceLROnPlateau(**PLATEAU), LearningRateMonitor(), optimizer=make())
    edits = [row for row in rows_of(reduced) if "edit" in row]
    assert [(row["step"], row["epoch"]) for row in edits] == [(12, 3), (20, 5)]
    assert [row["edit"]["hyperparameters"][name] for row in edits] == pytest.approx(values)
    assert {row["edit"]["by"] for row in edits} == {"ReduceLROnPlateau"}
    assert all("val/loss" in row["edit"]["reason"] for row in edits)
    without = fitted(tmp_path, LearningRateMonitor(), optimizer=make())
    losses = [[one.history[epoch]["val/loss"] for epoch in (1, 2, 3, 4)] for one in (reduced, without)]
    assert losses[0][:3] == pytest.approx(losses[1][:3], rel=1e-5)
    assert losses[0][3] != pytest.approx(losses[1][3], rel=1e-5)
    # the reported rate has the scale, and one that cannot be seen is absent
    rates, unreduced = (
        [row["optimizer/lr_epoch"] for row in rows_of(one) if "optimizer/lr_epoch" in row] for one in (reduced, without)
    )
    scales, is_seen = [1, 1, 1, 0.5, 0.5], kind in ("configured", "inject_hyperparams")
    assert len(unreduced) == 5 * is_seen
    assert rates == pytest.approx([rate * scale for rate, scale in zip(unreduced, scales, strict=False)])
    reported = [row["optimizer/lr_scale_epoch"] for row in rows_of(reduced) if "optimizer/lr_scale_epoch" in row]
    assert reported == ([] if is_seen else scales)


def test_reductions_stop_at_the_minimum(tmp_path):
    callback = ReduceLROnPlateau(**{**PLATEAU, "patience": 0}, min_lr=1e-3)
    optimizer = optax.inject_hyperparams(optax.sgd)(learning_rate=3e-3)
    edits = [row["edit"] for row in rows_of(fitted(tmp_path, callback, optimizer=optimizer)) if "edit" in row]
    assert [one["hyperparameters"]["learning_rate"] for one in edits] == pytest.approx([1.5e-3, 1e-3])


def test_a_minimum_needs_a_rate_that_can_be_seen(tmp_path):
    with pytest.raises(ValueError, match="min_lr.*0.001.*inject_hyperparams"):
        fitted(tmp_path, ReduceLROnPlateau(min_lr=1e-3))


def test_metrics_of_training_may_be_monitored(tmp_path):
    callback = ReduceLROnPlateau(**PLATEAU, monitor="train/loss", check_on_train_epoch_end=True)
    edits = [row for row in rows_of(fitted(tmp_path, callback, test_ds=None)) if "edit" in row]
    assert [row["step"] for row in edits] == [12, 20]


def test_a_resumed_run_is_the_same_run(tmp_path):
    whole = fitted(tmp_path / "whole", ReduceLROnPlateau(**PLATEAU), epochs=6)
    fitted(tmp_path / "parts", ReduceLROnPlateau(**PLATEAU), epochs=3)
    # of another length, so by its folder
    (folder,) = (tmp_path / "parts" / "fit").iterdir()
    again = fitted(tmp_path / "parts", ReduceLROnPlateau(**PLATEAU), epochs=6, resume=folder)
    leaves = [jax.tree.leaves((one.state.params, one.state.opt_state)) for one in (whole, again)]
    assert all(np.array_equal(a, b) for a, b in zip(*leaves, strict=True))
    assert [row for row in rows_of(again) if "edit" in row] == [row for row in rows_of(whole) if "edit" in row]


# what other callbacks make of an edit


def cleared(state: TrainState) -> TrainState:
    return state.replace(params=jax.tree.map(jnp.zeros_like, state.params))


def test_weights_that_an_edit_changed_do_not_get_the_metrics_of_those_before(tmp_path):
    edits = {2: Edit(cleared), 3: Edit(hyperparameters={"learning_rate_scale": 0.5})}
    with run_in(tmp_path) as run:
        saver = ModelCheckpoint(ModelCheckpointConfig(), run)
        editor = LambdaCallback(on_validation_epoch_end=lambda epoch: edits.get(epoch))

        run_with(editor, saver, program=matrix_program(), plan=Plan(max_epochs=3, eval_every=Every(epochs=1)))
        kept = {step: bool(metrics) for step, _, metrics in run.checkpoints.kept}  # type: ignore[union-attr]
    assert kept == {4: True, 8: False, 12: True}


def test_an_edit_is_a_row_and_a_line(tmp_path, capsys):

    edit = Edit(hyperparameters={"learning_rate_scale": 0.5}, reason="why not")
    editor = LambdaCallback(on_training_epoch_end=lambda epoch: edit if epoch == 1 else None)
    log, bar = LogMetrics(JsonlWriter(tmp_path / "rows.jsonl")), ProgressBar()
    run_with(log, bar, editor, program=matrix_program())
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [row for row in rows if "edit" in row] == [
        {
            "step": 4,
            "epoch": 1,
            "edit": {"by": "LambdaCallback", "hyperparameters": {"learning_rate_scale": 0.5}, "reason": "why not"},
        }
    ]
    assert "LambdaCallback  learning_rate_scale = 0.5 (why not)" in capsys.readouterr().err


@pytest.mark.parametrize("hook", ["on_training_epoch_start", "on_step_end", "on_save_point", "on_training_end"])
def test_a_hook_that_returns_an_edit_where_none_can_be_applied_is_an_error(hook):
    edit = Edit(hyperparameters={"learning_rate_scale": 0.5})
    with pytest.raises(ValueError, match="LambdaCallback.*on_training_epoch_end"):
        run_with(LambdaCallback(**{hook: lambda *_: edit}))


def test_two_hooks_cannot_both_return_an_edit():
    edit = Edit(hyperparameters={"learning_rate_scale": 0.5})
    both = LambdaCallback(on_training_epoch_end=lambda: edit, on_filtered_training_epoch_end=lambda: edit)
    with pytest.raises(TypeError, match="LambdaCallback.*EpochEnd"):
        run_with(both)
