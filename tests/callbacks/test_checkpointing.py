import logging
import math
from dataclasses import replace
from typing import Any

import pytest
from compoconf import parse_config

from jax_trainer.callbacks import Callback, CallbackConfig, ModelCheckpoint, ModelCheckpointConfig, logger_observers
from jax_trainer.checkpoint.errors import SaveError
from jax_trainer.checkpoint.store import CheckpointStore
from jax_trainer.datasets import Position
from jax_trainer.engine import EvalRoundEnd, Every, Plan
from jax_trainer.testing import EventRecorder, assert_same_bits, numbered_loader
from tests.callbacks.callback_runs import STEPS, Saves, fit, run_in


class ValidationCounter:
    """Counts evaluations."""

    seen = 0

    def handle(self, event):
        self.seen += isinstance(event, EvalRoundEnd)


def saved(folder_run, config=None, plan=None, *, validates=True, seen=None, evals=None):
    store = Saves()
    run = replace(folder_run, checkpoints=store, validates=validates)
    fit(ModelCheckpoint(config or ModelCheckpointConfig(), run), *([seen] if seen else []), plan=plan, evals=evals)
    return store.kept


def test_every_validation_is_saved_with_its_metrics_and_the_position_in_the_data(folder_run):
    seen = EventRecorder()
    kept = saved(folder_run, seen=seen)
    assert [(step, position) for step, position, _ in kept] == [(STEPS, Position(1, 0)), (2 * STEPS, Position(2, 0))]
    for (_, _, metrics), (_, _, evaluated) in zip(kept, seen.evals, strict=True):
        assert metrics == {f"val/{name}": value for name, value in evaluated.items()}


def test_a_validation_within_an_epoch_is_saved_where_it_happened(folder_run):
    kept = saved(folder_run, plan=Plan(max_steps=2 * STEPS, eval_every=Every(steps=3)))
    assert [(step, position) for step, position, metrics in kept if metrics] == [
        (3, Position(1, 3)),
        (6, Position(2, 2)),
    ]
    assert kept[-1] == (2 * STEPS, Position(2, 0), {})  # the last state is saved, too, though it was not evaluated


TWO = {"val_near": numbered_loader(32), "val_far": numbered_loader(64)}


@pytest.mark.parametrize("monitor", ["val_near/loss", "val_far/acc"])
def test_of_several_validation_sets_each_may_be_monitored_and_the_state_is_saved_once(folder_run, monitor):
    seen = EventRecorder()
    kept = saved(folder_run, ModelCheckpointConfig(monitor=monitor), seen=seen, evals=TWO)
    assert [step for step, _, _ in kept] == [STEPS, 2 * STEPS]
    last = {f"{name}/{key}": value for _, name, metrics in seen.evals[2:] for key, value in metrics.items()}
    assert kept[-1][2] == last
    assert {"val_near/loss", "val_near/acc", "val_far/loss", "val_far/acc"} == set(last)


def test_a_monitor_that_no_set_reports_is_an_error_that_lists_all_of_them(folder_run):
    message = "No metric 'val/loss' to monitor. Logged metrics: val_far/acc, val_far/loss, val_near/acc, val_near/loss."
    with pytest.raises(ValueError, match=message):
        saved(folder_run, evals=TWO)


def test_nothing_is_saved_before_the_first_step(folder_run):
    kept = saved(folder_run, plan=Plan(max_epochs=1, eval_every=Every(epochs=1), eval_at_start=True))
    assert [step for step, _, _ in kept] == [STEPS]


def test_only_every_so_many_epochs_are_saved(folder_run):
    plan = Plan(max_epochs=4, eval_every=Every(epochs=1))
    kept = saved(folder_run, ModelCheckpointConfig(every_n_epochs=2), plan)
    assert [position.epoch for _, position, _ in kept] == [2, 4]


@pytest.mark.parametrize("eval_at_start", [True, False])
def test_an_unknown_monitor_is_an_error_at_the_first_validation(folder_run, eval_at_start):
    plan = Plan(max_epochs=2, eval_every=Every(epochs=1), eval_at_start=eval_at_start)
    with pytest.raises(ValueError, match="'val/accuracy'.*val/acc, val/loss"):
        saved(folder_run, ModelCheckpointConfig(monitor="val/accuracy"), plan)


def test_without_validation_every_epoch_is_saved_with_one_warning(folder_run, caplog):
    with caplog.at_level(logging.WARNING, "jax_trainer"):
        kept = saved(folder_run, plan=Plan(max_epochs=2), validates=False)
    assert [(step, position) for step, position, _ in kept] == [(STEPS, Position(1, 0)), (2 * STEPS, Position(2, 0))]
    assert "train/loss" in kept[0][2]
    [said] = [record.message for record in caplog.records if "no validation" in record.message]
    assert "ModelCheckpoint" in said and "`monitor: val/loss`" in said


def test_a_run_without_a_store_is_refused(folder_run):
    with pytest.raises(ValueError, match="`ModelCheckpoint` needs a checkpoint store.*`checkpoints`"):
        ModelCheckpoint(ModelCheckpointConfig(), folder_run)


