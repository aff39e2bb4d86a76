"""Evaluation sets with schedules and metrics of their own, in Python and in a file."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jax_trainer.callbacks import Callback, EarlyStoppingConfig, ModelCheckpointConfig
from jax_trainer.config import ConfigError
from jax_trainer.config.settings import SettingsError
from jax_trainer.datasets import ArrayLoader
from jax_trainer.datasets.examples import DigitsConfig
from jax_trainer.metrics import F1
from jax_trainer.testing import assert_same_bits
from jax_trainer.trainer import EvalSet, TrainResults, build, load_experiment, stored_run
from tests.trainer.metric_job import examples, trainer_in
from tests.trainer.trainer_runs import rows

EXPERIMENT = """\
trainer:
  class_name: ImgClassifierTrainer
  train_epochs: 2
  num_classes: 10
  enable_progress_bar: false
  callbacks:
    ModelCheckpoint: {monitor: val_tested/f1, mode: max}
    EarlyStopping: {monitor: val_tested/f1, mode: max, patience: 9}
model: {class_name: LinearLinen, num_classes: 10}
optimizer: {class_name: SGD}
dataset: {class_name: DigitsDataset, global_batch_size: 64, limit_train_size: 128}
eval_sets:
  tested:
    part: test
    every_n_epochs: 2
    metrics:
      f1: {class_name: F1, average: macro}
  other:
    dataset: {class_name: DigitsDataset, global_batch_size: 60}
    every_n_steps: 3
