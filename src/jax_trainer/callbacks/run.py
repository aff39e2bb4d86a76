"""What a callback may use besides events."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from jax_trainer.core import TrainState
from jax_trainer.datasets import DatasetModule, Position
from jax_trainer.logger import Logger


class Checkpoints(Protocol):
    """What a callback needs of a `CheckpointStore`; so this room does not load the store's libraries."""

    def prepare(self, state: TrainState) -> None:
        """Sees to it that states like this one can be saved."""
        ...

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
        """Saves `state`, which stands at `position` in the data and was judged by `metrics`, in the background."""
        ...

    def check(self) -> None:
        """Raises what went wrong with an earlier save."""
        ...

    def wait(self) -> None:
        """Waits until everything is saved, and raises what went wrong."""
        ...

    def best(self) -> Any | None:
        """The best checkpoint; None where none can be compared."""
        ...

    def completed(self) -> None:
        """The run is over, and nothing will be gone on from."""
        ...


@dataclass(frozen=True)
class RunContext:
    """What a callback may use besides events.

    Args:
        folder: the run's own folder.
        logger: takes numbers, figures and texts.
        checkpoints: where states are saved, if they are.
        dataset: the data, where it is a module.
        validates: whether the plan has evaluations.
        trainer: whose run it is, where a trainer made it.
        callback_states: gives what every callback of the run would save of itself, by name; so do others that watch.
        monitors: whether the best checkpoints are told by a metric; otherwise the store was told how else.
        epochs: how many epochs are planned, where that is known.
        steps: the step with which training ends, where that is known.
        transforms: of batches on the device, in words; "" where a trainer has none.
    """

    folder: Path
    logger: Logger
    checkpoints: Checkpoints | None = None
    dataset: DatasetModule | None = None
    validates: bool = True
    trainer: Any = None
    callback_states: Callable[[], Mapping[str, Any]] = dict
    monitors: bool = True
    epochs: int | None = None
    steps: int | None = None
    transforms: str = ""