def test_the_section_of_the_seed_document_is_read():
    section = {"monitor": "val/acc", "mode": "max", "save_top_k": 1, "save_optimizer_state": False}
    config: Any = parse_config(Callback.cfgtype, {"class_name": "ModelCheckpoint", **section})
    assert config == ModelCheckpointConfig(monitor="val/acc", mode="max")
    kept = {"keep_latest": 2, "keep_every": 0, "keep_best": 1, "weights_only_best": True}
    assert config.store_options() == {**kept, "monitor": "val/acc", "mode": "max"}
    assert config.store_options(monitors=False) == kept
    assert ModelCheckpointConfig(save_optimizer_state=True).store_options()["weights_only_best"] is False


def test_what_callbacks_know_is_saved_with_every_state(folder_run):
    store, validations = Saves(), ValidationCounter()
    run = replace(folder_run, checkpoints=store, callback_states=lambda: {"a": {"seen": validations.seen}})
    fit(validations, ModelCheckpoint(run=run))
    assert store.callbacks == [{"a": {"seen": 1}}, {"a": {"seen": 2}}]


def test_a_checkpoint_knows_how_long_the_record_was(folder_run):
    run = replace(folder_run, checkpoints=(store := Saves()))
    fit(*logger_observers(run.logger), ModelCheckpoint(run=run))
    run.logger.flush()
    content = (folder_run.folder / "metrics.jsonl").read_bytes()
    lines = [content[: saved["record"]].count(b"\n") for saved in store.runs]
    assert lines == [2, 4]  # an epoch and its validation each
    assert store.runs[-1]["record"] == len(content)


def test_a_checkpoint_knows_where_the_loop_stands(folder_run):
    run = replace(folder_run, checkpoints=(store := Saves()))
    fit(ModelCheckpoint(ModelCheckpointConfig(every_n_steps=3), run), plan=Plan(max_steps=STEPS))
    within, end = (saved["loop"] for saved in store.runs)
    assert (within["has_ended"], end["has_ended"]) == (False, True)
    assert within["metrics_state"] and not end["metrics_state"]
    assert [position for _, position, _ in store.kept] == [Position(1, 3), Position(1, 0)]


def test_states_are_saved_every_so_many_steps_and_at_the_end(folder_run):
    kept = saved(folder_run, ModelCheckpointConfig(every_n_steps=3), Plan(max_steps=2 * STEPS))
    assert [step for step, _, _ in kept] == [3, 6, 2 * STEPS]


def test_saves_after_epochs_may_be_skipped_for_newer_ones_and_those_by_steps_may_not(folder_run):
    run = replace(folder_run, checkpoints=(store := Saves()))
    plan = Plan(max_steps=2 * STEPS, eval_every=Every(epochs=1))
    fit(ModelCheckpoint(ModelCheckpointConfig(every_n_steps=3), run), plan=plan)
    assert [step for step, _, _ in store.kept] == [3, STEPS, 6, 2 * STEPS]
    assert store.coalesced == [STEPS, 2 * STEPS]


def test_states_are_saved_every_so_many_minutes(folder_run):
    config = ModelCheckpointConfig(every_n_minutes=1e-6)
    kept = saved(folder_run, config, Plan(max_steps=STEPS))
    assert [step for step, _, _ in kept] == [1, 2, 3, 4, 4]  # the last one again, when its epoch is over


def test_a_step_that_is_also_evaluated_is_saved_once_with_its_metrics(folder_run):
    plan = Plan(max_steps=6, eval_every=Every(steps=3))
    kept = saved(folder_run, ModelCheckpointConfig(every_n_steps=3), plan)
    assert [(step, bool(metrics)) for step, _, metrics in kept] == [(3, True), (6, True), (6, True)]


def test_nothing_is_saved_when_the_configuration_asks_for_nothing(folder_run):
    assert saved(folder_run, ModelCheckpointConfig(every_n_epochs=0)) == []


class Fails(Callback):
    """Raises at a step."""

    config: CallbackConfig

    def on_step_end(self, event):
        if event.step == 3:
            raise LookupError("mine")


@pytest.mark.parametrize("saves", [True, False])
def test_a_failing_run_saves_its_state_unless_configured_otherwise(folder_run, saves):
    store = Saves()
    saver = ModelCheckpoint(ModelCheckpointConfig(save_on_exception=saves), replace(folder_run, checkpoints=store))
    with pytest.raises(LookupError, match="mine"):
        fit(Fails(CallbackConfig(), folder_run), saver)
    assert [(step, position) for step, position, _ in store.kept] == ([(3, Position(1, 3))] if saves else [])


def test_a_state_that_cannot_be_saved_ends_the_run(folder_run):
    store = Saves()
    store.failures = [SaveError("no room")]
    with pytest.raises(SaveError, match="no room"):
        fit(ModelCheckpoint(ModelCheckpointConfig(every_n_steps=1), replace(folder_run, checkpoints=store)))
    assert len(store.kept) == 1  # what fails is not tried again on the way out


