"""Metric writers, logging tools, and the thread of a tool: training never waits for it; failures cost a warning."""

import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import numpy as np
from compoconf import RegistrableConfigInterface, register_interface

from jax_trainer.diagnostics.worker import QueueThread
from jax_trainer.logger.run_log import LOG
from jax_trainer.logger.values import png_of

MOST_ENTRIES = 10_000  # in the queue of a tool
MOST_BYTES = 256 * 2**20  # of images and arrays in the queue
FAILURES_IN_A_ROW = 10  # after which a tool is disabled
LINGER_SECONDS = 0.1  # for which a tool waits for more entries before it writes: each time it runs, training waits
_LONGEST = 300  # characters of an error in a message

Entry = Callable[[Any], None]


class MetricWriter(Protocol):
    """Writes metrics by name."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Writes `values` at `step`."""
        ...

    def close(self, status: str) -> None:
        """Closes the writer; `status` is how the run ended."""
        ...


@runtime_checkable
class EditWriter(Protocol):
    """A writer that also records edits of the training state."""

    def write_edit(self, step: int, edit: Mapping[str, Any]) -> None:
        """Writes who changed what at `step`, and why: plain data with the `epoch`."""
        ...


@register_interface
class ToolLoggerInterface(RegistrableConfigInterface):
    """A `MetricWriter` for a logging tool, created from its configuration and the run folder.

    `step` is the position on the x-axis, which all curves share. A tool must have
    `write`; the other methods do nothing by default. All methods are called in one background thread. An error of a
    tool costs one warning and the entry.

    Attributes:
        whole_steps: whether positions are rounded to integers, which matters for seconds.
        axis: the x-axis: step, epoch, examples, tokens or seconds.
    """

    config: Any
    whole_steps: ClassVar[bool] = True
    axis: str = "step"

    def __init__(self, config: Any, folder: Path) -> None:
        self.config, self.folder = config, folder

    @classmethod
    def require(cls) -> None:
        """Raises `ImportError` if a package is missing; called before training, in the main thread."""

    def resume_at(self, step: int) -> int | None:
        """Drops what was logged at `step` or later: the run resumes from a checkpoint of this step.

        Returns from which step on the logger writes the rows of `metrics.jsonl` again: `step`, or 0 if the tool has
        dropped everything. None: the tool cannot drop anything, and what is trained again appears twice.
        """

    def check_exists(self, path: Path) -> None:
        """Raises an error if the file of the tool was deleted: writes would still succeed, and be lost."""
        if not path.exists():
            raise FileNotFoundError(f"{path} was deleted while the run wrote to it.")

    def take(self, step: int, at: float, kind: str, *args: Any) -> None:
        """Calls the method `kind` with the position of an entry on the x-axis."""
        getattr(self, kind)(step if kind == "write_edit" else self.rounded(at), *args)

    def rounded(self, position: float) -> Any:
        """A position as this tool takes it."""
        return round(position) if self.whole_steps else position

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Logs a row of metrics at `step`; it may contain the epoch as "epoch"."""
        raise NotImplementedError(f"{type(self).__name__} must implement `write(step, values)`.")

    def image(self, step: int, name: str, pixels: np.ndarray) -> None:
        """Logs an image: uint8 [height, width, 1, 3 or 4 channels]; as a figure, if this is not overridden."""
        self.figure(step, name, png_of(pixels))

    def figure(self, step: int, name: str, png: bytes) -> None:
        """Logs a figure, rendered as a PNG file."""

    def histogram(self, step: int, name: str, values: np.ndarray) -> None:
        """Logs a histogram of `values`, which may have any shape."""

    def text(self, step: int, name: str, text: str) -> None:
        """Logs a text."""

    def hparams(self, step: int, params: Mapping[str, Any], metrics: Mapping[str, float]) -> None:
        """Logs hyperparameters by dotted name, and final metrics."""

    def write_edit(self, step: int, edit: Mapping[str, Any]) -> None:
        """Logs an edit of the training state: who changed what and why, with the epoch."""

    def flush(self) -> None:
        """Writes buffered entries."""

    def close(self, status: str) -> None:
        """Closes the tool; `status` is how the run ended."""


# in a thread


class DroppedRecords:
    """Counts dropped entries, and logs a warning for the first one.

    Args:
        name: the tool that dropped them.
        consequence: the end of the warning, after "Training continues".
    """

    def __init__(self, name: str, consequence: str) -> None:
        self.name, self.count = name, 0
        self._consequence = consequence
        self._has_warned = False
        self._lock = threading.Lock()

    def add(self, what: str, entries: int = 1) -> None:
        """Counts `entries`; `what` is the reason."""
        with self._lock:
            self.count += entries
            is_first, self._has_warned = not self._has_warned, True
        if is_first:
            LOG.warning(f"{self.name} {what.rstrip('.')}. Training continues; {self._consequence}.")

    def add_failure(self, failure: BaseException, what: str = "failed", entries: int = 1) -> None:
        """Counts entries that an error dropped."""
        text = " ".join(str(failure).split())
        text = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
        self.add(f"{what}: {type(failure).__name__}: {text}", entries)


class _Queued(NamedTuple):
    """A queue item: what to call, its approximate bytes, and the number of entries."""

    entry: Entry
    size: int
    entries: int


class BackgroundWriter(QueueThread):
    """Creates a tool in a background thread and calls it there with entries, in order.

    The thread starts with the first entry or by `start`: a run that fails before, because it cannot be resumed, leaves
    nothing in any tool. It writes entries together, a tenth of a second after the first, or as soon as a caller waits.

    If the queue is full, new entries are dropped. Dropped and failing entries, and failures to start or to close, are
    counted.

    Args:
        dropped: counts dropped entries, and has the tool's name.
        make: creates the tool, in the thread.
        check: called immediately; if it raises, the tool is disabled.
        most_entries: capacity of the queue.
        patience: seconds to wait for space in the queue before an entry is dropped. After a timeout, there is no
            further wait until the tool has made progress.
    """

    def __init__(
        self,
        dropped: DroppedRecords,
        make: Callable[[], ToolLoggerInterface],
        *,
        check: Callable[[], None] = lambda: None,
        most_entries: int = MOST_ENTRIES,
        patience: float = 0.0,
    ) -> None:
        super().__init__(f"jax-trainer log {dropped.name}")
        self.dropped = dropped
        self._make, self._most_entries, self._patience = make, most_entries, patience
        self._queued_bytes = 0
        self._submitted = self._done = 0  # items, flushes included
        self._stuck_at = -1  # the value of `_done` at the last timeout
        self._status: str | None = None  # how the run ended
        self._failures = 0  # in a row
        self._is_idle = False  # whether the thread waits for an entry
        self._is_disabled = self._is_abandoned = False
        self._tool: Any = None  # once it is created
        try:
            check()
        except Exception as failure:
            self._is_disabled = True
            dropped.add_failure(failure)

    def start(self) -> None:
        """Creates the tool now; a second call does nothing."""
        if self._thread is None and not self._is_disabled:
            self._start_thread()

    def submit(self, entry: Entry, size: int = 0) -> None:
        """Queues an entry of about `size` bytes. After `finish` it is ignored."""
        with self._changed:
            if self._status is not None:
                return
            has_space = lambda: self._has_space_for(size)
            if self._patience and self._stuck_at != self._done and not has_space():
                self._stuck_at = -1 if self._await(has_space, self._patience) else self._done
            if is_queued := has_space() and not self._is_disabled:
                self._append(_Queued(entry, size, 1))
        if not is_queued:
            self.dropped.add(f"is slow or blocks: its queue of {self._most_entries} entries is full: new ones are lost")

    def flush(self, deadline: float) -> bool:
        """Waits until all queued entries are written, or `deadline` of the monotonic clock; returns whether they are.

        After a timeout, there is no further wait until the tool has made progress.
        """
        with self._changed:
            if self.is_busy and not self._is_disabled and self._stuck_at != self._done:
                self._append(_Queued(lambda tool: tool.flush(), 0, 0))
                target = self._submitted
                is_written = self._await(lambda: self._done >= target, _seconds_until(deadline))
                self._stuck_at = -1 if is_written else self._done
            return self._done == self._submitted and not self.dropped.count

    def ask(self, question: Callable[[Any], Any]) -> Callable[[float], Any]:
        """Queues a call of `question` with the tool, after all entries so far.

        Returns a function for the result, which waits at most the given seconds, in any thread. None: the tool failed
        or timed out.
        """
        answers: list[Any] = []
        with self._changed:
            if self._status is None and not self._is_disabled:
                self._append(_Queued(lambda tool: answers.append(question(tool)), 0, 0))
            number = self._submitted

        def answer(seconds: float) -> Any:
            with self._changed:
                self._await(lambda: self._done >= number, seconds)
                return answers[0] if answers else None

        return answer

    def wait_for_start(self, deadline: float) -> None:
        """Waits until `deadline` of the monotonic clock for a tool that is still starting; after a second, says so."""
        is_started = lambda: self._tool is not None or self._is_disabled or not self.is_busy
        with self._changed:
            if not self._await(is_started, min(1.0, _seconds_until(deadline))) and (left := _seconds_until(deadline)):
                LOG.info(f"Waiting for {self.dropped.name}, which is still starting; {left:.0f} s at most.")
                self._await(is_started, left)

    def finish(self, status: str) -> None:
        """Closes the tool once its queue is written. Does not wait for that."""
        with self._changed:
            self._status = status
            self._changed.notify_all()

    def join(self, deadline: float) -> None:
        """Waits until `deadline` for the thread to end. A tool that still blocks then is abandoned."""
        if self._thread is None:  # never started
            return
        self._thread.join(_seconds_until(deadline))
        with self._changed:
            self._is_abandoned = self._thread.is_alive()
            left = self._emptied()
        if self._is_abandoned:
            self.dropped.add("blocks, and the run no longer waits for it", max(left, 1))

    def _has_space_for(self, size: int) -> bool:
        fits = self._queued_bytes + size <= MOST_BYTES or not self._queue
        return (fits and len(self._queue) < self._most_entries) or self._is_disabled

    def _append(self, one: _Queued) -> None:
        self.start()
        self._queue.append(one)
        self._queued_bytes += one.size
        self._submitted += 1
        if self._is_idle or self._must_write_now():
            self._changed.notify_all()

    def _must_write_now(self) -> bool:
        is_half_full = 2 * len(self._queue) > self._most_entries or 2 * self._queued_bytes > MOST_BYTES
        return self._waiters > 0 or self._status is not None or is_half_full

    def _emptied(self) -> int:
        """Empties the queue; returns how many entries will never be written."""
        lost = [*self._queue, *([] if self._current is None else [self._current])]
        self._queue, self._current, self._queued_bytes = [], None, 0
        return sum(one.entries for one in lost)

    # in the thread

    def _work(self) -> None:
        if self._succeeds(self._create):
            super()._work()
        with self._changed:
            left = self._emptied()
            self._done = self._submitted
            self._is_disabled = True  # later entries are dropped
            self._changed.notify_all()
        if left:
            self.dropped.add("was disabled", left)
        if self._tool is not None:
            self._succeeds(lambda: self._tool.close(self._status or "failed"))

    def _create(self) -> None:
        self._tool = self._make()

    def _next(self) -> _Queued | None:
        if self._failures >= FAILURES_IN_A_ROW:
            return None
        if not self._queue:
            self._is_idle = True
            self._changed.wait_for(lambda: self._queue or self._status is not None)
            self._is_idle = False
            self._changed.wait_for(self._must_write_now, LINGER_SECONDS)
        if not self._queue:
            return None
        one = self._queue.pop(0)
        self._queued_bytes -= one.size
        return one

    def _run(self, job: _Queued) -> None:
        self._failures = 0 if self._succeeds(lambda: job.entry(self._tool)) else self._failures + 1
        with self._changed:
            self._done += 1

    def _succeeds(self, call: Callable[[], Any]) -> bool:
        """Calls the tool; an error is counted."""
        try:
            call()
        except BaseException as failure:
            if not self._is_abandoned:  # then all entries are counted, and run.log is closed
                self.dropped.add_failure(failure, entries=getattr(failure, "entries", 1))
            return False
        return True


def _seconds_until(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())
