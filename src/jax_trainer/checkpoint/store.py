"""`CheckpointStore`: saves states crash-safely in the background, applies the retention policy, and restores them.

A checkpoint is a folder `step_00001755` with `checkpoint.json`, the arrays by dotted name in `state/`, and the digests
of these files in `MANIFEST.json`. A thread writes it under a temporary name and renames it once everything is on disk,
so a folder with the final name is complete.
"""

import ctypes
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal
from weakref import WeakValueDictionary

from jax_trainer.checkpoint.arrays import StateSpec, StateSpecs, load_orbax
from jax_trainer.checkpoint.backend import PATIENCE, Backend, backend_for
from jax_trainer.checkpoint.commit import sweep
from jax_trainer.checkpoint.errors import CheckpointError, SaveError, as_save_error, with_retries
from jax_trainer.checkpoint.ranking import newest_first
from jax_trainer.checkpoint.record import (
    CheckpointInfo,
    Record,
    SavedCheckpoint,
    checkpoint_infos,
    name_of,
    read_saved,
    versions_in_use,
)
from jax_trainer.checkpoint.restore import (
    Check,
    RestoreOptions,
    first_complete,
    no_check,
    not_resumable,
    read_into,
    read_verified,
)
from jax_trainer.checkpoint.retention import GarbageCollector, Retention
from jax_trainer.core import TrainState, digest_of, failpoint, step_of
from jax_trainer.datasets import Position
from jax_trainer.diagnostics.output import reserve_standard_streams
from jax_trainer.diagnostics.worker import Worker

__all__ = ["CheckpointError", "CheckpointInfo", "CheckpointStore", "SaveError", "SavedCheckpoint", "Which"]

Which = SavedCheckpoint | Path | int | Literal["latest", "best"] | None
RunState = Mapping[str, Any] | Callable[[], Mapping[str, Any]] | None
_FIELDS = tuple(name for name in TrainState.__dataclass_fields__ if name != "frozen")
_MOST_WAITING = 1 << 28  # bytes of all queued saves, if more than one is queued
_NOTICEABLE = 2.0  # total seconds that saves waited for the previous one
_log = logging.getLogger("jax_trainer")


