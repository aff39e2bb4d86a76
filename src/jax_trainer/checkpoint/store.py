"""`CheckpointStore`: saves states so that a crash costs none that is there, keeps the right ones, and restores them.

A checkpoint is a folder `step_00001755` with `checkpoint.json` and, in `state/`, the arrays by dotted name. It is
written under a temporary name, and renamed when all of it is on the disk: what has the name is complete.
"""

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax

from jax_trainer.checkpoint.catalogue import Catalogue, name_of, read_saved
from jax_trainer.checkpoint.content import held_specs, read_held, write_checkpoint
from jax_trainer.checkpoint.durable import sync_folder
from jax_trainer.checkpoint.leaves import Spec, check_fits, field_of, named_leaves
from jax_trainer.checkpoint.partial import discard, sweep
from jax_trainer.checkpoint.record import CheckpointError, Record, Saved
from jax_trainer.checkpoint.retention import Better, Retention
from jax_trainer.checkpoint.slim import Slimmer, refusal
from jax_trainer.core import TrainState, failpoint, step_of
from jax_trainer.datasets import Position

__all__ = ["CheckpointError", "CheckpointStore", "Saved", "Which"]

Which = Saved | int | Literal["latest", "best"] | None


class CheckpointStore:
    """The checkpoints of one run, in `folder`.

    Args:
        folder: where they are; made when the first one is saved.
        keep_latest: how many of the newest stay, to go on from.
        keep_best: how many of the best by `monitor` stay besides.
        monitor: the metric that decides, for example "val/acc"; every save must then have it. None: only the newest.
        mode: whether its smallest values are the best, or its largest ("max").
        better: `better(new, old)` decides instead, from the metrics that were saved with two checkpoints.
        slim_best: a checkpoint that stays only as one of the best, and is no more among the latest, is rewritten
            without the optimizer's state: it can be used, and not be gone on from.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep_latest: int = 1,
        keep_best: int = 1,
        monitor: str | None = None,
        mode: Literal["min", "max"] = "min",
        better: Better | None = None,
        slim_best: bool = False,
    ) -> None:
        self.folder = Path(folder).absolute()
        self._retention = Retention(
            keep_latest=keep_latest, keep_best=keep_best, monitor=monitor, mode=mode, better=better
        )
        self._catalogue = Catalogue(self.folder)
        self._slims_best, self._slimmer = slim_best, Slimmer()
        if jax.distributed.is_initialized() and jax.process_count() > 1:
            raise NotImplementedError("Checkpoints of several processes are not supported yet. Use one process.")

    def save(
        self,
        state: TrainState,
        position: Position,
        metrics: Mapping[str, float],
        callbacks: Mapping[str, Any] | None = None,
    ) -> Path:
        """Saves `state` as the checkpoint of its step; it is on the disk when this returns.

        Args:
            state: all that changes while training.
            position: where in the data the run stands.
            metrics: what was measured with exactly this state.
            callbacks: what callbacks have to remember, in plain data, by their names.
        """
        self._check_monitored(metrics)
        leaves = named_leaves(state)
        empty = {name: Spec.of(leaf) for name, leaf in leaves.items() if not math.prod(leaf.shape)}
        record = Record.of(step_of(state), position, metrics, empty, callbacks)
        try:
            return self._write(leaves, record)
        except Exception as error:
            error.add_note(f"This happened while the checkpoint of step {record.step} was saved in {self.folder}.")
            raise

    def all(self) -> list[Saved]:
        """The checkpoints that there are, by ascending step."""
        return list(self._catalogue.scan().found.values())

    def steps(self) -> list[int]:
        """The steps that there is a checkpoint of, in ascending order."""
        return [saved.step for saved in self.all()]

    def latest(self) -> Saved | None:
        """The checkpoint of the largest step."""
        return next(reversed(self._catalogue.scan().found.values()), None)

    def best(self) -> Saved | None:
        """The best checkpoint, by the metric that is monitored or by `better`; None where none can be compared."""
        return next(iter(self._retention.best_first(self._catalogue.scan().found.values())), None)

    def restore(
        self, which: Which, like: TrainState, *, only: Sequence[str] = tuple(TrainState.__dataclass_fields__)
    ) -> tuple[TrainState, Saved]:
        """The state of a checkpoint, bit for bit as it was saved, and the checkpoint.

        Args:
            which: "latest" (or None), "best", a step, or what `latest` or `best` returned.
            like: a state of arrays or of `jax.ShapeDtypeStruct`s, as the program makes it. The checkpoint must have
                exactly its arrays. They are placed as it says, and on the default device where it says nothing.
            only: these fields of the state, such as "params"; the others stay as `like` has them.
        """
        saved, record = read_saved(self._find(which).path)
        if any(name in only for name in saved.without):
            raise refusal(saved, self._catalogue.scan().found.values())
        everything = named_leaves(like)
        wanted = {name: leaf for name, leaf in everything.items() if field_of(name) in only}
        held = {name: spec for name, spec in held_specs(saved.path, record).items() if field_of(name) in only}
        check_fits(held, {name: Spec.of(leaf) for name, leaf in wanted.items()}, saved.path)
        restored = {**everything, **read_held(saved.path, wanted)}
        return jax.tree.unflatten(jax.tree.structure(like), restored.values()), saved

    def _check_monitored(self, metrics: Mapping[str, float]) -> None:
        monitor = self._retention.monitor
        if monitor is not None and monitor not in metrics:
            raise ValueError(
                f"No metric {monitor!r} to monitor. There are: {', '.join(sorted(metrics)) or 'none'}. Set `monitor` "
                "to one of these, and save after the evaluation that reports it."
            )

    def _write(self, leaves: Mapping[str, Any], record: Record) -> Path:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._catalogue.scan()  # what another version of this library wrote must be known before more is added
        sweep(self.folder)
        path = write_checkpoint(self.folder, leaves, record, last_point="before_rename")
        failpoint("after_rename")
        self._slimmer.forget(path)
        self._retain(record.step, {name: Spec.of(leaf) for name, leaf in leaves.items()})
        return path

    def _retain(self, newest: int, specs: Mapping[str, Spec]) -> None:
        listing = self._catalogue.scan()
        found = listing.found.values()
        kept, latest = self._retention.kept(found, newest), self._retention.latest(found, newest)
        for path in (*listing.replaced, *(saved.path for saved in found if saved.step not in kept)):
            discard(path)
        sync_folder(self.folder)
        for saved in found if self._slims_best else ():
            if saved.step in kept - latest:
                self._slimmer.slim(saved, specs)

    def _find(self, which: Which) -> Saved:
        match which:
            case Saved():
                return which
            case None | "latest":
                found = self.latest()
            case "best":
                found = self.best()
            case int():
                found = self._of_step(which)
            case _:
                raise ValueError(f"`which` must be 'latest', 'best', a step or a checkpoint, got {which!r}.")
        if found is None:
            raise CheckpointError(f"There is no checkpoint {self._asked(which)} in {self.folder}. {self._offered()}")
        return found

    def _of_step(self, step: int) -> Saved | None:
        found = self._catalogue.scan().found.get(step)
        path = self.folder / name_of(step)
        return read_saved(path)[0] if found is None and os.path.lexists(path) else found  # it says what is wrong

    def _asked(self, which: Which) -> str:
        if which == "best":
            monitor = self._retention.monitor
            if self._retention.better is not None:
                return "with metrics to compare"
            return "that is the best, as no metric is monitored," if monitor is None else f"with a {monitor!r}"
        return f"of step {which}" if isinstance(which, int) else "to restore"

    def _offered(self) -> str:
        steps = self.steps()
        return f"There are the steps {', '.join(map(str, steps))}." if steps else "Nothing has been saved there."
