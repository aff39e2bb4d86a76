import logging
from dataclasses import replace
from typing import Any

import pytest
from callback_runs import STEPS, Saves, fit
from compoconf import parse_config

from jax_trainer.callbacks import Callback, ModelCheckpoint, ModelCheckpointConfig
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


@pytest.mark.parametrize(
    ("monitor", "mode"),
    [
        ("val/acc", "max"),
        ("val/top5_accuracy", "max"),
        ("val/F1", "max"),
        ("val/auc", "max"),
        ("val/loss", "min"),
        ("val/accumulated_loss", "min"),
        ("val_acc/perplexity", "min"),
    ],
)
def test_auto_goes_by_the_name_of_the_metric(monitor, mode):
    assert ModelCheckpointConfig(monitor=monitor, mode="auto").best_mode == mode


def test_the_section_of_the_seed_document_is_read():
    section = {"monitor": "val/acc", "mode": "max", "save_top_k": 1, "save_optimizer_state": False}
    config: Any = parse_config(Callback.cfgtype, {"class_name": "ModelCheckpoint", **section})
    assert config == ModelCheckpointConfig(monitor="val/acc", mode="max")
    assert config.store_options() == {"keep_latest": 1, "keep_best": 1, "monitor": "val/acc", "mode": "max"}


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


def test_the_real_store_keeps_the_latest_where_nothing_is_judged(folder_run):
    config = ModelCheckpointConfig()
    store = CheckpointStore(folder_run.folder / "checkpoints", **config.store_options(validates=False))
    run = replace(folder_run, checkpoints=store, validates=False)
    last = fit(ModelCheckpoint(config, run), plan=Plan(max_epochs=2))
    assert_same_bits(store.restore("latest", like=last)[0], last)
    assert store.steps() == [2 * STEPS]
