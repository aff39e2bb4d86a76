"""A sweep on SLURM: what is printed and refused, and real workers of submitit's local executor, one of them killed."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from cli_runs import run_command
from tuning_runs import PATIENCE, QUICK, RATE, process_environment, space_file, tiny_file

WORDS = ["tune", "tiny.yaml", "--space", "space.yaml", "--on", "slurm"]
URL = "postgresql+psycopg://me:hunter22@host/studies"
SUBMITS = """
import functools, sys
from jax_trainer.launching import slurm
slurm.submit = functools.partial(slurm.submit, cluster="local")
from jax_trainer.cli import main
if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def study(tmp_path: Path) -> Path:
    tiny_file(tmp_path, QUICK)
    space_file(tmp_path, f"{RATE}: {{low: 1e-4, high: 1e-1, log: true}}")
    return tmp_path


def test_the_printed_array_runs_the_same_command_in_each_worker(study: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("STUDY", URL)
    words = ["trainer.seed=1", "--workers", "8", "--time", "4h", "--restarts", "2", "--cpus-per-process", "4"]
    words += ["--trials", "40", "--storage", "env:STUDY", "--option", "partition=gpu", "--print"]
    script = run_command(*WORDS, *words, folder=study).out
    lines = script.splitlines()
    expected = ["job-name=tiny", "array=0-7", "cpus-per-task=4", "time=04:00:00", "partition=gpu", "signal=TERM@180"]
    assert {f"#SBATCH --{one}" for one in expected} <= set(lines)
    command = "jax-trainer tune tiny.yaml trainer.seed=1 --space space.yaml --trials 40 --storage env:STUDY"
    assert f"srun --kill-on-bad-exit=1 {command} || code=$?" in lines
    assert "hunter22" not in script


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], "--time"),
        (["--time", "1h"], "srun"),
        (["--address", "auto"], "--on ray"),
        (["--time", "1h", "model.c_hidd=3"], "`c_hid`"),
        (["--print", "--storage", URL], "env:STUDY"),
        (["--print", "--storage", "mysql://host/x?password=abc"], "env:STUDY"),
        (["--print", "--storage", "env:NOT_THERE"], "'NOT_THERE'"),
        (["--on", "ray", "--print"], "--on slurm"),
        (["--on", "local", "--workers", "2"], "--on ray or --on slurm"),
        (["--on", "local", "--time", "1h"], "--on ray or --on slurm"),
    ],
)
def test_what_cannot_be_started_is_refused_at_once(words: list[str], expected: str, study: Path):
    result = run_command(*WORDS, *words, folder=study)
    assert result.code == 2
    assert expected in result.err
    assert "hunter22" not in result.err + result.out
    assert not (study / "runs").exists()


@pytest.mark.integration
@pytest.mark.parametrize("number", [signal.SIGUSR2, signal.SIGKILL], ids=["preempted", "killed"])
def test_workers_share_the_trials_and_one_that_gets_a_signal_is_requeued(number: signal.Signals, study: Path):
    (study / "submits.py").write_text(SUBMITS)
    words = [*WORDS, "--trials", "12", "--pruner", "none", "--name", "line", "--platform", "cpu", "--json"]
    words += ["--workers", "2", "--time", "10m", "--restarts", "1"]
    environment = process_environment(XLA_FLAGS="", NPROC="4")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    command = [sys.executable, "submits.py", *words]
    sweep = subprocess.Popen(command, cwd=study, env=environment, text=True, start_new_session=True, **pipes)  # type: ignore[call-overload]
    try:
        deadline = time.monotonic() + PATIENCE
        while len(found := running(study)) < 2 or len(list(study.glob("runs/tune/line/trials/*"))) < 3:
            assert time.monotonic() < deadline and sweep.poll() is None, sweep.communicate()
            time.sleep(0.05)
        task, child = sorted(found.items())[0]
        os.kill(child if number == signal.SIGKILL else task, number)
        out, err = sweep.communicate(timeout=PATIENCE)
    finally:
        if sweep.poll() is None:
            os.killpg(sweep.pid, signal.SIGKILL)
    assert sweep.returncode == 0, err
    logs = "".join(file.read_text() for file in study.glob("runs/slurm/*_log.out"))
    assert logs.count("Requeued job") == 1
    assert "[0] trial" in err and "[1] trial" in err
    data = json.loads(out)
    assert data["counts"] | {"interrupted": 1} == {
        "complete": 12,
        "pruned": 0,
        "failed": 0,
        "interrupted": 1,
        "running": 0,
    }
    complete = [trial["params"][RATE] for trial in data["trials"] if trial["state"] == "complete"]
    assert set(Counter(complete).values()) == {1}
    assert {trial["params"][RATE] for trial in data["trials"] if trial["state"] == "interrupted"} <= set(complete)


def running(folder: Path) -> dict[int, int]:
    """The processes of submitit that run a worker in `folder`, and their children, which run `tune`."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_text().split("\0")
            if "submitit.core._submit" in words and os.path.realpath(process / "cwd") == str(folder.resolve()):
                children = (process / "task" / process.name / "children").read_text().split()
                found |= {int(process.name): int(child) for child in children[:1]}
        except OSError:  # it has ended
            continue
    return found
