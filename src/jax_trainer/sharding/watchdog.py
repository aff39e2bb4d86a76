"""Detects dead and failed processes of a job, so that no process waits for them forever.

A thread stores a heartbeat twice a second. The primary process reads all heartbeats and announces dead processes, so
that a large job puts little load on the store. A failure of another process is raised in the main thread at the next
event; a main thread that hangs in a collective with a dead process cannot raise, so the process ends after a grace
period. It also ends after the error was raised: JAX would wait for the dead process at exit, and then end without an
error message.
"""

import itertools
import json
import logging
import os
import socket
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import jax

from jax_trainer.sharding.group import ProcessGroup, heartbeat_timeout

LOST = 75  # exit code after another process died: a temporary failure, to be retried
BEAT = 0.5  # seconds between two heartbeats
GRACE = 2.0  # seconds for the main thread to end by itself after another process died
GRACE_AFTER_ERROR = 10.0  # the same after another process reported an error: this one may be about to fail, too
_FINISHED = "finished"
# in the errors of a collective
_COLLECTIVE = ("Gloo", "NCCL", "nccl", "UNAVAILABLE", "collective", "ProcessGroupError", "heartbeat")
_runs = itertools.count(1)  # equal in all processes; separates the keys of consecutive runs
LOG = logging.getLogger("jax_trainer")


class ProcessFailedError(RuntimeError):
    """Another process of the job failed or died; the message names it."""


class ProcessLostError(ProcessFailedError):
    """Another process of the job died without an error of its own: started again, the run resumes."""


@dataclass
class Heartbeat:
    """A heartbeat with the progress of a process.

    Args:
        where: host and process id, for messages.
        beat: number of the heartbeat.
        step: last dispatched step.
    """

    where: str = field(default_factory=lambda: f"{socket.gethostname()}, pid {os.getpid()}")
    beat: int = 0
    step: int = 0


class Watchdog:
    """Monitors the other processes of a job during a run: `with Watchdog(process_group()) as watchdog: …`."""

    def __init__(self, group: ProcessGroup, *, heartbeat: float | None = None) -> None:
        self._group, self._heartbeat = group, heartbeat_timeout() if heartbeat is None else heartbeat
        self._run = next(_runs)
        self._mine, self._others = Heartbeat(), dict[int, Heartbeat]()
        self._last_beat: dict[int, float] = {}  # time of the last heartbeat of each other process
        self._failure, self._since = "", 0.0
        self._grace = GRACE
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
        self._mine.step = step

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
            deadline = time.monotonic() + self._heartbeat + 2 * BEAT
            while not self._failure and time.monotonic() < deadline:
                time.sleep(BEAT / 10)
            if self._failure:
                return self._error()
        self._announce_own_failure(error)
        return error

    def _error(self) -> ProcessFailedError:
        return ProcessLostError(self._failure) if self._has_died else ProcessFailedError(self._failure)

    def _announce_own_failure(self, error: BaseException) -> None:
        text = " ".join(str(error).split())[:500]
        try:
            text = f"{self._named(self._group.index, self._mine.where)} failed: {type(error).__name__}: {text}"
            self._announce(self._group.index, text, GRACE_AFTER_ERROR)
        except jax.errors.JaxRuntimeError:
            LOG.warning("The other processes could not be notified: process 0 cannot be reached.")
            return
        if self._group.is_primary:  # the store is in this process: the others need a moment to read it
            time.sleep(2 * BEAT)

    def _watch(self) -> None:
        while not self._is_over.wait(BEAT):
            try:
                self._exchange()
            except jax.errors.JaxRuntimeError as error:
                self._record_failure(
                    f"Process 0 (primary) cannot be reached: {str(error).partition(chr(10))[0]}", GRACE
                )
            if self._failure and time.monotonic() - self._since > self._grace:
                _end_process(LOST if self._has_died else 1)
                return
        if self._has_died:
            time.sleep(max(0.0, self._since + self._grace - time.monotonic()))
            _end_process(LOST)
        elif not self._failure:
            self._group.put(f"alive/{self._run}/{self._group.index}", json.dumps(_FINISHED))

    def _exchange(self) -> None:
        self._mine.beat += 1
        self._group.put(f"alive/{self._run}/{self._group.index}", json.dumps(vars(self._mine)))
        if self._group.is_primary:
            self._check_heartbeats(time.monotonic())
        for name, value in self._group.get_all(f"failed/{self._run}").items():
            if int(name) != self._group.index:
                self._record_failure(**json.loads(value))

    def _check_heartbeats(self, now: float) -> None:
        for name, value in self._group.get_all(f"alive/{self._run}").items():
            self._receive(int(name), json.loads(value), now)
        for index, last in self._last_beat.items():
            if now - last > self._heartbeat:
                beat = self._others[index]
                silence = f"has given no sign of life for {now - last:.0f} seconds: it was killed, or its machine"
                text = f"{self._named(index, beat.where)} {silence} failed. Its last step was {beat.step}."
                self._announce(index, text, GRACE)
                self._record_failure(text, GRACE)

    def _announce(self, index: int, text: str, grace: float) -> None:
        self._group.put(f"failed/{self._run}/{index}", json.dumps({"text": text, "grace": grace}))

    @property
    def _has_died(self) -> bool:
        """Whether another process died without reporting an error."""
        return bool(self._failure) and self._grace == GRACE

    def _receive(self, index: int, value: Any, now: float) -> None:
        if index == self._group.index:
            return
        if value == _FINISHED:
            self._last_beat.pop(index, None)
            return
        beat = Heartbeat(**value)
        if index not in self._others or self._others[index].beat != beat.beat:
            self._others[index], self._last_beat[index] = beat, now

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
