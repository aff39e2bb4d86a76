"""`Backend`: how a store copies, writes and reads checkpoints; the seam between one process and several.

In a job of several processes, all call the same methods of their stores in the same order. The primary process (index
0) manages the folder, every process writes its own shards. After each phase they exchange results at a barrier that
none leaves before all have arrived. A failure in one process therefore fails all of them with the same message, and all
continue, retry or give up together.

The phases of a save, in the saving thread of every process, with a barrier after each (and one before, which gathers
the positions of loaders that keep their own):

1. The primary process creates a folder under a temporary name, and broadcasts it. A process that has nothing to save,
   because it failed before (an invalid state, no memory for a snapshot), reports that here.
2. Every process writes its shards of distributed arrays into that folder, and its part of large replicated ones. The
   primary process also writes what is replicated: small arrays, and those on the host.
3. The primary process merges the parts, writes the record and the manifest, and renames the folder.
4. The primary process deletes the checkpoints that the retention policy does not keep.

After a failure no process writes any more once the barrier has passed, and the primary process deletes its folder. All
retry from 1 if every failure is transient, and otherwise raise a `SaveError` that names the process.

A process that dies or hangs does not reach the next barrier. The others time out and raise a `SaveError`. Until the
primary process has renamed the folder there is no checkpoint, and a later save sweeps the leftovers. If the others are
lost after the rename, the error of the primary process says that the checkpoint exists.

To restore, the primary process chooses a checkpoint with valid digests and broadcasts its path; every process reads its
shards and reports whether that succeeded. The primary process also lists the folder, while nothing is being saved, and
broadcasts the result.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from jax_trainer.checkpoint import arrays as stored
from jax_trainer.checkpoint.arrays import (
    ARRAYS,
    LARGEST,
    PackIndex,
    Snapshots,
    Spec,
    StateSpec,
    has_space_for_copy,
    is_on_cpu,
    packed,
)
from jax_trainer.checkpoint.commit import check_writable, complete, partial_folder, write_checkpoint
from jax_trainer.checkpoint.errors import TRANSIENT, CheckpointError, MultiHostError, errno_of, in_one_line
from jax_trainer.checkpoint.json_codec import decoded, encoded
from jax_trainer.checkpoint.record import Record
from jax_trainer.core import copied, failpoint
from jax_trainer.datasets import Position
from jax_trainer.datasets.arrays import joined_states, own_state
from jax_trainer.diagnostics.files import write_atomically
from jax_trainer.sharding.group import ProcessGroupError, process_group

Result = TypeVar("Result")
PATIENCE = 600.0  # seconds that one of several processes waits for the others
_SLOWEST = 50e6  # bytes per second: larger checkpoints get a longer timeout
_MOST_BYTES = 16  # per array element
_MOST_NAMED = 3


class Backend:
    """Saves and restores in this process.

    Attributes:
        coalesces: whether queued saves may be skipped.
        raises_early: whether the error of a background save may be raised before the next save.
    """

    coalesces = raises_early = True

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._snapshots = Snapshots()

    # snapshots

    def prepare(self, leaves: Mapping[str, Any], spec: StateSpec, check: Callable[[], None]) -> None:
        """Checks that states like this can be saved, also by `check`, and allocates buffers."""
        check_writable(self._folder, spec.nbytes)
        check()
        self._snapshots.allocate(leaves, is_on_host=spec.is_on_host)

    def snapshot(self, leaves: Mapping[str, Any], spec: StateSpec) -> dict[str, Any]:
        """A copy of the arrays, which the next step cannot change."""
        return self._snapshots.take(leaves, is_on_host=spec.is_on_host)

    def release(self, snapshot: dict[str, Any], spec: StateSpec) -> None:
        """Returns the buffers of a snapshot that is no longer needed."""
        self._snapshots.release(snapshot, is_on_host=spec.is_on_host)

    # saving

    def taking_part(self, settle: Callable[[], object]) -> AbstractContextManager[None]:
        """Around the part of a save in the caller's thread; `settle` waits for the saves before."""
        return nullcontext()

    def full_record(self, record: Record) -> Record:
        """`record` with what only the backend knows."""
        return record

    def write(
        self,
        path: Path,
        arrays: Mapping[str, Any],
        record: Callable[[], Record],
        prepare: Callable[[], None],
        size: int,
    ) -> None:
        """Writes the checkpoint `path`: when this returns, it is complete.

        Args:
            path: the final folder of the checkpoint.
            arrays: the snapshot.
            record: called after the arrays are written.
            prepare: called first; makes the folder ready.
            size: total bytes of all arrays.
        """
        prepare()
        write_checkpoint(path.parent, arrays, record, int(path.name.rpartition("_")[2]), last_point="before_rename")

    def collect(self, path: Path, collect: Callable[[], None]) -> None:
        """Collects garbage, after the checkpoint `path` exists."""
        collect()

    # questions

    def agree(self, compute: Callable[[], Result]) -> Result:
        """The result of `compute`, which is JSON data."""
        return compute()

    def read(self, choose: Callable[[], Path], read: Callable[[Path], Result], like: Any) -> Result:
        """The result of `read` for the path of `choose`; `like` is the state to restore."""
        return read(choose())

    def own_position(self, position: Position) -> Position:
        """The position of a checkpoint, as this process resumes from it."""
        return position


