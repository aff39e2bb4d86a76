"""`CheckpointStore`: saves states crash-safely in the background, applies the retention policy, and restores them.

A checkpoint is a folder `step_00001755` with `checkpoint.json`, the arrays by dotted name in `state/`, and the digests
of these files in `MANIFEST.json`. A thread writes it under a temporary name and renames it once everything is on disk,
so a folder with the final name is complete.
"""

import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import jax

from jax_trainer.checkpoint.arrays import load_orbax
from jax_trainer.checkpoint.background import saving_thread
from jax_trainer.checkpoint.choosing import (
    Check,
    first_complete,
    lacks,
    newest_with,
    no_check,
    of_step,
    problem_of,
    read_verified,
)
from jax_trainer.checkpoint.content import write_checkpoint
from jax_trainer.checkpoint.direction import Mode, best_mode
from jax_trainer.checkpoint.disk import SaveError
from jax_trainer.checkpoint.disk_check import check_writable
from jax_trainer.checkpoint.failures import as_save_error, with_retries
from jax_trainer.checkpoint.garbage_collection import GarbageCollector
from jax_trainer.checkpoint.index import name_of, read_saved
from jax_trainer.checkpoint.info import CheckpointInfo, checkpoint_infos
from jax_trainer.checkpoint.leaves import Spec
from jax_trainer.checkpoint.local_shards import local_shard
from jax_trainer.checkpoint.multihost import (
    HostBarrier,
    garbage_collect_all,
    probe_all,
    read_all,
    with_all_positions,
    write_all,
)
from jax_trainer.checkpoint.partial import sweep
from jax_trainer.checkpoint.reading import read_into
from jax_trainer.checkpoint.record import CheckpointError, Record, SavedCheckpoint, versions_in_use
from jax_trainer.checkpoint.restore_options import RestoreOptions
from jax_trainer.checkpoint.retention import Better, Retention
from jax_trainer.checkpoint.snapshot import Snapshots
from jax_trainer.checkpoint.state_spec import StateSpec, StateSpecs
from jax_trainer.checkpoint.weights_only import not_resumable
from jax_trainer.core import TrainState, failpoint, step_of
from jax_trainer.core.output import reserve_standard_streams
from jax_trainer.datasets import Position
from jax_trainer.processes.group import TIMEOUT

__all__ = ["CheckpointError", "CheckpointInfo", "CheckpointStore", "SaveError", "SavedCheckpoint", "Which"]

Which = SavedCheckpoint | Path | int | Literal["latest", "best"] | None
RunState = Mapping[str, Any] | Callable[[], Mapping[str, Any]] | None
_FIELDS = tuple(TrainState.__dataclass_fields__)
_MOST_BYTES = 16  # per array element
_MOST_WAITING = 1 << 28  # bytes of all queued saves, if more than one is queued
_NOTICEABLE = 2.0  # total seconds that saves waited for the previous one
_log = logging.getLogger("jax_trainer")


