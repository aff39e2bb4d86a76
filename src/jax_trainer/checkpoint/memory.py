"""The best weights of a run that writes no checkpoints, in memory."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from jax_trainer.checkpoint.record import CheckpointError, SavedCheckpoint
from jax_trainer.checkpoint.retention import Retention
from jax_trainer.core import PyTree, TrainState, step_of
from jax_trainer.core.compile import copied
from jax_trainer.datasets import Position

WEIGHTS = ("params", "model_state", "extra")  # the fields that inference needs


class BestInMemory:
    """A stand-in for `CheckpointStore` that keeps the weights of the best state, on the state's devices.

    Args:
        folder: the run folder, for messages.
        monitor: the metric that ranks states; None: keep nothing.
        mode: "min" if lower is better, "max" if higher is better.
    """

    def __init__(self, folder: Path, *, monitor: str | None, mode: Literal["min", "max"] = "min") -> None:
        self.folder = folder
        self._retention = Retention(keep_latest=1, keep_best=1, monitor=monitor, mode=mode)
        self._best: SavedCheckpoint | None = None
        self._weights: dict[str, PyTree] = {}

    def prepare(self, state: TrainState) -> None:
        """Does nothing: no folder is needed."""

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
        """Keeps the weights of `state` if it is the best so far."""
        new = SavedCheckpoint(step_of(state), position, dict(metrics), self.folder)
        found = [new] if self._best is None else [self._best, new]
        if next(iter(self._retention.best_first(found)), None) is new:
            self._best, self._weights = new, copied({name: getattr(state, name) for name in WEIGHTS})
        return self.folder

    def check(self) -> None:
        """Does nothing: no save can fail."""

    def wait(self) -> None:
        """Does nothing: saves are synchronous."""

    def completed(self) -> None:
        """Does nothing: the best weights stay in memory."""

    def best(self) -> SavedCheckpoint | None:
        """The best state; None if none could be compared."""
        return self._best

    def restore(
        self, which: Literal["best"], like: TrainState, *, only: Sequence[str] = WEIGHTS
    ) -> tuple[TrainState, SavedCheckpoint]:
        """`like` with the weights of the best state."""
        if which != "best" or self._best is None or not set(only) <= set(WEIGHTS):
            raise CheckpointError(
                f"The run in {self.folder} saved no checkpoints: it has no {which!r} state with {only}."
            )
        return like.replace(**copied({name: self._weights[name] for name in only})), self._best
