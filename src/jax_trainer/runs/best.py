"""The best weights of a run, and which weights are used after it: the same rule for every style."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple, get_args

from jax_trainer.callbacks import ModelCheckpointConfig
from jax_trainer.callbacks.monitored import Direction, describe_mode
from jax_trainer.checkpoint.memory import WEIGHTS, BestInMemory
from jax_trainer.checkpoint.store import CheckpointStore
from jax_trainer.core import TrainState, step_of

Weights = Literal["best", "last"]


class Best(NamedTuple):
    """The best weights: epoch, step, metrics, and the metric that ranked them.

    `monitor` and `mode` are None if a user's function ranked them.
    """

    epoch: int
    step: int
    metrics: dict[str, Any]
    monitor: str | None = None
    mode: Direction | None = None

    @property
    def description(self) -> str:
        """Readable text: epoch, step, metric and mode."""
        at = f"epoch {self.epoch}, step {self.step}"
        if self.monitor is None or self.mode is None or self.monitor not in self.metrics:
            return at
        return f"{at}: {self.monitor} {float(self.metrics[self.monitor]):.6g}, {describe_mode(self.mode)}"

    def data(self) -> dict[str, Any]:
        """The description as plain data."""
        value = None if self.monitor is None else self.metrics.get(self.monitor)
        return {"epoch": self.epoch, "step": self.step, "monitor": self.monitor, "mode": self.mode, "value": value}


@dataclass(frozen=True)
class KeptBest:
    """The best weights of a run that has ended, loaded on demand.

    Args:
        best: their epoch, step and metrics.
        load: returns the last state with these weights; called at most once.
        validated: whether a validation ranked them; otherwise they are only used on request.
    """

    best: Best
    load: Callable[[], TrainState]
    validated: bool = True

    @cached_property
    def state(self) -> TrainState:
        """The last state with the best weights."""
        return self.load()


def best_in(
    store: CheckpointStore | BestInMemory,
    last: TrainState,
    saver: ModelCheckpointConfig | None,
    *,
    validated: bool = True,
) -> KeptBest | None:
    """The best weights that a run has saved or kept in memory; `saver` has the metric. None if there are none."""
    saved = store.best()
    if saved is None:
        return None
    by: Mapping[str, Any] = {} if saver is None else {"monitor": saver.monitor, "mode": saver.best_mode}
    best = Best(saved.epoch, saved.step, dict(saved.metrics), **by)
    is_last = saved.step == step_of(last)
    return KeptBest(best, lambda: last if is_last else store.restore("best", like=last, only=WEIGHTS)[0], validated)


def used_by_default(kept: KeptBest | None) -> Weights:
    """The default weights: the best validated ones, if the run has some, else the last."""
    return "best" if kept is not None and kept.validated else "last"


def select_weights(which: Weights | None, last: TrainState, kept: KeptBest | None) -> TrainState:
    """The state with the requested weights; None: the default ones."""
    if which not in (None, *get_args(Weights)):
        raise ValueError(f"`which` must be 'best' or 'last', got {which!r}.")
    if (which or used_by_default(kept)) == "last":
        return last
    if kept is None:
        raise ValueError(
            "`which='best'`: this run has no best weights. It has them after training with validation, until other "
            "weights are set or loaded. Use `which='last'`, or load a checkpoint."
        )
    return kept.state
