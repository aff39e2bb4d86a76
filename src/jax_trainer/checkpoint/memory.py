"""The best state of a run that writes no checkpoints, kept in memory."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from jax_trainer.checkpoint.record import CheckpointError, SavedCheckpoint
from jax_trainer.checkpoint.retention import Retention
from jax_trainer.core import PyTree, TrainState, step_of
from jax_trainer.core.compile import copied
from jax_trainer.datasets import Position

WEIGHTS = ("params", "model_state", "extra")  # what of a state is needed to use it


class BestInMemory:
    """Stands where a `CheckpointStore` does, and holds the weights of the best state, where the state is; no others.

    Args:
        folder: of the run, for messages.
        monitor: the metric that decides; None: nothing is kept.
        mode: whether its smallest value is the best, or its largest ("max").
    """

    def __init__(self, folder: Path, *, monitor: str | None, mode: Literal["min", "max"] = "min") -> None:
        self.folder = folder
        self._retention = Retention(keep_latest=1, keep_best=1, monitor=monitor, mode=mode)
        self._best: SavedCheckpoint | None = None
        self._weights: dict[str, PyTree] = {}

    def prepare(self, state: TrainState) -> None:
        """Does nothing: there is no folder to look at."""

    def save(
        self,
        state: TrainState,
        position: Position,
        metrics: Mapping[str, float],
        *,
        callbacks: Mapping[str, Any] | None = None,
        run: Mapping[str, Any] | Callable[[], Mapping[str, Any]] | None = None,
        wait: bool = True,
        coalesce: bool = False,
    ) -> Path:
        """Keeps the weights of `state` if it is better than all before."""
        new = SavedCheckpoint(step_of(state), position, dict(metrics), self.folder)
        found = [new] if self._best is None else [self._best, new]
        if next(iter(self._retention.best_first(found)), None) is new:
            self._best, self._weights = new, copied({name: getattr(state, name) for name in WEIGHTS})
        return self.folder

    def check(self) -> None:
        """Nothing can have failed."""

    def wait(self) -> None:
        """There is nothing to wait for."""

    def completed(self) -> None:
        """The best state stays."""

    def best(self) -> SavedCheckpoint | None:
        """The best state; None where none could be compared."""
        return self._best

    def restore(
        self, which: Literal["best"], like: TrainState, *, only: Sequence[str] = WEIGHTS
    ) -> tuple[TrainState, SavedCheckpoint]:
        """`like` with the weights of the best state."""
        if which != "best" or self._best is None or not set(only) <= set(WEIGHTS):
            raise CheckpointError(f"The run in {self.folder} saved nothing: there is no {which!r} state with {only}.")
        return like.replace(**copied({name: self._weights[name] for name in only})), self._best
