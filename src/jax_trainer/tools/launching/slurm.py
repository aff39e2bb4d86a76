"""SLURM: an sbatch script whose job requeues itself; it is printed, or submitted and its output shown."""

import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from jax_trainer.tools.launching import RESUMABLE, SAVE_SECONDS, Launch, LaunchError

FOLDER = "runs/slurm"  # of the logs; shared by all nodes, as the run folder is
_POLL = 2.0  # seconds between two looks at a job: all users ask the same controller
_OUTAGE_SECONDS = 60.0  # for which a controller that does not answer is asked again, as during its restart
_ENDED = {"COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL", "DEADLINE"}
_ENDED |= {"OUT_OF_MEMORY"}


def sbatch(launch: Launch, options: Mapping[str, str] = {}, program: Sequence[str] = ("jax-trainer",)) -> str:
    """The script for `sbatch`, of an array if there are several jobs.

    Args:
        launch: what is trained.
        options: of sbatch, such as `{"partition": "gpu"}`.
        program: the command `jax-trainer` on the nodes.
    """
    command = shlex.join([*program, *launch.words(resume=False)])
    if launch.words(resume=True) != launch.words(resume=False):
        command += " ${SLURM_RESTART_COUNT:+resume=auto}"  # set when the job was requeued, by itself or by SLURM
    # in an array, the SLURM_JOB_ID of one of its jobs may be that of the whole array
    job = "$SLURM_JOB_ID" if (launch.workers or 1) == 1 else "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"
    devices, setup = launch.devices_per_process or 1, list[str]()
    if launch.platform == "cpu":
        setup = [f"export {name}={shlex.quote(value)}" for name, value in launch.cpu_variables().items()]
    elif devices > 1 and not launch.workers:
        # JAX assigns one GPU to a process if it is not asked for more
        first = f"$((SLURM_LOCALID * {devices}))"
        ids = f"$(seq -s, {first} $((SLURM_LOCALID * {devices} + {devices - 1})))"
        command = f"bash -c {shlex.quote(f'JAX_LOCAL_DEVICE_IDS={ids} exec {command}')}"
    setup += [f'export {name}="{value}"' for name, value in launch.job_variables(job).items()]
    gpus = devices * launch.processes_per_node
    memory = (launch.memory_per_process or 0) * launch.processes_per_node
    hours, seconds = divmod(launch.time or 0, 3600)
    directives = {
        "job-name": launch.job_name,
        "array": f"0-{launch.workers - 1}" if launch.workers > 1 else None,
        "nodes": launch.nodes,
        "ntasks-per-node": launch.processes_per_node,
        "gpus-per-node": None if launch.platform == "cpu" else gpus,
        "cpus-per-task": launch.cpus_per_process,
        "mem": f"{memory}G" if memory else None,
        "time": f"{hours:02}:{seconds // 60:02}:{seconds % 60:02}" if launch.time else None,
        "signal": f"TERM@{min(SAVE_SECONDS, launch.time // 2) if launch.time else SAVE_SECONDS}",
        "open-mode": "append",
        **options,
    }
    lines = ["#!/bin/bash"]
    lines += [f"#SBATCH --{name}={value}" for name, value in directives.items() if value is not None]
    # processes end by themselves after another one, with codes that say why; srun exits with the highest of them
    lines += ["#SBATCH --requeue", "", *setup, "code=0", f"srun --kill-on-bad-exit=0 {command} || code=$?"]
    if launch.restarts:
        lines += [
            f'if [[ " {" ".join(map(str, sorted(RESUMABLE)))} " == *" $code "* ]] &&',
            f'    [ "${{SLURM_RESTART_COUNT:-0}}" -lt {launch.restarts} ]; then',
            f'    scontrol requeue "{job}"',
            "fi",
        ]
    return "\n".join([*lines, 'exit "$code"', ""])


def submit(launch: Launch, options: Mapping[str, str] = {}) -> str:
    """Submits the script of `sbatch`, with logs in `FOLDER`; returns the id of the job, or of the array.

    Args:
        launch: what is trained.
        options: of sbatch, such as `{"partition": "gpu"}`.
    """
    if launch.time is None:
        raise LaunchError("SLURM needs the time limit of the job: --time 12h.")
    if taken := {"output", "error"} & set(options):
        raise LaunchError(f"The logs are shown, from {FOLDER}. Leave out --option {min(taken)}, or pass --print.")
    if shutil.which("sbatch") is None:
        raise LaunchError("sbatch is not on this machine. Run the command on one of the cluster, or pass --print.")
    Path(FOLDER).mkdir(parents=True, exist_ok=True)
    name = "%A_%a" if (launch.workers or 1) > 1 else "%j"
    logs = {"output": f"{FOLDER}/{name}.out", "error": f"{FOLDER}/{name}.err"}
    script = sbatch(launch, {**options, **logs}, (sys.executable, "-m", "jax_trainer"))
    done = subprocess.run(["sbatch", "--parsable"], input=script, capture_output=True, text=True)
    if done.returncode:
        raise LaunchError(f"sbatch has not accepted the job: {' '.join(done.stderr.split())}")
    return done.stdout.strip().partition(";")[0]  # the name of the cluster may follow


def follow(launch: Launch, job: str, out: IO[str] | None) -> None:
    """Shows the state and the output of a submitted job, or of all jobs of an array, until they have ended.

    Args:
        launch: as it was submitted.
        job: as `submit` returns it.
        out: gets the standard output; None: it is not shown, only the progress on standard error.
    """
    names = [job] if (launch.workers or 1) == 1 else [f"{job}_{index}" for index in range(launch.workers or 1)]
    seen, before = dict[Path, int](), ""
    while True:
        found = _states(job)
        states = {state for state, _, _ in found}
        is_over = states <= _ENDED  # before the last look at the output
        if (text := ", ".join(sorted(states))) != before:
            sys.stderr.write(f"jax-trainer: Job {job} is {text}.\n")
            before = text
        for index, name in enumerate(names):
            prefix = f"[{index}] " if len(names) > 1 else ""
            for file, stream in ((Path(FOLDER, f"{name}.out"), out), (Path(FOLDER, f"{name}.err"), sys.stderr)):
                if stream is not None:
                    seen[file] = _forward(file, seen.get(file, 0), stream, prefix, is_last=is_over)
        if is_over:
            break
        time.sleep(_POLL)
    for state, code, number in found:
        if state != "COMPLETED":
            known = {str(one.value): one.name for one in signal.Signals}  # others are SLURM's own
            reason = f"by {known.get(number, f'signal {number} of SLURM')}" if int(number) else f"with exit code {code}"
            raise LaunchError(f"Job {job} has ended as {state}, {reason}. Its logs are in {FOLDER}.", int(code) or 1)


def _states(job: str) -> list[tuple[str, str, str]]:
    """The state, the exit code and the signal of a job, or of each job of an array."""
    deadline = time.monotonic() + _OUTAGE_SECONDS
    while True:
        done = subprocess.run(["scontrol", "--oneliner", "show", "job", job], capture_output=True, text=True)
        found = re.findall(r" JobState=(\w+) .* ExitCode=(\d+):(\d+) ", done.stdout)
        if found and not done.returncode:
            return found
        if time.monotonic() < deadline:
            time.sleep(_POLL)
            continue
        reason = " ".join((done.stderr or done.stdout).split())
        raise LaunchError(f"Job {job} cannot be followed: {reason!r}. It may still run; its logs are in {FOLDER}.", 1)


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
