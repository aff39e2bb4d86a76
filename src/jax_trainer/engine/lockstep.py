"""Batches of several processes, each with its own part: all continue together, or fail together.

Training data must be equal in number and size (`LockstepBatches`); evaluation data may have any (`GatheredBatches`).
`ArrayLoader` and `GrainLoader` shard their batches themselves and need neither, if these divide evenly.
"""

import base64
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from jax_trainer.core import Batch, CompiledProgram
from jax_trainer.datasets import NOT_READY, BatchIterator, DataError, StepBatch
from jax_trainer.diagnostics.leaves import leaf_path
from jax_trainer.sharding import LayoutError, resized
from jax_trainer.sharding.group import ProcessGroup, ProcessGroupError

Describe = Callable[[int], str]  # describes the batch with this number
PlaceFn = Callable[[StepBatch], StepBatch]
_HINT = (
    "With several processes, each must yield the same number of training batches, all of one size: use a "
    "`DistributedSampler` and `drop_last=True`, or an `ArrayLoader` or `GrainLoader`, which shard batches themselves."
)


class WrappedBatches:
    """A `BatchIterator` over another one; subclasses define `next`."""

    def __init__(self, batches: BatchIterator) -> None:
        self._batches = batches

    @property
    def waited(self) -> float:
        """Seconds for which the device was idle, waiting for a batch."""
        return self._batches.waited

    def next(self, patience: float) -> Any:
        """The next batch."""
        raise NotImplementedError

    def close(self) -> None:
        """Stops making batches."""
        self._batches.close()


