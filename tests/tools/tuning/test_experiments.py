"""Real trainings: one study of the tiny experiment, which many tests look at."""

import json
from pathlib import Path
from typing import Any

import pytest

from jax_trainer.config import ConfigError
from jax_trainer.tools.tuning import StudyError, TuneResult, read_space, tune
from jax_trainer.tools.tuning.objectives import ExperimentTrials, best_value
from jax_trainer.trainer import Validation, build, load_experiment
from tests.tools.tuning.tuning_runs import QUICK, RATE, RATES, TINY, tiny_file

TRIALS = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("study")


def study(folder: Path, trials: int = TRIALS) -> TuneResult:
    options: dict[str, Any] = {"monitor": "val/acc", "sampler": "random", "startup": 1, "seed": 1, "quiet": True}
    return tune(tiny_file(folder, QUICK), RATES, trials=trials, folder=folder / "out", **options)


@pytest.fixture(scope="module")
def found(folder: Path) -> TuneResult:
    return study(folder)


def validations(run: Path) -> list[float]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row["val/acc"] for row in rows if "val/acc" in row]


@pytest.mark.slow
def test_bad_trials_are_cut_and_good_ones_are_not(found: TuneResult):
    assert found.count("complete") + found.count("pruned") == TRIALS
    cut = [trial for trial in found.trials if trial["state"] == "pruned"]
    completed = [trial for trial in found.trials if trial["state"] == "complete"]
    assert cut and all(trial["reports"] < 3 for trial in cut)
    assert completed and all(trial["reports"] == 3 for trial in completed)
    assert found.value == max(trial["value"] for trial in completed)


def test_a_trial_is_evaluated_by_its_best_validation(found: TuneResult):
    for trial in found.trials:
        [run] = (found.folder / "trials" / f"{trial['trial']:04}").iterdir()
        values = validations(run)
        assert len(values) == trial["reports"]
        assert trial["value"] == (max(values) if trial["state"] == "complete" else values[-1])


def test_every_trial_is_a_run_of_its_own(found: TuneResult):
    folders = sorted(path.name for path in (found.folder / "trials").iterdir())
    assert folders == [f"{number:04}" for number in range(TRIALS)]
    for trial in found.trials:
        [run] = (found.folder / "trials" / f"{trial['trial']:04}").iterdir()
        stored: Any = load_experiment(run / "config.yaml").value
        assert stored.optimizer.learning_rate.peak_value == trial["params"][RATE]


def test_the_best_experiment_gives_the_same_value_to_the_last_bit(found: TuneResult, tmp_path: Path):
    assert found.config is not None and found.config == found.folder / "best.yaml"
    experiment: Any = load_experiment(found.config, [f"trainer.logger.log_dir={tmp_path}"]).value
    trainer = build(experiment)
    results = trainer.train_model(trainer.dataset.train_loader, trainer.dataset.val_loader, quiet=True)
    assert best_value(results.validations, "val/acc", "max") == found.value
    assert experiment.optimizer.learning_rate.peak_value == found.params[RATE]
    first = found.config.read_text().splitlines()[0]
    assert first.startswith("#") and "'tiny'" in first and f"val/acc was {found.value:.6g}" in first


def test_the_best_experiment_says_nothing_of_the_folder_of_its_trial(found: TuneResult):
    assert found.config is not None
    assert load_experiment(found.config).value.trainer.logger.log_dir == ""


def test_asked_again_nothing_is_trained(found: TuneResult, folder: Path):
    before = {path: path.stat().st_mtime_ns for path in (found.folder / "trials").rglob("*")}
    again = study(folder)
    assert again.trials == found.trials and again.params == found.params
    assert {path: path.stat().st_mtime_ns for path in (found.folder / "trials").rglob("*")} == before


@pytest.mark.slow
def test_a_training_that_diverges_is_a_failed_trial(tmp_path: Path):
    options: dict[str, Any] = {"sampler": "grid", "overrides": ["trainer.train_epochs=1"], "quiet": True}
    found = tune(tiny_file(tmp_path), {RATE: [1e-1, 1e30]}, folder=tmp_path / "out", **options)
    assert [trial["state"] for trial in found.trials] == ["complete", "failed"]
    assert found.trials[1]["error"].startswith("NonFiniteError: Step ")


# without training


def trials_of(folder: Path, text: str = TINY, overrides: tuple[str, ...] = (), **options: Any) -> ExperimentTrials:
    return ExperimentTrials(tiny_file(folder, text), overrides, read_space(RATES), folder=folder, **options)


SAVER = "trainer.callbacks.ModelCheckpoint={monitor: val/acc, mode: max}"


