"""`eval`: every checkpoint of a run is evaluated and recorded once, also while the run is training."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from jax_trainer.checkpoint.record import checkpoint_infos
from jax_trainer.runs import EVALUATIONS, evaluation_record
from jax_trainer.tools.cli.commands import evaluate
from tests.tools.cli.cli_runs import PATIENCE, PROGRAM, QUICK, run_command

SETS = """
eval_sets:
  tested: {part: test, metrics: {f1: {class_name: F1}}}
"""
PACED = """
import time
from compoconf import register
from jax_trainer.callbacks import Callback, CallbackConfig


@register
class SlowSteps(Callback):
    config: CallbackConfig

    def on_step_end(self, event):
        time.sleep(0.3)
"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A run with two checkpoints and an evaluation set: read-only."""
    folder = tmp_path_factory.mktemp("saved")
    (folder / "run.yaml").write_text(QUICK + SETS)
    result = run_command("train", "run.yaml", "--json", folder=folder)
    assert (result.code, result.err) == (0, "")
    return Path(result.data["run"])


@pytest.fixture
def run(saved, tmp_path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "run"))


def lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / EVALUATIONS).read_text().splitlines()]


def digests(run: Path) -> dict[str, str]:
    return {
        str(file.relative_to(run)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in run.rglob("*")
        if file.is_file() and file.name != EVALUATIONS
    }


def test_every_checkpoint_is_evaluated_once_as_in_the_training(run):
    before, infos = digests(run), checkpoint_infos(run / "checkpoints")
    result = run_command("eval", run, "--json", folder=run.parent)
    assert (result.code, result.data["run_status"]) == (0, "completed")
    found = lines(run)
    assert [(one["step"], one["epoch"], one["sets"]) for one in found] == [
        (4, 1, ["val", "tested"]),
        (8, 2, ["val", "tested"]),
    ]
    assert [one["metrics"] for one in found] == [one.metrics for one in infos]
    assert "val_tested/f1" in found[0]["metrics"]
    assert result.data["evaluations"] == found
    written = (run / EVALUATIONS).read_bytes()
    again = run_command("eval", run, "--follow", folder=run.parent)
    assert (again.code, again.err) == (0, "") and "val_tested/f1" in again.out
    assert (run / EVALUATIONS).read_bytes() == written
    assert digests(run) == before


def test_other_sets_overrides_and_one_checkpoint_are_separate_evaluations(run):
    one = run_command("eval", run / "checkpoints" / "step_00000004", "--sets", "test,val", "--json", folder=run.parent)
    tested = run_command("test", run, "--which", "4", "--json", folder=run.parent).data["metrics"]["test"]
    (line,) = lines(run)
    assert (one.code, line["step"], line["sets"]) == (0, 4, ["test", "val"])
    assert {name: value for name, value in line["metrics"].items() if name.startswith("test/")} == tested
    secret = "dataset.aux={api_key: hunter2222}"
    assert run_command("eval", run, "--sets", "val", "trainer.limit_val_batches=1", folder=run.parent).code == 0
    assert [(one["step"], one["overrides"]) for one in lines(run)[1:]] == [
        *((4, ["trainer.limit_val_batches=1"]), (8, ["trainer.limit_val_batches=1"]))
    ]
    assert "hunter2222" not in run_command("eval", run, secret, folder=run.parent).err
    assert "hunter2222" not in (run / EVALUATIONS).read_text()
    wrong = run_command("eval", run, "--sets", "tets", folder=run.parent)
    assert wrong.code == 2 and "'tets'" in wrong.err and "test" in wrong.err


def test_a_line_that_was_cut_off_is_evaluated_again_and_a_wrong_one_is_an_error(run):
    run_command("eval", run, folder=run.parent)
    whole = (run / EVALUATIONS).read_bytes()
    (run / EVALUATIONS).write_bytes(whole[:-20])
    assert run_command("eval", run, "--quiet", folder=run.parent).code == 0
    assert (run / EVALUATIONS).read_bytes() == whole
    (run / EVALUATIONS).write_text('{"step": -1}\n')
    result = run_command("eval", run, folder=run.parent)
    assert result.code == 2 and f"{EVALUATIONS}:1" in result.err


def test_damaged_and_deleted_checkpoints_do_not_stop_the_others(run, monkeypatch):
    first, second = (one.path for one in checkpoint_infos(run / "checkpoints"))
    evaluated = evaluate._evaluated

    def deleting(trainer: Any, which: Any, sets: Any) -> Any:
        shutil.rmtree(first, ignore_errors=True)  # as the retention of the training may do in this moment
        return evaluated(trainer, which, sets)

    monkeypatch.setattr(evaluate, "_evaluated", deleting)
    assert run_command("eval", run, "--json", folder=run.parent).code == 0
    assert [(one["step"], one["deleted"], bool(one["metrics"])) for one in lines(run)] == [
        (4, True, False),
        (8, False, True),
    ]
    (run / EVALUATIONS).unlink()
    next(second.glob("state/**/d/*")).write_bytes(b"damaged")
    result = run_command("eval", run, "--json", folder=run.parent)
    assert result.code == 1 and second.name in result.err and result.data["evaluations"] == []


def test_one_process_writes_the_record(run):
    with evaluation_record(run):
        result = run_command("eval", run, folder=run.parent)
    assert result.code == 2 and str(run) in result.err


def started(*words: str, folder: Path, **environment: str) -> subprocess.Popen[str]:
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([*PROGRAM, *words], cwd=folder, env={**os.environ, **environment}, **pipes)


@pytest.mark.integration
@pytest.mark.parametrize("kept", [1, 100])
def test_a_follower_that_is_killed_loses_and_repeats_nothing(tmp_path, kept):
    slow = QUICK.replace("ModelCheckpoint:", "SlowSteps: {}\n    ModelCheckpoint:")
    (tmp_path / "run.yaml").write_text(
        slow.replace("mode: max", f"mode: max, keep_latest: {kept}, save_top_k: 0") + SETS
    )
    (tmp_path / "slow.py").write_text(PACED)
    training = started("train", "run.yaml", "slow.py", "trainer.train_epochs=40", "--quiet", folder=tmp_path)
    run = waited(lambda: next(iter(tmp_path.glob("runs/*/*/checkpoints/step_*")), None)).parents[1]
    follow = ("eval", str(run), "slow.py", "--follow", "--json")
    first = started(*follow, folder=tmp_path)
    waited(lambda: (run / EVALUATIONS).exists() and len(lines(run)) >= 2)
    first.send_signal(signal.SIGKILL)
    assert ended(first) == -signal.SIGKILL
    second = started(*follow, folder=tmp_path, JAXTRAINER_FAILPOINT="evaluation:kill:2")  # directly after a line
    assert ended(second) == -signal.SIGKILL
    assert training.poll() is None
    out, err = (third := started(*follow, folder=tmp_path)).communicate(timeout=300)
    assert (third.returncode, err) == (0, "")
    assert ended(training) == 0
    found = lines(run)
    steps = [one["step"] for one in found]
    assert len(steps) == len(set(steps)) and steps == sorted(steps)
    assert steps[-1] == 160 and not found[-1]["deleted"]
    assert json.loads(out)["evaluations"] == found
    left = {one.step: dict(one.metrics) for one in checkpoint_infos(run / "checkpoints")}
    assert {one["step"]: one["metrics"] for one in found if one["step"] in left} == left
    if kept == 100:
        assert steps == [*left] and len(left) == 40


def ended(process: subprocess.Popen[str]) -> int:
    process.communicate(timeout=PATIENCE)
    return process.returncode


def waited(found: Any) -> Any:
    until = time.monotonic() + PATIENCE
    while not (value := found()):
        assert time.monotonic() < until
        time.sleep(0.05)
    return value
