"""SLURM itself: a controller and a node on this machine, whose jobs reach their time limit, are requeued and killed."""

import getpass
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from jax_trainer.testing import assert_same_bits
from jax_trainer.tools.launching.local import free_port
from tests.tools.cli.cli_runs import PATIENCE, PROGRAM, TINY, last_state, process_environment, run_process, tiny_file
from tests.tools.launching import slow_start
from tests.tools.tuning.tuning_runs import QUICK, RATE, space_file

SYSTEM = f"{os.environ['PATH']}:/usr/sbin"
DAEMONS = ("munged", "slurmctld", "slurmd")
pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not all(shutil.which(name, path=SYSTEM) for name in (*DAEMONS, "sbatch")),
        reason="SLURM is not installed: apt-get install slurmctld slurmd munge slurm-client",
    ),
]
SETTINGS = """\
ClusterName=test
SlurmctldHost=localhost
SlurmctldPort={controller}
SlurmdPort={node}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_interval=1
ReturnToService=2
NodeName=localhost NodeAddr=127.0.0.1 CPUs=8 State=UNKNOWN
PartitionName=main Nodes=localhost Default=YES MaxTime=INFINITE State=UP
"""
STEPS = 2 * 359  # the first epoch takes longer than a start may: `SlowStart` waits for 0.2 s at each step


@pytest.fixture(scope="module")
def cluster() -> Iterator[dict[str, str]]:
    """The environment in which the commands of a SLURM cluster on this machine work."""
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))  # short: sockets have short names
    (folder / "state").mkdir()
    ports = {"controller": free_port(), "node": free_port()}
    (folder / "slurm.conf").write_text(SETTINGS.format(folder=folder, user=getpass.getuser(), **ports))
    (folder / "munge.key").write_bytes(secrets.token_bytes(256))
    (folder / "munge.key").chmod(0o600)
    more = {"SLURM_CONF": str(folder / "slurm.conf"), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "NPROC": "4"}
    environment = process_environment(PATH=f"{Path(sys.executable).parent}:{SYSTEM}", **more)
    files = {"key-file": "munge.key", "socket": "munge.socket", "pid-file": "munge.pid", "seed-file": "munge.seed"}
    munge = ["--foreground", "--force", "--log-file=/dev/stderr"]
    munge += [f"--{option}={folder / name}" for option, name in files.items()]
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        for name, words in zip(DAEMONS, (munge, ["-D"], ["-D", "-N", "localhost"]), strict=True):
            log = stack.enter_context((folder / f"{name}.log").open("w"))
            program = shutil.which(name, path=SYSTEM) or name
            daemon = subprocess.Popen([program, *words], env=environment, stdout=log, stderr=log)
            stack.callback(lambda daemon=daemon: (daemon.terminate(), daemon.wait(60)))
            if name == "munged":
                until((folder / "munge.socket").exists, lambda: (folder / "munged.log").read_text())
        until(lambda: "idle" in asked(environment, "sinfo", "--noheader"), lambda: str(list(folder.glob("*.log"))))
        stack.callback(until, lambda: not asked(environment, "squeue", "--noheader"), lambda: "a job does not end")
        stack.callback(asked, environment, "scancel", "--user", getpass.getuser())
        yield environment


def until(condition: Callable[[], Any], state: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + PATIENCE
    while not (found := condition()):
        assert time.monotonic() < deadline, state()
        time.sleep(0.05)
    return found


def asked(environment: dict[str, str], *command: str) -> str:
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE).stdout.strip()


@pytest.fixture
def slow(tmp_path: Path) -> Path:
    """An experiment whose first start takes more than a minute; all saves but the last are those of signals."""
    (tmp_path / "slow_start.py").write_text(Path(slow_start.__file__).read_text())
    text = TINY.replace("  max_steps_per_epoch: 4\n", "").replace("batch_size: 32", "batch_size: 4")
    tiny_file(tmp_path, text.replace("    ModelCheckpoint:", "    SlowStart: {}\n    ModelCheckpoint:"))
    return tmp_path


@contextmanager
def launched(folder: Path, environment: dict[str, str], *words: str) -> Iterator[subprocess.Popen[str]]:
    command = [*PROGRAM, "launch", "--on", "slurm", "--processes-per-node", "2", "--platform", "cpu", *words]
    command += ["--heartbeat", "5", "tiny.yaml", "slow_start.py"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, cwd=folder, env=environment, text=True, **pipes)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def until_trained(folder: Path, environment: dict[str, str]) -> tuple[str, Path, dict[int, int]]:
    """The id of the job, the run folder, and the training processes by rank, when the first steps are done."""
    logged = lambda: [file for file in folder.glob("runs/MLP/*/metrics.jsonl") if file.stat().st_size]
    run = until(logged, lambda: [file.read_text() for file in folder.glob("**/*.out")])[0].parent
    (job,) = asked(environment, "squeue", "--noheader", "--format=%A").split()
    return job, run, processes(folder, "SLURM_PROCID", "train")


