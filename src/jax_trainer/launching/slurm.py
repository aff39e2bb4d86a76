"""SLURM: submitit submits the job, follows its output and requeues it; or the same as an sbatch script."""

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from jax_trainer.launching.job import RESUMABLE, SAVE_SECONDS, Launch, LaunchError
from jax_trainer.launching.local import exit_code
from jax_trainer.optional_import import from_extra

FOLDER = "runs/slurm"  # of the logs and the submitted job; shared by all nodes, as the run folder is
_POLL = 0.5  # seconds between two looks at the output of a job
_PORTS = range(20000, 30000)


def sbatch(launch: Launch, options: Mapping[str, str] = {}) -> str:
    """The script for `sbatch`, of an array if there are several jobs.

    Args:
        launch: what is trained.
        options: of sbatch, such as `{"partition": "gpu"}`.
    """
    command = shlex.join(["jax-trainer", *launch.words(resume=launch.restarts > 0)])
    # in an array, the SLURM_JOB_ID of one of its jobs may be that of the whole array
    job = "$SLURM_JOB_ID" if launch.jobs == 1 else "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"
    devices, setup = launch.devices_per_process or 1, list[str]()
    if launch.platform == "cpu":
        setup = [f"export {name}={shlex.quote(value)}" for name, value in launch.cpu_variables().items()]
    elif devices > 1 and launch.has_group:
        # JAX assigns one GPU to a process if it is not asked for more
        first = f"$((SLURM_LOCALID * {devices}))"
        ids = f"$(seq -s, {first} $((SLURM_LOCALID * {devices} + {devices - 1})))"
        command = f"bash -c {shlex.quote(f'JAX_LOCAL_DEVICE_IDS={ids} exec {command}')}"
    setup += [f'export {name}="{value}"' for name, value in launch.job_variables(job).items()]
    lines = ["#!/bin/bash", *(f"#SBATCH --{name}={value}" for name, value in _directives(launch, options).items())]
    lines += ["#SBATCH --requeue", "", *setup, "code=0", f"srun --kill-on-bad-exit=1 {command} || code=$?"]
    if launch.restarts:
        lines += [
            f'if [[ " {" ".join(map(str, sorted(RESUMABLE)))} " == *" $code "* ]] &&',
            f'    [ "${{SLURM_RESTART_COUNT:-0}}" -lt {launch.restarts} ]; then',
            f'    scontrol requeue "{job}"',
            "fi",
        ]
    return "\n".join([*lines, 'exit "$code"', ""])


def _directives(launch: Launch, options: Mapping[str, str]) -> dict[str, Any]:
    gpus = (launch.devices_per_process or 1) * launch.processes_per_node
    memory = (launch.memory_per_process or 0) * launch.processes_per_node
    hours, seconds = divmod(launch.time or 0, 3600)
    known = {
        "job-name": launch.job_name,
        "array": f"0-{launch.jobs - 1}" if launch.jobs > 1 else None,
        "nodes": launch.nodes,
        "ntasks-per-node": launch.processes_per_node,
        "gpus-per-node": None if launch.platform == "cpu" else gpus,
        "cpus-per-task": launch.cpus_per_process,
        "mem": f"{memory}G" if memory else None,
        "time": f"{hours:02}:{seconds // 60:02}:{seconds % 60:02}" if launch.time else None,
        "signal": f"TERM@{_save_seconds(launch)}",
        "open-mode": "append",
    }
    return {**{name: value for name, value in known.items() if value is not None}, **options}


def _save_seconds(launch: Launch) -> int:
    return SAVE_SECONDS if launch.time is None else min(SAVE_SECONDS, launch.time // 2)


# submitting


class Task:
    """What submitit runs in each process of a job: `jax-trainer` as a child, which it stops and resumes.

    Args:
        launch: what is trained.
        restarts: how often the job may be requeued from now on.
        resume: whether this start resumes the run.
    """

    def __init__(self, launch: Launch, restarts: int, *, resume: bool = False) -> None:
        self.launch, self.restarts, self.resume = launch, restarts, resume
        self._child: subprocess.Popen[str] | None = None
        self._stopped = False

    def __call__(self) -> str:
        """Runs the words of the process, and returns the JSON object of the primary process, or nothing."""
        place = _submitit().JobEnvironment()
        job, rank = int(place.raw_job_id.partition("_")[0]), place.global_rank
        resume = self.resume or os.environ.get("SLURM_RESTART_COUNT", "0") != "0"  # SLURM itself has requeued the job
        words = self.launch.words(rank, f"{place.hostnames[0]}:{_PORTS[job % len(_PORTS)]}", resume=resume)
        environment = self.launch.environment(place.local_rank) | self.launch.job_variables(place.job_id)
        out = subprocess.PIPE if self.launch.json and rank == 0 else None
        command = [sys.executable, "-u", "-m", "jax_trainer", *words]
        # in a session of its own: a signal to all processes of the job step must arrive once, from here
        self._child = subprocess.Popen(command, env=environment, text=True, start_new_session=True, stdout=out)
        signal.signal(signal.SIGTERM, self._stop)  # submitit ignores it
        output = self._child.communicate()[0] or ""
        code = exit_code(self._child.returncode)
        if not code:
            return output.strip().rpartition("\n")[2]
        if code in RESUMABLE and not self._stopped and rank == 0:
            signal.raise_signal(getattr(signal, f"SIG{place.USR_SIG}"))  # as at the time limit: `checkpoint`, requeue
        if code in RESUMABLE and not self._stopped:
            raise SystemExit(code)  # the first process requeues the job, and reports if it cannot
        raise RuntimeError(f"Process {rank} exited with code {code}.")

    def checkpoint(self) -> Any:
        """Stops the run with a checkpoint; returns what the requeued job runs, or None without restarts left."""
        self._terminate()
        if not self.restarts:
            return None
        resumed = Task(self.launch, self.restarts - 1, resume=True)
        return _submitit().helpers.DelayedSubmission(resumed)

    def _stop(self, number: int, frame: Any) -> None:
        self._stopped = True
        self._terminate(wait=False)

    def _terminate(self, *, wait: bool = True) -> None:
        """Sends SIGTERM to the child. A signal handler calls it: `Popen.wait`, which was interrupted, has a lock."""
        child = self._child
        with suppress(ProcessLookupError, ChildProcessError):  # it has ended
            if child is not None and child.returncode is None:
                os.kill(child.pid, signal.SIGTERM)
                os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT) if wait else None


