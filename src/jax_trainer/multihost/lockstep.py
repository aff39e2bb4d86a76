"""Training data in several processes, each with its own part: all continue together, or fail together.

`ArrayLoader` and `GrainLoader` shard their batches themselves and do not need this.
"""

import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import jax
import numpy as np

from jax_trainer.core import Batch, CompiledProgram, LayoutError, leaf_path
from jax_trainer.datasets import NOT_READY, BatchIterator, DataError, StepBatch
from jax_trainer.multihost.group import ProcessGroup, ProcessGroupError

Where = Callable[[int], str]  # describes the batch with this number
_HINT = (
    "With several processes, each must yield the same number of training batches, all of one size: use a "
    "`DistributedSampler` and `drop_last=True`, or an `ArrayLoader` or `GrainLoader`, which shard batches themselves."
)


class LocalShard(NamedTuple):
    """This process's part of a dispatch, on the devices, and its signature, which must be equal in all processes."""

    step_batch: StepBatch
    signature: str

    @property
    def batch(self) -> Batch:
        """The part itself."""
        return self.step_batch.batch


class LocalShards:
    """Places parts on the devices. All must have the size of the first: a step uses those of all processes."""

    def __init__(self, program: CompiledProgram, where: Where, index: int) -> None:
        self._program, self._where, self._index = program, where, index
        self._rows: int | None = None

    def place(self, step_batch: StepBatch) -> LocalShard:
        """`step_batch` on the devices."""
        assert self._program.layout is not None
        assert self._program.layout.batch_placement is not None
        try:
            rows = self._program.layout.batch_placement.rows_of(step_batch.batch, stacked=step_batch.stacked)
            self._rows = self._rows or rows
            if rows != self._rows:
                raise DataError(
                    f"The {self._where(step_batch.number)} has {rows} examples in process {self._index}, but earlier "
                    f"ones have {self._rows}. {_HINT}"
                )
            placed = self._program.place(step_batch.batch, stacked=step_batch.stacked)
        except LayoutError as error:
            raise DataError(f"The {self._where(step_batch.number)} cannot be placed on the devices: {error}") from error
        return LocalShard(step_batch._replace(batch=placed), _signature(step_batch))


class LockstepBatches:
    """A `BatchIterator` of parts with equal signatures in all processes; if they differ, or one fails, all fail.

    The processes compare in the main thread, which calls `next` equally often in all of them, while the devices work.
    """

    def __init__(self, batch_iterator: BatchIterator, name: str, process_group: ProcessGroup) -> None:
        self._batch_iterator, self._name, self._process_group = batch_iterator, name, process_group

    @property
    def waited(self) -> float:
        """Seconds for which the device was idle, waiting for a batch."""
        return self._batch_iterator.waited

    def next(self, patience: float) -> Any:
        """The next part; None if no process has one; `NOT_READY` if this process waits for it."""
        part = or_notify(lambda: self._batch_iterator.next(patience), self._name, self._process_group)
        if part is NOT_READY:
            return NOT_READY
        messages = exchange(self._process_group, self._name, {"signature": "" if part is None else part.signature})
        signatures = [message["signature"] for message in messages]
        if len(set(signatures)) > 1:
            found = "; ".join(f"process {index} has {one or 'none'}" for index, one in enumerate(signatures))
            raise DataError(f"Batches of the {self._name!r} data differ between processes: {found}. {_HINT}")
        return None if part is None else part.step_batch

    def close(self) -> None:
        """Stops making batches."""
        self._batch_iterator.close()


def or_notify(make: Callable[[], Any], name: str, process_group: ProcessGroup) -> Any:
    """The result of `make()`; if it fails, the other processes, which wait for this one, are notified."""
    try:
        return make()
    except Exception as error:
        with suppress(ProcessGroupError):
            exchange(process_group, name, {"failed": f"{type(error).__name__}: {error}"})
        raise


def exchange(process_group: ProcessGroup, name: str, message: dict[str, Any]) -> list[dict[str, Any]]:
    """The messages of all processes about their next batch; raises if another process has failed."""
    messages = [json.loads(text) for text in process_group.all_gather(f"data/{name}", json.dumps(message))]
    for index, received in enumerate(messages):
        if received.get("failed") and index != process_group.index:
            raise ProcessGroupError(f"Process {index} has no further batch of the {name!r} data: {received['failed']}")
    return messages


def _signature(step_batch: StepBatch) -> str:
    """What must be equal in all processes: shapes and dtypes, for which a step is compiled, and scalars."""
    axis = int(step_batch.stacked)
    leaves = jax.tree_util.tree_leaves_with_path(step_batch.batch)
    kinds = [f"{leaf_path(path) or 'array'} {np.asarray(x).dtype}{list(np.shape(x)[axis:])}" for path, x in leaves]
    numbers = [f"= {np.asarray(x).tolist()}" if np.ndim(x) <= axis else "" for _, x in leaves]
    each = ", ".join(f"{kind} {number}".strip() for kind, number in zip(kinds, numbers, strict=True))
    return f"{step_batch.steps} × ({each})" if step_batch.stacked else f"({each})"