class JointBatches(WrappedBatches):
    """Batches of which each process has a part. The main thread calls `next` equally often in all of them.

    A process that fails notifies the others, which wait for it.
    """

    def __init__(self, batches: BatchIterator, name: str, group: ProcessGroup) -> None:
        super().__init__(batches)
        self._name, self._group = name, group

    def _or_notify(self, make: Callable[..., Any], *args: Any) -> Any:
        """The result of `make`; if it fails, the other processes are notified."""
        try:
            return make(*args)
        except Exception as error:
            with suppress(ProcessGroupError):
                self._exchange({"failed": f"{type(error).__name__}: {error}"})
            raise

    def _exchange(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        """The messages of all processes about their next batch; raises if another process has failed."""
        messages = [json.loads(text) for text in self._group.all_gather(f"data/{self._name}", json.dumps(message))]
        for index, received in enumerate(messages):
            if received.get("failed") and index != self._group.index:
                raise ProcessGroupError(
                    f"Process {index} has no further batch of the {self._name!r} data: {received['failed']}"
                )
        return messages


class LocalShard(NamedTuple):
    """This process's part of a dispatch, on the devices, and its signature, which must be equal in all processes."""

    step_batch: StepBatch
    signature: str

    @property
    def batch(self) -> Batch:
        """The part itself."""
        return self.step_batch.batch


def place_shards(program: CompiledProgram, where: Describe, index: int) -> Callable[[StepBatch], Any]:
    """Places parts on the devices. All must have the size of the first: a step uses those of all processes."""
    expected = 0

    def place(step_batch: StepBatch) -> LocalShard:
        nonlocal expected
        assert program.layout is not None
        assert program.layout.batch_placement is not None
        try:
            rows = program.layout.batch_placement.rows_of(step_batch.batch, stacked=step_batch.stacked)
            expected = expected or rows
            if rows != expected:
                raise DataError(
                    f"The {where(step_batch.number)} has {rows} examples in process {index}, but earlier ones have "
                    f"{expected}. {_HINT}"
                )
            placed = program.place(step_batch.batch, stacked=step_batch.stacked)
        except LayoutError as error:
            raise DataError(f"The {where(step_batch.number)} cannot be placed on the devices: {error}") from error
        return LocalShard(step_batch._replace(batch=placed), _signature(step_batch))

    return place


class LockstepBatches(JointBatches):
    """Batches of parts with equal signatures in all processes; if they differ, or one fails, all fail."""

    def next(self, patience: float) -> Any:
        """The next part; None if no process has one; `NOT_READY` if this process waits for it."""
        part = self._or_notify(self._batches.next, patience)
        if part is NOT_READY:
            return NOT_READY
        messages = self._exchange({"signature": "" if part is None else part.signature})
        signatures = [message["signature"] for message in messages]
        if len(set(signatures)) > 1:
            each = "; ".join(f"process {index} has {text or 'none'}" for index, text in enumerate(signatures))
            raise DataError(f"Batches of the {self._name!r} data differ between processes: {each}. {_HINT}")
        return None if part is None else part.step_batch


def _signature(step_batch: StepBatch) -> str:
    """What must be equal in all processes: shapes and dtypes, for which a step is compiled, and scalars."""
    axis = int(step_batch.stacked)
    leaves = jax.tree_util.tree_leaves_with_path(step_batch.batch)
    kinds = [f"{leaf_path(path) or 'array'} {np.asarray(x).dtype}{list(np.shape(x)[axis:])}" for path, x in leaves]
    numbers = [f"= {np.asarray(x).tolist()}" if np.ndim(x) <= axis else "" for _, x in leaves]
    each = ", ".join(f"{kind} {number}".strip() for kind, number in zip(kinds, numbers, strict=True))
    return f"{step_batch.steps} × ({each})" if step_batch.stacked else f"({each})"


class GatheredBatches(JointBatches):
    """Global batches, gathered from all processes; some may have fewer examples, or none.

    The examples are all-gathered through the devices.
    """

    def __init__(
        self, batches: BatchIterator, name: str, group: ProcessGroup, program: CompiledProgram, where: Describe
    ) -> None:
        super().__init__(batches, name, group)
        self._program, self._where = program, where
        self._structure: Any = None
        self._has_ended, self._rounds = False, 0

    def next(self, patience: float) -> Any:
        """The next global batch; None if no process has one; `NOT_READY` if this process waits for its part."""
        step_batch = None if self._has_ended else self._or_notify(self._batches.next, patience)
        if step_batch is NOT_READY:
            return NOT_READY
        # the ragged last batch of a sharded loader is complete in every process
        batch = step_batch.batch if step_batch is not None and step_batch.replicated else self._joined(step_batch)
        if batch is None:
            return None
        self._rounds += 1
        placed = self._program.place(batch, stacked=False, replicated=True)
        return StepBatch(placed, 1, False, self._rounds - 1, None, replicated=True)

    def _joined(self, step_batch: StepBatch | None) -> Batch | None:
        """The next examples of all processes, ordered by process index."""
        self._has_ended = step_batch is None
        batch = None if step_batch is None else jax.tree.map(np.asarray, step_batch.batch)
        messages = self._exchange(self._or_notify(self._message, batch))
        all_specs = [message["specs"] for message in messages if "specs" in message]
        if not all_specs:
            return None
        if any(specs != all_specs[0] for specs in all_specs):
            each = [f"process {index} has {_describe(message.get('specs'))}" for index, message in enumerate(messages)]
            raise DataError(
                f"The {self._where(self._rounds)} differs between processes: {'; '.join(each)}. Give all of them the "
                "same keys, dtypes and shapes of examples."
            )
        specs, rows = [_LeafSpec(*spec) for spec in all_specs[0]], [message["rows"] for message in messages]
        leaves = jax.tree.leaves(batch) or [None] * len(specs)
        padded = [spec.padded(leaf, max(rows)) for spec, leaf in zip(specs, leaves, strict=True)]
        arrays = []
        for spec, parts in zip(specs, multihost_utils.process_allgather(padded), strict=True):
            if spec.shape is None:
                arrays.append(parts[np.argmax(rows)])
            else:
                arrays.append(np.concatenate([part[:count] for part, count in zip(parts, rows, strict=True)]))
        return resized(self._tree(messages).unflatten(arrays), sum(rows))

    def _message(self, batch: Batch | None) -> dict[str, Any]:
        if batch is None:
            return {"rows": 0, "has_tree": self._structure is not None}
        leaves = jax.tree_util.tree_leaves_with_path(batch)
        lengths = {leaf_path(path): len(leaf) for path, leaf in leaves if leaf.ndim}
        if len(set(lengths.values())) != 1 or 0 in lengths.values():
            raise DataError(
                f"The {self._where(self._rounds)} has arrays of the lengths {lengths}. With several processes all of "
                "them must have the same number of examples, and at least one."
            )
        is_first, self._structure = self._structure is None, jax.tree.structure(batch)
        specs = [
            _LeafSpec(leaf_path(path), leaf.shape[1:] if leaf.ndim else None, str(leaf.dtype)) for path, leaf in leaves
        ]
        tree = _as_text(self._structure) if is_first else ""
        return {"rows": next(iter(lengths.values())), "specs": specs, "tree": tree, "has_tree": True}

    def _tree(self, messages: list[dict[str, Any]]) -> Any:
        """The tree structure of batches; that of another process if this one never had a batch."""
        texts = [message["tree"] for message in messages if message.get("tree")]
        missing = [index for index, message in enumerate(messages) if not message["has_tree"]]
        if missing and not texts:  # in all processes, so that none continues alone
            raise DataError(
                f"Process {missing[0]} has no batch of the {self._name!r} data, and the batch class of the others "
                "cannot be sent to it. Give every process a batch, or use dicts or tuples of arrays."
            )
        if self._structure is None:
            self._structure = _from_text(texts[0])
        return self._structure


class _LeafSpec(NamedTuple):
    """The name, shape and dtype of an array of a batch."""

    name: str
    shape: Sequence[int] | None  # of one example; None for a scalar, which is the same in all processes
    dtype: str

    def padded(self, leaf: np.ndarray | None, rows: int) -> np.ndarray:
        """`leaf` with so many rows; None: this process has no more examples."""
        dtype = jax.dtypes.canonicalize_dtype(jnp.dtype(self.dtype))
        padded = np.zeros(() if self.shape is None else (rows, *self.shape), dtype)
        if leaf is not None:
            padded[tuple(map(slice, leaf.shape))] = leaf
        return padded


def _describe(specs: list[Any] | None) -> str:
    return "none" if specs is None else ", ".join(f"{name} {dtype}{list(shape or ())}" for name, shape, dtype in specs)


def _as_text(structure: Any) -> str:
    try:
        return base64.b64encode(structure.serialize_using_proto()).decode()
    except ValueError:  # a custom class
        return ""


def _from_text(text: str) -> Any:
    proto = base64.b64decode(text)
    return jax.tree_util.PyTreeDef.deserialize_using_proto(jax.tree_util.default_registry, proto)