# several processes


class HostBarrier:
    """Exchanges results between the processes of a job about the checkpoints in `folder`.

    Args:
        folder: the same in all processes.
        what: the name of the barrier; every thread needs its own.
        patience: seconds to wait for the other processes.
    """

    def __init__(self, folder: Path, what: str, patience: float) -> None:
        self._topic, self._patience = f"checkpoints/{str(folder).strip('/')}/{what}", patience

    def all_gather(self, work: Callable[[], Any], size: int = 0) -> list[Any]:
        """What `work` returns in each process, as JSON data. If one fails, all raise the same `MultiHostError`.

        Args:
            work: called in every process.
            size: number of bytes to write or read, which extends the timeout.
        """
        answer, failure = {}, None
        try:
            answer = {"result": work()}
        except Exception as error:
            answer, failure = {"problem": in_one_line(error), "errno": errno_of(error)}, error
        text, patience = json.dumps(answer, default=str), self._patience + size / _SLOWEST
        answers = [json.loads(one) for one in process_group().all_gather(self._topic, text, timeout=patience)]
        if failed := {index: one for index, one in enumerate(answers) if "problem" in one}:
            raise _failure_of(failed, len(answers)) from failure
        return [one["result"] for one in answers]

    def from_primary(self, compute: Callable[[], Any], size: int = 0) -> Any:
        """Broadcasts the result of `compute` in the primary process."""
        return self.all_gather(compute if process_group().is_primary else lambda: None, size)[0]

    def ask_primary(self, compute: Callable[[], Any], size: int = 0) -> Any:
        """Like `from_primary`, for the main thread: the primary raises its own error, others a `CheckpointError`."""
        with _own_error():
            return self.from_primary(compute, size)

    def all_do(self, work: Callable[[], Result], size: int = 0) -> Result:
        """The result of `work` in this process, once all have finished."""
        results: list[Result] = []
        self.all_gather(lambda: results.append(work()), size)
        return results[0]


@contextmanager
def _own_error() -> Iterator[None]:
    """After a failure, raises the error of this process, or a `CheckpointError` if only others failed."""
    try:
        yield
    except MultiHostError as error:
        raise error.__cause__ or CheckpointError(str(error)) from None


def _failure_of(failed: Mapping[int, Mapping[str, Any]], count: int) -> MultiHostError:
    codes = [answer["errno"] for answer in failed.values()]
    named = [f"process {index} of {count}: {answer['problem']}" for index, answer in failed.items()]
    more = f" (and {len(named) - _MOST_NAMED} more)" if len(named) > _MOST_NAMED else ""
    lasting = next((code for code in codes if code not in TRANSIENT), codes[0])
    return MultiHostError(lasting, "; ".join(named[:_MOST_NAMED]) + more)


