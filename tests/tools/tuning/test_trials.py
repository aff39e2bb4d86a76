import csv
import io
import math
import re
from pathlib import Path
from typing import Any

import optuna
import pytest

from jax_trainer.core import NonFiniteError
from jax_trainer.tools.tuning import StudyError, TuneResult, tune
from jax_trainer.tools.tuning.storage import open_storage
from tests.tools.tuning.tuning_runs import LINE, parabola


def by_number(found: TuneResult) -> list[tuple[str, Any]]:
    return [(trial["state"], trial["params"]) for trial in sorted(found.trials, key=lambda trial: trial["trial"])]


def test_asked_again_only_what_is_missing_is_made(tmp_path: Path):
    calls: list[float] = []

    def counted(values: dict[str, Any], trial: Any) -> float:
        calls.append(values["x"])
        return values["x"]

    for trials, made in ((3, 3), (3, 3), (2, 3), (5, 5)):
        found = tune(counted, LINE, trials=trials, folder=tmp_path, quiet=True)
        assert len(calls) == len(found.trials) == made


def test_a_trial_that_diverges_is_recorded_and_the_study_continues(tmp_path: Path):
    def fragile(values: dict[str, Any], trial: Any) -> float:
        ends: dict[int, Any] = {1: math.nan, 2: math.inf, 3: "text"}
        if trial.number == 4:
            raise NonFiniteError("The loss was not finite.", step=3)
        if trial.number == 5:
            trial.report(math.nan, 1)
            raise optuna.TrialPruned  # a pruner cuts what is no number
        return ends.get(trial.number, values["x"])

    found = tune(fragile, LINE, trials=7, folder=tmp_path, quiet=True)
    assert [state for state, _ in by_number(found)] == ["complete", *["failed"] * 5, "complete"]
    errors = {trial["trial"]: trial["error"] for trial in found.trials if trial["state"] == "failed"}
    kinds = {
        1: "FloatingPointError: .*nan",
        2: "FloatingPointError: .*inf",
        3: "TypeError: .*'text'",
        4: "NonFiniteError",
        5: "FloatingPointError",
    }
    assert errors.keys() == kinds.keys()
    assert all(re.match(kinds[number], errors[number]) for number in errors)


def test_three_failures_from_the_start_end_it_with_the_error_itself(tmp_path: Path):
    def broken(values: dict[str, Any], trial: Any) -> float:
        raise KeyError(f"bug {trial.number}")

    with pytest.raises(KeyError, match="bug 2") as caught:
        tune(broken, LINE, trials=10, name="line", folder=tmp_path, quiet=True)
    assert ["first 3 trials" in note for note in caught.value.__notes__] == [True]
    rows = list(csv.DictReader(io.StringIO((tmp_path / "results.csv").read_text())))
    assert [(row["trial"], row["state"], row["error"]) for row in rows] == [
        (str(number), "failed", f"KeyError: 'bug {number}'") for number in range(3)
    ]
    # with the mistake corrected, the same study is resumed
    assert tune(parabola, LINE, trials=5, name="line", folder=tmp_path, quiet=True).count("complete") == 2


def test_ctrl_c_ends_the_study_and_its_values_are_tried_again(tmp_path: Path):
    def interrupted(values: dict[str, Any], trial: Any) -> float:
        if trial.number == 2:
            raise KeyboardInterrupt
        return values["x"]

    options: dict[str, Any] = {"name": "line", "folder": tmp_path, "seed": 0, "quiet": True}
    with pytest.raises(KeyboardInterrupt):
        tune(interrupted, LINE, trials=4, **options)
    assert (tmp_path / "results.csv").read_text().count("\n") == 4
    found = tune(lambda values, trial: values["x"], LINE, trials=4, **options)
    made = by_number(found)
    assert [state for state, _ in made] == ["complete", "complete", "interrupted", "complete", "complete"]
    assert made[2][1] == made[3][1]
    assert tune(parabola, LINE, trials=4, **options).trials == found.trials


def test_no_trial_begins_after_the_time_is_up(tmp_path: Path):
    assert tune(parabola, LINE, trials=5, timeout=0.0, folder=tmp_path, quiet=True).trials == []
    found = tune(parabola, LINE, trials=5, timeout=600, folder=tmp_path, quiet=True)
    assert found.count("complete") == 5


def test_what_others_are_making_counts(tmp_path: Path):
    """Another process is simulated by a trial within a trial."""

    within: list[TuneResult] = []

    def nested(values: dict[str, Any], trial: Any) -> float:
        if trial.number == 0:
            within.append(tune(nested, LINE, trials=3, folder=tmp_path, quiet=True))
        return values["x"]

    assert tune(nested, LINE, trials=3, folder=tmp_path, quiet=True).count("complete") == 3
    assert [(one.count("complete"), one.count("running")) for one in within] == [(2, 1)]


def test_a_study_of_something_else_is_not_resumed(tmp_path: Path, subtests):
    for number, (change, text) in enumerate(
        [
            (
                {"space": {"x": {"low": 0.0, "high": 2.0}}},
                "another space: .*1.0.*, now .*2.0",
            ),
            ({"mode": "max"}, 'another mode: "min", now "max".*`name`'),
            ({"monitor": "loss"}, "another monitor"),
        ]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        with subtests.test(change=change):
            options: dict[str, Any] = {"space": LINE, "folder": folder, "quiet": True}
            before = tune(parabola, trials=2, **options)
            with pytest.raises(StudyError, match=text):
                tune(parabola, trials=3, **{**options, **change})
            # in the same journal, under another name
            other = tune(parabola, trials=1, name="other", **{**options, **change})
            assert len(other.trials) == 1
            assert tune(parabola, trials=2, **options).trials == before.trials


def test_a_study_that_plain_optuna_created_is_resumed_if_it_fits(tmp_path: Path):
    url = f"sqlite:///{tmp_path / 'study.db'}"
    study = optuna.create_study(storage=url, study_name="line", direction="maximize")
    study.optimize(lambda trial: trial.suggest_float("x", 0.0, 1.0), n_trials=2)
    options: dict[str, Any] = {"storage": url, "name": "line", "folder": tmp_path, "quiet": True}
    with pytest.raises(StudyError, match='another mode: "max", now "min"'):
        tune(parabola, LINE, **options)
    found = tune(parabola, LINE, mode="max", trials=3, **options)
    assert found.count("complete") == 3
    assert {trial["trial"]: trial["value"] for trial in found.trials}[0] == study.trials[0].value


def test_a_process_that_was_taken_for_dead_does_no_harm(tmp_path: Path):
    def slow(values: dict[str, Any], trial: Any) -> float:
        storage = open_storage(tmp_path / "study.journal")
        if trial.number == 0:
            storage.set_trial_state_values(trial._trial_id, optuna.trial.TrialState.FAIL)
        if trial.number == 2:
            storage.set_trial_state_values(trial._trial_id, optuna.trial.TrialState.FAIL)
            raise KeyboardInterrupt
        return values["x"]

    with pytest.raises(KeyboardInterrupt):
        tune(slow, LINE, trials=4, folder=tmp_path, quiet=True)
    found = tune(slow, LINE, trials=4, folder=tmp_path, quiet=True)
    assert [state for state, _ in by_number(found)] == ["failed", "complete", "failed", "complete"]
