"""Makes the batches of a `GrainLoader`, in worker processes if it has any."""

import contextlib
import dataclasses
import multiprocessing
import os
import shutil
import signal
import tempfile
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from concurrent import futures
from multiprocessing import connection
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jax_trainer.core import Batch
from jax_trainer.datasets.foreign import register_as_pytree
from jax_trainer.datasets.order import HostTransforms, Order
from jax_trainer.stop_signals import STOP_SIGNALS

try:
    import cloudpickle  # sends also lambdas, and functions of a notebook, to a worker; a dependency of Grain
except ImportError as error:
    raise ImportError("Records are read with Grain: `pip install 'jax-trainer[grain]'`.") from error

GRACE = 3.0  # seconds that threads and workers get to end by themselves
_starting = threading.Lock()

Stored = tuple[str, list[tuple[int, tuple[int, ...], np.dtype]]]  # a tree structure as text, and leaves in a file


class LoaderError(RuntimeError):
    """A batch could not be loaded, or a worker process died or hangs."""


@dataclasses.dataclass
class Batches:
    """All batches from a position on, epoch after epoch without end, each a function of its index alone.

    So they do not depend on the number of workers. `stride` is added to the epoch number at the end of an epoch: 1, or
    0 to repeat the epoch. Workers write batches to files in `spool`.
    """

    source: Any
    decode: Callable[[Any], Any] | None
    order: Order
    host: HostTransforms
    epoch: int
    start: int
    stride: int = 1
    spool: str = ""
    _rows: tuple[int, np.ndarray] | None = None  # the last epoch and its order

    def __getitem__(self, index: int) -> Batch | Stored | str:
        try:
            batch = self.make(index)
            return _store(batch, Path(self.spool, str(index))) if self.spool else batch
        except BaseException as error:
            message = f"{self.name(index)} could not be loaded: {error!r}."
            if self.spool:  # as text: not every error can be sent
                return f"{message}\n\n{traceback.format_exc()}"
            if isinstance(error, Exception):
                raise LoaderError(message) from error
            raise

    def position(self, item: int) -> tuple[int, int]:
        """The epoch of batch number `item`, and its index in the epoch."""
        epoch, index = self.epoch, self.start + item
        if self.order.sizes is None or not self.stride:
            epochs, index = divmod(index, len(self.order.in_epoch(epoch)))
            return epoch + self.stride * epochs, index
        while index >= (length := len(self.order.in_epoch(epoch))):
            epoch, index = epoch + self.stride, index - length
        return epoch, index

    def name(self, item: int) -> str:
        """Batch number `item`, for messages."""
        return "Batch {1} (from 0) of epoch {0}".format(*self.position(item))

    def make(self, item: int) -> Batch:
        """Loads batch number `item`."""
        epoch, index = self.position(item)
        if self._rows is None or self._rows[0] != epoch:
            self._rows = epoch, self.order.of(epoch)
        order = self.order.in_epoch(epoch)
        rows = order.cut(self._rows[1], index).tolist()
        batch = self.host.make_batch(self._read(rows), order, epoch, index)
        batch = self.host.finish(batch, order, epoch, index)
        batch = jax.tree.map(np.asarray, batch)
        if not jax.tree.leaves(batch) or any(leaf.dtype.hasobject for leaf in jax.tree.leaves(batch)):
            raise TypeError(
                f"A batch must have arrays of numbers or text, got {batch!r:.200}. Convert them in `decode`."
            )
        return batch

    def _read(self, rows: list[int]) -> list[Any]:
        read = getattr(self.source, "__getitems__", None)
        records = [self.source[row] for row in rows] if read is None else read(rows)
        records = list(records) if self.decode is None else [self.decode(record) for record in records]
        register_as_pytree(records[0])  # a dataclass of the script is not registered as a pytree in a worker
        return records


