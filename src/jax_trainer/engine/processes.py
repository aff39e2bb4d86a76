"""What the loops leave to the job that this process belongs to; no other file of the engine knows of other processes.

`SingleProcess` is the usual case, where nothing is done. A `MultiProcess` trains in step with the others, by one clock,
and until all stop. Its batches, of which each process may have its own part, continue together or fail together:
training data must be equal in number and size (`LockstepBatches`), evaluation data may have any (`GatheredBatches`).
`ArrayLoader` and `GrainLoader` shard their batches themselves and need neither, if these divide evenly.
"""

import base64
import json
import os
import signal
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from jax_trainer.config.stop_signals import STOP_SIGNALS
from jax_trainer.core import Batch, CompiledProgram
from jax_trainer.datasets import NOT_READY, BatchIterator, DataError, DataSource, StepBatch
from jax_trainer.diagnostics.leaves import leaf_path
from jax_trainer.engine.events import Edit, Interruption, StopTraining
from jax_trainer.engine.loop_state import LoopState, RunClock
from jax_trainer.engine.plan import Plan
from jax_trainer.sharding import resized
from jax_trainer.sharding.group import ProcessGroup, ProcessGroupError, Watchdog, process_group
from jax_trainer.sharding.placement import is_alone

SYNC_SECONDS = 1.0  # between two synchronizations with the clock of the primary process, about
MAX_DISPATCHES = 10_000  # between two synchronizations

Describe = Callable[[int], str]  # describes the batch with this number
PlaceFn = Callable[[StepBatch], StepBatch]
Feed = tuple[PlaceFn, Callable[[Any], Any]]  # places a batch; wraps the iterator of placed batches
_HINT = (
    "With several processes, each must yield the same number of training batches, all of one size: use a "
    "`DistributedSampler` and `drop_last=True`, or an `ArrayLoader` or `GrainLoader`, which shard batches themselves."
)


class SingleProcess:
    """One process, which waits for nobody.

    Attributes:
        is_multi_process: whether there are others. Metrics are then read at the same steps in all of them, an
            evaluation set may have no batch in this one, and a run that failed cannot wait for its saves.
        signals: those that end a run after its current event.
        index: the number of this process.
    """

    is_multi_process = False
    signals: tuple[signal.Signals, ...] = STOP_SIGNALS
    index = 0

    def stop_all(self, number: int) -> bool:
        """Stops all processes at the same step, after signal `number`; False: the signal ends this run alone."""
        return False

    def broadcast_from_primary(self, what: str, compute: Callable[[], Any]) -> Any:
        """The result of `compute` in the primary process, which is JSON data."""
        return compute()

    def watching(self) -> AbstractContextManager[Any]:
        """Around a run: monitors the other processes; gives None, or what `Driver` asks about them."""
        return nullcontext()

    def clock(self, plan: Plan, at: LoopState) -> RunClock:
        """The clock for a run of `plan` from `at`."""
        return RunClock(plan, at)

    def stepping(self, batches: BatchIterator) -> BatchIterator:
        """The batches of an epoch, as the loop draws them between two steps."""
        return batches

    def can_save_after(self, reason: BaseException) -> bool:
        """Whether a run that ends early for `reason` can be saved."""
        return True

    def check_edits(self, edits: Sequence[Edit]) -> None:
        """Raises if the processes have decided on different edits: their states would no longer match."""

    def feed(
        self, program: CompiledProgram, data_source: DataSource, where: Describe, place: PlaceFn, *, trains: bool
    ) -> Feed:
        """How batches reach the devices in training or an evaluation, given what places the complete ones."""
        return place, unchanged


