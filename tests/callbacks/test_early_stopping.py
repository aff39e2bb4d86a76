import json
import logging
import math
from dataclasses import replace

import pytest

from jax_trainer.callbacks import EarlyStopping, EarlyStoppingConfig, ModelCheckpoint, ModelCheckpointConfig
from jax_trainer.config.settings import SettingsError
from jax_trainer.engine import EpochEnd, Every, FitStart, Plan, StopTraining
from tests.callbacks.callback_runs import STEPS, Saves, evaluated, fit, run_in, send_event
from tests.rows import noted_row


def stops_at(values, **options) -> int | None:
    """After how many validations with these values training ends."""
    callback = EarlyStopping(EarlyStoppingConfig(**options))
    for number, value in enumerate(values, 1):
        try:
            evaluated(callback, {"loss": value, "acc": value}, step=number)
        except StopTraining:
            return number
    return None


def test_training_ends_when_the_metric_says_so():
    for values, options, stop in [
        ([5, 4, 3, 2, 1, 0], {}, None),
        ([5, 4, 4, 4, 4, 4], {}, 5),  # equal is not better
        ([5, 6, 6, 4, 6, 6, 6], {}, 7),  # a better one begins the count anew
        ([5, 6, 6, 6], {"patience": 1}, 2),
        ([1, 2, 3, 3, 3, 3], {"mode": "max"}, 6),
        ([1, 2, 3, 3, 3, 3], {"monitor": "val/acc"}, 6),
        ([5, 4.6, 4.2, 3.9, 3.9], {"min_delta": 1.0, "patience": 2}, 3),
        ([5, 4.6, 3.9, 3.5, 3.0], {"min_delta": 1.0, "patience": 2}, 5),  # measured from the best, 3.9
        ([5, 4, 3], {"stopping_threshold": 4.0}, 2),
        ([1, 2, 3], {"stopping_threshold": 2.5, "mode": "max"}, 3),
        ([5, 6, 9, 1], {"divergence_threshold": 8.0}, 3),
        ([5, 4, 1], {"divergence_threshold": 2.0, "mode": "max"}, 3),
        ([5, math.nan], {}, 2),
        ([5, -math.inf], {}, 2),
        ([math.nan, 5, math.nan, 4, math.nan, math.nan], {"check_finite": False, "patience": 2}, 6),
        ([5, -math.inf, 4], {"check_finite": False, "patience": 2}, None),  # what is not finite is never the best
    ]:
        assert stops_at(values, **options) == stop


def test_the_reason_is_reported_and_logged(caplog):
    callback = EarlyStopping(EarlyStoppingConfig(patience=1))
    evaluated(callback, {"loss": 0.25}, step=4)
    with caplog.at_level(logging.INFO, "jax_trainer"), pytest.raises(StopTraining) as stopped:
        evaluated(callback, {"loss": 0.5}, step=8)
    (message,) = [record.message for record in caplog.records]
    assert message == str(stopped.value)
    assert all(word in message for word in ("EarlyStopping", "step 8", "`val/loss`", "0.25"))


def test_an_unknown_monitor_is_an_error_that_lists_what_there_is():
    with pytest.raises(ValueError, match="'val/f1'.*val/acc, val/loss"):
        evaluated(EarlyStopping(EarlyStoppingConfig(monitor="val/f1")), {"loss": 1.0, "acc": 0.5}, step=1)


def test_only_every_so_many_epochs_count():
    callback = EarlyStopping(EarlyStoppingConfig(patience=1, every_n_epochs=2))
    for epoch, value in enumerate([1, 5, 9, 2, 1], 1):
        evaluated(callback, {"loss": value}, step=epoch, epoch=epoch)
    assert callback.best == 2


TRAINING = EarlyStoppingConfig(monitor="train/loss", patience=1, check_on_train_epoch_end=True)


def test_a_run_without_validation_is_refused_unless_training_metrics_are_monitored(tmp_path):
    with run_in(tmp_path, validates=False) as run:
        with pytest.raises(ValueError, match="'val/loss'.*no validation"):
            EarlyStopping(run=run)
        callback = EarlyStopping(TRAINING, run)
        send_event(callback, EpochEnd, 4, 1, {"loss": 1.0}, 1.0, 0.0, None)
        evaluated(callback, {"loss": 9.0}, step=4)  # not what is monitored
        with pytest.raises(StopTraining):
            send_event(callback, EpochEnd, 8, 2, {"loss": 1.0}, 1.0, 0.0, None)


def resumed(callback: EarlyStopping) -> EarlyStopping:
    again = EarlyStopping(callback.config)
    again.load_state_dict(json.loads(json.dumps(callback.state_dict(), allow_nan=False)))
    return again


def test_a_resumed_run_continues_counting():
    callback = EarlyStopping()
    for step, value in enumerate([3, 4, 5], 1):
        evaluated(callback, {"loss": value}, step=step)
    callback = resumed(callback)
    send_event(callback, FitStart, 3, 3)
    evaluated(callback, {"loss": 5}, step=3)  # the state of the checkpoint once more: not a new look
    with pytest.raises(StopTraining, match="after step 4.* the best was 3"):
        evaluated(callback, {"loss": 5}, step=4)


def test_a_resumed_run_that_had_stopped_stops_at_once(caplog):
    callback = EarlyStopping(EarlyStoppingConfig(stopping_threshold=2.0))
    with pytest.raises(StopTraining):
        evaluated(callback, {"loss": 1.0}, step=4)
    with caplog.at_level(logging.INFO, "jax_trainer"), pytest.raises(StopTraining, match="threshold 2.0"):
        send_event(resumed(callback), FitStart, 4, 1)
    assert "had already stopped" in caplog.text


@pytest.mark.parametrize("steps_per_call", [1, "epoch"])
def test_what_is_saved_at_the_end_says_that_it_is_the_end(tmp_path, steps_per_call):
    with run_in(tmp_path) as run:
        stopping = EarlyStopping(EarlyStoppingConfig(patience=1, min_delta=100.0), run)
        store = Saves()
        saving = replace(run, checkpoints=store, callback_states=lambda: {"EarlyStopping": stopping.state_dict()})
        plan = Plan(max_epochs=4, eval_every=Every(epochs=1), steps_per_call=steps_per_call)
        fit(stopping, ModelCheckpoint(ModelCheckpointConfig(), saving), plan=plan)
    assert [step for step, _, _ in store.kept] == [STEPS, 2 * STEPS]
    assert [bool(saved["EarlyStopping"]["stopped"]) for saved in store.callbacks] == [False, True]


def test_settings_that_make_no_sense_are_refused():
    for options, message in [
        ({"patience": 0}, "`patience` must be.*got 0"),
        ({"min_delta": -0.1}, "`min_delta` must be.*got -0.1"),
        (
            {"stopping_threshold": 1.0, "divergence_threshold": 0.5},
            r"`divergence_threshold` 0.5 must be worse than `stopping_threshold` 1.0 \(mode min\)",
        ),
    ]:
        with noted_row(options, message), pytest.raises(SettingsError, match=message):
            EarlyStoppingConfig(**options)
