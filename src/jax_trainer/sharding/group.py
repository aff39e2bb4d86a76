"""The processes of a job: joining them, described explicitly or detected from the launcher, and exchanging strings."""

import json
import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax

from jax_trainer.diagnostics.jax_internals import key_value_client

LOG = logging.getLogger("jax_trainer")
HEARTBEAT = 30.0  # seconds without a heartbeat after which a process counts as dead
JAX_MARGIN = 5.0  # seconds that JAX waits longer than the watchdog: JAX ends a process without an error message
TIMEOUT = 600.0  # seconds to wait for other processes: reading a large checkpoint takes a while
_ROOT = "jax_trainer"
# environment variables of launchers: (number of processes, number of this process)
LAUNCHERS = {"SLURM": ("SLURM_NTASKS", "SLURM_PROCID"), "Open MPI": ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK")}
_heartbeats: list[float] = []  # timeouts passed to `join`, at most one


# joining


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
    for name, (count, rank) in LAUNCHERS.items():
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


# exchanging strings


class ProcessGroupError(RuntimeError):
    """Another process did not respond in time, or failed."""


class ProcessGroup:
    """The processes of this job; this one has the number `index`, and number 0 is the primary process.

    Every exchange has a topic. All processes must use a topic equally often and in the same order; different topics can
    be used from different threads at the same time. A single process never waits.
    """

    def __init__(self, index: int, count: int, client: Any = None) -> None:
        self.index, self.count, self._client = index, count, client
        self._uses: Counter[str] = Counter()
        self._lock = threading.Lock()

    @property
    def is_primary(self) -> bool:
        """Whether this is process 0, which writes files and logs."""
        return self.index == 0

    @property
    def is_multi_process(self) -> bool:
        """Whether there are other processes."""
        return self.count > 1

    def all_gather(self, topic: str, value: str = "", *, timeout: float = TIMEOUT) -> list[str]:
        """The values of all processes, in their order; waits until all have called it, up to `timeout` seconds."""
        if not self.is_multi_process:
            return [value]
        with self._lock:
            self._uses[topic] = use = self._uses[topic] + 1
        prefix = f"{_ROOT}/{topic}/{use}"
        try:
            self._client.key_value_set(f"{prefix}/{self.index}", value)
            self._client.wait_at_barrier(prefix, int(1000 * timeout))
            values = dict(self._client.key_value_dir_get(f"{prefix}/"))
            if use > 1:  # all processes are past this barrier, and so have read the values of the previous exchange
                self._client.key_value_delete(f"{_ROOT}/{topic}/{use - 1}/{self.index}")
        except (jax.errors.JaxRuntimeError, ValueError) as error:
            raise ProcessGroupError(
                f"Not all of the {self.count} processes reached {topic!r}: {str(error).partition(chr(10))[0][:300]}"
            ) from error
        return [values[f"{prefix}/{index}"] for index in range(self.count)]

    def broadcast(self, topic: str, compute: Callable[[], str], *, timeout: float = TIMEOUT) -> str:
        """The result of `compute` in the primary process. If it raises, the other processes raise, too."""
        value, failure = "", None
        if self.is_primary:
            try:
                value = compute()
            except Exception as error:
                failure = error
        message = json.dumps({"value": value, "failed": failure and f"{type(failure).__name__}: {failure}"})
        answer = json.loads(self.all_gather(topic, message, timeout=timeout)[0])
        if failure is not None:
            raise failure
        if answer["failed"]:
            raise ProcessGroupError(f"The primary process failed: {answer['failed']}")
        return answer["value"]

    def put(self, key: str, value: str) -> None:
        """Stores a value under a key, overwriting the previous one; does not wait for other processes."""
        if self.is_multi_process:
            self._client.key_value_set(f"{_ROOT}/values/{key}", value, allow_overwrite=True)

    def get_all(self, folder: str) -> dict[str, str]:
        """All values whose keys start with `folder/`, by the rest of the key; does not wait for other processes."""
        if not self.is_multi_process:
            return {}
        prefix = f"{_ROOT}/values/{folder}/"
        return {key.removeprefix(prefix): value for key, value in self._client.key_value_dir_get(prefix)}


@cache
def _cached_group(index: int, count: int, client: Any) -> ProcessGroup:
    return ProcessGroup(index, count, client)


def process_group() -> ProcessGroup:
    """The processes of this job. Initialises JAX's devices."""
    count = jax.process_count()
    return _cached_group(jax.process_index(), count, key_value_client() if count > 1 else None)
