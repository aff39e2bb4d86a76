"""Making batches ahead of the step, in a thread, and knowing how long the device had to wait for them."""

import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Generator
from typing import Any, Protocol

from jax_trainer.datasets.epoch_iterator import StepBatch
from jax_trainer.datasets.foreign import DataError

Made = tuple[StepBatch | None, BaseException | None]
NOT_READY = object()  # no batch yet
FIRST_LOOK = 1e-4  # seconds until a waiting loop looks at the device for the first time; later ones are further apart
JOIN_SECONDS = 2.0


class BatchIterator(Protocol):
    """Where the loop gets its batches."""

    @property
    def waited(self) -> float:
        """Seconds in which the device had nothing to do for want of a batch."""
        ...

    def next(self, patience: float) -> Any:
        """The next `StepBatch`; None at the end; `LATE` if there is none after `patience` seconds."""
        ...

    def close(self) -> None:
        """Ends the making of batches."""
        ...


class SyncIterator:
    """Batches made when they are asked for, by whoever asks."""

    def __init__(self, batches: Generator[StepBatch, None, None], device_is_idle: Callable[[], bool]) -> None:
        self._batches, self._device_is_idle = batches, device_is_idle
        self.waited = 0.0

    def next(self, patience: float) -> StepBatch | None:
        """The next batches; waits for them however long it takes."""
        began = time.perf_counter()
        taken = next(self._batches, None)
        took = time.perf_counter() - began
        if took > FIRST_LOOK and self._device_is_idle():
            self.waited += took / 2  # the device ran dry somewhere in between
        return taken

    def close(self) -> None:
        """Ends the making of batches."""
        self._batches.close()


class PrefetchIterator:
    """Batches made by a thread, at most `depth` ahead. What it raises is raised where the batch is asked for.

    `kill` ends worker processes of a loader that does not answer when the thread is to end.
    """

    def __init__(
        self,
        batches: Generator[StepBatch, None, None],
        device_is_idle: Callable[[], bool],
        *,
        depth: int,
        name: str,
        timeout: float | None = None,
        kill: Callable[[], None] = lambda: None,
    ) -> None:
        self._batches, self._device_is_idle, self._name, self._timeout = batches, device_is_idle, name, timeout
        # a queue's `get(timeout)` may wait for ever when a signal comes just as the time is up (CPython 3.11)
        self._made: deque[Made] = deque()
        self._news = threading.Event()
        self._room = threading.Semaphore(depth)
        self._kill = kill
        self._closing = False
        self._late_since: float | None = None
        self.waited = 0.0
        self._thread = threading.Thread(target=self._make, name=f"jax_trainer feed {name!r}", daemon=True)
        self._thread.start()

    def next(self, patience: float) -> Any:
        """The next batches; `LATE` if there are none after `patience` seconds."""
        if not self._made and not self._wait(patience):
            return NOT_READY
        self._late_since = None
        self._room.release()
        taken, error = self._made.popleft()
        if error is not None:
            raise error
        return taken

    def close(self) -> None:
        """Stops the thread; one that hangs in the loader is left behind, and said so."""
        self._closing = True
        self._room.release()
        self._thread.join(JOIN_SECONDS)
        if self._thread.is_alive():
            self._kill()
            self._thread.join(JOIN_SECONDS / 4)
        if self._thread.is_alive():
            warnings.warn(
                f"The loader of the {self._name!r} data does not answer; its thread is left behind and ends with the "
                "process.",
                RuntimeWarning,
                stacklevel=2,
            )

    def _make(self) -> None:
        try:
            while self._take_room():
                taken = next(self._batches, None)
                self._hand_over((taken, None))
                if taken is None:
                    return
        except BaseException as error:
            self._hand_over((None, error))
        finally:
            self._batches.close()

    def _hand_over(self, made: Made) -> None:
        self._made.append(made)
        self._news.set()

    def _take_room(self) -> bool:
        self._room.acquire()
        return not self._closing

    def _wait(self, patience: float) -> bool:
        """Waits for a batch, and counts the time from when the device has nothing left to do."""
        began = now = time.perf_counter()
        self._late_since = self._late_since or began
        idle_since = began if self._device_is_idle() else None
        while not self._made and now - began < patience:
            self._news.clear()
            if not self._made:
                self._news.wait(max(FIRST_LOOK, (now - began) / 8))
            now = time.perf_counter()
            if idle_since is None and not self._made and self._device_is_idle():
                idle_since = now
        if idle_since is not None:
            self.waited += now - idle_since
        if not self._made and self._timeout is not None and now - self._late_since >= self._timeout:
            raise DataError(
                f"The {self._name!r} data gave no batch for {now - self._late_since:.0f} s, and `timeout` is "
                f"{self._timeout:g} s. Look at the loader and its workers: one may hang, or read from a slow disk. "
                "Raise `timeout` if it only needs longer."
            )
        return bool(self._made)
