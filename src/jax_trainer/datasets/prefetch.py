"""The batches of one epoch: one at a time or several stacked for a dispatch, made on demand or prefetched by a thread.

Both measure how long the device waits for them.
"""

import atexit
import threading
import time
import warnings
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterator
from typing import Any, NamedTuple, Protocol
from weakref import WeakSet

import jax
import numpy as np

from jax_trainer.core import Batch
from jax_trainer.datasets.foreign import DataError, check_batch
from jax_trainer.diagnostics.leaves import leaf_path
from jax_trainer.diagnostics.user_frame import with_user_frame

NOT_READY = object()  # no batch yet
FIRST_POLL = 1e-4  # seconds until a waiting loop polls the device for the first time; later polls are further apart
JOIN_SECONDS = 2.0
SMALL_BYTES = 1 << 20  # of all prefetched batches, where more than usual are prefetched
BLOCK_SECONDS = 1e-3  # a block of small batches that takes no longer is made while the loop waits for it
ON_DEMAND = -1


class StepBatch(NamedTuple):
    """Batches for one dispatch: one batch, or `steps` of them stacked (and padded to a full chunk)."""

    batch: Batch
    steps: int
    stacked: bool
    number: int  # index of the last of them in its epoch, from 0
    state: Any  # of the data, after these batches
    replicated: bool = False  # with several processes: whether each has the complete batch instead of a part


class ChunkedBatches(Iterator[Batch]):
    """The batches of an epoch, of which several can be taken at once."""

    @abstractmethod
    def take(self, limit: int, chunk: int) -> tuple[Batch, int]:
        """Up to `limit` full batches, stacked and padded to `chunk`, and their number."""


class EpochIterator:
    """Iterates over one epoch of a `DataSource`.

    `state_of` returns the state of the data after a batch was drawn; `is_replicated(index)` is whether every process
    has the complete batch.
    """

    def __init__(
        self,
        batches: Iterator[Batch],
        name: str,
        epoch: int,
        start: int,
        state_of: Callable[[], Any] | None = None,
        is_replicated: Callable[[int], bool] | None = None,
    ) -> None:
        self._batches, self._name, self._epoch, self._state_of = batches, name, epoch, state_of
        self._is_replicated = is_replicated or (lambda index: False)
        self._pushed_back: list[tuple[Batch, Any]] = []
        self._state: Any = None  # of the data, after the last batch that was drawn
        self._kinds: Any = None  # dtype and rank of the arrays of the first batch that was stacked
        self._checked = False
        self.position = start

    def __iter__(self) -> Iterator[Batch]:
        while (step_batch := self.take(1)) is not None:
            yield step_batch.batch

    def close(self) -> None:
        """Ends the epoch here."""
        close = getattr(self._batches, "close", None)
        if callable(close):
            close()

    def take(self, limit: int, chunk: int = 1) -> StepBatch | None:
        """Up to `limit` batches, stacked and padded to `chunk` if that is above 1; None at the end of the epoch."""
        if chunk == 1:
            batch = self._draw()
            return None if batch is None else self._step_batch(batch, 1, stacked=False)
        limit = min(limit, chunk)
        if isinstance(self._batches, ChunkedBatches) and not self._pushed_back:
            batch, steps = self._batches.take(limit, chunk)
            if steps:
                return self._step_batch(batch, steps, stacked=True)
        return self._stack(limit, chunk)

    def skip(self, count: int = 1) -> int:
        """Skips up to `count` batches; returns the number of batches skipped. `position` counts them."""
        for skipped in range(count):
            if self._draw() is None:
                return skipped
            self.position += 1
        return count

    def _step_batch(self, batch: Batch, steps: int, *, stacked: bool) -> StepBatch:
        if not self._checked:
            check_batch(batch, self.where(self.position))
            self._checked = True
        replicated = self._is_replicated(self.position)
        self.position += steps
        return StepBatch(batch, steps, stacked, self.position - 1, self._state, replicated)

    def _stack(self, limit: int, chunk: int) -> StepBatch | None:
        batches: list[Batch] = []
        while len(batches) < limit:
            before = self._state
            batch = self._draw(len(batches))
            if batch is None:
                break
            index = self.position + len(batches)
            self._check_like_first(batch, index)
            # a complete last batch may have the shape of a part of a full one
            is_other = self._is_replicated(index) != self._is_replicated(self.position)
            if batches and (is_other or _shapes(batch) != _shapes(batches[0])):
                self._pushed_back = [(batch, self._state)]  # a ragged last batch goes alone
                self._state = before
                break
            batches.append(batch)
        if not batches:
            return None
        if len(batches) == 1:
            return self._step_batch(batches[0], 1, stacked=False)
        stacked = jax.tree.map(lambda *leaves: _padded_stack(leaves, chunk), *batches)
        return self._step_batch(stacked, len(batches), stacked=True)

    def _check_like_first(self, batch: Batch, index: int) -> None:
        """Raises for other keys, dtypes or ranks, which stacking would hide from the compiled step."""
        leaves = jax.tree_util.tree_leaves_with_path(batch)
        kinds = {leaf_path(path): f"{np.asarray(leaf).dtype} of rank {np.ndim(leaf)}" for path, leaf in leaves}
        self._kinds = self._kinds or kinds
        for path in kinds.keys() | self._kinds.keys():
            got, expected = kinds.get(path, "absent"), self._kinds.get(path, "absent")
            if got != expected:
                raise DataError(
                    f"The {self.where(index)} differs from earlier ones: {path or 'the array'} is {got}, expected "
                    f"{expected}. Give every batch the same keys, dtypes and ranks."
                )

    def _draw(self, ahead: int = 0) -> Batch | None:
        if self._pushed_back:
            batch, self._state = self._pushed_back.pop()
            return batch
        try:
            batch = next(self._batches)
        except StopIteration:
            return None
        except Exception as error:
            with_user_frame(error).add_note(f"This happened while {self.where(self.position + ahead)} was loaded.")
            raise
        if batch is None:
            raise DataError(f"The {self.where(self.position + ahead)} is None. Return arrays.")
        if self._state_of is not None:
            self._state = self._state_of()
        return batch

    def where(self, number: int) -> str:
        """Batch `number` of this epoch, for messages."""
        return describe_batch(number, self._epoch, self._name)


