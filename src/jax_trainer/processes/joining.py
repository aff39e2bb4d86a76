"""How a process finds the others of its job: told by name, or by what started them."""

import logging
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass

import jax

LOG = logging.getLogger("jax_trainer")
HEARTBEAT = 30.0  # seconds of silence after which a process counts as gone
BEHIND = 5.0  # seconds that JAX waits longer than we do: it ends a process without a word
# (how many processes there are, which one this is) as those who start them say it
_STARTERS = {"SLURM": ("SLURM_NTASKS", "SLURM_PROCID"), "Open MPI": ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK")}
_heartbeats: list[float] = []  # that were agreed on; a process joins once


class JoinError(ValueError):
    """The other processes of the job cannot be found."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job of several processes, as somebody describes it by name.

    Args:
        coordinator: host and port at which the first process listens, such as "10.0.0.1:9876".
        processes: how many there are.
        process: which one this is, from 0.
    """

    coordinator: str | None = None
    processes: int | None = None
    process: int | None = None

    def __post_init__(self) -> None:
        given = {name: value for name, value in vars(self).items() if value is not None}
        if given and len(given) < len(vars(self)):
            missing = [name for name in vars(self) if name not in given]
            raise JoinError(
                f"A job is described by coordinator, processes and process, all of them or none: {', '.join(missing)} "
                f"{'is' if len(missing) == 1 else 'are'} missing."
            )
        if self.processes is not None and not 0 <= (self.process or 0) < self.processes:
            raise JoinError(f"Process {self.process} cannot be one of {self.processes}: they count from 0.")
        if self.coordinator is not None and not self.coordinator.rpartition(":")[2].isdigit():
            raise JoinError(f"The coordinator must be host:port, such as 10.0.0.1:9876, got {self.coordinator!r}.")

    @property
    def is_described(self) -> bool:
        """Whether anything was said about it."""
        return self.coordinator is not None


def detect_launcher(environment: Mapping[str, str] = os.environ) -> str:
    """Who started several processes of which this is one: "SLURM" or "Open MPI"; "" if nobody says so.

    >>> started_together({"SLURM_NTASKS": "4", "SLURM_PROCID": "1"}), started_together({"SLURM_NTASKS": "1"})
    ('SLURM', '')
    """
    for name, (count, rank) in _STARTERS.items():
        if environment.get(count, "").isdigit() and int(environment[count]) > 1 and rank in environment:
            return name
    return ""


def join(job: Job | None = None, *, heartbeat: float = HEARTBEAT, timeout: float = 300.0) -> None:
    """Joins the other processes of the job; before JAX is used for anything else.

    Args:
        job: what is known about it; without, JAX looks for SLURM, Open MPI, Kubernetes and TPUs.
        heartbeat: seconds of silence after which a process counts as gone, and the others end.
        timeout: seconds to wait until all are there.
    """
    job = job or Job()
    described = {"coordinator_address": job.coordinator, "num_processes": job.processes, "process_id": job.process}
    detection = {"cluster_detection_method": "deactivate"} if job.is_described else {}
    patience = {"initialization_timeout": round(timeout), "heartbeat_timeout_seconds": round(heartbeat + BEHIND)}
    try:
        jax.distributed.initialize(**described, **detection, **patience)  # type: ignore[arg-type]
    except (ValueError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        where = (
            f"of {job.processes} at {job.coordinator}" if job.is_described else "that this machine's environment names"
        )
        raise JoinError(
            f"The processes {where} could not be joined: {reason}. Start all of them at the same time, let each reach "
            "the address of the first, and use JAX for nothing before. By name: `--coordinator host:port --processes N "
            "--process I`."
        ) from error
    _heartbeats.append(heartbeat)
    LOG.info("Process %d of %d, %d devices here.", jax.process_index(), jax.process_count(), jax.local_device_count())


def leave(patience: float = 15.0) -> None:
    """Takes leave of the other processes, which do the same: one that just ended would be taken for dead.

    Args:
        patience: seconds to wait for them.
    """
    if jax.distributed.is_initialized():
        leaving = threading.Thread(target=jax.distributed.shutdown, name="jax-trainer-leaves", daemon=True)
        leaving.start()
        leaving.join(patience)


def heartbeat_timeout() -> float:
    """Seconds of silence after which a process counts as gone; the usual ones where somebody else has joined them."""
    return _heartbeats[-1] if _heartbeats else HEARTBEAT
