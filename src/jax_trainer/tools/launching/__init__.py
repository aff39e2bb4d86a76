"""Starts the processes that train one experiment together: on this machine, or on an engine that the user has.

`Launch` is what every engine needs to know, also about independent workers. `local` and `ray_cluster` start an
`Attempt` and wait for it, `slurm` writes the script of a job and submits it, `kubernetes` writes a manifest. None of
them schedules or stores anything itself.
"""

import os
import re
import signal
from dataclasses import dataclass
from pathlib import Path

from jax_trainer.config.stop_signals import STOP_SIGNALS
from jax_trainer.sharding import HEARTBEAT, LOST

__all__ = ["RESUMABLE", "Attempt", "Launch", "LaunchError"]

SAVE_SECONDS = 180  # between a signal that stops and SIGKILL: to finish a step and save
# exit codes after which the same command resumes: a lost process or a hang, SIGABRT (of JAX, without its process 0),
# SIGKILL, SIGSEGV, and signals that stop, but Ctrl-C. All others come back: an exception, a wrong configuration
_KILLED = (signal.SIGABRT, signal.SIGKILL, signal.SIGSEGV)
RESUMABLE = (LOST, *(128 + number for number in (*_KILLED, *STOP_SIGNALS) if number != signal.SIGINT))
_SIGNALS = {*signal.Signals}
_GPUS = Path("/proc/driver/nvidia/gpus")


