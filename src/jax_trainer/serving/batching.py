"""Joins the examples of concurrent requests to batches, for which the program is compiled."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import jax
import numpy as np

from jax_trainer.serving.artifact import ArraySpec, ExportedModel, at_positions

Arrays = Mapping[str, np.ndarray]
OnBatch = Callable[[int, int, float], None]  # examples, size of the compiled batch, seconds


class QueueFull(Exception):
    """More examples wait than the queue holds."""


def sizes_up_to(most: int) -> tuple[int, ...]:
    """The batch sizes that a program is compiled for: powers of two, and the largest.

    >>> sizes_up_to(24)
    (1, 2, 4, 8, 16, 24)
    """
    return (*(2**power for power in range((most - 1).bit_length())), most)


class CompiledSizes:
    """A model compiled for some batch sizes; a batch is padded with zeros to the next larger one."""

    def __init__(self, model: ExportedModel, most: int) -> None:
        self.sizes = (model.batch,) if model.batch is not None else sizes_up_to(most)
        self._inputs: Sequence[ArraySpec] = model.inputs
        with ThreadPoolExecutor(thread_name_prefix="compile") as pool:
            self._programs = dict(zip(self.sizes, pool.map(model.compiled, self.sizes), strict=True))
        for size in self.sizes:  # the first call of a program takes longer
            zeros = {spec.name: np.zeros((size, *spec.row), spec.dtype) for spec in model.inputs}
            jax.block_until_ready(self._programs[size](zeros))

    @property
    def most(self) -> int:
        """The largest batch size."""
        return self.sizes[-1]

    def size_for(self, count: int) -> int:
        """The batch size for so many examples."""
        return next(size for size in self.sizes if size >= count)

    def run(
        self, requests: Sequence[Arrays], counts: Sequence[int], positions: Sequence[int] = ()
    ) -> list[dict[str, np.ndarray]]:
        """The outputs of each request; all of them are one batch.

        Args:
            requests: the inputs of each.
            counts: the number of examples of each.
            positions: of each, where it needs the outputs of a sequence; only these leave the device, because the
                logits of a whole text are large. Empty: everywhere.
        """
        total = sum(counts)
        size = self.size_for(total)
        inputs = {spec.name: self._joined([request[spec.name] for request in requests], size) for spec in self._inputs}
        on_device = self._programs[size](inputs)
        if positions:
            padded = np.repeat([*positions, 0], [*counts, size - total]).astype(np.int32)
            on_device = at_positions(on_device, padded)
        outputs = {name: np.asarray(array) for name, array in on_device.items()}
        ends = np.cumsum(counts)
        return [
            {name: array[end - count : end] for name, array in outputs.items()}
            for end, count in zip(ends, counts, strict=True)
        ]

    def _joined(self, parts: Sequence[np.ndarray], size: int) -> np.ndarray:
        if len(parts) == 1 and len(parts[0]) == size:
            return parts[0]
        joined = np.zeros((size, *parts[0].shape[1:]), parts[0].dtype)
        np.concatenate(parts, out=joined[: sum(map(len, parts))])
        return joined


@dataclass(frozen=True)
class _Request:
    inputs: Arrays
    count: int
    position: int | None  # of a sequence, where outputs are needed; None: everywhere
    result: "asyncio.Future[dict[str, np.ndarray]]"
    arrived: float


class Batcher:
    """A queue of requests, and the task that runs them in batches, in a thread.

    Args:
        compiled: runs a batch.
        max_delay: seconds that the first request of a batch waits for others.
        max_queue: examples that may wait.
        on_batch: called after each batch.
    """

    def __init__(self, compiled: CompiledSizes, *, max_delay: float, max_queue: int, on_batch: OnBatch) -> None:
        self._compiled, self._max_delay, self._max_queue, self._on_batch = compiled, max_delay, max_queue, on_batch
        self._queue: deque[_Request] = deque()
        self._changed = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="jax_trainer serving")
        self._is_closing = False
        self.waiting = 0  # examples in the queue
        self.started: float | None = None  # when the running batch did

    async def run(self, inputs: Arrays, count: int, position: int | None = None) -> dict[str, np.ndarray]:
        """The outputs of a request, at one position or all; it may wait in the queue.

        Raises `QueueFull` at once if that is full.
        """
        if self._is_closing or self.waiting + count > self._max_queue:
            raise QueueFull
        request = _Request(inputs, count, position, asyncio.get_running_loop().create_future(), time.monotonic())
        self._queue.append(request)
        self.waiting += count
        self._changed.set()
        return await request.result

    async def work(self) -> None:
        """Runs batches until `close`, and then those that still wait."""
        while await self._has_batch():
            requests = self._next()
            if not requests:  # all of them were given up
                continue
            counts = [request.count for request in requests]
            positions = [request.position for request in requests if request.position is not None]
            self.started = time.monotonic()
            try:
                batch = [request.inputs for request in requests], counts, positions
                results = await asyncio.get_running_loop().run_in_executor(self._thread, self._compiled.run, *batch)
            except Exception as error:  # each of its requests gets the error; the server continues
                for request in requests:
                    if not request.result.done():
                        request.result.set_exception(error)
                continue
            finally:
                seconds, self.started = time.monotonic() - self.started, None
            self._on_batch(sum(counts), self._compiled.size_for(sum(counts)), seconds)
            for request, result in zip(requests, results, strict=True):
                if not request.result.done():
                    request.result.set_result(result)

    def close(self) -> None:
        """Refuses new requests; `work` ends after those that wait."""
        self._is_closing = True
        self._changed.set()

    async def _has_batch(self) -> bool:
        """Waits until a batch is full, or its first request has waited for `max_delay`; False: closed and empty."""
        while not self._queue:
            if self._is_closing:
                return False
            self._changed.clear()
            await self._changed.wait()
        latest = self._queue[0].arrived + self._max_delay
        while self.waiting < self._compiled.most and not self._is_closing:
            self._changed.clear()
            try:
                async with asyncio.timeout(latest - time.monotonic()):
                    await self._changed.wait()
            except TimeoutError:
                break
        return True

    def _next(self) -> list[_Request]:
        """The next requests that fit into one batch, and need outputs at one position, or at all."""
        chosen: list[_Request] = []
        room, is_whole = self._compiled.most, self._queue[0].position is None
        while self._queue and self._queue[0].count <= room and (self._queue[0].position is None) == is_whole:
            request = self._queue.popleft()
            self.waiting -= request.count
            if not request.result.done():  # its client may have been answered: too late
                chosen.append(request)
                room -= request.count
        return chosen
