"""A run that is really killed around an edit resumes to the same bits, callback states and rows."""

from typing import Any

import pytest

from tests.trainer import reduced_job
from tests.trainer.killed_jobs import kill, result_of

KILLS = {  # the first edit is after step 8, after the fourth batch of evaluations
    "in the evaluation before it": "eval_step:kill:4",
    "when it is applied": "edit:kill:1",
    "when the second one is applied": "edit:kill:2",
    "in the step after it": "step:kill:9",
    "some steps after it": "step:kill:11",
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> dict[str, Any]:
    return result_of(reduced_job, tmp_path_factory.mktemp("whole"))


def test_the_run_has_edits(whole):
    assert [edit["step"] for edit in whole["edits"]] == [8, 16, 24]
    assert [row["step"] for row in whole["rows"] if "edit" in row] == [8, 16, 24]


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name == "when it is applied" else pytest.mark.slow) for name in KILLS],
)
def test_a_run_that_is_killed_around_an_edit_is_the_same_run(whole, tmp_path, name):
    kill(reduced_job, tmp_path, KILLS[name])
    assert result_of(reduced_job, tmp_path) == whole
