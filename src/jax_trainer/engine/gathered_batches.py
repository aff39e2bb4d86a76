"""Evaluation data of which each of several processes has its own part, whatever its size: judged in whole batches."""

import base64
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from jax_trainer.core import Batch, CompiledProgram, leaf_path, resized
from jax_trainer.datasets import NOT_READY, BatchIterator, DataError, StepBatch
from jax_trainer.engine.lockstep import Where, exchanged, or_tell
from jax_trainer.processes import ProcessGroup


class GatheredBatches:
    """A supply of whole batches, put together of what the processes have; some may have less than others, or nothing.

    Rows travel through the devices, as bytes, so that every process has all of them; in the main thread, which comes by
    here equally often in all processes.
    """

    def __init__(
        self,
        batch_iterator: BatchIterator,
        name: str,
        process_group: ProcessGroup,
        program: CompiledProgram,
        where: Where,
    ) -> None:
        self._batch_iterator, self._name, self._process_group, self._program, self._where = (
            batch_iterator,
            name,
            process_group,
            program,
            where,
        )
        self._structure: Any = None
        self._has_ended, self._rounds = False, 0

    @property
    def waited(self) -> float:
        """Seconds in which the device had nothing to do for want of a batch."""
        return self._batch_iterator.waited

    def next(self, patience: float) -> Any:
        """The next batch; None when nobody has one; `LATE` if this process waits for its part."""
        taken = None
        if not self._has_ended:
            taken = or_tell(lambda: self._batch_iterator.next(patience), self._name, self._process_group)
        if taken is NOT_READY:
            return NOT_READY
        # what is left over of a loader that is shared goes to every process as it is
        batch = taken.batch if taken is not None and taken.replicated else self._joined(taken)
        if batch is None:
            return None
        self._rounds += 1
        placed = self._program.place(batch, stacked=False, whole=True)
        return StepBatch(placed, 1, False, self._rounds - 1, None, replicated=True)

    def close(self) -> None:
        """Ends the making of batches."""
        self._batch_iterator.close()

    def _joined(self, taken: StepBatch | None) -> Batch | None:
        """The rows that all processes have next, those of the first one first."""
        self._has_ended = taken is None
        batch = None if taken is None else jax.tree.map(np.asarray, taken.batch)
        words = exchanged(
            self._process_group, self._name, or_tell(lambda: self._word(batch), self._name, self._process_group)
        )
        told = [word["kinds"] for word in words if "kinds" in word]
        if not told:
            return None
        if any(kinds != told[0] for kinds in told):
            here = "; ".join(f"process {index} has {_in_words(word.get('kinds'))}" for index, word in enumerate(words))
            raise DataError(
                f"The {self._where(self._rounds)} is of another kind in other processes: {here}. Give all of them the "
                "same keys, dtypes and shapes of examples."
            )
        kinds, rows = [_Kind(*kind) for kind in told[0]], [word["rows"] for word in words]
        packed = _packed(jax.tree.leaves(batch), kinds, rows[self._process_group.index], max(rows))
        found = multihost_utils.process_allgather(packed)
        arrays = _unpacked(np.concatenate([found[index, :count] for index, count in enumerate(rows)]), kinds)
        return resized(self._tree(words).unflatten(arrays), sum(rows))

    def _word(self, batch: Batch | None) -> dict[str, Any]:
        if batch is None:
            return {"rows": 0, "knows": self._structure is not None}
        leaves = jax.tree_util.tree_leaves_with_path(batch)
        lengths = {leaf_path(path): len(leaf) for path, leaf in leaves if leaf.ndim}
        if len(set(lengths.values())) != 1 or 0 in lengths.values():
            raise DataError(
                f"The {self._where(self._rounds)} has arrays of the lengths {lengths}. With several processes all of "
                "them must hold the same number of examples, and at least one."
            )
        is_first, self._structure = self._structure is None, jax.tree.structure(batch)
        kinds = [
            _Kind(leaf_path(path), leaf.shape[1:] if leaf.ndim else None, str(leaf.dtype)) for path, leaf in leaves
        ]
        tree = _as_text(self._structure) if is_first else ""
        return {"rows": next(iter(lengths.values())), "kinds": kinds, "tree": tree, "knows": True}

    def _tree(self, words: list[dict[str, Any]]) -> Any:
        """The structure of batches; of those of another process where this one never had any."""
        texts = [word["tree"] for word in words if word.get("tree")]
        ignorant = [index for index, word in enumerate(words) if not word["knows"]]
        if ignorant and not texts:  # all find out, so that nobody goes on alone
            raise DataError(
                f"Process {ignorant[0]} has no batch of the {self._name!r} data at all, and cannot know the class of "
                "the batches of others. Give every process one, or use dicts or tuples of arrays."
            )
        if self._structure is None:
            self._structure = _from_text(texts[0])
        return self._structure


class _Kind(NamedTuple):
    """What an array of a batch is made of."""

    name: str
    shape: Sequence[int] | None  # of one example; None for a single number, which is the same in all processes
    dtype: str

    @property
    def width(self) -> int:
        """Bytes per example."""
        return math.prod(self.shape or ()) * jnp.dtype(self.dtype).itemsize


def _in_words(kinds: list[Any] | None) -> str:
    return "none" if kinds is None else ", ".join(f"{name} {dtype}{list(shape or ())}" for name, shape, dtype in kinds)


def _packed(leaves: list[np.ndarray], kinds: list[_Kind], rows: int, room: int) -> np.ndarray:
    """The bytes of this process's examples, a row for each, in an array with room for those of any process."""
    packed = np.zeros((room, sum(kind.width for kind in kinds)), np.uint8)
    start = 0
    for leaf, kind in zip(leaves, kinds, strict=False):  # none, where this process has no more
        each = np.ascontiguousarray(np.broadcast_to(leaf, (rows, *(kind.shape or ()))))
        packed[:rows, start : start + kind.width] = each.reshape(rows, -1).view(np.uint8).reshape(rows, kind.width)
        start += kind.width
    return packed


def _unpacked(packed: np.ndarray, kinds: list[_Kind]) -> list[np.ndarray]:
    ends = np.cumsum([kind.width for kind in kinds])
    arrays = []
    for kind, part in zip(kinds, np.split(packed, ends[:-1], axis=1), strict=True):
        array = np.frombuffer(np.ascontiguousarray(part).tobytes(), jnp.dtype(kind.dtype))
        arrays.append(array[0] if kind.shape is None else array.reshape(len(packed), *kind.shape))
    return arrays


def _as_text(structure: Any) -> str:
    try:
        return base64.b64encode(structure.serialize_using_proto()).decode()
    except ValueError:  # a class of somebody's own
        return ""


def _from_text(text: str) -> Any:
    proto = base64.b64decode(text)
    return jax.tree_util.PyTreeDef.deserialize_using_proto(jax.tree_util.default_registry, proto)
