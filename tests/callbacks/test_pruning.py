import json

import optuna
import pytest

from jax_trainer.callbacks import LambdaCallback, OptunaPruning
from jax_trainer.engine import Every, Plan, StopTraining
from jax_trainer.testing import EventRecorder
from tests.callbacks.callback_runs import STEPS, evaluated, fit
from tests.rows import noted_row

optuna.logging.set_verbosity(optuna.logging.WARNING)


def trial_of(pruner: optuna.pruners.BasePruner | None = None) -> optuna.Trial:
    return optuna.create_study(pruner=pruner or optuna.pruners.NopPruner()).ask()


def reported(trial: optuna.Trial) -> dict[int, float]:
    return trial.study.get_trials(deepcopy=False)[trial.number].intermediate_values


def test_every_validation_is_reported():
    for report, places in [("epoch", [1, 2]), ("step", [STEPS, 2 * STEPS])]:
        with noted_row(report, places):
            trial, seen = trial_of(), EventRecorder()
            fit(OptunaPruning(trial, "val/acc", report), seen)  # type: ignore[arg-type]
            assert reported(trial) == dict(zip(places, (metrics["acc"] for _, _, metrics in seen.evals), strict=True))


def test_a_pruned_trial_raises_after_all_callbacks_were_notified():
    trial, ends = trial_of(optuna.pruners.ThresholdPruner(upper=1e-9, n_warmup_steps=2)), []
    watcher = LambdaCallback(finalize=ends.append)
    with pytest.raises(optuna.TrialPruned, match="Pruned after epoch 2: `val/loss` is "):
        fit(OptunaPruning(trial), watcher, plan=Plan(max_epochs=4, eval_every=Every(epochs=1)))
    assert ends == ["stopped"]
    assert list(reported(trial)) == [1, 2]


def test_a_resumed_trial_reports_nothing_twice():
    trial = trial_of()
    first = OptunaPruning(trial)
    evaluated(first, {"loss": 1.0}, step=4, epoch=1)
    second = OptunaPruning(trial)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    evaluated(second, {"loss": 1.0}, step=4, epoch=1)  # optuna would warn, and a warning fails the test
    evaluated(second, {"loss": 0.5}, step=8, epoch=2)
    evaluated(second, {"loss": 0.4}, step=9, epoch=2)  # nor is a second validation of the same epoch
    assert reported(trial) == {1: 1.0, 2: 0.5}


def test_pruning_is_a_stop_that_raises_later():
    callback = OptunaPruning(trial_of(optuna.pruners.ThresholdPruner(upper=0.0)))
    with pytest.raises(StopTraining) as stopped:
        evaluated(callback, {"loss": 1.0}, step=4)
    assert isinstance(stopped.value.then, optuna.TrialPruned)


def test_an_unknown_axis_and_an_unknown_metric_are_refused():
    with pytest.raises(ValueError, match="`report` must be 'epoch' or 'step', got 'minute'"):
        OptunaPruning(trial_of(), report="minute")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'val/f1'.*val/loss"):
        evaluated(OptunaPruning(trial_of(), "val/f1"), {"loss": 1.0}, step=4)
