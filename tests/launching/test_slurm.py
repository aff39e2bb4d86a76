"""SLURM: the script as it is printed, and submitit with its local executor, real processes and real signals."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import paced
import pytest
from cli_runs import PATIENCE, ROOT, TINY, last_state, process_environment, run_command, run_process, tiny_file

from jax_trainer.launching import Launch, Workers
from jax_trainer.launching.slurm import sbatch
from jax_trainer.testing import assert_same_bits

LONG = TINY.replace("train_epochs: 2", "train_epochs: 30").replace("mode: max}", "mode: max, every_n_steps: 5}")
SUBMITS = """
import sys
from jax_trainer.launching import Launch, slurm
if __name__ == "__main__":
    launch = Launch(config="tiny.yaml", changes=("paced.py",), processes_per_node=2, platform="cpu", time=600,
                    restarts={restarts}, heartbeat=5, json=True)
    print(slurm.follow(slurm.submit(launch, cluster="local"), sys.stderr))
"""


def test_the_printed_script_is_the_one_of_the_guide(tmp_path: Path):
    page = (ROOT / "docs" / "guides" / "processes.md").read_text()
    shown = re.search(r"```bash\n(#!/bin/bash.*?)```", page, re.DOTALL)
    assert shown is not None
    words = ["--nodes", "4", "--processes-per-node", "8", "--cpus-per-process", "8", "--time", "12h"]
    words += ["--restarts", "20", "gpt2"]
    assert run_command("launch", "--on", "slurm", "--print", *words, folder=ROOT).out == shown[1]


@pytest.mark.parametrize(
    "launch",
    [
        Launch(config="a b.yaml", changes=("trainer.name='x y'",), platform="cpu", restarts=2),
        Launch(config="x.yaml", nodes=2, devices_per_process=4, processes_per_node=2),
    ],
)
def test_the_printed_script_is_bash_that_passes_every_word_on(launch: Launch, tmp_path: Path):
    (tmp_path / "srun").write_text('#!/bin/bash\nshift\nSLURM_LOCALID=1 "$@"')
    (tmp_path / "jax-trainer").write_text('#!/bin/bash\nprintf "%s\\n" "$@" "$JAX_LOCAL_DEVICE_IDS"\nexit 3')
    for tool in tmp_path.iterdir():
        tool.chmod(0o700)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    script = sbatch(launch, {"partition": "gpu"})
    done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True)
    assert done.returncode == 3, done.stderr
    devices = "" if launch.platform == "cpu" else "4,5,6,7"
    assert done.stdout.splitlines() == [*launch.train_words(resume=launch.restarts > 0), devices]
    assert "#SBATCH --partition=gpu\n" in script


@pytest.mark.parametrize(("code", "count", "is_requeued"), [(143, 1, True), (143, 2, False), (1, 0, False)])
def test_the_script_of_workers_is_an_array_that_requeues_one_job_of_it(
    code: int, count: int, is_requeued: bool, tmp_path: Path
):
    tools = {"srun": 'shift; "$@"', "jax-trainer": f'echo "$@" "$ID"\nexit {code}', "scontrol": 'echo "$@"'}
    for name, text in tools.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o700)
    array = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3", "SLURM_RESTART_COUNT": str(count)}
    environment = {**os.environ, **array, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    command = ("tune", "x.yaml", "--space", "space.yaml")
    workers = Workers(config="x.yaml", command=command, workers=8, id_variable="ID", restarts=2, devices_per_process=2)
    script = sbatch(workers)
    assert "#SBATCH --array=0-7\n#SBATCH --nodes=1\n#SBATCH --ntasks-per-node=1\n#SBATCH --gpus-per-node=2\n" in script
    done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    assert done.stdout.splitlines() == [" ".join([*command, "7_3"]), *["requeue 7_3"] * is_requeued]
    alone = sbatch(replace(workers, workers=1))  # a job of its own, with its id
    assert "--array" not in alone
    done = subprocess.run(["bash", "-c", alone], env=environment, capture_output=True, text=True)
    assert done.stdout.splitlines() == [" ".join([*command, "7"]), *["requeue 7"] * is_requeued]


@pytest.fixture
def long(tmp_path: Path) -> Path:
    (tmp_path / "paced.py").write_text(Path(paced.__file__).read_text())
    tiny_file(tmp_path, LONG.replace("    ModelCheckpoint:", "    Paced: {}\n    ModelCheckpoint:"))
    return tmp_path


def tasks(folder: Path, count: int = 2) -> list[int]:
    """The processes of submitit in `folder` that run a task, the first rank first."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        found = {}
        for process in Path("/proc").glob("[0-9]*"):
            words = _text(process / "cmdline").split("\0")
            if "submitit.core._submit" in words and os.path.realpath(process / "cwd") == str(folder.resolve()):
                variables = dict(w.split("=", 1) for w in _text(process / "environ").split("\0") if "=" in w)
                found[int(variables.get("SUBMITIT_LOCAL_GLOBALID", -1))] = int(process.name)
        if sorted(found) == list(range(count)):
            return [found[rank] for rank in range(count)]
        time.sleep(0.05)
    raise AssertionError("no tasks")