class CheckpointStore:
    """The checkpoints of one run, in `folder`.

    In a job of several processes all call the same methods in the same order: see `MultiHostBackend`.

    Args:
        folder: the folder of the checkpoints; created by the first save.
        patience: seconds that a process waits for the others, in addition to the time that large arrays take.
        retention: which checkpoints are kept: the arguments of `Retention`.

    Attributes:
        before_commit: called in the saving thread before a checkpoint is committed; it writes files that the checkpoint
            refers to.
        after_commit: called there after each checkpoint, once retention has deleted others.
    """

    before_commit: Callable[[], object] | None = None
    after_commit: Callable[[], object] | None = None

    def __init__(self, folder: Path, *, patience: float = PATIENCE, **retention: Any) -> None:
        reserve_standard_streams()
        self.folder = Path(folder).absolute()
        self._retention = Retention(**retention)
        self._garbage_collector = GarbageCollector(self.folder, self._retention)
        self._state_specs, self._thread, self._patience = StateSpecs(), _thread_of(self.folder), patience
        self._waited, self._has_warned_of_waiting = 0.0, False
        self._frozen: str | None = None  # the digest of the arrays that are not saved

    @cached_property
    def _backend(self) -> Backend:
        return backend_for(self.folder, self._patience)  # at the first use: processes join before they have arrays

    def prepare(self, state: TrainState) -> None:
        """Checks before the first step that states like this can be saved here, and allocates buffers."""
        spec, leaves = self._state_specs.of(state.replace(frozen={}))
        self._backend.prepare(leaves, spec, self._garbage_collector.check)
        load_orbax()
        versions_in_use()

    def save(
        self,
        state: TrainState,
        position: Position,
        metrics: Mapping[str, float],
        *,
        callbacks: Mapping[str, Any] | None = None,
        run: RunState = None,
        wait: bool = True,
        coalesce: bool = False,
    ) -> Path:
        """Saves `state` as the checkpoint of its step. Raises a `SaveError` if the previous save failed.

        Args:
            state: the training state. Its buffers may be donated as soon as this returns.
            position: the position in the data.
            metrics: the evaluation metrics of this state; empty if it was not evaluated.
            callbacks: the states of callbacks by name, as plain data.
            run: other state of the run, or a function that returns it; the saving thread calls it after writing the
                arrays, and it may block.
            wait: return once the checkpoint is on disk; otherwise write it in the background.
            coalesce: do not wait for a checkpoint that is being written: queue this one in memory, and skip it if newer
                ones arrive that would delete it.
        """
        with self._taking_part():
            self._check_monitored(metrics)
            spec, leaves = self._state_specs.of(state.replace(frozen={}))
            if self._frozen is None:  # no step changes it
                self._frozen = digest_of(state.frozen)
            record = Record.of(step_of(state), position, metrics, callbacks, spec.keys)
            record = replace(record, frozen=self._frozen)
            if not callable(run):
                record = record.with_run(run)
        coalesce = coalesce and self._backend.coalesces
        self._wait_for_space(spec.nbytes, coalesce=coalesce)
        with self._taking_part():
            save = _Save(self, self._backend.snapshot(leaves, spec), spec, record, run)
        if coalesce:
            self._thread.submit(save, self._needed)
        else:
            self._thread.start(save)
        if wait:
            self.wait()
        return self.folder / name_of(record.step)

    def wait(self) -> None:
        """Waits for pending saves; raises a `SaveError` if one failed."""
        self._thread.wait()

    def check(self) -> None:
        """Raises a `SaveError` if a background save failed; does not wait.

        Several processes raise it at the next `save` or `wait` instead, since they would fail at different steps.
        """
        if self._backend.raises_early:
            self._thread.check()

    def mark_resumed_from(self, saved: SavedCheckpoint) -> None:
        """Marks `saved` as the checkpoint that the run resumed from; it is kept until `completed`.

        Checkpoints of later steps are ignored, and deleted by the next save.
        """
        self._thread.settle()
        self._backend.agree(lambda: self._garbage_collector.mark_resumed_from(saved))

    def completed(self) -> None:
        """Marks the run as completed: waits for saves, and no longer keeps the checkpoint it resumed from."""
        self.wait()
        self._backend.agree(self._garbage_collector.completed)

    def all(self) -> list[SavedCheckpoint]:
        """The checkpoints by ascending step. Waits for pending saves."""
        self._thread.settle()  # nothing is deleted before the list was read
        paths = self._backend.agree(lambda: [str(saved.path) for saved in self._checkpoints()])
        return [read_saved(Path(path))[0] for path in paths]

    def steps(self) -> list[int]:
        """The steps of the checkpoints, in ascending order."""
        return [saved.step for saved in self.all()]

    def latest(self) -> SavedCheckpoint | None:
        """The checkpoint of the largest step; `restore` and `verify` check its content."""
        return next(iter(newest_first(self.all())), None)

    def best(self) -> SavedCheckpoint | None:
        """The best checkpoint by the monitored metric or by `better`; None if none can be compared."""
        return next(iter(self._retention.best_first(self.all())), None)

    def infos(self) -> list[CheckpointInfo]:
        """All folders named like a checkpoint, by ascending step, damaged ones included."""
        self._thread.settle()
        rows = self._backend.agree(lambda: [asdict(one) for one in checkpoint_infos(self.folder)])
        return [CheckpointInfo(**{**row, "path": Path(row["path"])}) for row in rows]

    def verify(self, path: Path) -> str:
        """The problem of the checkpoint in `path`, found by reading all its files; "" if it is intact."""

        def problem() -> str:
            try:
                read_verified(Path(path).absolute())
            except CheckpointError as error:
                return str(error)
            return ""

        return self._backend.agree(problem)

    def restore(
        self,
        which: Which,
        like: TrainState,
        *,
        only: Sequence[str] = _FIELDS,
        cast: bool = False,
        partial: bool | Sequence[str] = False,
        rename: Mapping[str, str | None] | None = None,
        check: Check = no_check,
    ) -> tuple[TrainState, SavedCheckpoint]:
        """Restores the state of a checkpoint bit for bit; returns it with the checkpoint.

        Every file is compared with its digest first. For "latest" and "best", damaged checkpoints are skipped with a
        warning; if all are damaged, that is an error.

        Args:
            which: "latest" (or None), "best", a step, what `latest` or `best` returned, or the folder of a checkpoint.
            like: a state of arrays or `jax.ShapeDtypeStruct`s. The checkpoint must have exactly its arrays. They are
                placed with its shardings, and on the default device where it has none.
            only: the fields of the state to restore, such as "params"; the others are taken from `like`.
            cast: convert floating-point arrays to the precision of `like`.
            partial: take arrays that the checkpoint lacks from `like`, and ignore arrays that `like` lacks; fields of
                the state: only for theirs.
            rename: maps names in the checkpoint to names in the state: `{"params.encoder.*": "params.backbone.*"}`.
            check: called with a checkpoint whose digests match; a `CheckpointError` that it raises counts as damage.
                Of several processes, only one calls it.
        """
        options = RestoreOptions(cast=cast, partial=partial, rename=dict(rename or {}))
        self._thread.settle()
        fields = () if partial is True else only

        def read(path: Path) -> tuple[TrainState, SavedCheckpoint]:
            saved, record = read_saved(path)
            state = read_into(like, saved.path, record, only, options)
            return state, replace(saved, position=self._backend.own_position(saved.position))

        return self._backend.read(lambda: self._path_of(which, fields, check), read, like)

    def _check_monitored(self, metrics: Mapping[str, float]) -> None:
        monitor = self._retention.monitor
        if monitor is not None and metrics and monitor not in metrics:
            raise ValueError(
                f"No metric {monitor!r} to monitor. Logged metrics: {', '.join(sorted(metrics))}. Set `monitor` "
                "to one of these, and save after the evaluation that reports it."
            )

    def _taking_part(self) -> AbstractContextManager[None]:
        return self._backend.taking_part(lambda: self._thread.settle(insist=True))

    def _wait_for_space(self, size: int, *, coalesce: bool) -> None:
        """Waits until nothing is being written or, with `coalesce`, until the queue has space for `size` bytes."""

        def has_space(waiting: Sequence[Any]) -> bool:
            return not waiting or size + sum(save.spec.nbytes for save in waiting) <= _MOST_WAITING

        self._waited += self._thread.wait_for(has_space) if coalesce else self._thread.settle(insist=True)
        if self._waited > _NOTICEABLE and not self._has_warned_of_waiting:
            self._has_warned_of_waiting = True
            _log.warning(
                "Saving takes longer than the interval between saves: training has waited %.1f s for %s. Save less "
                "often, or to a faster disk.",
                *(self._waited, self.folder),
            )
        self._thread.check()

    def _needed(self, current: Any, waiting: list[Any]) -> list[Any]:
        """The saves of `waiting`, newest last, that the retention policy would keep once all were written.

        The others would have been deleted again, so the final set of checkpoints does not depend on write speed.
        """
        *before, new = waiting
        if not before or any(save.store is not self for save in before):
            return waiting
        running = [current] if current is not None and current.store is self else []
        try:
            kept = self._garbage_collector.kept_with([save.saved for save in (*running, *waiting)])
        except ValueError as error:  # from the user's `better`
            raise as_save_error(error, new.record.step, new.saved.path, new.spec.nbytes) from error
        left_out = [save for save in before if save.record.step not in kept or save.record.step == new.record.step]
        for save in left_out:
            self._backend.release(save.arrays, save.spec)
        return [save for save in waiting if save not in left_out]

    def _write(self, save: "_Save") -> None:
        # runs in the saving thread
        step, path, what = save.record.step, save.saved.path, f"Saving the checkpoint of step {save.record.step}"

        @cache
        def full_record() -> Record:
            full = with_positions.with_run(save.run()) if callable(save.run) else with_positions
            if self.before_commit is not None:
                self.before_commit()
            return full

        def make_folder() -> None:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._garbage_collector.check()
            sweep(self.folder)

        def collect_garbage() -> None:
            failpoint("after_rename")
            with_retries(lambda: self._garbage_collector.committed(step, path, save.spec.specs), what)

        try:
            with_positions = self._backend.full_record(save.record)
            write = lambda: self._backend.write(path, save.arrays, full_record, make_folder, save.spec.nbytes)
            with_retries(write, what)
            self._backend.collect(path, collect_garbage)
        except BaseException as error:
            failure = as_save_error(error, step, path, save.spec.nbytes)
            raise failure from failure.__cause__
        if self.after_commit is not None:
            self.after_commit()

    def _checkpoints(self) -> list[SavedCheckpoint]:
        return list(self._garbage_collector.listing().found.values())

    def _path_of(self, which: Which, fields: Sequence[str], check: Check) -> Path:
        if isinstance(which, SavedCheckpoint | Path):
            saved = read_verified(which.absolute() if isinstance(which, Path) else which.path, check)
        else:
            saved = self._choose(which, fields, check)
        if any(name in fields for name in saved.without):
            raise not_resumable(saved, self._checkpoints())
        return saved.path

    def _choose(
        self, which: int | Literal["latest", "best"] | None, fields: Sequence[str], check: Check
    ) -> SavedCheckpoint:
        listing = self._garbage_collector.listing()
        found = list(listing.found.values())
        steps = f"Saved steps: {', '.join(map(str, listing.found))}." if found else "The folder has no checkpoints."
        if isinstance(which, int):
            path = listing.found[which].path if which in listing.found else self.folder / name_of(which)
            if which not in listing.found and path not in listing.damaged:
                raise CheckpointError(f"No checkpoint in {self.folder} has step {which}. {steps}")
            return read_verified(path, check)
        if which == "best":
            candidates, criterion = self._retention.best_first(found), self._retention.criterion
            others = {} if found and not candidates else listing.damaged  # damage is not why none compares
            return first_complete(
                candidates, lambda _: others, f"No checkpoint in {self.folder} {criterion}. {steps}", check
            )
        if which not in (None, "latest"):
            raise ValueError(f"`which` must be 'latest', 'best', a step, a checkpoint or its folder, got {which!r}.")
        candidates = newest_first(found, fields)
        if found and not candidates:
            raise not_resumable(found[-1], found)
        nothing = f"No checkpoint in {self.folder} can be restored. {steps}"
        return first_complete(candidates, listing.damaged_after, nothing, check)


@dataclass(frozen=True, eq=False)
class _Save:
    """A save in the queue."""

    store: CheckpointStore
    arrays: dict[str, Any]
    spec: StateSpec
    record: Record
    run: RunState

    def __call__(self) -> None:
        try:
            self.store._write(self)
        finally:
            self.store._backend.release(self.arrays, self.spec)
            # threads that write arrays fragment their heaps: 80 MB more, and growing
            if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:  # not in every C library
                trim(0)

    @property
    def saved(self) -> SavedCheckpoint:
        """As the retention policy ranks it."""
        metrics = {name: float(value) for name, value in self.record.metrics.items()}
        return SavedCheckpoint(self.record.step, Position(), metrics, self.store.folder / name_of(self.record.step))


_threads: "WeakValueDictionary[str, Worker]" = WeakValueDictionary()  # by folder


def _thread_of(folder: Path) -> Worker:
    """The thread that saves to `folder`, shared by all stores of this process."""
    key = os.path.realpath(folder)
    thread = _threads.get(key)
    if thread is None:
        thread = _threads[key] = Worker("jax-trainer-save", f"a checkpoint in {folder}")
    return thread
