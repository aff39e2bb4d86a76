"""`Backend`: how a store copies, writes and reads checkpoints; the seam between one process and several.

This one is for a single process. `MultiHostBackend` (multi_process.py) has the same methods for a job of several.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

from jax_trainer.checkpoint.commit import check_writable, write_checkpoint
from jax_trainer.checkpoint.record import Record
from jax_trainer.checkpoint.snapshot import Snapshots, StateSpec
from jax_trainer.datasets import Position

Result = TypeVar("Result")
PATIENCE = 600.0  # seconds that one of several processes waits for the others


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
        self._snapshots.allocate(leaves)

    def snapshot(self, leaves: Mapping[str, Any], spec: StateSpec) -> dict[str, Any]:
        """A copy of the arrays, which the next step cannot change."""
        return self._snapshots.take(leaves, spec.method)

    def release(self, snapshot: dict[str, Any]) -> None:
        """Returns the buffers of a snapshot that is no longer needed."""
        self._snapshots.release(snapshot)

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

    def agree(
        self,
        compute: Callable[[], Result],
        encode: Callable[[Result], Any] = lambda result: result,
        decode: Callable[[Any], Result] = lambda data: data,
    ) -> Result:
        """The result of `compute`; `encode` makes JSON data of it, and `decode` is the inverse."""
        return compute()

    def read(self, choose: Callable[[], Path], read: Callable[[Path], Result], like: Any) -> Result:
        """The result of `read` for the path of `choose`; `like` is the state to restore."""
        return read(choose())

    def own_position(self, position: Position) -> Position:
        """The position of a checkpoint, as this process resumes from it."""
        return position
