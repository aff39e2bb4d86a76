import json
from typing import Any

import jax
import pytest

from jax_trainer.callbacks import ModelCheckpointConfig
from jax_trainer.testing import numbered_loader
from jax_trainer.trainer.training import named_sets
from tests.trainer.trainer_runs import Plain, WatcherConfig, first_examples, plain_for, rows, train_plain, values


def test_sets_are_named_after_what_they_are_for():
    assert named_sets("val", None) == {}
    assert named_sets("val", [1]) == {"val": [1]}
    assert named_sets("test", {"test": 1, "noisy": 2}) == {"test": 1, "test_noisy": 2}


def test_of_several_validations_in_an_epoch_the_last_counts(tmp_path):
    trainer = plain_for("nnx", tmp_path, val_every_n_steps=2)
    results = train_plain(trainer)
    first, last = (row for row in rows(trainer) if "val/loss" in row)
    assert results == {1: {name: value for name, value in last.items() if name.startswith("val")}}
    assert first["val/loss"] != last["val/loss"]


INSIDE: dict[str, Any] = {"train_epochs": 2, "val_every_n_steps": 3}  # 4 steps per epoch


def test_every_validation_is_returned_with_its_epoch_and_step(tmp_path):
    trainer = plain_for("nnx", tmp_path, **INSIDE)
    results = train_plain(trainer)
    assert [(one.epoch, one.step) for one in results.validations] == [(1, 3), (1, 4), (2, 6), (2, 8)]
    assert [one.metrics["val/loss"] for one in results.validations] == list(values(trainer, "val/loss"))
    assert results == {1: results.validations[1].metrics, 2: results.validations[3].metrics}


def test_without_validation_the_training_metrics_of_every_epoch_are_returned(tmp_path):
    trainer = plain_for("nnx", tmp_path, train_epochs=2)
    results = trainer.train_model(numbered_loader(128))
    assert [results[epoch]["train/loss"] for epoch in (1, 2)] == list(values(trainer, "train/loss_epoch"))
    assert (list(results), results.validations) == ([1, 2], [])
    never = plain_for("nnx", tmp_path, train_epochs=2, check_val_every_n_epoch=0)
    assert train_plain(never) == results


def test_an_unknown_key_of_the_results_names_the_known_ones(tmp_path):
    trainer = plain_for("nnx", tmp_path, train_epochs=2)
    results = train_plain(trainer)
    for key in (3, "test", "val/acc"):
        with pytest.raises(KeyError, match=rf"{key}.*1, 2.*results\[epoch\]"):
            results[key]
    with pytest.raises(KeyError, match="val/accuracy.*`val/acc`.*val/acc, val/loss"):
        results[2]["val/accuracy"]
    assert "val/accuracy" not in results[2] and results[2].get("val/accuracy") is None
    assert jax.tree.map(float, results[2]) == results[2]
    unvalidated = trainer.train_model(numbered_loader(128), num_epochs=1)
    with pytest.raises(KeyError, match="val/acc.*`val_loader`.*train/acc"):
        unvalidated[1]["val/acc"]
    for metrics in (trainer.eval_model(numbered_loader(128)), trainer.test_model(numbered_loader(128))):
        with pytest.raises(KeyError, match="'acc'.*/acc`.*/acc, .*/loss"):
            metrics["acc"]


class Adding(Plain):
    """Adds a metric to every validation."""

    def on_validation_epoch_end(self, eval_metrics, epoch_idx):
        eval_metrics["val/double"] = 2 * eval_metrics["val/loss"]


def test_several_sets_and_what_a_hook_adds_are_one_validation(tmp_path):
    trainer = plain_for("nnx", tmp_path, kind=Adding, **INSIDE)
    sets = {"val": first_examples(64), "near": first_examples(32)}
    results = trainer.train_model(numbered_loader(128), sets)
    assert [one.step for one in results.validations] == [3, 4, 6, 8]
    for one in results.validations:
        assert one.metrics["val/double"] == 2 * one.metrics["val/loss"]
        assert "val_near/loss" in one.metrics


@pytest.mark.parametrize(  # at a validation within an epoch, at the end of one, and between
    "stopped_at", [3, *(pytest.param(step, marks=pytest.mark.slow) for step in (4, 5, 6, 7))]
)
def test_a_resumed_run_has_every_validation_and_every_file_of_it(tmp_path, stopped_at):
    saver = {"saver": ModelCheckpointConfig(monitor="val/loss")}
    complete = plain_for("nnx", tmp_path / "complete", callbacks=saver, **INSIDE)
    expected = train_plain(complete)
    watcher = {"watcher": WatcherConfig(interrupt_at=stopped_at)}
    cut = plain_for("nnx", tmp_path / "cut", callbacks={**saver, **watcher}, **INSIDE)
    with pytest.raises(KeyboardInterrupt):
        train_plain(cut)
    again = plain_for("nnx", tmp_path / "cut", callbacks=saver, **INSIDE)
    results = train_plain(again, resume=cut.folder.path)
    assert (results, results.validations) == (expected, expected.validations)
    assert saved(again) == saved(complete)


def saved(trainer: Plain) -> dict[str, dict[str, float]]:
    assert trainer.folder is not None
    files = {path.name: json.loads(path.read_text()) for path in (trainer.folder.path / "metrics").iterdir()}
    return {name: {key: one for key, one in file.items() if "time" not in key} for name, file in files.items()}