def probe_all(barrier: HostBarrier, folder: Path, prepare: Callable[[], None]) -> None:
    """Fails in all processes unless all can write to `folder`, and it is the same folder for all."""

    def begin() -> str:
        prepare()
        return str(stack.enter_context(partial_folder(folder)))

    def probe() -> None:
        _check_visible(Path(probed))
        write_atomically(Path(probed, "probe"), "x")

    with ExitStack() as stack:
        probed = barrier.ask_primary(begin)
        with _own_error():
            barrier.all_do(probe)


class MultiHostBackend(Backend):
    """Saves and restores together with the other processes; see above.

    Args:
        folder: the folder of the checkpoints, the same in all processes.
        patience: seconds that a process waits for the others, in addition to the time that large arrays take.
    """

    coalesces = False  # processes could not agree on which saves to skip
    raises_early = False  # they would fail at different steps

    def __init__(self, folder: Path, patience: float) -> None:
        super().__init__(folder)
        self._main, self._saving = (HostBarrier(folder, what, patience) for what in ("main", "saving"))

    def prepare(self, leaves: Mapping[str, Any], spec: StateSpec, check: Callable[[], None]) -> None:
        def check_all() -> None:
            check_writable(self._folder, spec.nbytes)
            check()

        probe_all(self._main, self._folder, check_all)
        self.snapshot(leaves, spec)  # compiles the copies

    def snapshot(self, leaves: Mapping[str, Any], spec: StateSpec) -> dict[str, Any]:
        return local_shard(leaves, is_primary=process_group().is_primary)

    def release(self, snapshot: dict[str, Any], spec: StateSpec) -> None:
        """Nothing: its memory is not reused."""

    @contextmanager
    def taking_part(self, settle: Callable[[], object]) -> Iterator[None]:
        """Reports a failure to the other processes, which would wait for this one's part of the save."""
        try:
            yield
        except Exception as error:
            settle()
            with suppress(MultiHostError, ProcessGroupError):  # the error itself is about to be raised
                self._saving.all_do(partial(_raise, error))
            raise

    def full_record(self, record: Record) -> Record:
        """`record` with the positions of all processes, if their loaders keep their own."""
        if record.data_state is None:
            return record
        states = [decoded(state) for state in self._saving.all_gather(lambda: record.data_state)]
        return replace(record, data_state=encoded(joined_states(states)))

    def write(
        self,
        path: Path,
        arrays: Mapping[str, Any],
        record: Callable[[], Record],
        prepare: Callable[[], None],
        size: int,
    ) -> None:
        """The first three phases of a save; `record` and `prepare` are called in the primary process."""

        def begin() -> list[str]:
            prepare()
            partial = stack.enter_context(partial_folder(path.parent))
            failpoint("after_tmp_dir")
            stored.make_shared_folder(partial / ARRAYS)
            return [path.name, str(partial)]

        def write() -> PackIndex:
            if name != path.name:
                problem = f"It saves {path.name}, and the primary process {name}: all must save the same step."
                raise CheckpointError(problem)
            _check_visible(Path(partial))
            return _write_shard(Path(partial, ARRAYS), arrays)

        def finish() -> None:
            if process_group().is_primary:
                stored.merge_parts(Path(partial, ARRAYS))
                complete(Path(partial), path, pack_index, record, "before_rename")
                done.append(path)

        done: list[Path] = []
        with ExitStack() as stack:
            name, partial = self._saving.from_primary(begin)
            pack_index = self._saving.all_do(write, size)
            with _naming_saved(done):
                self._saving.all_do(finish, size)

    def collect(self, path: Path, collect: Callable[[], None]) -> None:
        """The last phase of a save."""
        with _naming_saved([path]):
            self._saving.from_primary(collect)

    def agree(self, compute: Callable[[], Result]) -> Result:
        """The result of `compute` in the primary process."""
        return self._main.ask_primary(compute)

    def read(self, choose: Callable[[], Path], read: Callable[[Path], Result], like: Any) -> Result:
        """The result of `read` for the path that the primary process chooses, once all processes have read it."""
        size = sum(_MOST_BYTES * math.prod(leaf.shape) for leaf in jax.tree.leaves(like))
        path = Path(self._main.ask_primary(lambda: str(choose()), size))
        with _own_error():
            return self._main.all_do(lambda: read(path), size)

    def own_position(self, position: Position) -> Position:
        """`position` with the state of this process's loader."""
        us = process_group()
        return replace(position, state=own_state(position.state, us.index, us.count))


