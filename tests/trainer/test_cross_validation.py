"""Cross-validation: the folds, their runs, and what is trained again after an interruption."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.model_selection import StratifiedKFold

from jax_trainer.callbacks import LambdaCallback, ModelCheckpointConfig
from jax_trainer.datasets import ArrayLoader, DataError, DatasetConfig, DatasetModule, SupervisedBatch
from jax_trainer.trainer import CrossValidation, cross_validate
from jax_trainer.trainer.cross_validation import all_examples, fold_rows, labels_of
from tests.trainer.metric_job import examples, trainer_in

FOLDS = 2
SAVER = {"saver": ModelCheckpointConfig(monitor="val/loss", every_n_steps=1)}
YAML = """\
trainer:
  class_name: ImgClassifierTrainer
  train_epochs: 2
  num_classes: 10
  callbacks: {ModelCheckpoint: {monitor: val/loss, every_n_steps: 2}}
model: {class_name: MLP, num_classes: 10, hidden: [8]}
optimizer: {class_name: SGD, learning_rate: 0.1}
dataset: {class_name: DigitsDataset, global_batch_size: 64, limit_train_size: 320}
"""


def data() -> DatasetModule:
    """44 examples: 32 to train on, 12 to validate on, and some of them to test on."""
    arrays = examples()
    return DatasetModule(DatasetConfig(global_batch_size=8), arrays[:32], arrays[32:], arrays[:12])


def made(folder: Path, fold: DatasetModule, **observers: Any) -> Any:
    options = {"metrics": {}, "class_weights": {}, "train_epochs": 2, "callbacks": SAVER}
    trainer = trainer_in(folder, **options)
    trainer.set_dataset(fold)
    trainer._given_callbacks |= observers
    return trainer


def crossed(folder: Path, **observers: Any) -> CrossValidation:
    make = lambda fold: made(folder / "never", fold, **observers)
    return cross_validate(make, FOLDS, dataset=data(), folder=folder, seed=1, quiet=True)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> CrossValidation:
    return crossed(tmp_path_factory.mktemp("whole"))


@given(
    labels=st.lists(st.integers(0, 4), min_size=6, max_size=60).map(np.array),
    folds=st.integers(2, 6),
    seed=st.integers(0, 9),
)
def test_folds_are_a_partition_with_the_counts_of_stratified_k_fold(labels, folds, seed):
    for of_class in (None, labels):
        rows = fold_rows(len(labels), folds, seed, of_class)
        assert sorted(np.concatenate(rows)) == [*range(len(labels))]
        assert np.ptp([len(one) for one in rows]) <= 1
        again = fold_rows(len(labels), folds, seed, of_class)
        assert all(map(np.array_equal, rows, again))
    counts = np.array([np.bincount(labels[one], minlength=5) for one in rows])
    assert (np.ptp(counts, axis=0) <= 1).all()
    if np.unique(labels, return_counts=True)[1].min() >= folds:  # it warns of smaller classes
        oracle = StratifiedKFold(folds, shuffle=True, random_state=seed).split(labels, labels)
        others = np.array([np.bincount(labels[one], minlength=5) for _, one in oracle])
        assert np.array_equal(np.sort(counts, axis=0), np.sort(others, axis=0))


def test_another_seed_is_another_assignment():
    assert not np.array_equal(fold_rows(40, 4, 0)[0], fold_rows(40, 4, 1)[0])


def test_a_fold_is_a_run_on_its_rows(whole, tmp_path):
    arrays = all_examples(data())
    assert np.array_equal(arrays.input, examples().input)
    val = fold_rows(44, FOLDS, 1, labels_of(arrays))[1]
    train = np.setdiff1d(np.arange(44), val)
    trainer = made(tmp_path, DatasetModule(DatasetConfig(global_batch_size=8), examples()[train], examples()[val]))
    results = trainer.train_model(trainer.dataset.train_loader, trainer.dataset.val_loader, data().test_loader)
    expected = {**results.best.metrics, **results["test"]}
    assert whole.folds[1].metrics == {name: float(value) for name, value in expected.items()}
    assert (whole.folds[1].step, whole.folds[1].epoch) == (results.best.step, results.best.epoch)


def test_mean_and_standard_deviation_are_those_over_the_folds(whole):
    values = [one.metrics["val/loss"] for one in whole.folds]
    assert len(set(values)) == FOLDS
    assert whole.mean["val/loss"] == pytest.approx(np.mean(values), rel=1e-12)
    assert whole.std["val/loss"] == pytest.approx(np.std(values, ddof=1), rel=1e-12)
    assert {"test/loss", "val/acc"} <= whole.mean.keys()
    assert whole.data()["mean"] == whole.mean


def test_an_interrupted_fold_resumes_and_ended_ones_are_not_trained_again(whole, tmp_path):
    steps: list[int] = []

    def count(event: Any) -> None:
        steps.append(event.step)
        if len(steps) == 7:  # in the second epoch of the second fold
            signal.raise_signal(signal.SIGINT)

    watch = {"watch": LambdaCallback(on_step_end=count)}
    with pytest.raises(KeyboardInterrupt):
        crossed(tmp_path, **watch)
    assert steps == [1, 2, 3, 4, 1, 2, 3]
    result = crossed(tmp_path, **watch)
    assert steps[7:] == [4]
    assert [one.metrics for one in result.folds] == [one.metrics for one in whole.folds]
    assert crossed(tmp_path, **watch) == result and len(steps) == 8


def test_a_run_of_a_fold_stores_no_dataset_which_is_not_its_own(whole):
    for one in whole.folds:
        assert "dataset:" not in (Path(one.run) / "config.yaml").read_text()


def test_what_cannot_be_folded_is_refused(tmp_path):
    arrays = examples()
    batches = DatasetModule(DatasetConfig(), train_loader=[arrays[:8], arrays[8:16]])
    transformed = ArrayLoader(arrays, 8, batch_transform=lambda batch, rng: batch)
    regression = DatasetModule(DatasetConfig(global_batch_size=8), (arrays.input, arrays.input.sum(1)))
    make = lambda fold: made(tmp_path, fold)
    refused: tuple[tuple[DatasetModule, dict[str, Any], str], ...] = (
        (batches, {}, "train.*list"),
        (DatasetModule(DatasetConfig(), train_loader=transformed), {}, "train.*ArrayLoader"),
        (regression, {"stratify": True}, "stratify"),
        (data(), {"folds": 45}, "folds.*45.*44"),
        (data(), {"folds": 1}, "folds.*1"),
    )
    for dataset, options, match in refused:
        with pytest.raises((DataError, ValueError), match=match):
            cross_validate(make, dataset=dataset, folder=tmp_path, **options)
    assert not [*tmp_path.iterdir()]


def test_labels_are_integers_of_one_axis():
    ids, floats = np.arange(3), np.zeros(3, np.float32)
    for arrays in ((floats, ids), {"x": floats, "y": ids}, SupervisedBatch.of(floats, ids)):
        found = labels_of(arrays)
        assert found is not None and np.array_equal(found, ids)
    for arrays in ((floats, floats), {"x": ids}, (floats, ids, ids), {"y": ids, "label": ids}, (ids, ids[:, None])):
        assert labels_of(arrays) is None


@pytest.mark.slow
@pytest.mark.parametrize("killed_at", [3, 9])
def test_a_killed_command_resumes_to_the_same_table(tmp_path, killed_at):
    found = []
    for name, at in (("whole", 0), ("killed", killed_at)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "run.yaml").write_text(YAML)
        command = [sys.executable, "-m", "jax_trainer", "cv", "run.yaml", "--folds", "2", "--json"]
        if at:
            environment = {**os.environ, "JAXTRAINER_FAILPOINT": f"step:kill:{at}"}
            killed = subprocess.run(command, cwd=folder, env=environment, capture_output=True, check=False)
            assert killed.returncode == -signal.SIGKILL
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
        found.append(json.loads(done.stdout))
    assert found[0]["mean"] == found[1]["mean"] and found[0]["std"] == found[1]["std"]
    assert [one["metrics"] for one in found[0]["folds"]] == [one["metrics"] for one in found[1]["folds"]]
    assert "val/acc" in found[0]["mean"] and "test/acc" in found[0]["mean"]
