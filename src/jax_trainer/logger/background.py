"""A tool in a thread of its own: training never waits for it, and whatever it does costs a warning and a count."""

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from jax_trainer.logger.run_log import LOG
from jax_trainer.logger.writers import ToolLoggerInterface

MOST_ENTRIES = 10_000  # that wait for a tool
MOST_BYTES = 256 * 2**20  # of images and the like among them
FAILURES_IN_A_ROW = 10  # after so many, a tool is given up on
_LONGEST = 300  # characters of an error that a message repeats

Entry = Callable[[ToolLoggerInterface], None]


class DroppedRecords:
    """Counts what was lost, and tells of the first loss.

    Args:
        name: whose losses they are.
        consolation: what the message says after "training goes on".
    """

    def __init__(self, name: str, consolation: str) -> None:
        self.name, self.count = name, 0
        self._consolation = consolation
        self._is_told = False
        self._lock = threading.Lock()

    def add(self, what: str, entries: int = 1) -> None:
        """Counts `entries`; `what` says what happened to them."""
        with self._lock:
            self.count += entries
            is_first, self._is_told = not self._is_told, True
        if is_first:
            LOG.warning(f"{self.name} {what.rstrip('.')}. Training goes on; {self._consolation}.")

    def add_failure(self, failure: BaseException, what: str = "failed", entries: int = 1) -> None:
        """Counts what an error cost."""
        self.add(f"{what}: {type(failure).__name__}: {_on_a_line(failure)}", entries)


def _on_a_line(failure: BaseException) -> str:
    text = " ".join(str(failure).split())
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


class _Waiting(NamedTuple):
    """What waits for a tool: something to do, about how many bytes it holds, how many entries it is."""

    entry: Entry
    size: int
    entries: int


