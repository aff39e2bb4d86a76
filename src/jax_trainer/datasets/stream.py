"""Runs Grain and its worker processes for a `GrainLoader`."""

import contextlib
import dataclasses
import functools
import gc
import itertools
import multiprocessing
import os
import queue
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NoReturn

import jax
import numpy as np

from jax_trainer.core import Batch
from jax_trainer.datasets.foreign import register_as_pytree
from jax_trainer.datasets.host import HostTransforms
from jax_trainer.datasets.order import Order

try:
    import grain
    from absl import flags
except ImportError as error:
    raise ImportError("Records are read with Grain: `pip install 'jax-trainer[grain]'`.") from error

POLL = 0.1  # seconds between checks of the workers while no batch is ready
GRACE = 3.0  # seconds that threads and workers get to end by themselves
WORKER_NAME = "grain-process-prefetch"  # prefix of the names of the processes of Grain 0.2.18
DELETER = "grain._src.python.ipc.shared_memory_array"  # where Grain 0.2.18 keeps threads
_starting = threading.Lock()  # streams start one after the other, so that each can identify its own processes

Stored = tuple[str, list[tuple[int, tuple[int, ...], np.dtype]]]  # a tree structure as text, and leaves in a file


class LoaderError(RuntimeError):
    """A batch could not be loaded, or a worker process died or hangs."""


@dataclasses.dataclass
class Batches:
    """All batches from a position on, epoch after epoch without end, each a function of its index alone.

    Grain distributes them to the workers, so the batches do not depend on the number of workers. `stride` is added to
    the epoch number at the end of an epoch: 1, or 0 to repeat the epoch. Workers write batches to files in `spool`.
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

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, index: int) -> Batch | Stored | str:
        try:
            batch = self.make(index)
            return _store(batch, Path(self.spool, str(index))) if self.spool else batch
        except BaseException as error:
            message = f"{self.name(index)} could not be loaded: {error!r}."
            if self.spool:  # as text: the error may not be picklable, and Grain would hang after a `SystemExit`
                return f"{message}\n\n{traceback.format_exc()}"
            if isinstance(error, Exception):
                raise LoaderError(message) from error
            raise

    def position(self, item: int) -> tuple[int, int]:
        """The epoch of batch number `item`, and its index in the epoch."""
        epochs, index = divmod(self.start + item, len(self.order))
        return self.epoch + self.stride * epochs, index

    def name(self, item: int) -> str:
        """Batch number `item`, for messages."""
        return "Batch {1} (from 0) of epoch {0}".format(*self.position(item))

    def make(self, item: int) -> Batch:
        """Loads batch number `item`."""
        epoch, index = self.position(item)
        if self._rows is None or self._rows[0] != epoch:
            self._rows = epoch, self.order.of(epoch)
        order = self._rows[1]
        rows = self.order.cut(order, index).tolist()
        batch = self.host.make_batch(self._read(rows), self.order, epoch, index)
        batch = self.host.finish(batch, self.order, epoch, index)
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
    """Writes the arrays to a file. Grain's shared memory would leak when a worker is killed."""
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