def backend_for(folder: Path, patience: float) -> Backend:
    """The backend for the checkpoints in `folder`: that of a single process, or of a job of several."""
    is_joint = jax.distributed.is_initialized() and process_group().is_multi_process
    return MultiHostBackend(folder, patience) if is_joint else Backend(folder)


def _write_shard(folder: Path, arrays: Mapping[str, Any]) -> PackIndex:
    """Writes this process's part of the arrays, and waits until it is on disk."""
    is_distributed = lambda array: isinstance(array, jax.Array) and not array.is_fully_addressable
    shared = {name: array for name, array in arrays.items() if is_distributed(array)}
    own = jax.device_get({name: array for name, array in arrays.items() if name not in shared})
    together, pack_index = packed({**shared, **own})
    if together:  # empty if no array is sharded over the processes
        stored.write_parts(folder, together)
    if index := process_group().index:  # only the process that wrote files can sync them; 0 syncs the merged ones
        stored.sync_parts(folder, index)
    return pack_index


@contextmanager
def _naming_saved(done: list[Path]) -> Iterator[None]:
    try:
        yield
    except ProcessGroupError as error:
        if not done:
            raise
        raise ProcessGroupError(f"The checkpoint is complete, but not all processes know of it. {error}") from error


def _raise(error: Exception) -> None:
    raise error


def _check_visible(folder: Path) -> None:
    if not folder.is_dir():
        raise CheckpointError(
            f"It does not see {folder}, which the primary process has just created: all processes must save to the "
            "same file system."
        )


def local_shard(leaves: Mapping[str, Any], *, is_primary: bool) -> dict[str, Any]:
    """Copies of the parts of `leaves` that this process writes."""
    shared = {name: leaf for name, leaf in leaves.items() if is_shared(leaf)}
    copies = _copies(shared)
    if is_primary:
        copies |= {name: _local_copy(leaf) for name, leaf in leaves.items() if name not in shared}
    return copies


def is_shared(leaf: Any) -> bool:
    """Whether all processes write a part of `leaf`."""
    if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable or not leaf.size:
        return False
    return not leaf.is_fully_replicated or Spec.of(leaf).nbytes > LARGEST


def _copies(shared: dict[str, Any]) -> dict[str, Any]:
    if not shared:
        return {}
    if is_on_cpu(shared):
        return jax.block_until_ready(copied(shared))  # several in flight can deadlock CPU devices
    if has_space_for_copy(shared):
        return copied(shared)
    return {name: _on_host(leaf) for name, leaf in shared.items()}


def _on_host(leaf: jax.Array) -> jax.Array:
    """The array in pinned host memory with the same sharding: orbax takes only jax arrays."""
    parts = [
        jax.device_put(shard.data, SingleDeviceSharding(shard.device, memory_kind="pinned_host"))
        for shard in leaf.addressable_shards
    ]
    sharding = leaf.sharding.with_memory_kind("pinned_host")
    return jax.make_array_from_single_device_arrays(leaf.shape, sharding, jax.block_until_ready(parts))


def _local_copy(leaf: Any) -> Any:
    if not leaf.size:  # the own part of it may have another shape
        return np.zeros(leaf.shape, leaf.dtype)
    if not isinstance(leaf, jax.Array):
        return np.array(leaf)
    return jnp.copy(leaf if leaf.is_fully_addressable else leaf.addressable_data(0))
