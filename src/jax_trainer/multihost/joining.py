"""Joining the processes of a job, described explicitly or detected from the launcher."""

import logging
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass

import jax

LOG = logging.getLogger("jax_trainer")
HEARTBEAT = 30.0  # seconds without a heartbeat after which a process counts as dead
JAX_MARGIN = 5.0  # seconds that JAX waits longer than the watchdog: JAX ends a process without an error message
# environment variables of launchers: (number of processes, number of this process)
_LAUNCHERS = {"SLURM": ("SLURM_NTASKS", "SLURM_PROCID"), "Open MPI": ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK")}
_heartbeats: list[float] = []  # timeouts passed to `join`, at most one


class JoinError(ValueError):
    """The other processes of the job cannot be found."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """An explicit description of a multi-process job.

    Args:
        coordinator: host and port of process 0, such as "10.0.0.1:9876".
        processes: number of processes.
        process: number of this process, from 0.
    """

    coordinator: str | None = None
    processes: int | None = None
    process: int | None = None

    def __post_init__(self) -> None:
        known = {name: value for name, value in vars(self).items() if value is not None}
        if known and len(known) < len(vars(self)):
            missing = [name for name in vars(self) if name not in known]
            raise JoinError(
                f"Set all of coordinator, processes and process, or none: {', '.join(missing)} "
                f"{'is' if len(missing) == 1 else 'are'} missing."
            )
        if self.processes is not None and not 0 <= (self.process or 0) < self.processes:
            raise JoinError(f"Process {self.process} cannot be one of {self.processes}: processes are numbered from 0.")
        if self.coordinator is not None and not self.coordinator.rpartition(":")[2].isdigit():
            raise JoinError(f"The coordinator must be host:port, such as 10.0.0.1:9876, got {self.coordinator!r}.")

    @property
    def is_explicit(self) -> bool:
        """Whether the job is described."""
        return self.coordinator is not None


def detect_launcher(environment: Mapping[str, str] = os.environ) -> str:
    """The launcher of several processes: "SLURM" or "Open MPI"; "" if none is detected.

    >>> detect_launcher({"SLURM_NTASKS": "4", "SLURM_PROCID": "1"}), detect_launcher({"SLURM_NTASKS": "1"})
    ('SLURM', '')
    """
    for name, (count, rank) in _LAUNCHERS.items():
        if environment.get(count, "").isdigit() and int(environment[count]) > 1 and rank in environment:
            return name
    return ""


def join(job: Job | None = None, *, heartbeat: float = HEARTBEAT, timeout: float = 300.0) -> None:
    """Joins the other processes of the job; call it before any other use of JAX.

    Args:
        job: its description; None: JAX detects SLURM, Open MPI, Kubernetes and TPUs.
        heartbeat: seconds without a heartbeat after which a process counts as dead, and the others end.
        timeout: seconds to wait for all processes.
    """
    job = job or Job()
    described = {"coordinator_address": job.coordinator, "num_processes": job.processes, "process_id": job.process}
    detection = {"cluster_detection_method": "deactivate"} if job.is_explicit else {}
    timeouts = {"initialization_timeout": round(timeout), "heartbeat_timeout_seconds": round(heartbeat + JAX_MARGIN)}
    try:
        jax.distributed.initialize(**described, **detection, **timeouts)  # type: ignore[arg-type]
    except (ValueError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        where = f"of {job.processes} at {job.coordinator}" if job.is_explicit else "named in the environment"
        raise JoinError(
            f"The processes {where} could not be joined: {reason}. Start all of them at the same time, check that each "
            "can reach the address of process 0, and do not use JAX before. Explicitly: `--coordinator host:port "
            "--processes N --process I`."
        ) from error
    _heartbeats.append(heartbeat)
    LOG.info(
        "Process %d of %d with %d local devices.", jax.process_index(), jax.process_count(), jax.local_device_count()
    )


def leave(timeout: float = 15.0) -> None:
    """Leaves the job together with the other processes: without it, an ended process would count as dead.

    Args:
        timeout: seconds to wait for them.
    """
    if jax.distributed.is_initialized():
        leaving = threading.Thread(target=jax.distributed.shutdown, name="jax-trainer-leaves", daemon=True)
        leaving.start()
        leaving.join(timeout)


def heartbeat_timeout() -> float:
    """Seconds without a heartbeat after which a process counts as dead; the default if `join` was not called."""
    return _heartbeats[-1] if _heartbeats else HEARTBEAT