def _start_worker(spool: str, index: int, count: int) -> None:
    """Initializes a worker process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the run, which then stops the workers
    jax.config.update(
        "jax_platforms", "cpu"
    )  # the accelerator belongs to the main process, also if a transform uses JAX
    threading.Thread(target=_end_with_parent, args=(spool,), daemon=True).start()
    Path(spool, f"worker-{index}-of-{count}").touch()


def _end_with_parent(spool: str) -> None:
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
        shutil.rmtree(spool, ignore_errors=True)
        os._exit(1)


def _pump(batches: Batches, workers: int, read_ahead: int, ready: "queue.Queue[Any]", stop: threading.Event) -> None:
    """Puts the batches of Grain, or its error, into the queue `ready`, until `stop`."""
    reading = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    working = grain.MultiprocessingOptions(num_workers=workers, per_worker_buffer_size=max(1, read_ahead))
    structures: dict[str, Any] = {}
    try:
        data = grain.MapDataset.source(batches).to_iter_dataset(reading)
        data = data.mp_prefetch(working, functools.partial(_start_worker, batches.spool))
        with contextlib.closing(iter(data)) as iterator:
            for item in itertools.takewhile(lambda _: not stop.is_set(), itertools.count()):
                batch: Any = next(iterator)
                if workers:
                    batch = LoaderError(batch) if isinstance(batch, str) else _load(batch, item, batches, structures)
                _offer(batch, ready, stop)
    except BaseException as error:  # whatever it is, the caller raises it
        _offer(error, ready, stop)


def _offer(batch: Any, ready: "queue.Queue[Any]", stop: threading.Event) -> None:
    while not stop.is_set():
        try:
            ready.put(batch, timeout=POLL)
        except queue.Full:
            continue
        return


class Stream:
    """Runs the iterator of Grain in a thread, with or without worker processes.

    Only the thread waits for Grain, so the caller can detect what Grain does not: workers that died or hang.
    """

    def __init__(self, batches: Batches, workers: int, read_ahead: int, timeout: float | None) -> None:
        if workers:
            memory = "/dev/shm"  # if it has space: a container may have as little as 64 MB
            has_space = os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > 2**30
            batches.spool = tempfile.mkdtemp(prefix="jax-trainer-", dir=memory if has_space else None)
        self._batches, self._timeout, self._count = batches, timeout, workers
        self._item, self._workers, self._broken = 0, list[BaseProcess](), False
        self._ready: queue.Queue[Any] = queue.Queue(max(1, read_ahead))
        self._stop = threading.Event()
        self._ends_deleter = workers > 0 and _deleter() is None
        pump = (batches, workers, read_ahead, self._ready, self._stop)
        self._thread = threading.Thread(target=_pump, args=pump, name="jax-trainer-records", daemon=True)

    @property
    def position(self) -> tuple[int, int]:
        """The epoch and the index of the next batch."""
        return self._batches.position(self._item)

    def start(self) -> None:
        """Starts the thread and the workers."""
        if self._count and not flags.FLAGS.is_parsed():
            flags.FLAGS.mark_as_parsed()  # without absl's `app.run`: Grain reads flags before it starts workers
        with _starting:
            before, until = set(multiprocessing.active_children()), time.monotonic() + 60
            self._thread.start()
            while len(self._workers) < self._count and self._thread.is_alive():
                time.sleep(0.002)
                new = set(multiprocessing.active_children()) - before
                self._workers = [worker for worker in new if worker.name.startswith(WORKER_NAME)]
                if time.monotonic() > until:
                    self._give_up(f"Grain {grain.__version__} started no workers. Use `workers=0`, or Grain 0.2.18.")

    def take(self) -> Batch:
        """The next batch."""
        batch, started = None, time.monotonic()
        while batch is None:
            try:
                batch = self._ready.get(timeout=POLL) if self._thread.ident else self._batches[self._item]
            except queue.Empty:
                if self._workers and self._item == 0 and not self._all_run():
                    started = time.monotonic()  # some workers are still importing
                self._check_workers(time.monotonic() - started)
        if isinstance(batch, BaseException):
            if isinstance(batch, LoaderError):
                raise batch
            self._check_workers(0)
            raise LoaderError(f"{self._batches.name(self._item)} could not be loaded: {batch!r}.") from batch
        self._item += 1
        return batch

    def close(self) -> None:
        """Stops the thread and the workers, and removes their files. Closing again does nothing."""
        self._stop.set()
        # the garbage collector may call from the thread itself
        join = self._thread.join if self._thread.ident not in (None, threading.get_ident()) else lambda _: None
        join(0 if self._broken else GRACE)
        killed = [worker for worker in self._workers if self._broken or worker.is_alive()]
        for worker in killed:
            worker.kill()
            worker.join(GRACE)
        join(GRACE)
        if self._batches.spool:
            shutil.rmtree(self._batches.spool, ignore_errors=True)
        if self._ends_deleter and (pool := _deleter()) is not None:
            sys.modules[DELETER].SharedMemoryArray._disable_async_del()
            pool.close()
            pool.join()
        if killed:
            gc.collect()  # Grain's semaphores are files, too, and its error refers to them

    def _all_run(self) -> bool:
        return len(list(Path(self._batches.spool).glob("worker-*"))) == self._count

    def _check_workers(self, waited: float) -> None:
        name = self._batches.name(self._item)
        for code in (worker.exitcode for worker in self._workers):
            if code is not None:
                self._give_up(
                    f"{name} could not be loaded: a worker process ended with exit code {code}. {_advice(code)}"
                )
        if self._timeout is not None and waited > self._timeout:
            self._give_up(
                f"{name} was not ready within {self._timeout} s: a worker hangs, or is slow. Check `decode` and the "
                "transforms, try `workers=0` to find the line, or use a longer `timeout`."
            )

    def _give_up(self, message: str) -> NoReturn:
        self._broken = True
        raise LoaderError(message)


def _advice(exit_code: int) -> str:
    if exit_code == -signal.SIGKILL:
        return "It was killed, most likely for memory: use fewer `workers`, or a smaller `read_ahead` or `batch_size`."
    if exit_code < 0:
        return f"That is {signal.Signals(-exit_code).name}: a library crashed. Try `workers=0` to find the line."
    return "Its error is printed above. A script that uses workers must start under `if __name__ == '__main__':`."


def _deleter() -> Any:
    """The thread pool of Grain that frees its shared memory: started with the first worker, never stopped (0.2.18)."""
    return getattr(getattr(sys.modules.get(DELETER), "SharedMemoryArray", None), "_del_thread_pool", None)