def processes(folder: Path, rank: str, command: str) -> dict[int, int]:
    """The processes that run a command in `folder`, by an environment variable."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words, variables = ((process / name).read_bytes().split(b"\0") for name in ("cmdline", "environ"))
            is_here = os.path.realpath(process / "cwd") == str(folder.resolve())
        except OSError:  # it has ended
            continue
        if is_here and command.encode() in words[:4] and words[0].endswith(b"python"):
            names = dict(one.split(b"=", 1) for one in variables if b"=" in one)
            found |= {int(names[rank.encode()]): int(process.name)} if rank.encode() in names else {}
    return found


def starts(run: Path) -> list[tuple[str, int, int]]:
    """How the starts of a run have ended, and their first and last steps."""
    return [
        (one["status"], one["from_step"], one["step"]) for one in json.loads((run / "run.json").read_text())["starts"]
    ]


def assert_as_undisturbed(folder: Path, run: Path) -> None:
    words = ("launch", "--processes-per-node", "2", "tiny.yaml", "slow_start.py", "--json")
    undisturbed = run_process(*words, folder=folder, XLA_FLAGS="", NPROC="4", SLURM_RESTART_COUNT="1")
    assert undisturbed.code == 0, undisturbed.err
    (state, step), (expected, last) = last_state(run), last_state(Path(undisturbed.data["run"]))
    assert step == last == STEPS
    assert_same_bits(state, expected)


def test_a_job_at_its_time_limit_saves_within_the_epoch_and_is_requeued_to_the_same_bits(slow: Path, cluster):
    with launched(slow, cluster, "--time", "2m", "--restarts", "1", "--json") as process:
        out, err = process.communicate(timeout=3 * PATIENCE)
    assert process.returncode == 0, err
    data = json.loads(out)
    (first, (_, second_from, _)) = starts(Path(data["run"]))
    assert (first[0], first[1], second_from) == ("interrupted", 0, first[2])
    assert 0 < first[2] < STEPS // 2  # within the first epoch
    assert (data["status"], data["processes"]) == ("completed", 2)
    assert_as_undisturbed(slow, Path(data["run"]))


def test_the_printed_script_resumes_when_slurm_requeues_its_job(slow: Path, cluster):
    words = ["launch", "--on", "slurm", "--print", "--processes-per-node", "2", "--platform", "cpu", "--time", "10m"]
    printed = run_process(*words, "tiny.yaml", "slow_start.py", folder=slow).out
    submitted = subprocess.run(["sbatch"], input=printed, cwd=slow, env=cluster, capture_output=True, text=True)
    assert submitted.returncode == 0, submitted.stderr
    job, run, _ = until_trained(slow, cluster)
    asked(cluster, "scontrol", "requeue", job)
    until(lambda: not asked(cluster, "squeue", "--noheader"), lambda: (slow / f"slurm-{job}.out").read_text())
    first, second = starts(run)
    assert (first[0], second) == ("interrupted", ("completed", first[2], STEPS))
    assert_as_undisturbed(slow, run)


def test_a_cancelled_job_saves_and_is_not_requeued(slow: Path, cluster):
    with launched(slow, cluster, "--time", "10m", "--restarts", "3") as process:
        job, run, _ = until_trained(slow, cluster)
        asked(cluster, "scancel", job)
        _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    assert f"Job {job} has ended as CANCELLED" in err
    ((status, _, step),) = starts(run)
    assert status == "interrupted" and 0 < step < STEPS // 2
    assert last_state(run)[1] == step


def test_a_job_that_has_lost_a_process_is_requeued_as_often_as_asked(slow: Path, cluster):
    with launched(slow, cluster, "--time", "10m", "--restarts", "1", "--json") as process:
        _, run, found = until_trained(slow, cluster)
        os.kill(found[1], signal.SIGKILL)
        out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, err
    assert json.loads(out)["run"] == str(run)
    assert err.index("is RUNNING") < err.rindex("is PENDING") < err.rindex("is RUNNING")
    assert_as_undisturbed(slow, run)


def test_an_exception_ends_a_job_with_its_exit_code_and_no_restart(slow: Path, cluster):
    with launched(slow, {**cluster, "RAISES": "1"}, "--time", "10m", "--restarts", "3") as process:
        _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    assert "of one process" in err and "FAILED, with exit code 1." in err and err.count("is PENDING") <= 1


def test_a_job_that_sbatch_refuses_is_reported_with_its_words(slow: Path, cluster):
    with launched(slow, cluster, "--time", "10m", "--option", "partition=gpu") as process:
        _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 2
    assert "invalid partition" in err


@pytest.mark.parametrize("how", ["preempted", "killed"])
def test_workers_share_the_trials_and_one_that_is_preempted_or_killed_is_requeued(how: str, tmp_path: Path, cluster):
    tiny_file(tmp_path, QUICK)
    space_file(tmp_path, f"{RATE}: {{low: 1e-4, high: 1e-1, log: true}}")
    words = ["tune", "tiny.yaml", "--space", "space.yaml", "--on", "slurm", "--trials", "12", "--pruner", "none"]
    words += ["--name", "line", "--platform", "cpu", "--json", "--workers", "2", "--time", "10m", "--restarts", "1"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    sweep = subprocess.Popen([*PROGRAM, *words], cwd=tmp_path, env=cluster, text=True, **pipes)
    try:
        running = lambda: processes(tmp_path, "SLURM_ARRAY_TASK_ID", "tune")
        until(lambda: len(running()) == 2 and len(list(tmp_path.glob("runs/tune/line/trials/*"))) > 2, sweep.poll)
        if how == "killed":
            os.kill(running()[0], signal.SIGKILL)
        else:
            job = asked(cluster, "squeue", "--noheader", "--format=%F").split()[0]
            asked(cluster, "scontrol", "requeue", f"{job}_0")
        out, err = sweep.communicate(timeout=2 * PATIENCE)
    finally:
        sweep.kill()
    assert sweep.returncode == 0, err
    assert "[0] trial" in err and "[1] trial" in err
    data = json.loads(out)
    expected = {"complete": 12, "pruned": 0, "failed": 0, "interrupted": 1, "running": 0}
    assert data["counts"] | {"interrupted": 1} == expected
    complete = [trial["params"][RATE] for trial in data["trials"] if trial["state"] == "complete"]
    assert set(Counter(complete).values()) == {1}
    assert {trial["params"][RATE] for trial in data["trials"] if trial["state"] == "interrupted"} <= set(complete)