class MultiProcess(SingleProcess):
    """One of several processes, which step, save and stop together."""

    is_multi_process = True
    # JAX announces a SIGTERM of one process to all of them; see `_Preemptible`
    signals = tuple(number for number in STOP_SIGNALS if number != signal.SIGTERM)
    _signal: ClassVar[int] = 0  # that this process got: what handles it and the loop that stops have peers of their own

    def __init__(self, group: ProcessGroup) -> None:
        self._group, self.index = group, group.index
        self.dispatches = 0  # of the run

    def stop_all(self, number: int) -> bool:
        MultiProcess._signal = number
        os.kill(os.getpid(), signal.SIGTERM)
        return True

    def stopping_signal(self) -> int:
        """The signal that has stopped all processes: that of the first that knows, else a SIGTERM, which JAX has."""
        numbers = map(int, self._group.all_gather("signal", str(MultiProcess._signal)))
        MultiProcess._signal = 0
        return next((number for number in numbers if number), signal.SIGTERM)

    def broadcast_from_primary(self, what: str, compute: Callable[[], Any]) -> Any:
        return json.loads(self._group.broadcast(what, lambda: json.dumps(compute())))

    def watching(self) -> AbstractContextManager[Watchdog]:
        return Watchdog(self._group)

    def clock(self, plan: Plan, at: LoopState) -> RunClock:
        by_time = plan.max_seconds or plan.eval_every.minutes or any(every.minutes for every in plan.saves)
        return SyncedClock(self._group, plan, at) if by_time else RunClock(plan, at)

    def stepping(self, batches: BatchIterator) -> BatchIterator:
        return _Preemptible(batches, self)

    def can_save_after(self, reason: BaseException) -> bool:
        """A process that fails does so alone: there is no step at which all of them could save."""
        return isinstance(reason, StopTraining | Interruption)

    def check_edits(self, edits: Sequence[Edit]) -> None:
        decided = self._group.all_gather("edits", "; ".join(f"{edit.by}: {edit.description}" for edit in edits))
        if len(set(decided)) > 1:
            each = ", ".join(f"process {index} has {text!r}" for index, text in enumerate(decided))
            raise ValueError(
                f"All processes must return the same edits, but {each}. Decide by metrics, which are equal."
            )

    def feed(
        self, program: CompiledProgram, data_source: DataSource, where: Describe, place: PlaceFn, *, trains: bool
    ) -> Feed:
        if program.layout is None:
            raise DataError(
                f"{self._group.count} processes are running, but the program was compiled for the devices of one. Pass "
                "`layout=Layout(mesh=make_mesh())`, which uses the devices of all processes."
            )
        placement = program.layout.batch_placement
        is_shared = data_source.is_shared
        if placement is not None and is_shared and not trains:  # do full batches divide evenly among all devices?
            ways = placement.ways
            is_shared = placement.axes is not None and all(size % ways == 0 for size in data_source.batch_sizes)
        if placement is None or is_shared:
            return place, unchanged
        if trains:
            lockstep = lambda batches: LockstepBatches(batches, data_source.name, self._group)
            return place_shards(placement.rows_of, where, place, self._group.index), lockstep
        return unchanged, lambda batches: GatheredBatches(batches, data_source.name, self._group, program, where)


def peers() -> SingleProcess:
    """How this process trains: by itself, or together with the others of its job."""
    return SingleProcess() if is_alone() else MultiProcess(process_group())


def unchanged(value: Any) -> Any:
    """`value`: the feed of batches that need no placing or no wrapping."""
    return value


class SyncedClock(RunClock):
    """A `RunClock` with the time of the primary process, as of the last synchronization: the same in all processes.

    Clocks differ, and a process that evaluates, saves or stops by its own would wait for the others forever.
    """

    def __init__(self, group: ProcessGroup, plan: Plan, at: LoopState) -> None:
        super().__init__(plan, at)
        self._group, self._synced = group, 0.0
        self._dispatches, self._next, self._last = 0, 1, 0

    def now(self) -> float:
        return self._synced

    def stepped(self) -> float:
        # all processes count dispatches alike, so they synchronize at the same one
        self._dispatches += 1
        if self._dispatches == self._next:
            seconds, following = self._group.broadcast("time", self._measure).split()
            self._synced, self._next = float.fromhex(seconds), int(following)
        return self._synced

    def _measure(self) -> str:
        now = super().now()
        pace = (now - self._synced) / max(1, self._dispatches - self._last)
        self._last = self._dispatches
        return f"{now.hex()} {self._dispatches + max(1, min(MAX_DISPATCHES, round(SYNC_SECONDS / max(pace, 1e-6))))}"


class WrappedBatches:
    """A `BatchIterator` over another one; subclasses define `next`."""

    def __init__(self, batches: BatchIterator) -> None:
        self._batches = batches

    @property
    def waited(self) -> float:
        """Seconds for which the device was idle, waiting for a batch."""
        return self._batches.waited

    def close(self) -> None:
        """Stops making batches."""
        self._batches.close()


