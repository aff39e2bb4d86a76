"""The best validated weights of a run, and which weights are used once it has ended: the same rule for every style."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple, get_args

from jax_trainer.callbacks import ModelCheckpointConfig
from jax_trainer.callbacks.monitored import Direction, direction_words
from jax_trainer.checkpoint.memory import WEIGHTS, BestInMemory
from jax_trainer.checkpoint.store import CheckpointStore
from jax_trainer.core import TrainState, step_of

Weights = Literal["best", "last"]


class Best(NamedTuple):
    """The best weights: of which epoch and step they are, what was measured with them, and what they are the best by.

    `monitor` and `mode` are None where a function of the user's compared them.
    """

    epoch: int
    step: int
    metrics: dict[str, Any]
    monitor: str | None = None
    mode: Direction | None = None

    @property
    def words(self) -> str:
        """For people: the place, the metric, and which way it is good."""
        place = f"epoch {self.epoch}, step {self.step}"
        if self.monitor is None or self.mode is None or self.monitor not in self.metrics:
            return place
        return f"{place}: {self.monitor} {float(self.metrics[self.monitor]):.6g}, {direction_words(self.mode)}"

    def data(self) -> dict[str, Any]:
        """For scripts."""
        value = None if self.monitor is None else self.metrics.get(self.monitor)
        return {"epoch": self.epoch, "step": self.step, "monitor": self.monitor, "mode": self.mode, "value": value}


@dataclass(frozen=True)
class KeptBest:
    """The best weights of a run that has ended, wherever they are.

    Args:
        best: what is known of them.
        load: makes the run's last state with these weights; called once, when they are needed.
        validated: whether a validation chose them; otherwise they are used only where they are asked for.
    """

    best: Best
    load: Callable[[], TrainState]
    validated: bool = True

    @cached_property
    def state(self) -> TrainState:
        """The run's last state with the best weights."""
        return self.load()


def best_in(
    store: CheckpointStore | BestInMemory,
    last: TrainState,
    saver: ModelCheckpointConfig | None,
    *,
    validated: bool = True,
) -> KeptBest | None:
    """The best weights that a run has saved or kept in memory, if there are some; `saver` says by what they are."""
    saved = store.best()
    if saved is None:
        return None
    by: Mapping[str, Any] = {} if saver is None else {"monitor": saver.monitor, "mode": saver.best_mode}
    best = Best(saved.epoch, saved.step, dict(saved.metrics), **by)
    is_last = saved.step == step_of(last)
    return KeptBest(best, lambda: last if is_last else store.restore("best", like=last, only=WEIGHTS)[0], validated)


def used_by_default(kept: KeptBest | None) -> Weights:
    """Which weights are used where nobody says: the best validated ones of the run, if there are some."""
    return "best" if kept is not None and kept.validated else "last"


def select_weights(which: Weights | None, last: TrainState, kept: KeptBest | None) -> TrainState:
    """The state with the weights that are asked for; None: those that are used by default."""
    if which not in (None, *get_args(Weights)):
        raise ValueError(f"`which` must be 'best' or 'last', got {which!r}.")
    if (which or used_by_default(kept)) == "last":
        return last
    if kept is None:
        raise ValueError(
            "`which='best'`: there are no best weights. A run has some after it has ended, if it validated and until "
            "other weights are set or loaded. Use `which='last'`, or load a checkpoint."
        )
    return kept.state
