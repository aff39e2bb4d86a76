"""A sweep on a real Ray cluster of this machine, one of whose workers is killed."""

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest

from jax_trainer.tools.tuning import tune
from tests.tools.cli.cli_runs import process_environment
from tests.tools.tuning.tuning_runs import PATIENCE, QUICK, RATE, space_file, tiny_file

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(600),
    pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed"),
]


def test_workers_share_the_trials_and_a_killed_one_is_replaced(tmp_path: Path):
    sweep = started(tmp_path, "--trials", "12", "--workers", "2", "--restarts", "1")
    deadline = time.monotonic() + PATIENCE
    while len(workers(tmp_path)) < 2 or len(list(tmp_path.glob("runs/tune/line/*/*"))) < 2:
        assert time.monotonic() < deadline and sweep.poll() is None, sweep.communicate()
        time.sleep(0.05)
    os.kill(workers(tmp_path)[0], signal.SIGKILL)
    out, err = sweep.communicate(timeout=2 * PATIENCE)
    assert sweep.returncode == 0, err
    assert '"status": "completed"' in out and out.count("\n") == 1
    found = tune(tmp_path / "tiny.yaml", tmp_path / "space.yaml", trials=12, name="line", pruner="none",
                 folder=tmp_path / "runs" / "tune" / "line", quiet=True)  # fmt: skip
    complete = [trial["params"][RATE] for trial in found.trials if trial["state"] == "complete"]
    assert 12 <= len(complete) <= 13
    assert set(Counter(complete).values()) == {1}


def test_a_worker_at_its_time_limit_interrupts_its_trial_and_its_restart_repeats_it(tmp_path: Path):
    sweep = started(tmp_path, "--trials", "500", "--workers", "1", "--time", "40s", "--restarts", "1")
    _, err = sweep.communicate(timeout=2 * PATIENCE)
    assert sweep.returncode == 143, err
    found = tune(tmp_path / "tiny.yaml", tmp_path / "space.yaml", trials=500, name="line", pruner="none", timeout=0,
                 folder=tmp_path / "runs" / "tune" / "line", quiet=True)  # fmt: skip
    drawn = [trial for trial in found.trials if trial["params"]]  # one may have been interrupted before
    complete, interrupted = (
        [trial["params"][RATE] for trial in drawn if trial["state"] == state] for state in ("complete", "interrupted")
    )
    assert len(interrupted) <= 2 and set(Counter(complete).values()) == {1}
    assert set(interrupted[:1]) <= set(complete)  # the last one is repeated by the next command


def started(folder: Path, *words: str) -> subprocess.Popen[str]:
    """A sweep on a cluster that starts and ends with it."""
    tiny_file(folder, QUICK)
    space_file(folder, f"{RATE}: {{low: 1e-4, high: 1e-1, log: true}}")
    study = ["tiny.yaml", "--space", "space.yaml", "--pruner", "none", "--name", "line"]
    command = [sys.executable, "-m", "jax_trainer", "tune", *study, "--on", "ray", *words, "--json"]
    environment = process_environment(HOME=str(folder), XLA_FLAGS="", NPROC="4")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, cwd=folder, env=environment, text=True, **pipes)  # type: ignore[call-overload]


def workers(folder: Path) -> list[int]:
    """The worker processes of Ray that train in `folder`."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            is_worker = (process / "cmdline").read_text().startswith("ray::Process.train")
        except OSError:  # it has ended
            continue
        if is_worker and os.path.realpath(process / "cwd") == str(folder.resolve()):
            found.append(int(process.name))
    return found