class _Preemptible(WrappedBatches):
    """The batches of an epoch; after a preemption notice, the next one is an `Interruption`, in all processes."""

    def __init__(self, batches: BatchIterator, job: MultiProcess) -> None:
        super().__init__(batches)
        self._job, self._has_dispatched = job, False

    def next(self, patience: float) -> Any:
        """The next batch, after the step before it was handled by all observers."""
        if self._has_dispatched:
            self._has_dispatched = False
            self._job.dispatches += 1  # the same in all processes, however many steps a dispatch has
            if multihost_utils.reached_preemption_sync_point(self._job.dispatches):
                raise Interruption(self._job.stopping_signal())
        step_batch = self._batches.next(patience)
        self._has_dispatched = step_batch is not NOT_READY
        return step_batch


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


def place_shards(
    rows_of: Callable[..., int], where: Describe, place: PlaceFn, index: int
) -> Callable[[StepBatch], Any]:
    """Places parts on the devices. All must have the size of the first: a step uses those of all processes."""
    expected = 0

    def place_shard(step_batch: StepBatch) -> LocalShard:
        nonlocal expected
        placed = place(step_batch)
        rows = rows_of(step_batch.batch, stacked=step_batch.stacked)
        expected = expected or rows
        if rows != expected:
            raise DataError(
                f"The {where(step_batch.number)} has {rows} examples in process {index}, but earlier ones have "
                f"{expected}. {_HINT}"
            )
        return LocalShard(placed, _signature(step_batch))

    return place_shard


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
        specs = [message["specs"] for message in messages if "specs" in message]
        if not specs:
            return None
        if any(one != specs[0] for one in specs):
            each = [f"process {index} has {_describe(message.get('specs'))}" for index, message in enumerate(messages)]
            raise DataError(
                f"The {self._where(self._rounds)} differs between processes: {'; '.join(each)}. Give all of them the "
                "same keys, dtypes and shapes of examples."
            )
        rows = [message["rows"] for message in messages]
        leaves = jax.tree.leaves(batch) or [None] * len(specs[0])
        padded = []
        for leaf, (_, shape, dtype) in zip(leaves, specs[0], strict=True):
            dtype = jax.dtypes.canonicalize_dtype(jnp.dtype(dtype))
            padded.append(np.zeros(() if shape is None else (max(rows), *shape), dtype))
            if leaf is not None:
                padded[-1][tuple(map(slice, leaf.shape))] = leaf
        arrays = []
        for (_, shape, _), parts in zip(specs[0], multihost_utils.process_allgather(padded), strict=True):
            own = [part if shape is None else part[:count] for part, count in zip(parts, rows, strict=True)]
            arrays.append(own[np.argmax(rows)] if shape is None else np.concatenate(own))
        return resized(self._tree(messages).unflatten(arrays), sum(rows))

    def _message(self, batch: Batch | None) -> dict[str, Any]:
        if batch is None:
            return {"rows": 0, "tree": None if self._structure is None else _as_text(self._structure)}
        leaves = jax.tree_util.tree_leaves_with_path(batch)
        lengths = {leaf_path(path): len(leaf) for path, leaf in leaves if leaf.ndim}
        if len(set(lengths.values())) != 1 or 0 in lengths.values():
            raise DataError(
                f"The {self._where(self._rounds)} has arrays of the lengths {lengths}. With several processes all of "
                "them must have the same number of examples, and at least one."
            )
        self._structure = jax.tree.structure(batch)
        # the name, the shape of one example and the dtype; no shape: a scalar, which is the same in all processes
        specs = [(leaf_path(path), leaf.shape[1:] if leaf.ndim else None, str(leaf.dtype)) for path, leaf in leaves]
        return {"rows": next(iter(lengths.values())), "specs": specs, "tree": _as_text(self._structure)}

    def _tree(self, messages: list[dict[str, Any]]) -> Any:
        """The tree structure of batches; that of another process if this one never had a batch."""
        texts = [message["tree"] for message in messages if message["tree"]]
        missing = [index for index, message in enumerate(messages) if message["tree"] is None]
        if missing and not texts:  # in all processes, so that none continues alone
            raise DataError(
                f"Process {missing[0]} has no batch of the {self._name!r} data, and the batch class of the others "
                "cannot be sent to it. Give every process a batch, or use dicts or tuples of arrays."
            )
        if self._structure is None:
            self._structure = _from_text(texts[0])
        return self._structure


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