def _store(batch: Batch, path: Path) -> Stored:
    """Writes the arrays to a file. Named shared memory would leak when a worker is killed."""
    leaves, structure = jax.tree.flatten(batch)
    locations = []
    with path.open("wb") as file:
        for leaf in leaves:
            file.write(bytes(-file.tell() % 64))  # aligned, as computations on it expect
            locations.append((file.tell(), leaf.shape, leaf.dtype))
            file.write(np.ascontiguousarray(leaf).reshape(-1).view(np.uint8).data)
        file.write(bytes(1))  # an empty file cannot be mapped
    return str(structure), locations


def _load(stored: Stored, item: int, batches: Batches, structures: dict[str, Any]) -> Batch:
    """Loads a batch that a worker has stored.

    Batch classes are not sent to workers, since a class that is defined in a script is another class in a worker.
    For a new tree structure, the batch is made once more in this process.
    """
    text, locations = stored
    if text not in structures:
        structures[text] = jax.tree.structure(batches.make(item))
        if str(structures[text]) != text:
            raise LoaderError(f"{batches.name(item)} is a {text} in a worker, but {structures[text]} here.")
    path = Path(batches.spool, str(item))
    data = np.asarray(np.memmap(path, np.uint8, "r+"))  # not copied: it lives as long as an array refers to it
    path.unlink()
    ends = [offset + int(np.prod(shape)) * dtype.itemsize for offset, shape, dtype in locations]
    leaves = [data[at:end].view(dtype).reshape(shape) for (at, shape, dtype), end in zip(locations, ends, strict=True)]
    return structures[text].unflatten(leaves)


def _work(link: connection.Connection, packed: bytes, spool: str) -> None:
    """The main function of a worker process: makes the batches that it is asked for, in that order."""
    for number in STOP_SIGNALS:  # for the run, which then stops the workers
        signal.signal(number, signal.SIG_IGN)
    ends_with_parent = threading.Thread(target=_end_with_parent, args=(spool,), daemon=True)
    ends_with_parent.start()
    batches = cloudpickle.loads(packed)
    try:
        link.send(None)  # it is running
        while (item := link.recv()) is not None:
            link.send(batches[item])
    except (EOFError, ConnectionError):
        if not _is_closed(link):
            ends_with_parent.join()  # the process of the loader has died: the thread removes the files


def _is_closed(link: connection.Connection) -> bool:
    """Whether a loader that takes no more batches has closed the worker; else its process has died."""
    try:
        while link.recv() is not None:
            pass
    except (EOFError, ConnectionError):
        return False
    return True


def _end_with_parent(spool: str) -> None:
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
        shutil.rmtree(spool, ignore_errors=True)
        os._exit(1)


@contextlib.contextmanager
def _on_the_cpu() -> Iterator[None]:
    """Processes that are started here use JAX on the CPU: the accelerator belongs to this process."""
    with _starting:
        before = os.environ.get("JAX_PLATFORMS")
        os.environ["JAX_PLATFORMS"] = "cpu"
        try:
            yield
        finally:
            del os.environ["JAX_PLATFORMS"]
            if before is not None:
                os.environ["JAX_PLATFORMS"] = before