def test_with_continue_the_run_continues_and_the_next_state_is_tried(folder_run, caplog):
    store, config = Saves(), ModelCheckpointConfig(every_n_steps=1, on_save_failure="continue")
    store.failures = [SaveError("no room")]
    with caplog.at_level(logging.WARNING, "jax_trainer"):
        fit(ModelCheckpoint(config, replace(folder_run, checkpoints=store)), plan=Plan(max_steps=3))
    assert [step for step, _, _ in store.kept] == [1, 2, 3, 3]
    assert len([record for record in caplog.records if "no room" in record.message]) == 1


def test_a_run_whose_last_state_is_lost_has_failed_whatever_the_policy(folder_run):
    class LosesTheLast(Saves):
        def completed(self):
            raise SaveError("no room")

    config = ModelCheckpointConfig(on_save_failure="continue")
    with pytest.raises(SaveError, match="no room"):
        fit(ModelCheckpoint(config, replace(folder_run, checkpoints=LosesTheLast())))


def test_what_a_run_resumed_from_is_given_up_when_it_is_done(folder_run):
    store = Saves()
    fit(ModelCheckpoint(run=replace(folder_run, checkpoints=store)))
    assert store.asked == ["prepare", "completed"]


def test_a_run_that_compares_states_otherwise_needs_no_monitor(folder_run):
    config, store = ModelCheckpointConfig(monitor="val/no_such_loss"), Saves()
    fit(ModelCheckpoint(config, replace(folder_run, checkpoints=store, monitors=False)))
    assert [step for step, _, _ in store.kept] == [STEPS, 2 * STEPS]


def test_a_second_run_starts_at_its_own_beginning(folder_run):
    stores = Saves(), Saves()
    callback = ModelCheckpoint()
    plan = Plan(max_steps=6, eval_every=Every(steps=3), eval_at_start=True)
    for store in stores:
        callback.attach(replace(folder_run, checkpoints=store))
        fit(callback, plan=plan)
    assert stores[0].kept == stores[1].kept
    assert [step for step, _, _ in stores[0].kept] == [3, 6, 6]


def test_the_best_weights_of_an_accuracy_are_those_with_the_highest(folder_run):
    config, seen = ModelCheckpointConfig(monitor="val/acc"), EventRecorder()
    store = CheckpointStore(folder_run.folder / "checkpoints", **config.store_options())
    plan = Plan(max_epochs=4, eval_every=Every(epochs=1))
    last = fit(ModelCheckpoint(config, replace(folder_run, checkpoints=store)), seen, plan=plan)
    restored, saved = store.restore("latest", like=last)
    assert_same_bits(restored, last)
    assert saved.position == Position(4, 0)
    best_step, _, best = max(reversed(seen.evals), key=lambda evaluated: evaluated[2]["acc"])  # of equal ones, the last
    found = store.best()
    assert found is not None
    assert (found.step, found.metrics["val/acc"]) == (best_step, best["acc"])
    assert set(store.steps()) == {3 * STEPS, 4 * STEPS, best_step}
    assert saved.callbacks == {}


def test_the_real_store_gives_back_what_callbacks_knew(folder_run):
    config = ModelCheckpointConfig()
    store = CheckpointStore(folder_run.folder / "checkpoints", **config.store_options())
    run = replace(folder_run, checkpoints=store, callback_states=lambda: {"mine": {"best": 0.5, "names": ["a"]}})
    last = fit(ModelCheckpoint(config, run))
    assert store.restore("latest", like=last)[1].callbacks == {"mine": {"best": 0.5, "names": ["a"]}}


def test_the_real_store_keeps_the_latest_where_nothing_is_evaluated(folder_run):
    config = ModelCheckpointConfig()
    store = CheckpointStore(folder_run.folder / "checkpoints", **config.store_options(validates=False))
    run = replace(folder_run, checkpoints=store, validates=False)
    last = fit(ModelCheckpoint(config, run), plan=Plan(max_epochs=2))
    assert_same_bits(store.restore("latest", like=last)[0], last)
    assert store.steps() == [STEPS, 2 * STEPS]


class ScriptedLoss:
    """Replaces the loss of each evaluation."""

    def __init__(self, losses: list[float]) -> None:
        self._losses = iter(losses)

    def handle(self, event):
        if isinstance(event, EvalRoundEnd):
            event.metrics["val"]["loss"] = next(self._losses)


@pytest.mark.parametrize(("losses", "warnings"), [([math.nan, math.nan], 1), ([math.nan, 0.5], 0), ([0.5, 0.5], 0)])
def test_a_run_without_a_best_checkpoint_reports_at_its_end_that_the_metric_was_nan(tmp_path, caplog, losses, warnings):
    store = CheckpointStore(tmp_path / "checkpoints", monitor="val/loss")
    with run_in(tmp_path) as context, caplog.at_level(logging.WARNING, "jax_trainer"):
        fit(ScriptedLoss(losses), ModelCheckpoint(run=replace(context, checkpoints=store)))
    messages = [record.getMessage() for record in caplog.records]
    assert sum("val/loss" in message and "NaN" in message for message in messages) == warnings
    assert (store.best() is None) == bool(warnings)