def _text(file: Path) -> str:
    try:
        return file.read_text(errors="replace")
    except OSError:  # the process has ended
        return ""


def until_saved(folder: Path, job: subprocess.Popen[str], step: int = 5) -> Path:
    deadline = time.monotonic() + PATIENCE
    while not (found := list(folder.glob(f"runs/MLP/*/checkpoints/step_{step:08}"))):
        assert time.monotonic() < deadline and job.poll() is None, job.communicate()
        time.sleep(0.02)
    return found[0].parents[1]


@pytest.fixture
def submitted(long: Path) -> Iterator[subprocess.Popen[str]]:
    with submitting(long) as job:
        yield job


@contextmanager
def submitting(long: Path, **variables: str) -> Iterator[subprocess.Popen[str]]:
    (long / "submits.py").write_text(SUBMITS.format(restarts=2))
    environment = process_environment(XLA_FLAGS="", NPROC="4", **variables)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    command = [sys.executable, "submits.py"]
    job = subprocess.Popen(command, cwd=long, env=environment, text=True, start_new_session=True, **pipes)  # type: ignore[call-overload]
    try:
        yield job
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)


@pytest.mark.integration
def test_a_job_at_its_time_limit_and_one_that_lost_a_process_continue_with_the_same_bits(long: Path, submitted):
    run = until_saved(long, submitted)
    first = tasks(long)
    os.kill(first[0], signal.SIGUSR2)  # what submitit has SLURM send before the time limit, and at a preemption
    while set(first) & set(tasks(long)):  # on a busy machine the first start saves more than once until it has stopped
        time.sleep(0.05)
    until_saved(long, submitted, _next_save(run))
    child = Path(f"/proc/{tasks(long)[1]}/task/{tasks(long)[1]}/children").read_text().split()
    os.kill(int(child[0]), signal.SIGKILL)
    out, err = submitted.communicate(timeout=PATIENCE)
    assert submitted.returncode == 0, err
    assert err.count("Requeued job") == 2
    assert f'"run": "{run}"' in out
    undisturbed = run_process("launch", "--processes-per-node", "2", "tiny.yaml", "paced.py", "--json", folder=long)
    (state, step), (expected, last) = last_state(run), last_state(Path(undisturbed.data["run"]))
    assert step == last == 120
    assert_same_bits(state, expected)


def _next_save(run: Path) -> int:
    """A step that the first start of a run has not saved: it was asked to stop just now."""
    return 5 * (max(int(path.name[5:]) for path in (run / "checkpoints").glob("step_*")) // 5 + 6)


@pytest.mark.integration
def test_a_cancelled_job_saves_and_is_not_requeued_and_one_that_slurm_requeues_resumes(long: Path, submitted):
    run = until_saved(long, submitted)
    for pid in tasks(long):
        os.kill(pid, signal.SIGTERM)  # as scancel does
    _, err = submitted.communicate(timeout=PATIENCE)
    assert submitted.returncode == 1
    assert "exited with code 143" in err and "Requeued" not in err
    steps = [int(path.name[5:]) for path in (run / "checkpoints").glob("step_*")]
    assert 5 <= max(steps) < 120
    with submitting(long, SLURM_RESTART_COUNT="1") as again:
        out, err = again.communicate(timeout=PATIENCE)
    assert again.returncode == 0, err
    assert f'"run": "{run}"' in out
