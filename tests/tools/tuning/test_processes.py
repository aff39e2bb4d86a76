"""Several processes share a study, and one that is killed leaves nothing behind that hurts."""

import time
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.storages.journal import JournalFileBackend

from jax_trainer.tools.tuning import tune
from tests.tools.tuning.tuning_runs import LINE, PATIENCE, python

SHARING = """
import time
from jax_trainer.tools.tuning import tune
def objective(values, trial):
    time.sleep(0.05)
    return values["x"]
found = tune(objective, {"x": {"low": 0.0, "high": 1.0}}, trials=16, seed=0, name="line", folder="out", quiet=True)
"""
DYING = """
import os, signal
from jax_trainer.tools.tuning import tune
def objective(values, trial):
    if trial.number in (1, 2):
        os.kill(os.getpid(), signal.SIGKILL)
    return values["x"]
tune(objective, {"x": {"low": 0.0, "high": 1.0}}, trials=4, seed=0, name="line", folder="out", quiet=True)
"""


def identity(values: dict[str, Any], trial: Any) -> float:
    return values["x"]


@pytest.mark.slow
def test_two_processes_share_the_work(tmp_path: Path):
    (tmp_path / "out").mkdir()
    processes = [python(SHARING, tmp_path) for _ in range(2)]
    output = [process.communicate(timeout=PATIENCE) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], output
    found = tune(identity, LINE, trials=16, name="line", folder=tmp_path / "out", quiet=True)
    assert 16 <= found.count("complete") <= 17
    assert len(found.trials) == found.count("complete")
    values = [trial["params"]["x"] for trial in found.trials]
    assert len(set(values)) == len(values)
    pids = {note["pid"] for note in notes(tmp_path / "out")}
    assert pids == {process.pid for process in processes}


def notes(folder: Path) -> list[dict[str, Any]]:
    backend = JournalFileBackend(str(folder / "study.journal"))
    study = optuna.load_study(study_name="line", storage=optuna.storages.JournalStorage(backend))
    return [trial.user_attrs["process"] for trial in study.trials]


@pytest.mark.slow
def test_the_values_of_a_killed_process_are_tried_again_until_the_trial_is_over(tmp_path: Path):
    for _ in range(2):  # the second one tries again what has killed the first
        process = python(DYING, tmp_path)
        process.communicate(timeout=PATIENCE)
        assert process.returncode == -9
    began = time.perf_counter()
    found = tune(identity, LINE, trials=4, seed=0, name="line", folder=tmp_path / "out", quiet=True)
    assert time.perf_counter() - began < 20
    trials = sorted(found.trials, key=lambda trial: trial["trial"])
    states = ["complete", "interrupted", "interrupted", "complete", "complete", "complete"]
    assert [trial["state"] for trial in trials] == states
    assert trials[1]["params"] == trials[2]["params"] == trials[3]["params"]
