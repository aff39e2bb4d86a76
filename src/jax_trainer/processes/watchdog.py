"""Processes that watch each other: one that is gone, failed or slow is named, and nobody waits for it for ever.

A thread leaves a sign of life twice a second. The lead's reads all of them, and tells who is gone, so that a large job
asks little of the store. What a process learns is raised in its main thread at the next event; a main thread that hangs
in a collective with a dead process cannot raise anything, so after a moment the whole process ends. It also ends when
the error was raised: JAX would wait for the dead process before Python may end, and then end without a word.
"""

import itertools
import json
import logging
import os
import socket
import statistics
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import jax

from jax_trainer.processes.group import ProcessGroup
from jax_trainer.processes.joining import heartbeat_timeout

BEAT = 0.5  # seconds between two signs of life
GRACE = 2.0  # seconds for the main thread to end by itself, once another process is gone
TIDY = 10.0  # the same once another process has failed and said so: this one may be about to fail, too
SLOW_SHARE = 0.5  # of the time of a step that is spent waiting for one process: worth a line
SLOW_STEPS, SLOW_SECONDS = 20, 2.0  # over which it is measured
_OVER = "over"
_runs = itertools.count(1)  # every process counts alike: what is said in one run does not concern the next
LOG = logging.getLogger("jax_trainer")


class ProcessFailedError(RuntimeError):
    """Another process of the job failed or is gone; the message names it."""


@dataclass
class Heartbeat:
    """A sign of life: how far a process is, and how long it kept the others waiting.

    Args:
        where: host and process id, for people.
        beat: counts the signs.
        step: the last step that was dispatched.
        idle: seconds, so far, for which its devices had nothing to do: it was busy with data, callbacks or Python.
    """

    where: str = field(default_factory=lambda: f"{socket.gethostname()}, pid {os.getpid()}")
    beat: int = 0
    step: int = 0
    idle: float = 0.0


class Watchdog:
    """Watches the other processes of a job while a run lasts: `with Watch(peers()) as watch: …`."""

    def __init__(self, us: ProcessGroup, *, heartbeat: float | None = None) -> None:
        self._us, self._heartbeat = us, heartbeat_timeout() if heartbeat is None else heartbeat
        self._run = next(_runs)
        self._mine, self._others = Heartbeat(), dict[int, Heartbeat]()
        self._heard: dict[int, float] = {}  # when each of the others last gave a sign
        self._trouble, self._since = "", 0.0
        self._patience = GRACE
        self._pace = _Pace()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="jax-trainer-peers", daemon=True)

    def __enter__(self) -> "Watchdog":
        if self._us.is_multi_process:
            self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._is_over.set()
        if self._thread.is_alive() and not self._is_gone:
            self._thread.join(2 * BEAT)

    def report_progress(self, step: int, idle: float) -> None:
        """This process is at `step`, and has kept devices waiting for so many seconds so far."""
        self._mine.step, self._mine.idle = step, idle

    def check(self) -> None:
        """Raises a `ProcessFailedError` if another process is gone or has failed."""
        if self._trouble:
            raise ProcessFailedError(self._trouble)

    def failed(self, error: BaseException) -> BaseException:
        """What to raise for `error` in this process: itself, after the others were told; or who is to blame for it.

        A collective fails when another process is gone: it takes a moment until it is known which.
        """
        if not self._us.is_multi_process or isinstance(error, ProcessFailedError):
            return error
        if _is_of_a_collective(error):
            self._wait_for_trouble()
            if self._trouble:
                return ProcessFailedError(self._trouble)
        self._tell_failure(error)
        return error

    def _wait_for_trouble(self) -> None:
        deadline = time.monotonic() + self._heartbeat + 2 * BEAT
        while not self._trouble and time.monotonic() < deadline:
            time.sleep(BEAT / 10)

    def _tell_failure(self, error: BaseException) -> None:
        text = " ".join(str(error).split())[:500]
        try:
            named = self._named(self._us.index, self._mine.where)
            self._tell(self._us.index, f"{named} failed: {type(error).__name__}: {text}", TIDY)
        except jax.errors.JaxRuntimeError:
            LOG.warning("The other processes could not be told: the first one cannot be reached.")
            return
        if self._us.is_primary:  # the words are kept here: the others need a moment to read them
            time.sleep(2 * BEAT)

    def _watch(self) -> None:
        while not self._is_over.wait(BEAT):
            try:
                self._exchange()
            except jax.errors.JaxRuntimeError as error:
                self._found(f"Process 0, which leads, cannot be reached: {str(error).partition(chr(10))[0]}", GRACE)
            if self._trouble and time.monotonic() - self._since > self._patience:
                _end_process()
                return
        if self._is_gone:
            time.sleep(max(0.0, self._since + self._patience - time.monotonic()))
            _end_process()
        elif not self._trouble:
            self._us.put(f"alive/{self._run}/{self._us.index}", json.dumps(_OVER))

    def _exchange(self) -> None:
        self._mine.beat += 1
        self._us.put(f"alive/{self._run}/{self._us.index}", json.dumps(vars(self._mine)))
        if self._us.is_primary:
            self._look_after_all(time.monotonic())
        for name, word in self._us.notes(f"failed/{self._run}").items():
            if int(name) != self._us.index:
                self._found(**json.loads(word))

    def _look_after_all(self, now: float) -> None:
        for name, word in self._us.notes(f"alive/{self._run}").items():
            self._hear(int(name), json.loads(word), now)
        for index, heard in self._heard.items():
            if now - heard > self._heartbeat:
                sign = self._others[index]
                silence = f"has given no sign of life for {now - heard:.0f} seconds: it was killed, or its machine is"
                text = f"{self._named(index, sign.where)} {silence} gone. Its last step was {sign.step}."
                self._tell(index, text, GRACE)
                self._found(text, GRACE)
        self._pace.look({self._us.index: self._mine, **self._others}, now)

    def _tell(self, index: int, text: str, patience: float) -> None:
        self._us.put(f"failed/{self._run}/{index}", json.dumps({"text": text, "patience": patience}))

    @property
    def _is_gone(self) -> bool:
        """Whether another process is, without a word."""
        return bool(self._trouble) and self._patience == GRACE

    def _hear(self, index: int, said: Any, now: float) -> None:
        if index == self._us.index:
            return
        if said == _OVER:
            self._heard.pop(index, None)
            return
        sign = Heartbeat(**said)
        if index not in self._others or self._others[index].beat != sign.beat:
            self._others[index], self._heard[index] = sign, now

    def _found(self, text: str, patience: float) -> None:
        if not self._trouble:
            self._trouble, self._since, self._patience = text, time.monotonic(), patience
            LOG.error("%s", text)  # at once: JAX may end this process any moment

    def _named(self, index: int, where: str) -> str:
        return f"Process {index} of {self._us.count} ({where})"