"""


def sets() -> dict[str, Any]:
    """In an epoch of five steps, `often` is evaluated inside of epochs, and once at the last step of one."""
    loader = ArrayLoader(examples(), 8)
    return {
        "val": loader,
        "same": EvalSet(loader, every_n_epochs=2, metrics={"f1": F1(average="weighted")}),
        "often": EvalSet(loader, every_n_steps=5),
        "third": EvalSet(loader, every_n_steps=3),
    }


SAVER = {"saver": ModelCheckpointConfig(monitor="val_same/f1", mode="max")}


def trained(folder: Path, evals: Any, trainer: Any = None, **options: Any) -> tuple[Any, TrainResults]:
    callbacks = options.pop("callbacks", SAVER)
    trainer = trainer or trainer_in(folder, metrics={}, class_weights={}, train_epochs=2, callbacks=callbacks)
    loader = ArrayLoader(examples(), 8, shuffle=True, drop_last=True)
    return trainer, trainer.train_model(loader, evals, **options)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> tuple[Any, TrainResults]:
    return trained(tmp_path_factory.mktemp("whole"), sets())


def evaluated(results: TrainResults) -> list[tuple[int, set[str]]]:
    """The step of each validation, and its sets."""
    return [(one.step, {name.partition("/")[0] for name in one.metrics}) for one in results.validations]


def test_every_set_is_evaluated_by_its_own_schedule(whole):
    assert evaluated(whole[1]) == [
        *((3, {"val_third"}), (5, {"val_often", "val"}), (6, {"val_third"}), (9, {"val_third"})),
        (10, {"val_often", "val", "val_same"}),
    ]


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> tuple[Any, TrainResults]:
    """The same run without further sets; its metric is computed on all data."""
    folder, metrics = tmp_path_factory.mktemp("plain"), {"f1": F1.config_class(average="weighted")}
    trainer = trainer_in(folder, metrics=metrics, class_weights={}, train_epochs=2)
    return trained(folder, ArrayLoader(examples(), 8), trainer)


def test_the_metrics_of_a_set_are_computed_on_it_alone(whole, plain):
    metrics, everywhere = whole[1][2], plain[1][2]
    assert {name for name in metrics if name.endswith("f1")} == {"val_same/f1"}
    assert metrics["val_same/f1"] == everywhere["val/f1"]
    assert metrics["val_same/loss"] == metrics["val/loss"] == everywhere["val/loss"]


def test_sets_do_not_change_the_training(whole, plain):
    assert_same_bits(whole[0].state, plain[0].state)


def test_chunks_of_steps_end_where_a_set_is_due(whole, tmp_path):
    trainer = trainer_in(tmp_path, metrics={}, class_weights={}, train_epochs=2, steps_per_call=4, callbacks=SAVER)
    _, results = trained(tmp_path, sets(), trainer)
    assert results.validations == whole[1].validations
    assert_same_bits(trainer.state, whole[0].state)


class Interrupting(Callback):
    """Ctrl-C after the first round of evaluations at the end of the first epoch that this process sees."""

    def on_validation_epoch_end(self, eval_metrics: dict[str, Any], epoch: int) -> None:
        if self.event.step == 5:
            signal.raise_signal(signal.SIGINT)


def test_a_run_that_is_interrupted_between_rounds_evaluates_each_set_once(whole, tmp_path):
    folder: Any = False
    for _ in range(2):
        trainer: Any = trainer_in(tmp_path, metrics={}, class_weights={}, train_epochs=2, callbacks=SAVER)
        trainer._given_callbacks["ctrl-c"] = Interrupting()
        with pytest.raises(KeyboardInterrupt):
            trained(tmp_path, sets(), trainer, resume=folder)
        folder = trainer.folder.path
    trainer = trainer_in(tmp_path, metrics={}, class_weights={}, train_epochs=2, callbacks=SAVER)
    _, results = trained(tmp_path, sets(), trainer, resume=folder)
    assert results.validations == whole[1].validations
    assert results.best == whole[1].best
    assert_same_bits(trainer.state, whole[0].state)
    values = [{key: row[key] for key in row if key.startswith("val")} for row in rows(trainer)]
    assert [row for row in values if row] == [
        row for row in [{key: row[key] for key in row if key.startswith("val")} for row in rows(whole[0])] if row
    ]


def test_rounds_without_the_ranking_set_are_not_ranked(tmp_path):
    loader = ArrayLoader(examples(), 8)
    evals = {"val": EvalSet(loader, every_n_steps=4), "often": EvalSet(loader, every_n_steps=3)}
    _, results = trained(tmp_path, evals, callbacks={}, test_loader=loader)
    assert results.best is not None
    assert results.best.monitor == "val/acc" and results.best.step in (4, 8)


def test_a_set_is_evaluated_although_the_trainer_never_validates(tmp_path):
    options = {"check_val_every_n_epoch": 0, "metrics": {}, "class_weights": {}, "train_epochs": 2}
    evals = {"val": ArrayLoader(examples(), 8), "second": EvalSet(ArrayLoader(examples(), 8), every_n_epochs=2)}
    _, results = trained(tmp_path, evals, trainer_in(tmp_path, **options))
    assert evaluated(results) == [(10, {"val_second"})]


def test_what_a_set_cannot_report_is_refused_before_training(tmp_path_factory, subtests):
    for evals, callbacks, match in [
        ({"a": EvalSet([1], metrics={"acc": F1()})}, {}, "eval_sets.a.metrics.acc"),
        ({"a": EvalSet([1], every_n_epochs=2)}, {"stop": EarlyStoppingConfig(monitor="val_a/f1")}, "val_a/f1"),
    ]:
        tmp_path = tmp_path_factory.mktemp("case")
        with subtests.test(evals=evals, callbacks=callbacks, match=match):
            evals = {
                name: EvalSet(ArrayLoader(examples(), 8), one.every_n_epochs, metrics=one.metrics)
                for name, one in evals.items()
            }
            with pytest.raises(SettingsError) as caught:
                trained(tmp_path, evals, callbacks=callbacks)
            assert match in str(caught.value.problems)
            assert not [*tmp_path.iterdir()]


def test_an_eval_set_has_a_valid_schedule_and_names(subtests):
    for wrong in [{"every_n_epochs": 0}, {"every_n_steps": 1.5}, {"metrics": {"loss": F1()}}]:
        with subtests.test(wrong=wrong), pytest.raises(ValueError, match=next(iter(wrong))):
            EvalSet([1], **wrong)


def test_sets_of_a_file_are_trained_stored_and_monitored(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(EXPERIMENT)
    loaded = load_experiment(file, [f"trainer.logger.log_dir={tmp_path}", "seed=3"])
    assert loaded.value.eval_sets["other"].dataset == DigitsConfig(global_batch_size=60, seed=3)
    trainer = build(loaded.value)
    data = trainer.dataset
    results = trainer.train_model(data.train_loader, data.val_loader)
    assert evaluated(results) == [(2, {"val"}), (3, {"val_other"}), (4, {"val", "val_tested"})]
    assert results.best.metrics["val_tested/f1"] == results[2]["val_tested/f1"]
    stored = stored_run(trainer.folder).value
    assert stored.eval_sets == loaded.value.eval_sets
    again = type(trainer).load_from_checkpoint(trainer.folder.path)
    sets = again.eval_sets
    assert again.eval_model(sets["tested"].data, "val_tested") == {
        name: value for name, value in results[2].items() if name.startswith("val_tested/")
    }


def test_a_wrong_set_of_a_file_is_reported_with_its_place(tmp_path_factory, subtests):
    for changes, match in [
        (["eval_sets.tested.part=train"], r"part.*train"),
        (["eval_sets.tested.every_n_epochs=0"], r"every_n_epochs.*0"),
        (["eval_sets.tested.metrics.f1.class_name=F0"], r"F0"),
        (["eval_sets.a/b.part=test"], r"a/b"),
        (["eval_sets.test.part=test"], r"eval_sets.test"),
        (["eval_sets.tested.metrics.loss.class_name=F1"], r"metrics.loss"),
    ]:
        tmp_path = tmp_path_factory.mktemp("case")
        with subtests.test(changes=changes, match=match):
            file = tmp_path / "run.yaml"
            file.write_text(EXPERIMENT)
            with pytest.raises(ConfigError, match=match):
                load_experiment(file, changes)


def test_a_dry_run_knows_the_metrics_of_the_sets(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(EXPERIMENT)
    build(load_experiment(file).value).dry_run()
    with pytest.raises(SettingsError, match="val_other/f1"):
        build(load_experiment(file, ["trainer.callbacks.EarlyStopping.monitor=val_other/f1"]).value).dry_run()


def test_errors_of_the_data_of_a_set_have_its_line(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(
        EXPERIMENT.replace("  tested:\n    part: test\n", "  val:\n    dataset: {class_name: DigitsDataset}\n")
    )
    loaded = load_experiment(file, ["trainer.callbacks={}"])
    with pytest.raises(SettingsError) as caught:
        _ = build(loaded.value).eval_sets
    assert "run.yaml:13" in str(loaded.error(caught.value))


@pytest.mark.slow
@pytest.mark.parametrize("killed_at", [3, 8, 14])
def test_a_run_that_is_killed_in_an_evaluation_resumes_exactly(tmp_path, killed_at):
    file = tmp_path / "run.yaml"
    file.write_text(EXPERIMENT)
    found = []
    for name, at in (("whole", 0), ("killed", killed_at)):
        command = [
            sys.executable,
            "-m",
            "jax_trainer",
            "train",
            str(file),
            "model.class_name=MLP",
            f"trainer.logger.log_dir={tmp_path / name}",
        ]
        command += ["trainer.train_epochs=6", "resume=auto", "--quiet"]
        environment = {**os.environ, "JAXTRAINER_FAILPOINT": f"eval_step:kill:{at}"} if at else {**os.environ}
        code = subprocess.run(command, env=environment, check=False).returncode
        assert code == (-signal.SIGKILL if at else 0)
        if at:
            assert subprocess.run(command, check=False).returncode == 0
        (history,) = (tmp_path / name).rglob("history.jsonl")
        lines = [json.loads(line) for line in history.read_text().splitlines()]
        found.append([line for line in lines if line.get("kind") == "val"])
    whole = {(one["step"], *sorted(one["metrics"])): one for one in found[0]}
    assert len(found[0]) == len(whole)
    assert {(one["step"], *sorted(one["metrics"])): one for one in found[1]} == whole
