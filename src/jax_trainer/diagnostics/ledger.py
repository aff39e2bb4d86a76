"""`TimeLedger`: where the time of a run goes. Every second is in exactly one phase, so the phases sum to all of it."""

import math
import os
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from jax import monitoring

IMPORT, SCRIPT, DATA, TRACE, COMPILE, INIT, RESTORE = "import", "script", "data", "trace", "compile", "init", "restore"
STEPS, WAITING, EVALUATION, SAVING = "steps", "waiting for data", "evaluation", "saving"
LOGGING, CLOSING, OTHER = "logging", "closing", "other"
_EARLY = (IMPORT, SCRIPT, DATA, TRACE, COMPILE, INIT)  # what may come before the call of a training
PHASES = (*_EARLY, RESTORE, STEPS, WAITING, EVALUATION, SAVING, LOGGING, CLOSING, OTHER)
CALLBACK = "callback "  # the prefix of the phase of a callback
_OF_JAX = {
    "/jax/core/compile/jaxpr_trace_duration": TRACE,
    "/jax/core/compile/jaxpr_to_mlir_module_duration": TRACE,
    "/jax/core/compile/backend_compile_duration": COMPILE,
}
_MOST_SPANS = 1000  # of JAX that may be inside a longer one which has not ended
Since = Literal["process", "import", "call"]


class TimeLedger:
    """The seconds of one thread by phase. Entering a phase pauses the one below it.

    Args:
        started: when the time begins, by `time.perf_counter`.
        since: what happened then: the start of the process, the import of this library, or the call of a training.
        phase: the phase in which the time begins, and to which it returns.
        seconds: of phases before now.
    """

    def __init__(
        self, started: float, since: Since, phase: str = OTHER, seconds: Mapping[str, float] | None = None
    ) -> None:
        self.started, self.since = started, since
        self.is_taken = False  # by a run
        self._outer: TimeLedger | None = None
        self._seconds = defaultdict(float, seconds or {})  # without those since the current phase was entered
        self._stack, self._entered = [phase], started + sum(self._seconds.values())
        self._guard = threading.RLock()  # another thread may read it at any time
        self._waited: Callable[[], float] = float
        self._spans: deque[tuple[float, float]] = deque(maxlen=_MOST_SPANS)
        self._ended: float | None = None

    def read(self) -> dict[str, float]:
        """Seconds by phase so far; they sum to the time since the start. Other threads may call it."""
        with self._guard:
            times = self._seconds.copy()
            times[self._stack[-1]] += max(0.0, (self._ended or time.perf_counter()) - self._entered)
        _move(times, STEPS, WAITING, self._waited())
        return dict(times)

    def enter(self, phase: str) -> int:
        """Starts `phase`; returns the depth that `leave` takes."""
        with self._guard:
            self._count()
            self._stack.append(phase)
            return len(self._stack) - 1

    def leave(self, depth: int) -> None:
        """Ends the phase that was entered at `depth`, and those above it: an abandoned generator ends late."""
        with self._guard:
            self._count()
            del self._stack[depth:]

    def move(self, phase: str, seconds: float) -> None:
        """Counts the last `seconds` of the current phase to `phase`."""
        if self._ended is None:
            self.rename(self._stack[-1], phase, seconds)

    def rename(self, phase: str, to: str, seconds: float = math.inf) -> None:
        """Counts all time of `phase` so far, or so many seconds of it, to another one."""
        with self._guard:
            self._count()
            _move(self._seconds, phase, to, seconds)

    def track_waiting(self, waited: Callable[[], float] = float) -> None:
        """Counts `waited()` seconds of the steps as waiting for data, from now on; without it, no more."""
        with self._guard:
            self.rename(STEPS, WAITING, self._waited())
            self._waited = waited

    def add_span(self, phase: str, seconds: float) -> None:
        """Counts a span of JAX that ends now, without the spans inside it, which were counted before."""
        started, inner = time.perf_counter() - seconds, 0.0
        while self._spans and self._spans[-1][0] + self._spans[-1][1] / 2 >= started:
            inner += self._spans.pop()[1]
        self._spans.append((started, seconds))
        self.move(phase, max(0.0, seconds - inner))

    def end(self) -> None:
        """Stops the time; that of the run around this one, if any, continues in this thread."""
        with self._guard:
            self._count()
            self._ended, self._stack = self._entered, [OTHER]
        if _current.ledger is self:
            _current.ledger = self._outer

    def _take(self, outer: "TimeLedger | None") -> None:
        with self._guard:
            self._count()
            self.is_taken, self._outer, self._stack = True, outer, [OTHER]
            for name in self._seconds.keys() - {*_EARLY}:  # of a loop that the script ran before
                self.rename(name, SCRIPT)

    def _count(self) -> None:
        """Counts the time since the current phase was entered."""
        if self._ended is None:
            now = time.perf_counter()
            self._seconds[self._stack[-1]] += now - self._entered
            self._entered = now


