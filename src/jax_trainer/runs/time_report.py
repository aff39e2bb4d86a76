"""`time.jsonl` of a run folder: where the time of every start of the run went, and what it means.

A row has the seconds by phase so far. It is written by a thread, also while the run compiles or waits: a run that is
killed loses at most `ROW_SECONDS`, or `ROW_SHARE` of the time of this start if that is more.
"""

import json
import logging
import math
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from jax_trainer.config.settings import AtLeast, checked
from jax_trainer.diagnostics.files import LineFile
from jax_trainer.diagnostics.ledger import (
    CALLBACK,
    COMPILE,
    EVALUATION,
    IMPORT,
    INIT,
    LOGGING,
    PHASES,
    SAVING,
    SCRIPT,
    STEPS,
    TRACE,
    WAITING,
    TimeLedger,
)

TIMES = "time.jsonl"
ROW_SECONDS, ROW_SHARE = 0.5, 0.005  # a row is written so often, in seconds and as a share of the time so far
RUNNING, KILLED = "running", "killed"
_MOST_BYTES = 1 << 26  # of the file
_LONGEST = 100  # characters of a name
_Seconds = Annotated[float, AtLeast(0)] | Annotated[int, AtLeast(0)]
_Step = Annotated[int, AtLeast(0)] | None
_ROW = {
    "start": Annotated[int, AtLeast(1)],
    "since": str,
    "status": str,
    "from": _Step,
    "step": _Step,
    "wall": _Seconds,
    "seconds": dict[str, _Seconds],
}
LOG = logging.getLogger("jax_trainer")


# what a run is bound by if a share of its time is at least the number: its kind, what that was, and what to change
_BY_PHASES = {
    (WAITING,): (0.1, "input-bound", "spent waiting for data", "use more workers, cheaper transforms, `resident=True`"),
    (TRACE, COMPILE): (
        0.3,
        "compile-bound",
        "spent on tracing and compiling",
        "keep the cache and the shapes of batches",
    ),
    (IMPORT, INIT): (0.3, "start-bound", "spent on imports and initialisation", "train longer per start"),
    (SCRIPT,): (0.3, "script-bound", "spent in your script before the call", "look there first"),
    (SAVING,): (0.1, "save-bound", "spent on saving", "save less often"),
    (EVALUATION,): (0.3, "evaluation-bound", "spent on evaluation", "evaluate less often, or on fewer batches"),
    (LOGGING,): (0.1, "logging-bound", "spent on logging", "log less often"),
}
_OF_CALLBACKS = (0.1, "callback-bound", "spent in {}", "call it less often, or make it cheaper")
_OF_RESTARTS = (0.1, "restart-bound", "repeated, because no checkpoint had it", "save more often")


class TimeRecord:
    """Appends the times of one start of a run to `time.jsonl`.

    Args:
        file: the file; None: nothing is written.
        ledger: the times of this start.
    """

    def __init__(self, file: Path | None, ledger: TimeLedger) -> None:
        self.file, self.ledger = None if file is None else LineFile(file), ledger
        self._from: int | None = None  # the step from which this start continued; None: it did not come that far
        self._step: Callable[[], int | None] = lambda: None
        self._number, self._status, self._is_over = 1, RUNNING, threading.Event()
        self._thread = threading.Thread(target=self._write_rows, name="jax-trainer-time", daemon=True)

    def open(self) -> None:
        """Numbers this start, and writes rows from now on."""
        if self.file is None:
            return
        try:
            self._number = 1 + max((start.number for start in _starts_in(self.file)), default=0)
        except (OSError, ValueError) as problem:
            self._give_up(problem)
        self._append()
        self._thread.start()

    def follow(self, step: Callable[[], int]) -> None:
        """Sets what returns the current step, which is the first one now."""
        self._from, self._step = step(), step

    def close(self, status: str) -> None:
        """Ends the time and the thread, and writes the last row."""
        last, self._status = self._step(), status
        self._step = lambda: last
        self._is_over.set()
        if self._thread.ident is not None:
            self._thread.join()
        self.ledger.end()
        self._append()

    @property
    def report(self) -> "TimeReport":
        """The times of all starts so far."""
        if self.file is not None:
            return TimeReport.of(self.file.path)
        return TimeReport(tuple(_starts({1: [self._row()]})))

    def _write_rows(self) -> None:
        while not self._is_over.wait(max(ROW_SECONDS, ROW_SHARE * sum(self.ledger.read().values()))):
            self._append()

    def _row(self) -> dict[str, Any]:
        seconds = {name: round(value, 6) for name, value in self.ledger.read().items()}
        row = {"start": self._number, "since": self.ledger.since, "status": self._status, "from": self._from}
        return {**row, "step": self._step(), "wall": sum(seconds.values()), "seconds": seconds}

    def _append(self) -> None:
        if self.file is None:
            return
        try:
            self.file.append([json.dumps(self._row()).encode() + b"\n"], sync=False)
        except (OSError, ValueError) as problem:  # a full disk must not end a training
            self._give_up(problem)

    def _give_up(self, problem: Exception) -> None:
        LOG.warning(f"{self.file and self.file.path} is not written, and the run continues without it: {problem}")
        self.file = None


