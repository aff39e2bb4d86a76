"""Metrics that are computed from statistics are the same after a kill: in an epoch, and after its last step."""

from typing import Any

import pytest

from jax_trainer.checkpoint.store import CheckpointStore
from tests.trainer import metric_job
from tests.trainer.killed_jobs import kill, result_of


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> dict[str, Any]:
    return result_of(metric_job, tmp_path_factory.mktemp("whole"), 5)


# an epoch has five steps: the first checkpoint is after the last one, before the end of the epoch was reported
@pytest.mark.slow
@pytest.mark.parametrize(("saved_every", "killed_at", "saved_at"), [(5, 7, 5), (4, 14, 12)])
def test_a_run_that_is_killed_reports_the_same_metrics(whole, tmp_path, saved_every, killed_at, saved_at):
    kill(metric_job, tmp_path, f"step:kill:{killed_at}", saved_every)
    (checkpoints,) = tmp_path.rglob("checkpoints")
    saved = CheckpointStore(checkpoints).latest()
    assert saved is not None
    assert (saved.step, saved.run["loop"]["has_ended"]) == (saved_at, False)
    assert {"f1", "auroc", "perplexity"} <= saved.run["loop"]["metrics_state"].keys()
    assert result_of(metric_job, tmp_path, saved_every) == whole


def test_the_metrics_are_reported(whole):
    names = {name for row in whole["rows"] for name in row}
    expected = {"train/f1_step", "train/f1_epoch", "train/auroc_epoch", "train/perplexity_epoch", "val/f1", "val/auroc"}
    assert expected <= names
    assert "val/perplexity" not in names