def describe_batch(number: int, epoch: int, name: str) -> str:
    """A batch of an epoch of the data `name`, for messages.

    >>> describe_batch(3, 1, "train")
    "batch 3 of epoch 1 of the 'train' data"
    """
    return f"batch {number} of epoch {epoch} of the {name!r} data"


def _shapes(batch: Batch) -> list[tuple[int, ...]]:
    return [np.shape(leaf) for leaf in jax.tree.leaves(batch)]


def _padded_stack(leaves: tuple[Any, ...], length: int) -> np.ndarray:
    first = np.asarray(leaves[0])
    out = np.empty((length, *first.shape), first.dtype)
    np.stack(leaves, out=out[: len(leaves)])
    out[len(leaves) :] = 0
    return out


class BatchIterator(Protocol):
    """The batches of an epoch, as the loops consume them."""

    @property
    def waited(self) -> float:
        """Seconds for which the device was idle, waiting for a batch."""
        ...

    def next(self, patience: float) -> Any:
        """The next `StepBatch`; None at the end; `NOT_READY` if none is ready after `patience` seconds."""
        ...

    def close(self) -> None:
        """Stops making batches."""
        ...


class SyncIterator:
    """Makes batches synchronously, in the thread of the caller."""

    def __init__(self, batches: Generator[StepBatch, None, None], device_is_idle: Callable[[], bool]) -> None:
        self._batches, self._device_is_idle = batches, device_is_idle
        self.waited = 0.0

    def next(self, patience: float) -> StepBatch | None:
        """The next batches; waits as long as necessary."""
        started = time.perf_counter()
        step_batch = next(self._batches, None)
        took = time.perf_counter() - started
        if took > FIRST_POLL and self._device_is_idle():
            self.waited += took / 2  # the device ran dry somewhere in between
        return step_batch

    def close(self) -> None:
        """Stops making batches."""
        self._batches.close()


