import logging
from dataclasses import replace
from typing import Any

import pytest
from callback_runs import STEPS, Saves, fit
from compoconf import parse_config

from jax_trainer.callbacks import Callback, ModelCheckpoint, ModelCheckpointConfig, logger_observers
from jax_trainer.checkpoint.store import CheckpointStore
from jax_trainer.datasets import Position
from jax_trainer.engine import Every, Plan
from jax_trainer.testing import Recorder, assert_same_bits, numbered_loader


def saved(folder_run, config=None, plan=None, *, validates=True, seen=None, evals=None):
    store = Saves()
    run = replace(folder_run, checkpoints=store, validates=validates)
    fit(ModelCheckpoint(config or ModelCheckpointConfig(), run), *([seen] if seen else []), plan=plan, evals=evals)
    return store.kept


def test_every_validation_is_saved_with_its_metrics_and_the_position_in_the_data(folder_run):
    seen = Recorder()
    kept = saved(folder_run, seen=seen)
    assert [(step, position) for step, position, _ in kept] == [(STEPS, Position(1, 0)), (2 * STEPS, Position(2, 0))]
    for (_, _, metrics), (_, _, judged) in zip(kept, seen.evals, strict=True):
        assert metrics == {f"val/{name}": value for name, value in judged.items()}


def test_a_validation_within_an_epoch_is_saved_where_it_happened(folder_run):
    kept = saved(folder_run, plan=Plan(max_steps=2 * STEPS, eval_every=Every(steps=3)))
    assert [(step, position) for step, position, _ in kept] == [(3, Position(1, 3)), (6, Position(2, 2))]


TWO = {"val_near": numbered_loader(32), "val_far": numbered_loader(64)}


@pytest.mark.parametrize("monitor", ["val_near/loss", "val_far/acc"])
def test_of_several_validation_sets_each_may_be_monitored_and_the_state_is_saved_once(folder_run, monitor):
    seen = Recorder()
    kept = saved(folder_run, ModelCheckpointConfig(monitor=monitor), seen=seen, evals=TWO)
    assert [step for step, _, _ in kept] == [STEPS, 2 * STEPS]
    last = {f"{name}/{key}": value for _, name, metrics in seen.evals[2:] for key, value in metrics.items()}
    assert kept[-1][2] == last
    assert {"val_near/loss", "val_near/acc", "val_far/loss", "val_far/acc"} == set(last)


def test_a_monitor_that_no_set_reports_is_an_error_that_lists_all_of_them(folder_run):
    message = "No metric 'val/loss' to monitor. There are: val_far/acc, val_far/loss, val_near/acc, val_near/loss."
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
    with pytest.raises(ValueError, match="No metric 'val/accuracy' to monitor. There are: val/acc, val/loss."):
        saved(folder_run, ModelCheckpointConfig(monitor="val/accuracy"), plan)


def test_without_validation_every_epoch_is_saved_and_said_once(folder_run, caplog):
    with caplog.at_level(logging.WARNING, "jax_trainer"):
        kept = saved(folder_run, plan=Plan(max_epochs=2), validates=False)
    assert [(step, position) for step, position, _ in kept] == [(STEPS, Position(1, 0)), (2 * STEPS, Position(2, 0))]
    assert "train/loss" in kept[0][2]
    assert [record.message for record in caplog.records if "no validation" in record.message] == [
        "This run has no validation: ModelCheckpoint saves at the end of epochs, and `monitor: val/loss` is not used."
    ]


def test_a_run_without_a_store_is_refused(folder_run):
    with pytest.raises(ValueError, match="`ModelCheckpoint` needs a place to save to"):
        ModelCheckpoint(ModelCheckpointConfig(), folder_run)


def test_auto_is_decided_by_the_name_of_the_metric():
    assert ModelCheckpointConfig(monitor="val/acc", mode="auto").best_mode == "max"
    assert ModelCheckpointConfig(monitor="val/loss", mode="auto").best_mode == "min"


