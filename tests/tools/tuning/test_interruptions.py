"""A study that is interrupted, however, and given again ends with as many trials as were asked for: the seed's own."""

import functools
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from jax_trainer.tools.tuning import TuneResult, tune
from jax_trainer.tools.tuning.space import Space
from jax_trainer.tools.tuning.storage import own_note
from jax_trainer.tools.tuning.study import Study
from tests.tools.tuning.tuning_runs import LINE

SPACE = {**LINE, "y": {"low": 0.0, "high": 1.0}}
TRIALS = 6


class Killed(BaseException):
    """Simulates SIGKILL: nothing is reported to the study."""


def complete(found: TuneResult) -> list[dict[str, Any]]:
    trials = sorted(found.trials, key=lambda trial: trial["trial"])
    return [trial["params"] for trial in trials if trial["state"] == "complete"]


@functools.cache
def uninterrupted(folder: Path, sampler: Any) -> list[dict[str, Any]]:
    return complete(study(folder / sampler, lambda values, trial: values["x"] + values["y"], sampler))


def study(folder: Path, objective: Any, sampler: Any) -> TuneResult:
    options: dict[str, Any] = {"sampler": sampler, "seed": 3, "startup": 2, "pruner": "none", "quiet": True}
    return tune(objective, SPACE, trials=TRIALS, name="line", folder=folder, **options)


@pytest.fixture(scope="module")
def uninterrupted_trials(tmp_path_factory):
    return functools.partial(uninterrupted, tmp_path_factory.mktemp("uninterrupted_trials"))


@pytest.fixture
def killing(monkeypatch):
    """Trials of this process count as those of a dead one, once they are no longer made; the dead say nothing."""
    monkeypatch.setattr("jax_trainer.tools.tuning.storage.is_alive", lambda note: False)
    say = Study.tell_interrupted
    monkeypatch.setattr(Study, "tell_interrupted", lambda *_: None)
    return say


def until_done(folder: Path, sampler: Any, endings: list[Any]) -> TuneResult:
    """Gives the command again and again; `endings` are what each but the last ends with, and in which call."""
    calls = 0

    def objective(values: dict[str, Any], trial: Any) -> float:
        nonlocal calls
        calls += 1
        if endings and calls == endings[0][0]:
            raise endings.pop(0)[1]
        return values["x"] + values["y"]

    for _ in range(len(endings)):
        with pytest.raises((KeyboardInterrupt, Killed)):
            study(folder, objective, sampler)
    return study(folder, objective, sampler)


@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_after_ctrl_c_the_trials_are_those_that_the_seed_says(uninterrupted_trials, sampler, tmp_path):
    found = until_done(tmp_path, sampler, [(2, KeyboardInterrupt), (3, KeyboardInterrupt), (6, KeyboardInterrupt)])
    assert complete(found) == uninterrupted_trials(sampler)


@pytest.mark.usefixtures("killing")
@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_a_study_that_was_killed_ends_with_all_trials_complete(uninterrupted_trials, sampler, tmp_path):
    found = until_done(tmp_path, sampler, [(2, Killed), (3, Killed), (4, Killed), (7, Killed)])
    assert complete(found) == uninterrupted_trials(sampler)


@pytest.mark.usefixtures("killing")
@pytest.mark.parametrize("moment", ["tools.tuning.space.Space.suggest", "tools.tuning.storage.own_note"])
def test_a_trial_killed_before_it_had_values_is_made_up_for(uninterrupted_trials, tmp_path, monkeypatch, moment):
    calls = []

    def killed(*given: Any) -> Any:
        calls.append(given)
        if len(calls) == 3:
            raise Killed  # before `own_note`, nobody even knows who made the trial
        return before(*given)

    before = Space.suggest if moment.endswith("suggest") else own_note
    monkeypatch.setattr("jax_trainer.tools.tuning.storage._UNTIL_NOTED", timedelta(seconds=0.3))
    monkeypatch.setattr(f"jax_trainer.{moment}", killed)
    with pytest.raises(Killed):
        study(tmp_path, lambda values, trial: values["x"] + values["y"], "tpe")
    found = study(tmp_path, lambda values, trial: values["x"] + values["y"], "tpe")
    assert complete(found) == uninterrupted_trials("tpe")


@pytest.mark.usefixtures("killing")
def test_a_process_that_is_killed_before_it_had_a_trial_repeated_has_it_repeated_later(
    uninterrupted_trials, tmp_path, monkeypatch
):
    def killed(*_: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(Study, "_repeat", killed)
        calls = iter(range(3))

        def objective(values: dict[str, Any], trial: Any) -> float:
            if next(calls) == 2:
                raise Killed
            return values["x"] + values["y"]

        for _ in range(2):  # the second one ends the trial of the first, and is killed then
            with pytest.raises(Killed):
                study(tmp_path, objective, "tpe")
    assert complete(until_done(tmp_path, "tpe", [])) == uninterrupted_trials("tpe")


@pytest.mark.usefixtures("killing")
def test_values_that_kill_again_and_again_are_given_up_and_others_are_tried(tmp_path):
    poison: list[float] = []

    def objective(values: dict[str, Any], trial: Any) -> float:
        if len(poison) < 5 and trial.number >= 1:
            poison.append(values["x"])
            raise Killed
        return values["x"]

    for _ in range(5):
        with pytest.raises(Killed):
            study(tmp_path, objective, "random")
    found = study(tmp_path, objective, "random")
    assert len(set(poison)) == 1
    assert [trial["error"] for trial in found.trials if trial["state"] == "failed"] == [
        "The process was killed 5 times with these values."
    ]
    assert len(complete(found)) == TRIALS