class _Pace:
    """Names a process that all the others wait for."""

    def __init__(self) -> None:
        self._before: dict[int, tuple[int, float]] = {}
        self._at = 0.0
        self._told: set[int] = set()

    def look(self, signs: dict[int, Heartbeat], now: float) -> None:
        """Compares what every process took by itself since the last look, once enough was done."""
        steps = min(sign.step - self._before.get(index, (sign.step, 0.0))[0] for index, sign in signs.items())
        if self._before.keys() == signs.keys() and (steps < SLOW_STEPS or now - self._at < SLOW_SECONDS):
            return
        if self._before.keys() == signs.keys():
            idle = {index: (sign.idle - self._before[index][1]) / steps for index, sign in signs.items()}
            self._compare(idle, (now - self._at) / steps, signs)
        self._before = {index: (sign.step, sign.idle) for index, sign in signs.items()}
        self._at = now

    def _compare(self, idle: dict[int, float], whole: float, signs: dict[int, Heartbeat]) -> None:
        slowest = max(idle, key=idle.__getitem__)
        others = statistics.median(time for index, time in idle.items() if index != slowest)
        if slowest in self._told or idle[slowest] - others < SLOW_SHARE * whole:
            return
        self._told.add(slowest)
        LOG.warning(
            f"Process {slowest} of {len(idle)} ({signs[slowest].where}) is slow, and all others wait for it: its "
            f"devices have nothing to do for {1000 * idle[slowest]:.0f} ms per step, those of the others for "
            f"{1000 * others:.1f} ms. Look at its data, its callbacks and its machine."
        )


def _is_of_a_collective(error: BaseException) -> bool:
    text = f"{type(error).__name__}: {error}"
    return any(
        word in text for word in ("Gloo", "NCCL", "nccl", "UNAVAILABLE", "collective", "ProcessGroupError", "heartbeat")
    )


def _end_process() -> None:
    LOG.error("This process ends, too, because another one is gone or has failed.")
    with suppress(OSError, ValueError, AttributeError):  # nobody may be reading any more
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(1)
