"""A run in which everything changes is the same run after it was really killed, wherever that was."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import scheduled_job

KILLS = {
    "before the first parameters are unfrozen": "step:kill:3",
    "when they are": "edit:kill:1",
    "between two steps of the schedules": "step:kill:6",
    "when the batch size changes, before the first step": "edit:kill:2",
    "while weights are averaged": "step:kill:11",
    "when the average becomes the weights, in the first batch of statistics": "batch_stats:kill:1",
    "in the last of them": "batch_stats:kill:4",
    "when they are complete, before they are saved": "edit:kill:4",
    "in the evaluation of the average": "eval_step:kill:8",
}
USUAL = "when the average becomes the weights, in the first batch of statistics"


def exit_code(folder: Path, fault: str) -> int:
    """How the job ends with the fault, in a process of its own."""
    environment = {**os.environ, "JAXTRAINER_FAILPOINT": fault}
    return subprocess.run(
        [sys.executable, scheduled_job.__file__, str(folder)], env=environment, check=False
    ).returncode


def result(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "result.json").read_text())


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("whole")
    scheduled_job.main(folder)
    return result(folder)


def test_the_run_has_all_edits(whole):
    made = [(edit["by"], edit["step"]) for edit in whole["edits"]]
    assert made == [
        ("Unfreeze", 4),
        ("Unfreeze", 8),
        ("StochasticWeightAveraging", 10),
        ("StochasticWeightAveraging", 12),
    ]
    assert whole["edits"][-1]["recomputes_batch_stats"] is True
    assert [row["edit"]["by"] for row in whole["rows"] if "edit" in row] == [by for by, _ in made]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == USUAL else pytest.mark.slow) for name in KILLS]
)
def test_a_run_that_is_killed_is_the_same_run(whole, tmp_path, name):
    assert exit_code(tmp_path, KILLS[name]) == -signal.SIGKILL
    assert not (tmp_path / "result.json").exists()
    scheduled_job.main(tmp_path)
    assert result(tmp_path) == whole
