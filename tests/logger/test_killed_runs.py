"""A run that is really killed and resumed has every point once, in every tool."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.logger import killed_job
from tests.logger.tensorboard_server import asking_tensorboard
from tests.logger.tool_files import Curves, shown

TIMED = ("/time", "throughput/")


def killed_and_resumed(folder: Path, tools: str, x_axis: Any = "step") -> Path:
    """The folder of a run that is killed in its third epoch, two steps after a checkpoint, and then resumed."""
    command = [sys.executable, killed_job.__file__, str(folder), tools, json.dumps(x_axis)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    killing = {**environment, "JAXTRAINER_FAILPOINT": "step:kill:11"}
    assert subprocess.run(command, env=killing, check=False).returncode == -signal.SIGKILL
    subprocess.run(command, env=environment, check=True)
    [run] = [file.parent for file in folder.glob("*/metrics.jsonl")]
    return run


def without_time(curves: Curves) -> Curves:
    """All curves but "epoch", which has several points at a step, and those of times."""
    return {name: points for name, points in curves.items() if name != "epoch" and not any(t in name for t in TIMED)}


def recorded(run: Path, axis: str = "step") -> Curves:
    """What `metrics.jsonl` has, on another axis."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if not any(isinstance(value, dict) for value in row.values())]
    names = dict.fromkeys(name for row in rows for name in row if "/" in name)
    curves = {name: sorted((row[axis], row[name]) for row in rows if name in row) for name in names}
    return without_time(curves)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A killed and resumed run with all tools that need nothing but `make test`."""
    return killed_and_resumed(tmp_path_factory.mktemp("killed"), "tensorboard,wandb,csv")


@pytest.mark.integration
@pytest.mark.parametrize("fast", [False, True])
def test_tensorboard_shows_every_point_once(run, fast):
    expected = recorded(run)
    assert [x for x, _ in expected["mine/steps"]] == [*range(1, 17)]
    assert [x for x, _ in expected["train/loss_step"]] == [2, 4, 6, 8, 10, 12, 14, 16]
    with asking_tensorboard(run, fast=fast, until="val/loss") as ask:
        found = {tag: ask("scalars/scalars", run=".", tag=tag) for tag in expected}
    curves = {tag: [(x, y) for _, x, y in points] for tag, points in found.items()}
    assert curves == {tag: [(x, pytest.approx(y, rel=1e-6)) for x, y in points] for tag, points in expected.items()}


@pytest.mark.integration
@pytest.mark.parametrize("tool", ["wandb", "csv"])
def test_files_have_every_point_once(run, tool):
    curves, _ = shown(tool, run)
    assert without_time(curves) == recorded(run)


@pytest.mark.integration
def test_mlflow_has_every_point_once(tmp_path):
    run = killed_and_resumed(tmp_path, "mlflow")
    curves = without_time(shown("mlflow", run)[0])
    assert {name: points for name, points in curves.items() if not name.startswith("hparam/")} == recorded(run)


@pytest.mark.integration
@pytest.mark.parametrize("axis", ["epoch", "examples", "seconds"])
def test_every_other_axis_has_every_point_once(tmp_path, axis):
    run = killed_and_resumed(tmp_path, "csv,tensorboard", axis)
    expected = recorded(run, axis)
    curves, _ = shown("csv", run)
    assert without_time(curves) == expected
    with asking_tensorboard(run, until="val/loss") as ask:
        for tag, points in expected.items():
            assert [x for _, x, _ in ask("scalars/scalars", run=".", tag=tag)] == [round(x) for x, _ in points]
