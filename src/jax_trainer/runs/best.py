"""The best weights of a run, and which weights are used after it: the same rule for every style."""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple, get_args

from jax_trainer.callbacks import full_names, merged_names
from jax_trainer.checkpoint.ranking import Direction, describe_mode
from jax_trainer.checkpoint.ranking import is_better as is_better_value
from jax_trainer.checkpoint.store import CheckpointStore
from jax_trainer.core import TrainState, copied, step_of
from jax_trainer.engine import EpochEnd, EvalRoundEnd, Event
from jax_trainer.runs.history import MetricDict

Weights = Literal["best", "latest", "last"]  # "last" is "latest"
WEIGHTS = ("step", "params", "model_state", "extra")  # the fields of a state that an evaluation needs
Metrics = Mapping[str, Any]


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

    @property
    def logged(self) -> dict[str, float]:
        """The metric that ranked them, as it is logged with the hyperparameters; empty if there is none."""
        return {} if self.monitor is None else {f"best/{self.monitor}": float(self.metrics[self.monitor])}

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


class Ranking(NamedTuple):
    """How the weights of a run are compared.

    Args:
        monitor: returns the metric that ranks weights with these metrics, and "min" or "max"; None: they have no rank,
            or a user's function ranks them.
        is_better: whether weights with the first metrics are better than those with the second; None: the first ones.
        is_custom: whether `is_better` also ranks weights without a monitored metric.
    """

    monitor: Callable[[Metrics], tuple[str, Direction] | None]
    is_better: Callable[[Metrics, Metrics | None], bool]
    is_custom: bool = False

    @classmethod
    def by(cls, monitor: str, mode: Direction) -> "Ranking":
        """A ranking by one metric."""

        def is_better(new: Metrics, old: Metrics | None) -> bool:
            return is_better_value(new[monitor], None if old is None else old[monitor], mode)

        return cls(lambda metrics: (monitor, mode) if monitor in metrics else None, is_better)


class BestInMemory:
    """An observer that keeps a copy of the best weights so far on the device, for a run without checkpoints.

    Args:
        ranking: compares weights.
        validates: whether validations rank the weights; otherwise the training metrics of epochs do.
        leaves_out: whether an evaluation with these metrics has nothing that ranks weights.
    """

    def __init__(
        self,
        ranking: Ranking,
        *,
        validates: bool,
        leaves_out: Callable[[Collection[str]], bool] = lambda metrics: False,
    ) -> None:
        self._ranking, self._validates, self._leaves_out = ranking, validates, leaves_out
        self._best: Best | None = None
        self._weights: dict[str, Any] = {}

    def handle(self, event: Event) -> None:
        """Keeps the weights of `event` if they are the best so far."""
        match event:
            case EvalRoundEnd() if not all(name.startswith("test") for name in event.metrics):
                metrics = merged_names(event.metrics)
                if not self._leaves_out(metrics):
                    self._compare(event, metrics)
            case EpochEnd() if not self._validates:
                self._compare(event, full_names(event.metrics, "train"))

    def _compare(self, event: Event, metrics: dict[str, Any]) -> None:
        ranking = self._ranking
        by = ranking.monitor(metrics)
        if (by is None and not ranking.is_custom) or (by is not None and math.isnan(metrics[by[0]])):
            return
        is_tie = by is not None and self._best is not None and metrics[by[0]] == self._best.metrics.get(by[0])
        if is_tie or ranking.is_better(metrics, None if self._best is None else self._best.metrics):
            self._best = Best(event.epoch, event.step, MetricDict(metrics), *(by or (None, None)))
            # a copy: the next step donates the buffers of its state
            self._weights = copied({name: getattr(event.state, name) for name in WEIGHTS})

    def kept(self, last: TrainState) -> "KeptBest | None":
        """The best weights, in a run that ended with the state `last`; None without any."""
        if self._best is None:
            return None
        return KeptBest(self._best, lambda: last.replace(**self._weights), self._validates)


def best_in(
    store: CheckpointStore, last: TrainState, by: tuple[str, Direction] | None, *, validated: bool = True
) -> KeptBest | None:
    """The best weights that a run has saved; `by` is the metric that ranks them. None if there are none."""
    saved = store.best()
    if saved is None:
        return None
    best = Best(saved.epoch, saved.step, MetricDict(saved.metrics), *(by or (None, None)))
    is_last = saved.step == step_of(last)
    return KeptBest(best, lambda: last if is_last else store.restore("best", like=last, only=WEIGHTS)[0], validated)


def used_by_default(kept: KeptBest | None) -> Weights:
    """The default weights: the best validated ones, if the run has some, else the last."""
    return "best" if kept is not None and kept.validated else "last"


def select_weights(which: Weights | None, last: TrainState, kept: KeptBest | None) -> TrainState:
    """The state with the requested weights; None: the default ones."""
    if which not in (None, *get_args(Weights)):
        raise ValueError(f"`which` must be 'best' or 'latest', got {which!r}.")
    if (which or used_by_default(kept)) != "best":
        return last
    if kept is None:
        raise ValueError(
            "`which='best'`: this run has no best weights. It has them after training with validation, until other "
            "weights are set or loaded. Use `which='latest'`, or load a checkpoint."
        )
    return kept.state