class CheckpointStore:
    """The checkpoints of one run, in `folder`.

    In a multi-process job all processes call the same methods in the same order from their main threads: see
    `multihost.py`.

    Args:
        folder: the folder of the checkpoints; created by the first save.
        keep_latest: number of newest checkpoints to keep, to resume from.
        keep_best: number of best checkpoints by `monitor` to keep in addition.
        keep_every: also keep checkpoints whose step is a multiple of this; 0: none.
        monitor: the metric that ranks checkpoints, for example "val/acc"; every save with metrics must include it.
            None: keep only the newest.
        mode: "min" if lower is better, "max" if higher is better, "auto" to infer it from the metric's name.
        better: `better(new, old)` ranks checkpoints instead, by the metrics of two of them.
        weights_only_best: rewrite checkpoints that are kept only as best ones without their optimizer state: they can
            be loaded and tested, but not resumed.
        patience: seconds that a process waits for the others, in addition to the time that large arrays take.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep_latest: int = 2,
        keep_best: int = 1,
        keep_every: int = 0,
        monitor: str | None = None,
        mode: Mode = "auto",
        better: Better | None = None,
        weights_only_best: bool = False,
        patience: float = TIMEOUT,
    ) -> None:
        reserve_standard_streams()
        self.folder = Path(folder).absolute()
        self._retention = Retention(
            keep_latest=keep_latest,
            keep_best=keep_best,
            keep_every=keep_every,
            monitor=monitor,
            mode="min" if monitor is None else best_mode(mode, monitor),
            better=better,
        )
        self._garbage_collector = GarbageCollector(self.folder, self._retention, weights_only_best=weights_only_best)
        self._state_specs, self._snapshots, self._thread = StateSpecs(), Snapshots(), saving_thread(self.folder)
        self._main_barrier, self._saving = (HostBarrier(self.folder, what, patience) for what in ("main", "saving"))
        self._waited, self._has_warned_of_waiting = 0.0, False

    def prepare(self, state: TrainState) -> None:
        """Checks before the first step that states like this can be saved here, and allocates buffers."""
        spec, leaves = self._state_specs.of(state)

        def check() -> None:
            check_writable(self.folder, spec.nbytes)
            self._garbage_collector.listing()  # fails on checkpoints of another library version before more are added

        if self._main_barrier.is_multi_process:
            probe_all(self._main_barrier, self.folder, check)
            self._snapshot(leaves, spec)  # compiles the copies
        else:
            check()
            self._snapshots.allocate(leaves)
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
                ones arrive that would delete it. Multi-process jobs skip none.
        """
        with self._reporting_absence():
            self._check_monitored(metrics)
            spec, leaves = self._state_specs.of(state)
            record = Record.of(step_of(state), position, metrics, spec.empty, callbacks, spec.keys)
            if not callable(run):
                record = record.with_run(run)
        # processes could not agree on which saves to skip
        coalesce = coalesce and not self._saving.is_multi_process
        self._wait_for_space(spec.nbytes, coalesce=coalesce)
        with self._reporting_absence():
            save = _Save(self, self._snapshot(leaves, spec), spec.specs, record, run, spec.nbytes)
        if coalesce:
            self._thread.submit(save, self._needed)
        else:
            self._thread.start(save)
        if wait:
            self.wait()
        return self.folder / name_of(record.step)

    @property
    def is_saving(self) -> bool:
        """Whether this process is writing a checkpoint."""
        return self._thread.is_busy

    def wait(self) -> None:
        """Waits for pending saves; raises a `SaveError` if one failed."""
        self._thread.wait()

    def check(self) -> None:
        """Raises a `SaveError` if a background save failed; does not wait.

        In multi-process jobs it raises nothing, since processes would fail at different steps. The next `save` or
        `wait` raises instead.
        """
        if not self._saving.is_multi_process:
            self._thread.check()

    def mark_resumed_from(self, saved: SavedCheckpoint) -> None:
        """Marks `saved` as the checkpoint that the run resumed from; it is kept until `completed`.

        Checkpoints of later steps are ignored, and deleted by the next save.
        """
        self._thread.settle()
        self._main_barrier.ask_primary(lambda: self._garbage_collector.mark_resumed_from(saved) or "")

    def completed(self) -> None:
        """Marks the run as completed: waits for saves, and no longer keeps the checkpoint it resumed from."""
        self.wait()
        self._main_barrier.ask_primary(lambda: self._garbage_collector.completed() or "")

    def all(self) -> list[SavedCheckpoint]:
        """The checkpoints by ascending step. Waits for pending saves."""
        self._thread.settle()  # multi-process: nothing is deleted before all processes have read the list
        if not self._main_barrier.is_multi_process:
            return self._checkpoints()
        paths = self._main_barrier.ask_primary(lambda: json.dumps([str(saved.path) for saved in self._checkpoints()]))
        return [read_saved(Path(path))[0] for path in json.loads(paths)]

    def steps(self) -> list[int]:
        """The steps of the checkpoints, in ascending order."""
        return [saved.step for saved in self.all()]

    def latest(self) -> SavedCheckpoint | None:
        """The checkpoint of the largest step; `restore` and `verify` check its content."""
        return next(iter(reversed(self.all())), None)

    def best(self) -> SavedCheckpoint | None:
        """The best checkpoint by the monitored metric or by `better`; None if none can be compared."""
        return next(iter(self._retention.best_first(self.all())), None)

    def infos(self) -> list[CheckpointInfo]:
        """All folders named like a checkpoint, by ascending step, damaged ones included."""
        self._thread.settle()
        if not self._main_barrier.is_multi_process:
            return checkpoint_infos(self.folder)
        listed = self._main_barrier.ask_primary(
            lambda: json.dumps([asdict(one) for one in checkpoint_infos(self.folder)], default=str)
        )
        return [
            CheckpointInfo(**{**one, "path": Path(one["path"]), "without": tuple(one["without"])})
            for one in json.loads(listed)
        ]

    def verify(self, path: Path) -> str:
        """The problem of the checkpoint in `path`, found by reading all its files; "" if it is intact."""
        return self._main_barrier.ask_primary(lambda: problem_of(Path(path).absolute()))

    def restore(
        self,
        which: Which,
        like: TrainState,
        *,
        only: Sequence[str] = _FIELDS,
        cast: bool = False,
        partial: bool = False,
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
            partial: take arrays that the checkpoint lacks from `like`, and ignore arrays that `like` lacks.
            rename: maps names in the checkpoint to names in the state: `{"params.encoder.*": "params.backbone.*"}`.
            check: called with a checkpoint whose digests match; a `CheckpointError` that it raises counts as damage.
                Only the primary process calls it.
        """
        options = RestoreOptions(cast=cast, partial=partial, rename=dict(rename or {}))
        self._thread.settle()
        fields = () if partial else only

        def read(path: Path) -> tuple[TrainState, SavedCheckpoint]:
            saved, record = read_saved(path)
            state = read_into(like, saved.path, record, only, options)
            return state, replace(saved, position=self._main_barrier.own_position(saved.position))

        if not self._main_barrier.is_multi_process:
            return read(self._path_of(which, fields, check))
        size = sum(_MOST_BYTES * math.prod(leaf.shape) for leaf in jax.tree.leaves(like))
        return read_all(self._main_barrier, lambda: self._path_of(which, fields, check), read, size)

    def _check_monitored(self, metrics: Mapping[str, float]) -> None:
        monitor = self._retention.monitor
        if monitor is not None and metrics and monitor not in metrics:
            raise ValueError(
                f"No metric {monitor!r} to monitor. Logged metrics: {', '.join(sorted(metrics))}. Set `monitor` "
                "to one of these, and save after the evaluation that reports it."
            )

    @contextmanager
    def _reporting_absence(self) -> Iterator[None]:
        """Reports a failure to the other processes, which would wait for this one's part of the save."""
        try:
            yield
        except Exception as error:
            if self._saving.is_multi_process:
                self._thread.settle(insist=True)
                self._saving.report_absence(error)
            raise

    def _snapshot(self, leaves: Mapping[str, Any], spec: StateSpec) -> dict[str, Any]:
        if self._saving.is_multi_process:
            return local_shard(leaves, is_primary=self._saving.is_primary)
        return self._snapshots.take(leaves, spec.method)

    def _wait_for_space(self, size: int, *, coalesce: bool) -> None:
        """Waits until nothing is being written or, with `coalesce`, until the queue has space for `size` bytes."""

        def has_space(waiting: Sequence[Any]) -> bool:
            return not waiting or size + sum(save.size for save in waiting) <= _MOST_WAITING

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
        own = [save for save in before if save.store is self and save.record.step != new.record.step]
        if before:
            coming = [save.saved for save in (*([current] if current else ()), *own, new) if save.store is self]
            try:
                kept = self._garbage_collector.kept_with(coming)
            except ValueError as error:  # from the user's `better`
                raise as_save_error(error, new.record.step, new.saved.path, new.size) from error
            own = [save for save in own if save.record.step in kept]
        for save in before:
            if save.store is self and save not in own:
                self._snapshots.release(save.arrays)
        return [*(save for save in before if save.store is not self or save in own), new]

    def _write(
        self, arrays: Mapping[str, Any], specs: Mapping[str, Spec], record: Record, run: RunState, size: int
    ) -> None:
        # runs in the saving thread
        path, what = self.folder / name_of(record.step), f"Saving the checkpoint of step {record.step}"

        @cache
        def full_record() -> Record:
            return with_positions.with_run(run()) if callable(run) else with_positions

        def make_folder() -> None:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._garbage_collector.listing()  # as in `prepare`
            sweep(self.folder)

        def write() -> None:
            if self._saving.is_multi_process:
                write_all(self._saving, path, arrays, full_record, make_folder, size)
                return
            make_folder()
            write_checkpoint(self.folder, arrays, full_record, record.step, last_point="before_rename")

        def garbage_collect() -> str:
            failpoint("after_rename")
            with_retries(lambda: self._garbage_collector.committed(record.step, path, specs), what)
            return ""

        try:
            with_positions = with_all_positions(self._saving, record)
            with_retries(write, what)
            if self._saving.is_multi_process:
                garbage_collect_all(self._saving, path, garbage_collect)
            else:
                garbage_collect()
        except BaseException as error:
            failure = as_save_error(error, record.step, path, size)
            raise failure from failure.__cause__

    def _checkpoints(self) -> list[SavedCheckpoint]:
        return list(self._garbage_collector.listing().found.values())

    def _path_of(self, which: Which, fields: Sequence[str], check: Check) -> Path:
        saved = self._choose(which, fields, check)
        if lacks(saved, fields):
            raise not_resumable(saved, self._checkpoints())
        return saved.path

    def _choose(self, which: Which, fields: Sequence[str], check: Check) -> SavedCheckpoint:
        match which:
            case SavedCheckpoint():
                return read_verified(which.path, check)
            case Path():
                return read_verified(which.absolute(), check)
            case int():
                return read_verified(self._of_step(which), check)
            case None | "latest":
                return self._newest_complete(fields, check)
            case "best":
                return self._best_complete(check)
        raise ValueError(f"`which` must be 'latest', 'best', a step, a checkpoint or its folder, got {which!r}.")

    def _newest_complete(self, fields: Sequence[str], check: Check) -> SavedCheckpoint:
        listing = self._garbage_collector.listing()

        def damaged(chosen: SavedCheckpoint | None) -> Mapping[Path, str]:
            return listing.damaged if chosen is None else listing.damaged_after(chosen.step)

        return first_complete(newest_with(fields, listing), damaged, self._not_found("can be restored"), check)

    def _best_complete(self, check: Check) -> SavedCheckpoint:
        listing = self._garbage_collector.listing()
        best_first = self._retention.best_first(listing.found.values())
        others = {} if listing.found and not best_first else listing.damaged  # damage is not why none compares
        return first_complete(best_first, lambda _: others, self._not_found(self._criterion()), check)

    def _of_step(self, step: int) -> Path:
        path = of_step(step, self._garbage_collector.listing(), self.folder)
        if path is None:
            raise CheckpointError(self._not_found(f"has step {step}"))
        return path

    def _criterion(self) -> str:
        if self._retention.better is not None:
            return "has metrics to compare"
        monitor = self._retention.monitor
        return "is the best (no metric is monitored)" if monitor is None else f"has the metric {monitor!r}"

    def _not_found(self, criterion: str) -> str:
        steps = [saved.step for saved in self._checkpoints()]
        available = f"Saved steps: {', '.join(map(str, steps))}." if steps else "The folder has no checkpoints."
        return f"No checkpoint in {self.folder} {criterion}. {available}"


@dataclass(frozen=True, eq=False)
class _Save:
    """A save in the queue."""

    store: CheckpointStore
    arrays: dict[str, Any]
    specs: Mapping[str, Spec]
    record: Record
    run: RunState
    size: int  # in bytes

    def __call__(self) -> None:
        try:
            self.store._write(self.arrays, self.specs, self.record, self.run, self.size)
        finally:
            self.store._snapshots.release(self.arrays)

    @property
    def saved(self) -> SavedCheckpoint:
        """As the retention policy ranks it."""
        metrics = {name: float(value) for name, value in self.record.metrics.items()}
        return SavedCheckpoint(self.record.step, Position(), metrics, self.store.folder / name_of(self.record.step))