class BackgroundWriter:
    """Makes a tool in a thread of its own and hands it entries there, in order.

    The thread begins with the first entry, if not by `start`: a run that ends before, as it cannot be resumed, leaves
    nothing in any tool.

    Where more entries wait than fit, the newest are dropped. Dropped entries, failing ones, and failing to begin or to
    end count as losses.

    Args:
        losses: where it counts, and how it is called.
        make: makes the tool, in the thread.
        check: is called here and now; if it raises, the tool is lost from the beginning.
        most_entries: that may wait.
        patience: seconds to wait for room before something is dropped. A tool that has written nothing since it was
            waited for in vain is not waited for again.
    """

    def __init__(
        self,
        losses: DroppedRecords,
        make: Callable[[], ToolLoggerInterface],
        *,
        check: Callable[[], None] = lambda: None,
        most_entries: int = MOST_ENTRIES,
        patience: float = 0.0,
    ) -> None:
        self.losses = losses
        self._make, self._most_entries, self._patience = make, most_entries, patience
        self._changed = threading.Condition()
        self._waiting: deque[_Waiting] = deque()
        self._waiting_bytes = 0
        self._given = self._done = 0  # how many of all, flushing included
        self._owed = 0  # how many entries it was given and has not tried to write
        self._stuck_at = -1  # how many entries were done when waiting for the rest of them was in vain
        self._status: str | None = None  # how the run ended
        self._is_given_up = self._is_abandoned = False
        self._thread = threading.Thread(target=self._work, name=f"jax-trainer {losses.name}", daemon=True)
        try:
            check()
        except Exception as failure:
            self._is_given_up = True
            losses.add_failure(failure)

    def start(self) -> None:
        """Makes the tool now; again it does nothing."""
        if self._thread.ident is None and not self._is_given_up:
            self._thread.start()

    def give(self, entry: Entry, size: int = 0) -> None:
        """Hands over an entry that holds about `size` bytes. After the end it is ignored."""
        with self._changed:
            if self._status is not None:
                return
            is_taken = self._wait_for(lambda: self._has_room_for(size), self._patience) and not self._is_given_up
            if is_taken:
                self._append(_Waiting(entry, size, 1))
        if not is_taken:
            self.losses.add(f"is slow or blocks, and {self._most_entries} entries wait for it: newer ones are dropped")

    def flush(self, deadline: float) -> bool:
        """Whether all that was given so far is written; waits for it until `deadline`, by the monotonic clock.

        A tool that has written nothing since it was waited for in vain is not waited for again.
        """
        with self._changed:
            if self._thread.is_alive() and not self._is_given_up and self._stuck_at != self._done:
                self._append(_Waiting(lambda tool: tool.flush(), 0, 0))
                given = self._given
                self._wait_for(lambda: self._done >= given, _seconds_until(deadline))
            return self._done == self._given and not self.losses.count

    def ask(self, question: Callable[[Any], Any]) -> Callable[[float], Any]:
        """Asks the tool something once it has been handed all that was given so far.

        The answer comes from the function that is returned, in whatever thread; it waits at most the seconds that it is
        given. None: the tool has failed to answer, or to live.
        """
        answers: list[Any] = []
        with self._changed:
            if self._status is None and not self._is_given_up:
                self._append(_Waiting(lambda tool: answers.append(question(tool)), 0, 0))
            number = self._given

        def answer(seconds: float) -> Any:
            with self._changed:
                self._changed.wait_for(lambda: self._done >= number, seconds)
                return answers[0] if answers else None

        return answer

    def finish(self, status: str) -> None:
        """Nothing more will come: the tool is closed once it has written what waits. Does not wait for that."""
        with self._changed:
            self._status = status
            self._changed.notify_all()

    def join(self, deadline: float) -> None:
        """Waits for the end until `deadline`. A tool that still blocks then is left behind, and ends when it can."""
        if self._thread.ident is None:  # it was never started
            return
        self._thread.join(_seconds_until(deadline))
        with self._changed:
            self._is_abandoned = self._thread.is_alive()
            left = self._emptied()
        if self._is_abandoned:
            self.losses.add("blocks, and the run does not wait any longer for it", max(left, 1))

    def _wait_for(self, holds: Callable[[], bool], seconds: float) -> bool:
        if holds() or not seconds or self._stuck_at == self._done:
            return holds()
        self._stuck_at = -1 if self._changed.wait_for(holds, seconds) else self._done
        return self._stuck_at == -1

    def _has_room_for(self, size: int) -> bool:
        fits = self._waiting_bytes + size <= MOST_BYTES or not self._waiting
        return (fits and len(self._waiting) < self._most_entries) or self._is_given_up

    def _append(self, one: _Waiting) -> None:
        self.start()
        self._waiting.append(one)
        self._waiting_bytes += one.size
        self._given += 1
        self._owed += one.entries
        self._changed.notify_all()

    def _emptied(self) -> int:
        """How many entries will never be written, now that none wait any more."""
        left, self._owed, self._waiting_bytes = self._owed, 0, 0
        self._waiting.clear()
        return left

    # in the thread

    def _work(self) -> None:
        tool = None
        try:
            tool = self._make()
        except BaseException as failure:
            self._lose(failure)
        else:
            self._write_with(tool)
        self._give_up_on_the_rest()
        if tool is not None:
            self._close(tool)

    def _write_with(self, tool: ToolLoggerInterface) -> None:
        failures = 0
        while failures < FAILURES_IN_A_ROW and (one := self._next()) is not None:
            try:
                one.entry(tool)
                failures = 0
            except BaseException as failure:
                self._lose(failure)
                failures += 1
            with self._changed:
                self._done += 1
                self._owed = max(0, self._owed - one.entries)  # 0 when it has been abandoned meanwhile
                self._changed.notify_all()

    def _next(self) -> _Waiting | None:
        """The next entry; None when there will be none."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._status is not None)
            if not self._waiting:
                return None
            one = self._waiting.popleft()
            self._waiting_bytes -= one.size
            return one

    def _give_up_on_the_rest(self) -> None:
        with self._changed:
            left = self._emptied()
            self._done = self._given
            self._is_given_up = True  # what still comes is lost
            self._changed.notify_all()
        if left:
            self.losses.add("was given up on", left)

    def _close(self, tool: ToolLoggerInterface) -> None:
        try:
            tool.close(self._status or "failed")
        except BaseException as failure:
            self._lose(failure)

    def _lose(self, failure: BaseException) -> None:
        if not self._is_abandoned:  # then everything is counted, and the run's log is closed
            self.losses.add_failure(failure, entries=getattr(failure, "entries", 1))


def _seconds_until(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())