def submit(launch: Launch, options: Mapping[str, str] = {}, *, cluster: str = "slurm") -> list[Any]:
    """Submits a job, or an array of them, and returns them, as submitit's `Job`s.

    Args:
        launch: what is trained.
        options: of sbatch, such as `{"partition": "gpu"}`.
        cluster: of submitit: "slurm", or "local" for processes on this machine.
    """
    if launch.time is None:
        raise LaunchError("SLURM needs the time limit of the job: --time 12h.")
    if cluster == "slurm" and shutil.which("srun") is None:
        raise LaunchError("srun is not on this machine. Run the command on one of the cluster, or pass --print.")
    executor = _submitit().AutoExecutor(folder=FOLDER, cluster=cluster)
    executor._executor.max_num_timeout = launch.restarts
    gpus = {} if launch.platform == "cpu" else {"gpus_per_node": _directives(launch, {})["gpus-per-node"]}
    more = {"cpus_per_task": launch.cpus_per_process} if launch.cpus_per_process else {}
    if launch.memory_per_process:
        more["mem_gb"] = launch.memory_per_process * launch.processes_per_node
    executor.update_parameters(
        name=launch.job_name,
        nodes=launch.nodes,
        tasks_per_node=launch.processes_per_node,
        timeout_min=-(-launch.time // 60),
        slurm_signal_delay_s=_save_seconds(launch),
        slurm_array_parallelism=launch.jobs,
        slurm_srun_args=["--kill-on-bad-exit=0"],  # the others end by themselves, with a code that says why
        slurm_additional_parameters={"requeue": True, **options},
        **gpus,
        **more,
    )
    with executor.batch():  # of several: an array
        return [executor.submit(Task(launch, launch.restarts)) for _ in range(launch.jobs)]


class JobFailed(RuntimeError):
    """A submitted job has ended without success."""


def follow(jobs: Sequence[Any], out: IO[str] | None) -> str:
    """Shows the output of the first process of each job until all have ended, and returns the result of the first job.

    Args:
        jobs: as `submit` returns them; lines of several start with their index.
        out: gets their standard output; None: it is not shown, only the progress on standard error.
    """
    first = [job.task(0) for job in jobs]
    seen: dict[Path, int] = {}
    is_done = False
    while not is_done:
        is_done = all(job.done() for job in first)  # before the last look
        for index, job in enumerate(first):
            prefix = f"[{index}] " if len(first) > 1 else ""
            for file, stream in ((job.paths.stdout, out), (job.paths.stderr, sys.stderr)):
                if stream is not None:
                    seen[file] = _forward(file, seen.get(file, 0), stream, prefix, is_last=is_done)
        time.sleep(0 if is_done else _POLL)
    for job in first:
        if (error := job.exception()) is not None:
            raise JobFailed(f"Job {job.job_id}: {str(error).strip().splitlines()[-1]} Logs: {job.paths.stdout.parent}")
    return first[0].result()


def _forward(file: Path, start: int, stream: IO[str], prefix: str, *, is_last: bool) -> int:
    """Writes what a file has from `start` on, and returns where it ended; with a prefix, only complete lines."""
    if not file.exists():
        return start
    with file.open("rb") as lines:
        lines.seek(start)
        new = lines.read()
    if prefix and not is_last:
        new = new[: new.rfind(b"\n") + 1]
    text = new.decode(errors="replace")
    stream.write("".join(f"{prefix}{line}" for line in text.splitlines(keepends=True)) if prefix else text)
    return start + len(new)


def _submitit() -> Any:
    with from_extra("slurm"):
        import submitit
    return submitit
