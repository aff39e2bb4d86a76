"""The retention policy: the newest checkpoints (to resume), the best (to use), and every n-th step (for analysis).

The sets are independent: a checkpoint in any of them is kept. After each save the others are deleted, and best
checkpoints that are not among the newest may be reduced to their weights.
"""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, get_args

from jax_trainer.checkpoint.arrays import Spec
from jax_trainer.checkpoint.commit import discard, write_checkpoint
from jax_trainer.checkpoint.errors import CheckpointError
from jax_trainer.checkpoint.ranking import Direction, Mode, best_first, best_mode
from jax_trainer.checkpoint.record import (
    OLD,
    CheckpointIndex,
    IndexEntries,
    SavedCheckpoint,
    read_saved,
    verify_digests,
)
from jax_trainer.checkpoint.restore import OPTIMIZER, check_fits, field_of, read_named, stored_in, with_keys
from jax_trainer.core import failpoint
from jax_trainer.diagnostics.files import sync_folder

Better = Callable[[Mapping[str, float], Mapping[str, float]], bool]
_log = logging.getLogger("jax_trainer")


@dataclass(frozen=True, kw_only=True)
class Retention:
    """Which checkpoints are kept, with which content.

    Args:
        keep_latest: number of newest checkpoints to keep, to resume from.
        keep_best: number of best checkpoints by `monitor` to keep in addition.
        keep_every: also keep checkpoints whose step is a multiple of this; 0: none.
        monitor: the metric that ranks checkpoints, for example "val/acc"; every save with metrics must include it.
            None: keep only the newest.
        mode: "min" if lower is better, "max" if higher is better, "auto" to infer it from the metric's name.
        better: `better(new, old)` ranks checkpoints instead, by the metrics of two of them.
        weights_only_best: rewrite checkpoints that are kept only as best ones without their optimizer state: they can
            be loaded and tested, but not resumed.
    """

    keep_latest: int = 2
    keep_best: int = 1
    keep_every: int = 0
    monitor: str | None = None
    mode: Mode = "auto"
    better: Better | None = None
    weights_only_best: bool = False

    def __post_init__(self) -> None:
        for name, low in (("keep_latest", 1), ("keep_best", 0), ("keep_every", 0)):
            value = getattr(self, name)
            if type(value) is not int or value < low:
                why = " A run resumes from the newest one." if low else ""
                raise ValueError(f"`{name}` must be an integer of at least {low}, got {value!r}.{why}")
        if self.mode not in get_args(Mode):
            raise ValueError(f"`mode` must be 'min', 'max' or 'auto', got {self.mode!r}.")
        if not (self.better is None or callable(self.better)):
            raise ValueError(f"`better` must be a function of the metrics of two checkpoints, got {self.better!r}.")
        _ = self.direction  # an unclear name of a metric is an error

    @cached_property
    def direction(self) -> Direction:
        """Whether lower or higher is better."""
        return "min" if self.monitor is None else best_mode(self.mode, self.monitor)

    @property
    def criterion(self) -> str:
        """What a checkpoint lacks that cannot be the best."""
        if self.better is not None:
            return "has metrics to compare"
        return "is the best (no metric is monitored)" if self.monitor is None else f"has the metric {self.monitor!r}"

    def best_first(self, found: Collection[SavedCheckpoint]) -> list[SavedCheckpoint]:
        """The comparable checkpoints, best first.

        By a metric: all that have it, except NaN, and the later of equal ones; by a function: all with any metrics.
        """
        return best_first(found, self.monitor, self.direction) if self.better is None else _ranked(found, self.better)

    def kept(self, found: Collection[SavedCheckpoint], newest: int, base: int | None = None) -> set[int]:
        """The steps to keep after `newest` was saved by a run that resumed from `base`."""
        best = self.best_first(found)[: self.keep_best] if self.keep_best else []
        return {*self.kept_in_full(found, newest, base), *(saved.step for saved in best)}

    def kept_in_full(self, found: Collection[SavedCheckpoint], newest: int, base: int | None = None) -> set[int]:
        """The steps to keep regardless of metrics, with optimizer state.

        `newest` is always kept: after a rollback it may be an earlier step than others.
        """
        steps = sorted(saved.step for saved in found)
        regular = [step for step in steps if self.keep_every and step and step % self.keep_every == 0]
        return {newest, *steps[-self.keep_latest :], *regular, *(() if base is None else (base,))}


def _ranked(found: Collection[SavedCheckpoint], better: Better) -> list[SavedCheckpoint]:
    ranked: list[SavedCheckpoint] = []
    for new in sorted((saved for saved in found if saved.metrics), key=lambda saved: saved.step):
        worse = (index for index, old in enumerate(ranked) if _is_better(new, old, better))
        ranked.insert(next(worse, len(ranked)), new)
    return ranked