@dataclass(frozen=True)
class StartTime:
    """The time of one start of a run, in seconds.

    Attributes:
        number: from 1.
        since: what the time begins with: the "process", the "import" of this library, or the "call" of the training.
        status: "completed", "stopped", "interrupted", "failed" or "running"; "killed" if no row says how it ended.
        from_step: the step from which it continued; None if it did not come that far.
        step: its last step.
        wall: all of its time; the sum of `seconds`.
        seconds: by phase.
        repeated: those after the step from which the next start continued.
    """

    number: int
    since: str
    status: str
    from_step: int | None
    step: int | None
    wall: float
    seconds: Mapping[str, float]
    repeated: float = 0.0


@dataclass(frozen=True)
class TimeReport:
    """Where the time of a run went, over all of its starts; `starts` has each of them."""

    starts: tuple[StartTime, ...]

    @classmethod
    def of(cls, file: Path) -> "TimeReport":
        """The report of a `time.jsonl`. An incomplete last line, of a process that was killed, is ignored.

        Raises a `FileNotFoundError` if there is no regular file, and a `ValueError` if it is damaged.
        """
        if file.is_symlink() or not file.is_file():
            raise FileNotFoundError(f"{file} does not exist, or is not a regular file.")
        return cls(tuple(_starts_in(LineFile(file))))

    @property
    def wall(self) -> float:
        """Seconds of all processes, without the time between them."""
        return sum(start.wall for start in self.starts)

    @property
    def repeated(self) -> float:
        """Seconds of steps that were done again, because no checkpoint had them."""
        return sum(start.repeated for start in self.starts)

    @cached_property
    def seconds(self) -> dict[str, float]:
        """Seconds by phase, in the order of a run."""
        names = dict.fromkeys(name for start in self.starts for name in start.seconds)
        last = PHASES.index(LOGGING)
        ordered = (*PHASES[:last], *(name for name in names if name not in PHASES), *PHASES[last:])
        return {name: sum(start.seconds.get(name, 0.0) for start in self.starts) for name in ordered if name in names}

    def share(self, *names: str) -> float:
        """The share of these phases in all of the time."""
        return sum(self.seconds.get(name, 0.0) for name in names) / self.wall if self.wall else 0.0

    @property
    def advice(self) -> str:
        """What took the most time, and what to change."""
        callback = max((name for name in self.seconds if name.startswith(CALLBACK)), key=self.share, default="")
        found = [(self.share(*names), *finding) for names, finding in _BY_PHASES.items()]
        found += [(self.share(callback), *_OF_CALLBACKS), (self.repeated / max(self.wall, 1e-9), *_OF_RESTARTS)]
        steps = (self.share(STEPS), 0.0, "compute-bound", "spent on training steps", "nothing to change")
        share, _, kind, what, change = max((one for one in found if one[0] >= one[1]), default=steps)
        return f"{kind}: {share:.0%} of the time was {what.format(callback)}: {change}."

    @property
    def line(self) -> str:
        """The report in one line: the time, the largest phases, and the kind of run."""
        most = sorted(self.seconds, key=self.share, reverse=True)[:4]
        phases = ", ".join(f"{name} {self.share(name):.0%}" for name in most if self.share(name) >= 0.01)
        starts = f" in {len(self.starts)} starts" if len(self.starts) > 1 else ""
        return f"{self.wall:.1f} s{starts}: {phases} ({self.advice.partition(':')[0]})"

    def data(self) -> dict[str, Any]:
        """The report as JSON-serializable data."""
        names = {"number": "start", "from_step": "from"}
        starts = [{names.get(name, name): value for name, value in vars(one).items()} for one in self.starts]
        total = {"wall": self.wall, "repeated": self.repeated, "seconds": self.seconds}
        return {**total, "advice": self.advice, "starts": starts}


def _starts_in(file: LineFile) -> list[StartTime]:
    by_start: dict[int, list[dict[str, Any]]] = {}
    for number, line in enumerate(file.read(_MOST_BYTES), start=1):
        row = _checked_row(line, f"{file.path}, line {number}")
        by_start.setdefault(row["start"], []).append(row)
    return _starts(by_start)


def _starts(by_start: Mapping[int, list[dict[str, Any]]]) -> list[StartTime]:
    starts: list[StartTime] = []
    for number in sorted(by_start, reverse=True):
        rows = by_start[number]
        last, next_from = rows[-1], starts[-1].from_step if starts else None
        status = KILLED if last["status"] == RUNNING and starts else last["status"]
        times = last["since"], status, last["from"], last["step"], last["wall"], last["seconds"]
        starts.append(StartTime(number, *times, _repeated(rows, next_from)))
    return starts[::-1]


def _checked_row(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = checked(json.loads(line), _ROW)
        if not all(math.isfinite(value) for value in (row["wall"], *row["seconds"].values())):
            raise ValueError("a number is not finite")
        if long := [name for name in row["seconds"] if len(name) > _LONGEST]:
            raise ValueError(f"the name {long[0]!r:.40}… is too long")
    except (ValueError, RecursionError) as problem:
        raise ValueError(f"{where} is damaged: {problem}. Delete the file: training does not need it.") from None
    return row


def _repeated(rows: list[dict[str, Any]], next_from: int | None) -> float:
    """The seconds of a start after step `next_from`, by interpolation between rows."""
    if next_from is None:
        return 0.0
    steps, walls = [0, *((row["step"] or 0) for row in rows)], [0.0, *(row["wall"] for row in rows)]
    return walls[-1] - float(np.interp(next_from, steps, walls))
