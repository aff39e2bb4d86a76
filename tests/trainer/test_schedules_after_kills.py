"""A run in which everything changes is the same run after it was really killed, wherever that was."""

from typing import Any

import pytest

from tests.trainer import scheduled_job
from tests.trainer.killed_jobs import kill, result_of

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


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> dict[str, Any]:
    return result_of(scheduled_job, tmp_path_factory.mktemp("whole"))


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


@pytest.mark.slow  # of a simpler run, `test_edits_after_kills.py` is not
@pytest.mark.parametrize("name", KILLS)
def test_a_run_that_is_killed_is_the_same_run(whole, tmp_path, name):
    kill(scheduled_job, tmp_path, KILLS[name])
    assert result_of(scheduled_job, tmp_path) == whole
