"""Training data of which each of several processes has its own part: they go on together, or fail together.

Our own loaders share their batches by themselves and need nothing of this.
"""

import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import jax
import numpy as np

from jax_trainer.core import CompiledProgram, LayoutError, leaf_path
from jax_trainer.datasets import NOT_READY, BatchIterator, DataError, StepBatch
from jax_trainer.processes import ProcessGroup, ProcessGroupError

Where = Callable[[int], str]  # the batch with this number, in words
_CURE = (
    "With several processes each must give equally many training batches, all of one size: use a `DistributedSampler` "
    "and `drop_last=True`, or an `ArrayLoader` or `GrainLoader`, which share batches by themselves."
)


class LocalShard(NamedTuple):
    """This process's part of a dispatch, on the devices, and what it looks like, to be compared with the others'."""

    taken: StepBatch
    looks: str


class LocalShards:
    """Puts parts on the devices; all must have the size of the first one, for a step joins those of all processes."""

    def __init__(self, program: CompiledProgram, where: Where, index: int) -> None:
        self._program, self._where, self._index = program, where, index
        self._rows: int | None = None

    def ready(self, taken: StepBatch) -> LocalShard:
        """The part on the devices."""
        assert self._program.layout is not None
        assert self._program.layout.batch_placement is not None  # there are several processes
        try:
            rows = self._program.layout.batch_placement.rows_of(taken.batch, stacked=taken.stacked)
            self._rows = self._rows or rows
            if rows != self._rows:
                raise DataError(
                    f"The {self._where(taken.number)} has {rows} examples in process {self._index}, and those before "
                    f"it have {self._rows}. {_CURE}"
                )
            placed = self._program.place(taken.batch, stacked=taken.stacked)
        except LayoutError as error:
            raise DataError(f"The {self._where(taken.number)} cannot be fed: {error}") from error
        return LocalShard(taken._replace(batch=placed), _looks(taken))


class LockstepBatches:
    """A supply of parts that look alike in all processes; where they do not, or one fails, all do.

    They tell each other in the main thread, which comes by here equally often in all of them, while the devices work.
    """

    def __init__(self, batch_iterator: BatchIterator, name: str, process_group: ProcessGroup) -> None:
        self._batch_iterator, self._name, self._process_group = batch_iterator, name, process_group

    @property
    def waited(self) -> float:
        """Seconds in which the device had nothing to do for want of a batch."""
        return self._batch_iterator.waited

    def next(self, patience: float) -> Any:
        """The next part, if all processes have one like it; None if nobody has one; `LATE` if this one waits for it."""
        part = or_tell(lambda: self._batch_iterator.next(patience), self._name, self._process_group)
        if part is NOT_READY:
            return NOT_READY
        words = exchanged(self._process_group, self._name, {"looks": "" if part is None else part.looks})
        looks = [word["looks"] for word in words]
        if len(set(looks)) > 1:
            told = "; ".join(f"process {index} has {look or 'none'}" for index, look in enumerate(looks))
            raise DataError(
                f"The processes do not have the same kind of batch of the {self._name!r} data: {told}. {_CURE}"
            )
        return None if part is None else part.taken

    def close(self) -> None:
        """Ends the making of batches."""
        self._batch_iterator.close()


def or_tell(make: Callable[[], Any], name: str, process_group: ProcessGroup) -> Any:
    """What `make` makes of the next batch; if it fails, the other processes hear of it, who wait for this one."""
    try:
        return make()
    except Exception as error:
        with suppress(ProcessGroupError):
            exchanged(process_group, name, {"failed": f"{type(error).__name__}: {error}"})
        raise


def exchanged(process_group: ProcessGroup, name: str, word: dict[str, Any]) -> list[dict[str, Any]]:
    """What every process says about its next batch; an error if one of the others has failed."""
    words = [json.loads(text) for text in process_group.all_gather(f"data/{name}", json.dumps(word))]
    for index, said in enumerate(words):
        if said.get("failed") and index != process_group.index:
            raise ProcessGroupError(f"Process {index} has no further batch of the {name!r} data: {said['failed']}")
    return words


def _looks(taken: StepBatch) -> str:
    """All that must be the same in every process: what a step is compiled for, and single numbers."""
    axis = int(taken.stacked)
    leaves = jax.tree_util.tree_leaves_with_path(taken.batch)
    kinds = [f"{leaf_path(path) or 'array'} {np.asarray(x).dtype}{list(np.shape(x)[axis:])}" for path, x in leaves]
    numbers = [f"= {np.asarray(x).tolist()}" if np.ndim(x) <= axis else "" for _, x in leaves]
    each = ", ".join(f"{kind} {number}".strip() for kind, number in zip(kinds, numbers, strict=True))
    return f"{taken.steps} × ({each})" if taken.stacked else f"({each})"
