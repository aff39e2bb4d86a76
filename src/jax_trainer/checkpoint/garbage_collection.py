"""Keeps the folder of a run's checkpoints in order: deletes, after a new one is there, what need not stay."""

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
    """What counts in `folder`, and what stays in it. Deletes checkpoints that it can read, and nothing else."""

    def __init__(self, folder: Path, retention: Retention, *, weights_only_best: bool) -> None:
        self._folder, self._retention = folder, retention
        self._checkpoint_index, self._converter, self._weights_only_best = (
            CheckpointIndex(folder),
            WeightsOnlyConverter(),
            weights_only_best,
        )
        self._base: int | None = None  # the step that the run goes on from
        self._overtaken: set[int] = set()  # later steps than that, of a run that is not continued
        self._newest: int | None = None  # the last step that was saved here
        self._specs: Mapping[str, Spec] = {}
        self._known: tuple[SavedCheckpoint, ...] = ()  # what counted at the last look

    def listing(self) -> IndexEntries:
        """What counts."""
        listing, overtaken = self._checkpoint_index.scan(), self._overtaken
        found = {step: saved for step, saved in listing.found.items() if step not in overtaken}
        self._known = tuple(found.values())
        return IndexEntries(found, listing.replaced, listing.damaged)

    def kept_with(self, coming: Sequence[SavedCheckpoint]) -> set[int]:
        """The steps that will stay once `coming`, the newest last, are saved as well; does not look at the disk."""
        found = {saved.step: saved for saved in (*self._known, *coming)}
        return self._retention.kept(found.values(), coming[-1].step, self._base)

    def mark_resumed_from(self, saved: SavedCheckpoint) -> None:
        """Keeps `saved`; what was saved later than it no longer counts, and goes once something new is there."""
        if saved.path.parent.resolve() == self._folder.resolve():
            self._base = saved.step
            self._overtaken = {step for step in self._checkpoint_index.scan().found if step > saved.step}

    def committed(self, step: int, path: Path, specs: Mapping[str, Spec]) -> None:
        """Cleans up after the checkpoint of `step` has its name; `specs` are those of its arrays."""
        self._newest, self._specs = step, specs
        self._converter.forget(path)
        failpoint("before_best_table")
        self._retain(step)

    def completed(self) -> None:
        """Cleans up once more: nobody has to go on from where this run did."""
        self._base = None
        if self._newest is not None:
            self._retain(self._newest)

    def _retain(self, newest: int) -> None:
        listing, overtaken = self._checkpoint_index.scan(), self._overtaken - {newest}
        found = [saved for step, saved in listing.found.items() if step not in overtaken]
        kept = self._retention.kept(found, newest, self._base)
        for path in (*listing.replaced, *(saved.path for saved in listing.found.values() if saved.step not in kept)):
            discard(path)
        self._overtaken = set()
        self._known = tuple(saved for saved in found if saved.step in kept)
        sync_folder(self._folder)
        if self._weights_only_best:
            whole = self._retention.whole(found, newest, self._base)
            for saved in found:
                if saved.step in kept - whole:
                    self._converter.slim(saved, self._specs)