def _is_better(new: SavedCheckpoint, old: SavedCheckpoint, better: Better) -> bool:
    try:
        return bool(better(new.metrics, old.metrics))
    except Exception as error:  # user code: may raise anything
        raise ValueError(
            f"`better` ({getattr(better, '__name__', type(better).__name__)}) failed to compare the metrics of "
            f"step {new.step} with those of step {old.step}: {type(error).__name__}: {error}. "
            f"Metrics of both: {', '.join(sorted(new.metrics.keys() & old.metrics.keys()))}."
        ) from error


class GarbageCollector:
    """Applies the retention policy to the checkpoints in `folder`. Deletes only checkpoints that it can read."""

    def __init__(self, folder: Path, retention: Retention) -> None:
        self._folder, self._retention = folder, retention
        self._index = CheckpointIndex(folder)
        self._base: int | None = None  # the step that the run resumed from
        self._superseded: set[int] = set()  # later steps than that, of the run before it resumed
        self._newest: int | None = None  # the last step that was saved here
        self._specs: Mapping[str, Spec] = {}
        self._known: tuple[SavedCheckpoint, ...] = ()  # the valid checkpoints when last listed
        self._not_reduced: set[Path] = set()  # best checkpoints that could not be reduced to their weights

    def listing(self) -> IndexEntries:
        """The valid checkpoints, read in full."""
        return self._valid(self._index.scan())

    def check(self) -> None:
        """Fails on checkpoints of another library version, before more are added."""
        self._valid(self._index.update())

    def kept_with(self, coming: Sequence[SavedCheckpoint]) -> set[int]:
        """The steps that are kept once `coming`, newest last, are saved as well; does not read the disk."""
        found = {saved.step: saved for saved in (*self._known, *coming)}
        return self._retention.kept(found.values(), coming[-1].step, self._base)

    def mark_resumed_from(self, saved: SavedCheckpoint) -> None:
        """Keeps `saved`; later checkpoints are ignored, and deleted after the next save."""
        if saved.path.parent.resolve() == self._folder.resolve():
            self._base = saved.step
            self._superseded = {step for step in self._index.scan().found if step > saved.step}

    def committed(self, step: int, path: Path, specs: Mapping[str, Spec]) -> None:
        """Collects garbage after the checkpoint of `step` is committed; `specs` are those of its arrays."""
        self._newest, self._specs = step, specs
        self._not_reduced.discard(path)  # it has a new checkpoint
        failpoint("before_best_table")
        self._retain(step)

    def completed(self) -> None:
        """Collects garbage once more: the checkpoint that the run resumed from need not stay."""
        self._base = None
        if self._newest is not None:
            self._retain(self._newest)

    def _valid(self, entries: IndexEntries) -> IndexEntries:
        found = {step: saved for step, saved in entries.found.items() if step not in self._superseded}
        self._known = tuple(found.values())
        return replace(entries, found=found)

    def _retain(self, newest: int) -> None:
        entries, superseded = self._index.update(), self._superseded - {newest}
        found = [saved for step, saved in entries.found.items() if step not in superseded]
        kept = self._retention.kept(found, newest, self._base)
        for path in (*entries.replaced, *(saved.path for saved in entries.found.values() if saved.step not in kept)):
            discard(path)
        self._superseded = set()
        self._known = tuple(saved for saved in found if saved.step in kept)
        sync_folder(self._folder)
        if self._retention.weights_only_best:
            only_best = kept - self._retention.kept_in_full(found, newest, self._base)
            for saved in self._known:
                if saved.step in only_best and not saved.without and saved.path not in self._not_reduced:
                    self._reduce(saved.path)

    def _reduce(self, path: Path) -> None:
        """Rewrites a checkpoint as weights-only; one that cannot be is left as is, with one warning."""
        try:
            is_reduced = _without_optimizer(path, self._specs)
        except CheckpointError as error:  # the newest one is intact: no reason to end the run
            _log.warning("A best checkpoint keeps its optimizer state, because it cannot be rewritten: %s", error)
            is_reduced = False
        if not is_reduced:
            self._not_reduced.add(path)


def _without_optimizer(path: Path, specs: Mapping[str, Spec]) -> bool:
    """Whether there was optimizer state to drop. After a crash either the old or the new one is complete."""
    _, record = read_saved(path)
    verify_digests(path)  # a damaged one must not become one with valid digests
    stored = stored_in(path, record)
    kept = _weights(stored)
    if len(kept) == len(stored):
        return False
    # before reading: an untrusted checkpoint may claim arrays of any size, or lack some
    check_fits(with_keys(kept, record), _weights(specs), path)
    reduced = replace(record, keys=_weights(record.keys), without=[OPTIMIZER])
    arrays = read_named(path, record, kept)
    new = write_checkpoint(path.parent, arrays, lambda: reduced, record.step, last_point="mid_convert")
    discard(new.with_name(new.name + OLD))
    return True


def _weights(named: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in named.items() if field_of(name) != OPTIMIZER}