class LaunchError(ValueError):
    """A launch that cannot be started: what it asks for is wrong, or not there; or one that failed, with a code.

    Args:
        text: the message.
        code: the exit code.
    """

    def __init__(self, text: str, code: int = 2) -> None:
        super().__init__(text)
        self.code = code


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One experiment that several processes train together, or a command whose work independent workers share.

    Workers, such as those of a study, do not know each other: on Ray, each is an actor; on SLURM, each is a job of an
    array. Each of them is restarted up to `restarts` times.

    Args:
        config: YAML file of the experiment.
        changes: overrides and .py files, as on the command line.
        imports: modules that register classes.
        name: of the job; by default that of `config`.
        nodes: number of machines.
        processes_per_node: number of processes on each of them.
        devices_per_process: GPUs, or CPU devices; None: GPUs are split evenly, one CPU device.
        platform: "cuda" or "cpu"; None: GPUs, if there are any.
        cpus_per_process: CPU cores that a process reserves; None: as the engine does by default.
        memory_per_process: memory that a process reserves, in GB; None: as the engine does by default.
        time: seconds after which a start is stopped with SIGTERM, and saved, or `SAVE_SECONDS` later killed; None: no
            limit.
        restarts: how often the run is resumed after a lost process, a preemption or the time limit.
        heartbeat: seconds without a heartbeat after which a process counts as dead.
        quiet: print errors only.
        json: print the result as one JSON object.
        workers: number of independent workers; 0: the processes train together.
        command: the arguments of `jax-trainer` in each worker.
        id_variable: the environment variable in which a worker and its restarts find the same id.
    """

    config: str
    changes: tuple[str, ...] = ()
    imports: tuple[str, ...] = ()
    name: str = ""
    nodes: int = 1
    processes_per_node: int = 1
    devices_per_process: int | None = None
    platform: str | None = None
    cpus_per_process: int | None = None
    memory_per_process: int | None = None
    time: int | None = None
    restarts: int = 0
    heartbeat: float = HEARTBEAT
    quiet: bool = False
    json: bool = False
    workers: int = 0
    command: tuple[str, ...] = ()
    id_variable: str = ""

    @property
    def processes(self) -> int:
        """The number of processes on all nodes."""
        return self.workers or self.nodes * self.processes_per_node

    def job_variables(self, job: str) -> dict[str, str]:
        """The environment variables of the processes of a job of this id, besides those of `environment`."""
        return {self.id_variable: job} if self.id_variable else {}

    @property
    def job_name(self) -> str:
        """The name of the job: lowercase letters, digits and hyphens, as in a host name.

        >>> Launch(config="configs/GPT2_small.yaml").job_name
        'gpt2-small'
        """
        name = self.name or re.sub(r"[^a-z0-9]+", "-", Path(self.config).stem.lower()).strip("-")[:50].strip("-")
        if not re.fullmatch(r"[a-z]([a-z0-9-]{0,48}[a-z0-9])?", name):
            hint = "Pass --name: up to 50 lowercase letters, digits and hyphens, the first a letter."
            raise LaunchError(f"{name!r} cannot be the name of a job. {hint}")
        return name

    def words(self, process: int | str = 0, coordinator: str = "", *, resume: bool) -> list[str]:
        """The arguments of `jax-trainer` in one process; several find each other at `coordinator`.

        Without one, by the environment, as under SLURM. With `resume`, the newest run with these changes continues.
        """
        if self.workers:
            return list(self.command)  # also to resume: the shared work says what is left
        has_resume = any(word.startswith("resume=") for word in self.changes)
        words = ["train", self.config, *self.changes, *(["resume=auto"] if resume and not has_resume else [])]
        if coordinator and self.processes > 1:
            words += ["--coordinator", coordinator, "--processes", str(self.processes), "--process", str(process)]
        words += ["--heartbeat", f"{self.heartbeat:g}"] if self.heartbeat != HEARTBEAT else []
        words += ["--quiet"] if self.quiet else []
        words += ["--json"] if self.json and process == 0 else []
        return [*words, *(word for name in self.imports for word in ("--import", name))]

    def environment(self, local_process: int) -> dict[str, str]:
        """The environment of a process on this machine: its own GPUs, or CPU devices."""
        gpus = [] if self.platform == "cpu" else _gpus()
        if not gpus or (self.platform is None and os.environ.get("JAX_PLATFORMS", "").startswith("cpu")):
            if self.platform == "cuda":
                raise LaunchError("This machine has no visible GPU. Leave out --platform cuda.")
            return {**os.environ, **self.cpu_variables()}
        each = self.devices_per_process or max(1, len(gpus) // self.processes_per_node)
        if each * self.processes_per_node > len(gpus):
            raise LaunchError(
                f"{self.processes_per_node} processes with {each} GPU{'s' * (each > 1)} each need "
                f"{each * self.processes_per_node} GPUs, but this machine has {len(gpus)}. Start fewer processes, or "
                "pass --platform cpu."
            )
        own = gpus[local_process * each : (local_process + 1) * each]
        return {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(own)}

    def cpu_variables(self) -> dict[str, str]:
        """The environment variables that give a process its CPU devices."""
        devices = self.devices_per_process or 1
        kept = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if "host_platform_device_count" not in flag]
        flags = " ".join([*kept, f"--xla_force_host_platform_device_count={devices}"])
        return {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "NPROC": str(max(4, 2 * devices))}


@dataclass(frozen=True)
class Attempt:
    """How one start of all processes has ended.

    Args:
        exit_codes: by process, in the order in which they ended.
        output: the JSON object of the primary process, or nothing.
        timed_out: whether the time limit has ended it.
        reason: what the first process that failed has said last, if nobody has seen it; or why it was killed.
        stopped_by: the signal to the launching process that has ended it; 0: none.
    """

    exit_codes: dict[int, int]
    output: str = ""
    timed_out: bool = False
    reason: str = ""
    stopped_by: int = 0

    @property
    def failed(self) -> dict[int, int]:
        """The exit codes of the processes that did not succeed."""
        return {index: code for index, code in self.exit_codes.items() if code}

    @property
    def text(self) -> str:
        """What the failed processes ended with."""
        ends = []
        for index, code in self.failed.items():
            number = code - 128
            end = f"was ended by {signal.Signals(number).name}" if number in _SIGNALS else f"exited with code {code}"
            end = f"was lost, or lost another one (code {LOST})" if code == LOST else end
            ends.append(f"process {index} {end}")
        text = "; then ".join(ends)
        return f"{text[:1].upper()}{text[1:]}.{' ' if self.reason else ''}{self.reason}"


def _gpus() -> list[str]:
    """The ids of the visible GPUs, as in `CUDA_VISIBLE_DEVICES`."""
    if (chosen := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [name for name in chosen.split(",") if name]
    return [str(number) for number in range(len(list(_GPUS.iterdir())))] if _GPUS.is_dir() else []