class Stream:
    """Makes batches one after the other: at once, in a thread, or in worker processes, which take turns."""

    def __init__(self, batches: Batches, workers: int, read_ahead: int, timeout: float | None) -> None:
        self._batches, self._timeout, self._count, self._read_ahead = batches, timeout, workers, read_ahead
        self._item = 0  # the next
        self._thread: futures.ThreadPoolExecutor | None = None
        self._pending: deque[futures.Future[Any]] = deque()
        self._workers: list[tuple[Any, connection.Connection]] = []
        self._structures: dict[str, Any] = {}
        self._running, self._grace = set[int](), GRACE

    @property
    def position(self) -> tuple[int, int]:
        """The epoch and the index of the next batch."""
        return self._batches.position(self._item)

    def start(self) -> None:
        """Starts the thread or the workers, if there are any."""
        if self._count:
            self._start_workers()
        elif self._read_ahead:
            self._thread = futures.ThreadPoolExecutor(1, "jax-trainer-records")
            for item in range(self._read_ahead):
                self._pending.append(self._thread.submit(self._batches.__getitem__, item))

    def _start_workers(self) -> None:
        memory = "/dev/shm"  # if it has space: a container may have as little as 64 MB
        has_space = os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > 2**30
        self._batches.spool = tempfile.mkdtemp(prefix="jax-trainer-", dir=memory if has_space else None)
        packed, processes = cloudpickle.dumps(self._batches), multiprocessing.get_context("spawn")
        with _on_the_cpu():
            for worker in range(self._count):
                ours, theirs = processes.Pipe()
                options: dict[str, Any] = {"args": (theirs, packed, self._batches.spool), "daemon": True}
                process = processes.Process(target=_work, name="jax-trainer-records", **options)
                self._workers.append((process, ours))
                process.start()
                theirs.close()
                for item in range(max(1, self._read_ahead)):
                    ours.send(worker + item * self._count)

    def take(self) -> Batch:
        """The next batch."""
        if self._workers:
            batch = self._from_worker(self._item % self._count)
        elif self._thread is not None:
            batch = self._pending.popleft().result()
            self._pending.append(self._thread.submit(self._batches.__getitem__, self._item + self._read_ahead))
        else:
            batch = self._batches[self._item]
        self._item += 1
        return batch

    def _from_worker(self, index: int) -> Batch:
        if index not in self._running:
            self._receive(index, None)  # importing takes its time
            self._running.add(index)
        stored = self._receive(index, self._timeout)
        if isinstance(stored, str):
            raise LoaderError(stored)
        with contextlib.suppress(ConnectionError):  # it died since; that is an error when its next batch is needed
            self._workers[index][1].send(self._item + self._count * max(1, self._read_ahead))
        return _load(stored, self._item, self._batches, self._structures)

    def _receive(self, index: int, timeout: float | None) -> Any:
        """The next message of a worker; raises if it died, or is silent for longer than `timeout`."""
        process, link = self._workers[index]
        name = self._batches.name(self._item)
        if not connection.wait([link, process.sentinel], timeout):
            raise self._broken(
                f"{name} was not ready within {timeout} s: a worker hangs, or is slow. Check `decode` and the "
                "transforms, try `workers=0` to find the line, or use a longer `timeout`."
            )
        try:
            if link.poll():
                return link.recv()
        except (EOFError, ConnectionError):
            pass  # it died
        process.join(GRACE)
        code = process.exitcode or 0
        raise self._broken(f"{name} could not be loaded: a worker process ended with exit code {code}. {_advice(code)}")

    def _broken(self, message: str) -> LoaderError:
        self._grace = 0  # `close` kills the workers
        return LoaderError(message)

    def close(self) -> None:
        """Stops the thread and the workers, and removes their files. Closing again does nothing."""
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)
            futures.wait([future for future in self._pending if not future.cancelled()], GRACE)
        for _, link in self._workers:
            with contextlib.suppress(ConnectionError):  # it has died
                link.send(None)
            link.close()  # ends a worker after its batch
        until = time.monotonic() + self._grace
        for process, _ in self._workers:
            if process.pid is not None:  # it was started
                process.join(max(0, until - time.monotonic()))
                process.kill()
                process.join()
        if self._batches.spool:
            shutil.rmtree(self._batches.spool, ignore_errors=True)


def _advice(exit_code: int) -> str:
    if exit_code == -signal.SIGKILL:
        return "It was killed, most likely for memory: use fewer `workers`, or a smaller `read_ahead` or `batch_size`."
    if exit_code < 0:
        return f"That is {signal.Signals(-exit_code).name}: a library crashed. Try `workers=0` to find the line."
    return "Its error is printed above. A script that uses workers must start under `if __name__ == '__main__':`."
