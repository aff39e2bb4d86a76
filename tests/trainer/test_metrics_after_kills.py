"""Metrics that are computed from statistics are the same after a kill: in an epoch, and after its last step."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import metric_job
import pytest

from jax_trainer.checkpoint.store import CheckpointStore


def result(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "result.json").read_text())


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("whole")
    metric_job.main(folder, 5)
    return result(folder)


# an epoch has five steps: the first checkpoint is after the last one, before the end of the epoch was reported
@pytest.mark.parametrize(
    ("saved_every", "killed_at", "saved_at"), [(5, 7, 5), pytest.param(4, 14, 12, marks=pytest.mark.slow)]
)
def test_a_run_that_is_killed_reports_the_same_metrics(whole, tmp_path, saved_every, killed_at, saved_at):
    environment = {**os.environ, "JAXTRAINER_FAILPOINT": f"step:kill:{killed_at}"}
    command = [sys.executable, metric_job.__file__, str(tmp_path), str(saved_every)]
    assert subprocess.run(command, env=environment, check=False).returncode == -signal.SIGKILL
    (checkpoints,) = tmp_path.rglob("checkpoints")
    saved = CheckpointStore(checkpoints).latest()
    assert saved is not None
    assert (saved.step, saved.run["loop"]["has_ended"]) == (saved_at, False)
    assert {"f1", "auroc", "perplexity"} <= saved.run["loop"]["metrics_state"].keys()
    metric_job.main(tmp_path, saved_every)
    assert result(tmp_path) == whole


def test_the_metrics_are_reported(whole):
    names = {name for row in whole["rows"] for name in row}
    expected = {"train/f1_step", "train/f1_epoch", "train/auroc_epoch", "train/perplexity_epoch", "val/f1", "val/auroc"}
    assert expected <= names
    assert "val/perplexity" not in names
