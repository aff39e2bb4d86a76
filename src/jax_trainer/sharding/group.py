"""The processes of a job: joining, exchanging strings, and a watchdog, so that none waits for a dead one forever."""

import itertools
import json
import logging
import os
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax

from jax_trainer.diagnostics.jax_internals import key_value_client

LOG = logging.getLogger("jax_trainer")
HEARTBEAT = 30.0  # seconds without a heartbeat after which a process counts as dead
JAX_MARGIN = 5.0  # seconds that JAX waits longer than the watchdog: JAX ends a process without an error message
LOST = 75  # exit code after another process died: a temporary failure, to be retried
BEAT = 0.5  # seconds between two heartbeats
GRACE = 2.0  # seconds for the main thread to end by itself after another process died
GRACE_AFTER_ERROR = 10.0  # the same after another process reported an error: this one may be about to fail, too
# in the errors of a collective
_COLLECTIVE = ("Gloo", "NCCL", "nccl", "UNAVAILABLE", "collective", "ProcessGroupError", "heartbeat")
_runs = itertools.count(1)  # equal in all processes; separates the keys of consecutive runs
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
        missing = [name for name, value in vars(self).items() if value is None]
        if 0 < len(missing) < len(vars(self)):
            raise JoinError(f"Set all of coordinator, processes and process, or none: missing {', '.join(missing)}.")
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


# dead processes


class ProcessFailedError(RuntimeError):
    """Another process of the job failed or died; the message names it."""


class ProcessLostError(ProcessFailedError):
    """Another process of the job died without an error of its own: started again, the run resumes."""


class Watchdog:
    """Detects dead and failed processes of a job during a run: `with Watchdog(process_group()) as watchdog: …`.

    A thread stores a heartbeat twice a second. The primary process reads all heartbeats and announces dead processes,
    so that a large job puts little load on the store. A failure of another process is raised in the main thread at the
    next event; a main thread that hangs in a collective with a dead process cannot raise, so the process ends after a
    grace period. It also ends after the error was raised: JAX would wait for the dead process at exit, and then end
    without an error message.
    """

    def __init__(self, group: ProcessGroup, *, heartbeat: float | None = None) -> None:
        self._group, self._timeout = group, heartbeat_timeout() if heartbeat is None else heartbeat
        self._run = next(_runs)
        self._where, self._beat, self._step = f"{socket.gethostname()}, pid {os.getpid()}", 0, 0
        self._heard: dict[int, tuple[Any, float]] = {}  # the last heartbeat of each other process, and when it came
        self._failure, self._since, self._grace = "", 0.0, GRACE
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="jax-trainer-watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        if self._group.is_multi_process:
            self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._is_over.set()
        if self._thread.is_alive() and not self._has_died:
            self._thread.join(2 * BEAT)

    def report_progress(self, step: int) -> None:
        """Records that this process is at `step`."""
        self._step = step

    def check(self) -> None:
        """Raises a `ProcessFailedError` if another process died or failed."""
        if self._failure:
            raise self._error()

    def failed(self, error: BaseException) -> BaseException:
        """The error to raise for `error`: itself, after notifying the others, or a `ProcessFailedError`.

        A collective fails when another process dies; it takes a moment until it is known which.
        """
        if not self._group.is_multi_process or isinstance(error, ProcessFailedError):
            return error
        if any(marker in f"{type(error).__name__}: {error}" for marker in _COLLECTIVE):
            deadline = time.monotonic() + self._timeout + 2 * BEAT
            while not self._failure and time.monotonic() < deadline:
                time.sleep(BEAT / 10)
            if self._failure:
                return self._error()
        text = f"{self._named(self._group.index, self._where)} failed: {type(error).__name__}: "
        try:
            self._announce(self._group.index, text + " ".join(str(error).split())[:500], GRACE_AFTER_ERROR)
        except jax.errors.JaxRuntimeError:
            LOG.warning("The other processes could not be notified: process 0 cannot be reached.")
            return error
        if self._group.is_primary:  # the store is in this process: the others need a moment to read it
            time.sleep(2 * BEAT)
        return error

    @property
    def _has_died(self) -> bool:
        """Whether another process died without reporting an error."""
        return bool(self._failure) and self._grace == GRACE

    def _error(self) -> ProcessFailedError:
        return ProcessLostError(self._failure) if self._has_died else ProcessFailedError(self._failure)

    def _watch(self) -> None:
        while not self._is_over.wait(BEAT):
            try:
                self._exchange(time.monotonic())
            except jax.errors.JaxRuntimeError as error:
                reason = str(error).partition("\n")[0]
                self._record_failure(f"Process 0 (primary) cannot be reached: {reason}", GRACE)
            if self._failure and time.monotonic() - self._since > self._grace:
                _end_process(LOST if self._has_died else 1)
                return
        if self._has_died:
            time.sleep(max(0.0, self._since + self._grace - time.monotonic()))
            _end_process(LOST)
        elif not self._failure:
            self._put_heartbeat(None)

    def _exchange(self, now: float) -> None:
        self._beat += 1
        self._put_heartbeat([self._beat, self._step, self._where])
        for name, value in self._group.get_all(f"alive/{self._run}").items() if self._group.is_primary else ():
            index, beat = int(name), json.loads(value)
            if beat is None:  # it has ended
                self._heard.pop(index, None)
            elif index != self._group.index and (index not in self._heard or self._heard[index][0] != beat):
                self._heard[index] = beat, now
        for index, ((_, step, where), last) in self._heard.items():
            if now - last > self._timeout:
                silence = f"has given no sign of life for {now - last:.0f} seconds: it was killed, or its machine"
                text = f"{self._named(index, where)} {silence} failed. Its last step was {step}."
                self._announce(index, text, GRACE)
                self._record_failure(text, GRACE)
        for name, value in self._group.get_all(f"failed/{self._run}").items():
            if int(name) != self._group.index:
                self._record_failure(**json.loads(value))

    def _put_heartbeat(self, beat: Any) -> None:
        self._group.put(f"alive/{self._run}/{self._group.index}", json.dumps(beat))

    def _announce(self, index: int, text: str, grace: float) -> None:
        self._group.put(f"failed/{self._run}/{index}", json.dumps({"text": text, "grace": grace}))

    def _record_failure(self, text: str, grace: float) -> None:
        if not self._failure:
            self._failure, self._since, self._grace = text, time.monotonic(), grace
            LOG.error("%s", text)  # immediately: JAX may end this process at any moment

    def _named(self, index: int, where: str) -> str:
        return f"Process {index} of {self._group.count} ({where})"


def _end_process(code: int) -> None:
    LOG.error("This process ends, too, because another one died or failed.")
    with suppress(OSError, ValueError, AttributeError):  # the streams may be closed
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
