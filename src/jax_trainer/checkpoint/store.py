"""`CheckpointStore`: saves states so that a crash costs none that is there, keeps the right ones, and restores them.

A checkpoint is a folder `step_00001755` with `checkpoint.json`, the arrays by dotted name in `state/`, and the digests
of all these in `MANIFEST.json`. It is written under a temporary name by a thread, and renamed when all of it is on the
disk: what has the name is complete.
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

from jax_trainer.checkpoint.arrays import get_ready
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
from jax_trainer.checkpoint.disk_check import make_ready
from jax_trainer.checkpoint.failures import as_save_error, with_retries
from jax_trainer.checkpoint.garbage_collection import GarbageCollector
from jax_trainer.checkpoint.index import name_of, read_saved
from jax_trainer.checkpoint.info import CheckpointInfo, checkpoint_infos
from jax_trainer.checkpoint.leaves import Spec, impl_of, named_leaves, words_of
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
from jax_trainer.checkpoint.weights_only import not_resumable
from jax_trainer.core import TrainState, failpoint, step_of
from jax_trainer.core.output import reserve_standard_streams
from jax_trainer.datasets import Position
from jax_trainer.processes.group import PATIENCE

__all__ = ["CheckpointError", "CheckpointInfo", "CheckpointStore", "SaveError", "SavedCheckpoint", "Which"]

Which = SavedCheckpoint | Path | int | Literal["latest", "best"] | None
Remembered = Mapping[str, Any] | Callable[[], Mapping[str, Any]] | None
_FIELDS = tuple(TrainState.__dataclass_fields__)
_MOST_BYTES = 16  # of a number
_MOST_WAITING = 1 << 28  # bytes of all saves that wait to be written, where there is more than one
_NOTICEABLE = 2.0  # seconds, all together, that saves have waited for the one before
_log = logging.getLogger("jax_trainer")


class CheckpointStore:
    """The checkpoints of one run, in `folder`.

    Several processes that train together all call the same methods, in the same order, from their main threads: see
    `together.py`.

    Args:
        folder: where they are; made when the first one is saved.
        keep_latest: how many of the newest stay, to go on from.
        keep_best: how many of the best by `monitor` stay besides.
        keep_every: those whose step is a multiple of this stay besides; 0: none.
        monitor: the metric that decides, for example "val/acc"; a save with any metrics must then have it. None: only
            the newest.
        mode: whether its smallest values are the best, or its largest ("max"); "auto": as the metric's name says.
        better: `better(new, old)` decides instead, from the metrics that were saved with two checkpoints.
        weights_only_best: rewrite a checkpoint that is kept only as one of the best without its optimizer state: it can
            be loaded and tested, but not resumed.
        patience: the seconds that one of several processes waits for the others, besides the time that large arrays
            take.
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
        patience: float = PATIENCE,
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
        self._keeping = GarbageCollector(self.folder, self._retention, weights_only_best=weights_only_best)
        self._snapshots, self._thread = Snapshots(), saving_thread(self.folder)
        self._asking, self._saving = (HostBarrier(self.folder, what, patience) for what in ("asking", "saving"))
        self._waited, self._has_told_of_waiting = 0.0, False

    def prepare(self, state: TrainState) -> None:
        """Finds out, before the first step, whether states like this can be saved here, and gets ready for it."""
        words = {name: words_of(leaf) for name, leaf in named_leaves(state).items()}

        def make_sure() -> None:
            make_ready(self.folder, _bytes_of(words))
            self._keeping.listing()  # what another version of this library wrote must be known before more is added

        if self._asking.is_multi_process:
            probe_all(self._asking, self.folder, make_sure)
            self._taken(words)  # copies are compiled when they are first made
        else:
            make_sure()
            self._snapshots.allocate(words)
        get_ready()
        versions_in_use()

    def save(
        self,
        state: TrainState,
        position: Position,
        metrics: Mapping[str, float],
        *,
        callbacks: Mapping[str, Any] | None = None,
        run: Remembered = None,
        wait: bool = True,
        coalesce: bool = False,
    ) -> Path:
        """Saves `state` as the checkpoint of its step. Raises a `SaveError` where the save before this one failed.

        Args:
            state: all that changes while training. It may be given away as soon as this returns.
            position: where in the data the run stands.
            metrics: what was measured with exactly this state; nothing if it was not judged.
            callbacks: what callbacks have to remember, in plain data, by their names.
            run: what else the run has to remember; or a function that gives it, called by the thread when the arrays
                are written, which may wait for something.
            wait: return when the checkpoint is on the disk; otherwise a thread writes it meanwhile.
            coalesce: do not wait for a checkpoint that is being written: this one waits in memory, and is skipped if
                newer ones come meanwhile after which it would be deleted. Of several processes none is skipped.
        """
        with self._telling_of_absence():
            self._check_monitored(metrics)
            named = named_leaves(state)
            words = {name: words_of(leaf) for name, leaf in named.items()}
            empty = {name: Spec.of(leaf) for name, leaf in words.items() if not math.prod(leaf.shape)}
            keys = {name: impl for name, leaf in named.items() if (impl := impl_of(leaf))}
            record = Record.of(step_of(state), position, metrics, empty, callbacks, keys)
            if not callable(run):
                record = record.with_run(run)
        size, coalesce = _bytes_of(words), coalesce and not self._saving.is_multi_process  # who could not agree on one
        self._wait_for_room(size, coalesce=coalesce)
        with self._telling_of_absence():
            specs = {name: Spec.of(leaf) for name, leaf in named.items()}
            save = _Save(self, self._taken(words), specs, record, run, size)
        if coalesce:
            self._thread.submit(save, self._needed)
        else:
            self._thread.start(save)
        if wait:
            self.wait()
        return self.folder / name_of(record.step)

    @property
    def is_saving(self) -> bool:
        """Whether a checkpoint is being written now; of several processes, by this one."""
        return self._thread.is_busy

    def wait(self) -> None:
        """Returns when nothing is being written; a `SaveError` if that failed."""
        self._thread.wait()

    def check(self) -> None:
        """Raises a `SaveError` if a save failed that nobody waited for; does not wait.

        Of several processes none does: they would learn it at different moments. The next `save` or `wait` tells.
        """
        if not self._saving.is_multi_process:
            self._thread.check()

    def mark_resumed_from(self, saved: SavedCheckpoint) -> None:
        """The run goes on from `saved`, which stays until `completed`.

        Checkpoints of later steps no longer count, and are deleted once a new one is there.
        """
        self._thread.settle()
        self._asking.ask_primary(lambda: self._keeping.mark_resumed_from(saved) or "")

    def completed(self) -> None:
        """The run is done: waits, and no longer keeps what it went on from."""
        self.wait()
        self._asking.ask_primary(lambda: self._keeping.completed() or "")

    def all(self) -> list[SavedCheckpoint]:
        """The checkpoints that there are, by ascending step. Waits for one that is being saved."""
        self._thread.settle()  # of several processes: nothing is deleted before the others have looked
        if not self._asking.is_multi_process:
            return self._counted()
        paths = self._asking.ask_primary(lambda: json.dumps([str(saved.path) for saved in self._counted()]))
        return [read_saved(Path(path))[0] for path in json.loads(paths)]

    def steps(self) -> list[int]:
        """The steps that there is a checkpoint of, in ascending order."""
        return [saved.step for saved in self.all()]

    def latest(self) -> SavedCheckpoint | None:
        """The checkpoint of the largest step; whether it is damaged, `restore` or `verify` find out."""
        return next(iter(reversed(self.all())), None)

    def best(self) -> SavedCheckpoint | None:
        """The best checkpoint, by the metric that is monitored or by `better`; None where none can be compared."""
        return next(iter(self._retention.best_first(self.all())), None)

    def infos(self) -> list[CheckpointInfo]:
        """All that has the name of a checkpoint, by ascending step, damaged or not."""
        self._thread.settle()
        if not self._asking.is_multi_process:
            return checkpoint_infos(self.folder)
        told = self._asking.ask_primary(
            lambda: json.dumps([asdict(one) for one in checkpoint_infos(self.folder)], default=str)
        )
        return [
            CheckpointInfo(**{**one, "path": Path(one["path"]), "without": tuple(one["without"])})
            for one in json.loads(told)
        ]

    def verify(self, path: Path) -> str:
        """What is wrong with the checkpoint in `path`, after reading all its files; "" if nothing is."""
        return self._asking.ask_primary(lambda: problem_of(Path(path).absolute()))

    def restore(
        self,
        which: Which,
        like: TrainState,
        *,
        only: Sequence[str] = _FIELDS,
        cast: bool = False,
        partial: bool = False,
        rename: Mapping[str, str] | None = None,
        check: Check = no_check,
    ) -> tuple[TrainState, SavedCheckpoint]:
        """The state of a checkpoint, bit for bit as it was saved, and the checkpoint.

        Every file is compared with its digest before. Of "latest" and "best", damaged ones are passed over with a
        warning; if all are damaged, that is an error.

        Args:
            which: "latest" (or None), "best", a step, what `latest` or `best` returned, or the folder of a checkpoint.
            like: a state of arrays or of `jax.ShapeDtypeStruct`s, as the program makes it. The checkpoint must have
                exactly its arrays. They are placed as it says, and on the default device where it says nothing.
            only: these fields of the state, such as "params"; the others stay as `like` has them.
            cast: convert floating-point numbers to the precision of `like`.
            partial: leave what the checkpoint lacks as `like` has it, and what `like` lacks unread.
            rename: what becomes of names in the checkpoint, such as `{"params.encoder.*": "params.backbone.*"}`.
            check: is given a checkpoint whose files are as they were written; a `CheckpointError` that it raises is
                damage. Of several processes the primary one calls it.
        """
        fitting = RestoreOptions(cast=cast, partial=partial, rename=dict(rename or {}))
        self._thread.settle()
        fields = () if partial else only

        def read(path: Path) -> tuple[TrainState, SavedCheckpoint]:
            saved, record = read_saved(path)
            state = read_into(like, saved.path, record, only, fitting)
            return state, replace(saved, position=self._asking.own_position(saved.position))

        if not self._asking.is_multi_process:
            return read(self._path_of(which, fields, check))
        size = sum(_MOST_BYTES * math.prod(leaf.shape) for leaf in jax.tree.leaves(like))
        return read_all(self._asking, lambda: self._path_of(which, fields, check), read, size)

    def _check_monitored(self, metrics: Mapping[str, float]) -> None:
        monitor = self._retention.monitor
        if monitor is not None and metrics and monitor not in metrics:
            raise ValueError(
                f"No metric {monitor!r} to monitor. There are: {', '.join(sorted(metrics))}. Set `monitor` "
                "to one of these, and save after the evaluation that reports it."
            )

    @contextmanager
    def _telling_of_absence(self) -> Iterator[None]:
        """Lets other processes, which wait for this one's part of a save, know that it has none."""
        try:
            yield
        except Exception as error:
            if self._saving.is_multi_process:
                self._thread.settle(insist=True)
                self._saving.tell_absence(error)
            raise

    def _taken(self, words: Mapping[str, Any]) -> dict[str, Any]:
        if self._saving.is_multi_process:
            return local_shard(words, is_primary=self._saving.is_primary)
        return self._snapshots.take(words)

    def _wait_for_room(self, size: int, *, coalesce: bool) -> None:
        """Waits until nothing is being written, or, to `coalesce`, nothing waits or what does is small."""

        def has_room(waiting: Sequence[Any]) -> bool:
            return not waiting or size + sum(save.size for save in waiting) <= _MOST_WAITING

        self._waited += self._thread.wait_for(has_room) if coalesce else self._thread.settle(insist=True)
        if self._waited > _NOTICEABLE and not self._has_told_of_waiting:
            self._has_told_of_waiting = True
            _log.warning(
                "Saving takes longer than the time between two saves: so far training waited %.1f s for %s. Save less "
                "often, or to a faster disk.",
                *(self._waited, self.folder),
            )
        self._thread.check()

    def _needed(self, current: Any, waiting: list[Any]) -> list[Any]:
        """Those saves of `waiting`, the newest last, that would still be there after all of them were written.

        What is left out would have been deleted again: which checkpoints there are in the end does not depend on how
        fast they are written.
        """
        *before, new = waiting
        own = [save for save in before if save.store is self and save.record.step != new.record.step]
        if before:
            coming = [save.saved for save in (*([current] if current else ()), *own, new) if save.store is self]
            try:
                kept = self._keeping.kept_with(coming)
            except ValueError as error:  # of a function that compares checkpoints
                raise as_save_error(error, new.record.step, new.saved.path, new.size) from error
            own = [save for save in own if save.record.step in kept]
        for save in before:
            if save.store is self and save not in own:
                self._snapshots.give_back(save.arrays)
        return [*(save for save in before if save.store is not self or save in own), new]

    def _write(
        self, arrays: Mapping[str, Any], specs: Mapping[str, Spec], record: Record, run: Remembered, size: int
    ) -> None:
        """What the thread does."""
        path, what = self.folder / name_of(record.step), f"Saving the checkpoint of step {record.step}"

        @cache
        def told() -> Record:
            return whole.with_run(run()) if callable(run) else whole

        def make_folder() -> None:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._keeping.listing()  # as in `prepare`
            sweep(self.folder)

        def write() -> None:
            if self._saving.is_multi_process:
                write_all(self._saving, path, arrays, told, make_folder, size)
                return
            make_folder()
            write_checkpoint(self.folder, arrays, told, record.step, last_point="before_rename")

        def garbage_collect() -> str:
            failpoint("after_rename")
            with_retries(lambda: self._keeping.committed(record.step, path, specs), what)
            return ""

        try:
            whole = with_all_positions(self._saving, record)
            with_retries(write, what)
            if self._saving.is_multi_process:
                garbage_collect_all(self._saving, path, garbage_collect)
            else:
                garbage_collect()
        except BaseException as error:
            failure = as_save_error(error, record.step, path, size)
            raise failure from failure.__cause__

    def _counted(self) -> list[SavedCheckpoint]:
        return list(self._keeping.listing().found.values())

    def _path_of(self, which: Which, fields: Sequence[str], check: Check) -> Path:
        saved = self._choose(which, fields, check)
        if lacks(saved, fields):
            raise not_resumable(saved, self._counted())
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
                return self._newest_whole(fields, check)
            case "best":
                return self._best_whole(check)
        raise ValueError(f"`which` must be 'latest', 'best', a step, a checkpoint or its folder, got {which!r}.")

    def _newest_whole(self, fields: Sequence[str], check: Check) -> SavedCheckpoint:
        listing = self._keeping.listing()

        def damaged(taken: SavedCheckpoint | None) -> Mapping[Path, str]:
            return listing.damaged if taken is None else listing.damaged_after(taken.step)

        return first_complete(newest_with(fields, listing), damaged, self._nothing("to restore"), check)

    def _best_whole(self, check: Check) -> SavedCheckpoint:
        listing = self._keeping.listing()
        best_first = self._retention.best_first(listing.found.values())
        others = {} if listing.found and not best_first else listing.damaged  # not why there is none to compare
        return first_complete(best_first, lambda _: others, self._nothing(self._criterion()), check)

    def _of_step(self, step: int) -> Path:
        path = of_step(step, self._keeping.listing(), self.folder)
        if path is None:
            raise CheckpointError(self._nothing(f"of step {step}"))
        return path

    def _criterion(self) -> str:
        if self._retention.better is not None:
            return "with metrics to compare"
        monitor = self._retention.monitor
        return "that is the best, as no metric is monitored," if monitor is None else f"with a {monitor!r}"

    def _nothing(self, asked: str) -> str:
        steps = [saved.step for saved in self._counted()]
        offered = f"There are the steps {', '.join(map(str, steps))}." if steps else "Nothing has been saved there."
        return f"There is no checkpoint {asked} in {self.folder}. {offered}"


@dataclass(frozen=True, eq=False)
class _Save:
    """A state that is to be written."""

    store: CheckpointStore
    arrays: dict[str, Any]
    specs: Mapping[str, Spec]
    record: Record
    run: Remembered
    size: int  # in bytes

    def __call__(self) -> None:
        try:
            self.store._write(self.arrays, self.specs, self.record, self.run, self.size)
        finally:
            self.store._snapshots.give_back(self.arrays)

    @property
    def saved(self) -> SavedCheckpoint:
        """As it will be compared with others."""
        metrics = {name: float(value) for name, value in self.record.metrics.items()}
        return SavedCheckpoint(self.record.step, Position(), metrics, self.store.folder / name_of(self.record.step))


def _bytes_of(arrays: Mapping[str, Any]) -> int:
    return sum(Spec.of(array).nbytes for array in arrays.values())