def test_the_section_of_the_seed_document_is_read():
    section = {"monitor": "val/acc", "mode": "max", "save_top_k": 1, "save_optimizer_state": False}
    config: Any = parse_config(Callback.cfgtype, {"class_name": "ModelCheckpoint", **section})
    assert config == ModelCheckpointConfig(monitor="val/acc", mode="max")
    kept = {"keep_latest": 1, "keep_best": 1, "slim_best": True}
    assert config.store_options() == {**kept, "monitor": "val/acc", "mode": "max"}
    assert config.store_options(monitors=False) == kept
    assert ModelCheckpointConfig(save_optimizer_state=True).store_options()["slim_best"] is False


def test_what_callbacks_know_is_saved_with_every_state(folder_run):
    store, states = Saves(), iter([{"a": {"seen": 1}}, {"a": {"seen": 2}}])
    fit(ModelCheckpoint(run=replace(folder_run, checkpoints=store, callback_states=lambda: next(states))))
    assert store.callbacks == [{"a": {"seen": 1}}, {"a": {"seen": 2}}]


def test_what_was_logged_is_on_the_disk_before_a_state_is_saved(folder_run, monkeypatch):
    calls: list[str] = []
    flush = folder_run.logger.flush
    monkeypatch.setattr(folder_run.logger, "flush", lambda: calls.append("flush") or flush())

    class Looks(Saves):
        def save(self, *given, **options):
            calls.append(f"save {len((folder_run.folder / 'metrics.jsonl').read_text().splitlines())}")
            return super().save(*given, **options)

    run = replace(folder_run, checkpoints=Looks())
    fit(*logger_observers(run.logger), ModelCheckpoint(run=run))
    assert calls == ["flush", "save 2", "flush", "save 4"]  # an epoch and its validation each


def test_a_run_that_compares_states_otherwise_needs_no_monitor(folder_run):
    config, store = ModelCheckpointConfig(monitor="val/nothing"), Saves()
    fit(ModelCheckpoint(config, replace(folder_run, checkpoints=store, monitors=False)))
    assert [step for step, _, _ in store.kept] == [STEPS, 2 * STEPS]


def test_a_second_run_begins_at_its_own_beginning(folder_run):
    stores = Saves(), Saves()
    callback = ModelCheckpoint()
    plan = Plan(max_steps=6, eval_every=Every(steps=3), eval_at_start=True)
    for store in stores:
        callback.attach(replace(folder_run, checkpoints=store))
        fit(callback, plan=plan)
    assert stores[0].kept == stores[1].kept
    assert [step for step, _, _ in stores[0].kept] == [3, 6]


def test_the_real_store_keeps_the_latest_and_the_best(folder_run):
    config, seen = ModelCheckpointConfig(monitor="val/acc", mode="auto"), Recorder()
    store = CheckpointStore(folder_run.folder / "checkpoints", **config.store_options())
    plan = Plan(max_epochs=4, eval_every=Every(epochs=1))
    last = fit(ModelCheckpoint(config, replace(folder_run, checkpoints=store)), seen, plan=plan)
    restored, saved = store.restore("latest", like=last)
    assert_same_bits(restored, last)
    assert saved.position == Position(4, 0)
    best_step, _, best = max(seen.evals, key=lambda judged: judged[2]["acc"])
    found = store.best()
    assert found is not None
    assert (found.step, found.metrics["val/acc"]) == (best_step, best["acc"])
    assert set(store.steps()) == {4 * STEPS, best_step}
    assert saved.callbacks == {}


def test_the_real_store_gives_back_what_callbacks_knew(folder_run):
    config = ModelCheckpointConfig()
    store = CheckpointStore(folder_run.folder / "checkpoints", **config.store_options())
    run = replace(folder_run, checkpoints=store, callback_states=lambda: {"mine": {"best": 0.5, "names": ["a"]}})
    last = fit(ModelCheckpoint(config, run))
    assert store.restore("latest", like=last)[1].callbacks == {"mine": {"best": 0.5, "names": ["a"]}}


def test_the_real_store_keeps_the_latest_where_nothing_is_judged(folder_run):
    config = ModelCheckpointConfig()
    store = CheckpointStore(folder_run.folder / "checkpoints", **config.store_options(validates=False))
    run = replace(folder_run, checkpoints=store, validates=False)
    last = fit(ModelCheckpoint(config, run), plan=Plan(max_epochs=2))
    assert_same_bits(store.restore("latest", like=last)[0], last)
    assert store.steps() == [2 * STEPS]
