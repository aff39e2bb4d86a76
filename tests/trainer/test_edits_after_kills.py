"""A run that is really killed around an edit resumes to the same bits, callback states and rows."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import reduced_job

KILLS = {  # the first edit is after step 8, after the fourth batch of evaluations
    "in the evaluation before it": "eval_step:kill:4",
    "when it is applied": "edit:kill:1",
    "when the second one is applied": "edit:kill:2",
    "in the step after it": "step:kill:9",
    "some steps after it": "step:kill:11",
}


def exit_code(folder: Path, fault: str) -> int:
    """How the job ends with the fault, in a process of its own."""
    environment = {**os.environ, "JAXTRAINER_FAILPOINT": fault}
    return subprocess.run([sys.executable, reduced_job.__file__, str(folder)], env=environment, check=False).returncode


def result(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "result.json").read_text())


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("whole")
    reduced_job.main(folder)
    return result(folder)


def test_the_run_has_edits(whole):
    assert [edit["step"] for edit in whole["edits"]] == [8, 16, 24]
    assert [row["step"] for row in whole["rows"] if "edit" in row] == [8, 16, 24]


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name == "when it is applied" else pytest.mark.slow) for name in KILLS],
)
def test_a_run_that_is_killed_around_an_edit_is_the_same_run(whole, tmp_path, name):
    assert exit_code(tmp_path, KILLS[name]) == -signal.SIGKILL
    assert not (tmp_path / "result.json").exists()
    reduced_job.main(tmp_path)
    assert result(tmp_path) == whole
