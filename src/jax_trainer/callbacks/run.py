"""The context of a run for its callbacks."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jax_trainer.checkpoint.store import CheckpointStore
from jax_trainer.datasets import DatasetModule
from jax_trainer.logger import Logger
from jax_trainer.sharding.placement import is_primary


class NoFolder:
    """In place of the folder and the logger of a run that has none."""

    def __init__(self, style: str) -> None:
        self._style = style

    def __str__(self) -> str:
        return f"no folder, a `{self._style}`"

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(
            f"`{self._style}` has no run folder and no logger. Use `fit` or `TrainerModule` for a callback that writes."
        )


@dataclass(frozen=True)
class RunContext:
    """What a callback may use besides events.

    Args:
        folder: the run folder.
        logger: logs metrics, figures and texts.
        checkpoints: the checkpoint store, if the run saves.
        dataset: the dataset module, if the run has one.
        validates: whether the plan has evaluations.
        trainer: the trainer of the run, if it has one.
        callback_states: returns the states of all callbacks and loggers of the run, by name.
        monitors: whether a metric ranks the checkpoints; otherwise the store has another comparison.
        epochs: total number of epochs, if known.
        steps: the last step of training, if known.
        transforms: description of the transforms of batches on the device; "" without a trainer.
        writes: whether this process writes files and logs; of several, only the primary one does.
        eval_sets: names of the validation sets, if they have schedules of their own: a round may leave some out.
    """

    folder: Path
    logger: Logger
    checkpoints: CheckpointStore | None = None
    dataset: DatasetModule | None = None
    validates: bool = True
    trainer: Any = None
    callback_states: Callable[[], Mapping[str, Any]] = dict
    monitors: bool = True
    epochs: int | None = None
    steps: int | None = None
    transforms: str = ""
    writes: bool = field(default_factory=is_primary)
    eval_sets: tuple[str, ...] = ()

    def leaves_out(self, monitor: str | None, metrics: Collection[str]) -> bool:
        """Whether a round that reports these metrics has no `monitor`, because the set of that metric was not due.

        None: whether it leaves out the first set, which is "val" if there is one of this name.
        """
        if not self.eval_sets:
            return False
        if monitor is not None:
            return monitor not in metrics and monitor.partition("/")[0] in self.eval_sets
        first = "val" if "val" in self.eval_sets else self.eval_sets[0]
        return not any(name.startswith(f"{first}/") for name in metrics)