class PrefetchIterator:
    """Prefetches up to `depth` batches in a thread. `next` raises the errors of the thread.

    Args:
        batches: makes the batches, in the thread.
        device_is_idle: whether the device has nothing to do.
        depth: the most batches that are prefetched; the thread replaces each as soon as it is used.
        small_depth: the most batches if all of them have less than a MiB. The thread then makes them in blocks: while
            the loop waits, if a block takes less than a millisecond, as two threads that take turns at every batch take
            longer than a tiny step; else when half of them are used.
        name: of the data, for messages.
        timeout: seconds to wait for a batch before a `DataError`; None waits forever.
        kill: ends the worker processes of a loader that hangs when the iterator is closed.
    """

    def __init__(
        self,
        batches: Generator[StepBatch, None, None],
        device_is_idle: Callable[[], bool],
        *,
        depth: int,
        small_depth: int = 0,
        name: str,
        timeout: float | None = None,
        kill: Callable[[], None] = lambda: None,
    ) -> None:
        self._batches, self._device_is_idle, self._name, self._timeout = batches, device_is_idle, name, timeout
        # a queue's `get(timeout)` may wait forever when a signal arrives just at the timeout (CPython 3.11)
        self._made: deque[tuple[StepBatch | None, BaseException | None]] = deque()
        self._wake, self._space = threading.Event(), threading.Event()
        self._depth, self._small_depth = depth, small_depth
        self._refill_at = depth - 1  # the number of batches left at which the thread continues
        self._kill = kill
        self._waits = self._closing = self._is_small = self._is_quick = False
        self._block_started = 0.0
        self._late_since: float | None = None
        self.waited = 0.0
        self._thread = threading.Thread(target=self._make, name=f"jax_trainer prefetch {name!r}", daemon=True)
        self._thread.start()
        _open.add(self)

    def next(self, patience: float) -> Any:
        """The next batches; `NOT_READY` if none are ready after `patience` seconds."""
        if not self._made and not self._wait(patience):
            return NOT_READY
        self._late_since = None
        step_batch, error = self._made.popleft()
        if len(self._made) == self._refill_at:
            self._space.set()
        if error is not None:
            raise error
        return step_batch

    def close(self) -> None:
        """Stops the thread; warns if it hangs in the loader."""
        self._closing = True
        _open.discard(self)
        self._space.set()
        self._thread.join(JOIN_SECONDS)
        if self._thread.is_alive():
            self._kill()
            self._thread.join(JOIN_SECONDS / 4)
        if self._thread.is_alive():
            warnings.warn(
                f"The loader of the {self._name!r} data hangs; its thread keeps running until the process ends.",
                RuntimeWarning,
                stacklevel=2,
            )

    def _make(self) -> None:
        try:
            while self._has_space():
                step_batch = next(self._batches, None)
                if self._small_depth and step_batch is not None:  # the first batch decides the depth
                    size = sum(getattr(leaf, "nbytes", 0) for leaf in jax.tree.leaves(step_batch.batch))
                    if size * self._small_depth <= SMALL_BYTES:
                        self._depth, self._is_small, self._block_started = self._small_depth, True, time.perf_counter()
                    self._small_depth = 0
                self._made.append((step_batch, None))
                if step_batch is None:
                    return
                if self._waits and (not self._is_small or time.perf_counter() - self._block_started > BLOCK_SECONDS):
                    self._wake.set()
        except BaseException as error:
            self._made.append((None, error))
        finally:
            self._wake.set()
            self._batches.close()

    def _has_space(self) -> bool:
        """Waits for space once all are made; False if the iterator is being closed."""
        if len(self._made) >= self._depth:
            if self._is_small:
                self._is_quick = time.perf_counter() - self._block_started < BLOCK_SECONDS
                self._refill_at = ON_DEMAND if self._is_quick else self._depth // 2
                self._wake.set()
            while len(self._made) > self._refill_at and not self._closing:
                self._space.clear()
                if len(self._made) > self._refill_at and not self._closing:
                    self._space.wait()
            self._block_started = time.perf_counter()
        return not self._closing

    def _wait(self, patience: float) -> bool:
        """Waits for a batch, and counts the time for which the device is idle."""
        started = now = time.perf_counter()
        self._late_since = self._late_since or started
        idle_since = started if self._device_is_idle() else None
        self._waits = True
        if self._refill_at == ON_DEMAND:
            self._refill_at = 0
            self._space.set()
        while not self._made and now - started < patience:
            self._wake.clear()
            if not self._made:
                self._wake.wait(max(BLOCK_SECONDS if self._is_quick else FIRST_POLL, (now - started) / 8))
            now = time.perf_counter()
            if idle_since is None and not self._made and self._device_is_idle():
                idle_since = now
        self._waits = False
        if idle_since is not None and not self._is_quick:
            self.waited += now - idle_since
        if not self._made and self._timeout is not None and now - self._late_since >= self._timeout:
            raise DataError(
                f"The {self._name!r} data gave no batch for {now - self._late_since:.0f} s, and `timeout` is "
                f"{self._timeout:g} s. Check the loader and its workers: one may hang, or read from a slow disk. "
                "Increase `timeout` if it only needs longer."
            )
        return bool(self._made)


_open: "WeakSet[PrefetchIterator]" = WeakSet()


@atexit.register
def _close_all() -> None:
    """Closes what an abandoned loop has left open: a thread that is placing a batch while Python exits aborts it."""
    for iterator in list(_open):
        iterator.close()