def _move(times: dict[str, float], phase: str, to: str, seconds: float) -> None:
    moved = min(seconds, times.get(phase, 0.0))
    if moved > 0:
        times[phase] -= moved
        times[to] += moved


class _OfThread(threading.local):
    ledger: TimeLedger | None = None  # of the run in this thread; threads without one count nothing


_current = _OfThread()


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Counts the time of its `with` block to this phase of the run in this thread."""
    ledger = _current.ledger
    if ledger is None:
        yield
        return
    depth = ledger.enter(name)
    try:
        yield
    finally:
        ledger.leave(depth)


def begin() -> TimeLedger:
    """The ledger of a run that starts with this call; `end` it.

    That of the first run in the main thread begins with the process. In an interactive session it begins with the call.
    """
    ledger = outer = _current.ledger
    if ledger is None or ledger.is_taken or hasattr(sys, "ps1") or "ipykernel" in sys.modules:
        ledger = _current.ledger = TimeLedger(time.perf_counter(), "call")
    ledger._take(outer if outer is not None and outer is not ledger and outer.is_taken else None)
    return ledger


def timed(name: str, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`function` with its time in the phase `name` of the run in this thread."""
    ledger = _current.ledger
    if ledger is None:
        return function

    def call(argument: Any) -> Any:
        depth = ledger.enter(name)
        try:
            return function(argument)
        finally:
            ledger.leave(depth)

    return call


def track_waiting(waited: Callable[[], float] = float) -> None:
    """Counts `waited()` seconds of the steps as waiting for data, from now on; without it, no more."""
    if _current.ledger is not None:
        _current.ledger.track_waiting(waited)


def open_ledger() -> TimeLedger:
    """The ledger of the run that a call in this thread has begun, or else of one that begins now."""
    ledger = _current.ledger
    return ledger if ledger is not None and ledger.is_taken else begin()


def imported(seconds: float | None = None) -> None:
    """Counts the last `seconds`, or all time of the script so far, as importing."""
    ledger = _current.ledger
    if ledger is not None and not ledger.is_taken:
        ledger.rename(SCRIPT, IMPORT) if seconds is None else ledger.move(IMPORT, seconds)


def _of_process() -> TimeLedger:
    now, stat = time.perf_counter(), Path("/proc/self/stat")
    if not (hasattr(time, "CLOCK_BOOTTIME") and stat.exists()):
        return TimeLedger(now, "import", SCRIPT)
    ticks = int(stat.read_text().rpartition(")")[2].split()[19])  # since the system was booted
    age = max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
    return TimeLedger(now - age, "process", SCRIPT, {IMPORT: age})


def _count_span(event: str, duration_secs: float, **_: Any) -> None:
    ledger, name = _current.ledger, _OF_JAX.get(event)
    if ledger is not None and name is not None:
        ledger.add_span(name, duration_secs)


if threading.current_thread() is threading.main_thread():
    _current.ledger = _of_process()
monitoring.register_event_duration_secs_listener(_count_span)
