import csv
import io
from pathlib import Path
from typing import Any

import optuna
import pytest
from rich.console import Console

from jax_trainer.tools.tuning import TuneResult, tune
from tests.tools.tuning.tuning_runs import LINE, parabola


def shown(found: TuneResult) -> str:
    console = Console(file=io.StringIO(), width=150)
    console.print(found)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def mixed(values: dict[str, Any], trial: Any) -> float:
    if trial.number == 1:
        trial.report(9.0, 1)
        raise optuna.TrialPruned
    if trial.number == 2:
        raise OSError("[bold]disk[/bold]\n full")
    return values["model.x"]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> TuneResult:
    space = {"model.x": {"low": 0.0, "high": 1.0}, "model.hidden": [[16], "[red]text"], "a.b": [None]}
    return tune(mixed, space, trials=6, seed=0, name="mixed", folder=tmp_path_factory.mktemp("mixed"), quiet=True)


def test_the_table_has_every_trial_and_marks_what_was_cut(found: TuneResult):
    lines = shown(found).splitlines()
    assert lines[0].strip() == "mixed: 4 complete, 1 pruned, 1 failed"
    assert [word for word in lines[2].split() if word.isalpha()] == ["trial", "value", "s", "x", "hidden", "b"]
    rows = [line for line in lines[4:] if line.strip()]
    assert "best" in rows[0] and "pruned at 1" in rows[4] and "failed" in rows[5]
    values = [float(row.split()[1]) for row in rows[:4]]
    assert values == sorted(values)
    assert "[16]" in shown(found) and "[red]text" in shown(found)


def test_the_file_has_the_same_to_the_last_digit(found: TuneResult):
    rows = list(csv.DictReader(io.StringIO((found.folder / "results.csv").read_text())))
    assert list(rows[0]) == ["trial", "state", "value", "reports", "seconds", "model.x", "model.hidden", "a.b", "error"]
    for row, trial in zip(rows, found.trials, strict=True):
        assert int(row["trial"]) == trial["trial"] and row["state"] == trial["state"]
        assert (float(row["value"]) if row["value"] else None) == trial["value"]
        assert float(row["model.x"]) == trial["params"]["model.x"]
    assert rows[-1]["error"] == "OSError: [bold]disk[/bold]\n full"


def test_the_best_is_the_best_that_was_not_cut(found: TuneResult):
    complete = [trial for trial in found.trials if trial["state"] == "complete"]
    best = min(complete, key=lambda trial: trial["value"])
    assert (found.trial, found.value, found.params) == (best["trial"], best["value"], best["params"])
    assert found.config is None and found.monitor == "value" and found.mode == "min"
    assert found.data()["best"] == {"trial": found.trial, "value": found.value, "params": found.params}
    assert found.data()["counts"] == {"complete": 4, "pruned": 1, "failed": 1, "interrupted": 0, "running": 0}


def test_large_is_good_where_it_is_asked_for(tmp_path: Path):
    found = tune(parabola, LINE, trials=4, mode="max", folder=tmp_path, quiet=True)
    assert found.value == max(trial["value"] for trial in found.trials)
    assert [trial["value"] for trial in found.trials] == sorted((t["value"] for t in found.trials), reverse=True)
    by_name = tune(parabola, LINE, trials=4, monitor="acc", name="by name", folder=tmp_path, quiet=True)
    assert by_name.mode == "max"


def test_a_long_table_is_cut(tmp_path: Path):
    found = tune(parabola, LINE, trials=33, sampler="random", folder=tmp_path, quiet=True)
    assert "… and 3 more in results.csv" in shown(found)


def test_every_trial_has_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    space = {"model.x": {"low": 0.0, "high": 1.0}}
    tune(mixed, space, trials=4, seed=0, name="mixed", folder=tmp_path)
    first, *lines = capsys.readouterr().err.splitlines()
    assert first == f"Study mixed in {tmp_path}/study.journal: 0 of 4 trials."
    assert [line.split("  ")[0].split() for line in lines] == [["trial"]] * 4
    assert "value 0." in lines[0] and "best so far" in lines[0] and " x=0." in lines[0]
    assert "pruned at 1: value 9" in lines[1]
    assert "failed: OSError: [bold]disk[/bold]  full" in lines[2]
    tune(mixed, space, trials=4, seed=0, name="mixed", folder=tmp_path, quiet=True)
    assert capsys.readouterr() == ("", "")