def test_trials_are_compared_by_what_the_experiment_saves_by(tmp_path: Path, subtests):
    for number, (overrides, options, expected) in enumerate(
        [
            ((), {}, ("val/loss", "min")),
            ((SAVER,), {}, ("val/acc", "max")),
            ((SAVER,), {"mode": "min"}, ("val/acc", "min")),
            ((SAVER,), {"monitor": "val/loss"}, ("val/loss", "min")),
            ((), {"monitor": "val/acc"}, ("val/acc", "max")),
            (("trainer.callbacks.ModelCheckpoint={monitor: val/x, mode: max}",), {}, ("val/x", "max")),
        ]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        with subtests.test(overrides=overrides):
            trials = trials_of(folder, overrides=overrides, **options)
            assert (trials.monitor, trials.mode) == expected


def test_what_would_fail_in_every_trial_is_found_before_the_first(tmp_path: Path, subtests):
    for number, (overrides, monitor, error, text) in enumerate(
        [
            ((), "val/f1", StudyError, "No metric 'val/f1' to monitor. Logged metrics: val/acc"),
            (
                ("trainer.check_val_every_n_epoch=0",),
                None,
                ConfigError,
                "command line: trainer.check_val_every_n_epoch: trials",
            ),
            (("dataset.global_batch_size=5000",), None, ConfigError, "command line: dataset"),
        ]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        with subtests.test(overrides=overrides):
            with pytest.raises(error, match=text):
                tune(tiny_file(folder), RATES, overrides=overrides, monitor=monitor, folder=folder / "out", quiet=True)
            assert not (folder / "out" / "trials").exists()
            journal = folder / "out" / "study.journal"
            assert not journal.exists() or journal.read_text() == ""  # no study that would stand in the way


def test_a_space_that_does_not_fit_leaves_nothing_behind(tmp_path: Path):
    with pytest.raises(ConfigError, match="space: model.c_hidd: SimpleClassifier has no key `c_hidd`. Did you mean"):
        tune(tiny_file(tmp_path), {"model.c_hidd": [1]}, folder=tmp_path / "out", quiet=True)
    assert not (tmp_path / "out").exists()


def test_another_experiment_under_the_same_name_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    options: dict[str, Any] = {"folder": tmp_path / "out", "timeout": 0.0, "quiet": True}
    tune(tiny_file(tmp_path), RATES, **options)
    tune(tiny_file(tmp_path), RATES, **options)
    assert not caplog.records
    tune(tiny_file(tmp_path), RATES, overrides=["trainer.train_epochs=7", "dataset.data_dir=elsewhere"], **options)
    [record] = caplog.records
    assert "'tiny'" in record.getMessage() and "`dataset.data_dir` was" in record.getMessage()
    assert "`trainer.train_epochs` was 3, is 7" in record.getMessage()


def test_the_best_of_all_validations_counts_not_the_last():
    results = [Validation(1 + step // 3, step, {"val/x": x}) for step, x in ((1, 2.0), (2, 3.0), (3, 2.5))]
    assert (best_value(results, "val/x", "max"), best_value(results, "val/x", "min")) == (3.0, 2.0)


def test_a_value_that_is_no_number_fails_the_trial():
    with pytest.raises(FloatingPointError, match="`val/loss` is nan in epoch 2, step 8"):
        best_value(
            [Validation(1, 4, {"val/loss": 1.0}), Validation(2, 8, {"val/loss": float("nan")})], "val/loss", "min"
        )
    with pytest.raises(ValueError, match="No validation has reported `val/loss`."):
        best_value([Validation(1, 4, {"val/acc": 1.0})], "val/loss", "min")


def test_a_study_is_named_after_what_is_tuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    found = tune(tiny_file(tmp_path), RATES, timeout=0.0, quiet=True)
    assert (found.study, found.folder) == ("tiny", tmp_path / "runs" / "tune" / "tiny")
    with pytest.raises(StudyError, match="study name '../out'"):
        tune(tiny_file(tmp_path), RATES, name="../out", quiet=True)


def test_a_wrong_option_is_reported_before_anything_else(subtests):
    for options, text in [
        ({"trials": 0}, "trials must be .* of at least 1, is 0"),
        ({"sampler": "magic"}, "sampler must be.*'magic'"),
        ({"pruner": "magic"}, "pruner must be.*'magic'"),
        ({"startup": -1}, "startup must be .* of at least 0, is -1"),
        ({"timeout": float("nan")}, "timeout must be .* of at least 0.* is nan"),
        ({"overrides": ["a=1"]}, "`overrides` are for a YAML file"),
    ]:
        with subtests.test(options=options), pytest.raises(ValueError, match=text):
            tune(lambda values, trial: 0.0, RATES, **options)
