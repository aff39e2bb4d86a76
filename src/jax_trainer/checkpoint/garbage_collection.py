"""Deletes the checkpoints that the retention policy does not keep, after each save."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from jax_trainer.checkpoint.durable import sync_folder
from jax_trainer.checkpoint.index import CheckpointIndex, IndexEntries
from jax_trainer.checkpoint.leaves import Spec
from jax_trainer.checkpoint.partial import discard
from jax_trainer.checkpoint.record import SavedCheckpoint
from jax_trainer.checkpoint.retention import Retention
from jax_trainer.checkpoint.weights_only import WeightsOnlyConverter
from jax_trainer.core import failpoint


class GarbageCollector:
    """Applies the retention policy to the checkpoints in `folder`. Deletes only checkpoints that it can read."""

    def __init__(self, folder: Path, retention: Retention, *, weights_only_best: bool) -> None:
        self._folder, self._retention = folder, retention
        self._checkpoint_index, self._converter, self._weights_only_best = (
            CheckpointIndex(folder),
            WeightsOnlyConverter(),
            weights_only_best,
        )
        self._base: int | None = None  # the step that the run resumed from
        self._superseded: set[int] = set()  # later steps than that, of the run before it resumed
        self._newest: int | None = None  # the last step that was saved here
        self._specs: Mapping[str, Spec] = {}
        self._known: tuple[SavedCheckpoint, ...] = ()  # the valid checkpoints at the last scan

    def listing(self) -> IndexEntries:
        """The valid checkpoints."""
        listing, superseded = self._checkpoint_index.scan(), self._superseded
        found = {step: saved for step, saved in listing.found.items() if step not in superseded}
        self._known = tuple(found.values())
        return IndexEntries(found, listing.replaced, listing.damaged)

    def kept_with(self, coming: Sequence[SavedCheckpoint]) -> set[int]:
        """The steps that are kept once `coming`, newest last, are saved as well; does not read the disk."""
        found = {saved.step: saved for saved in (*self._known, *coming)}
        return self._retention.kept(found.values(), coming[-1].step, self._base)

    def mark_resumed_from(self, saved: SavedCheckpoint) -> None:
        """Keeps `saved`; later checkpoints are ignored, and deleted after the next save."""
        if saved.path.parent.resolve() == self._folder.resolve():
            self._base = saved.step
            self._superseded = {step for step in self._checkpoint_index.scan().found if step > saved.step}

    def committed(self, step: int, path: Path, specs: Mapping[str, Spec]) -> None:
        """Collects garbage after the checkpoint of `step` is committed; `specs` are those of its arrays."""
        self._newest, self._specs = step, specs
        self._converter.forget(path)
        failpoint("before_best_table")
        self._retain(step)

    def completed(self) -> None:
        """Collects garbage once more: the checkpoint that the run resumed from need not stay."""
        self._base = None
        if self._newest is not None:
            self._retain(self._newest)

    def _retain(self, newest: int) -> None:
        listing, superseded = self._checkpoint_index.scan(), self._superseded - {newest}
        found = [saved for step, saved in listing.found.items() if step not in superseded]
        kept = self._retention.kept(found, newest, self._base)
        for path in (*listing.replaced, *(saved.path for saved in listing.found.values() if saved.step not in kept)):
            discard(path)
        self._superseded = set()
        self._known = tuple(saved for saved in found if saved.step in kept)
        sync_folder(self._folder)
        if self._weights_only_best:
            full = self._retention.kept_in_full(found, newest, self._base)
            for saved in found:
                if saved.step in kept - full:
                    self._converter.convert(saved, self._specs)
