"""Keeps the best weights of a run without checkpoints."""

import math
from typing import Any

from jax_trainer.callbacks import merged_names
from jax_trainer.core import TrainState, copy_state
from jax_trainer.engine import EvalRoundEnd, Event
from jax_trainer.runs import Best, KeptBest


class BestWeights:
    """Keeps a copy of the best weights so far on the device, which takes as much memory as the weights.

    Args:
        trainer: compares weights with `is_new_model_better`.
        must_compare: raise an error if no metric can be compared; otherwise no weights are the best.
    """

    def __init__(self, trainer: Any, *, must_compare: bool) -> None:
        self._trainer, self._must_compare = trainer, must_compare
        self._best: Best | None = None
        self._kept: dict[str, Any] = {}

    def handle(self, event: Event) -> None:
        if not isinstance(event, EvalRoundEnd) or all(name.startswith("test") for name in event.metrics):
            return
        metrics, trainer = merged_names(event.metrics), self._trainer
        by = None if trainer.has_custom_comparison else trainer.compared_by(metrics)
        if by is None and not (self._must_compare or trainer.has_custom_comparison):
            return
        if by is not None and math.isnan(metrics[by[0]]):
            return
        if trainer.is_new_model_better(metrics, None if self._best is None else self._best.metrics):
            self._best = Best(event.epoch, event.step, metrics, *(by or (None, None)))
            state = event.state
            ema = {name: value for name, value in state.extra.items() if name == "ema"}
            weights = {"params": state.params, "model_state": state.model_state, "extra": ema}
            self._kept = copy_state(weights)  # the next step donates the buffers of its state

    def kept(self, last: TrainState) -> KeptBest | None:
        """The best weights, in a run that ended with the state `last`; None without any."""
        if self._best is None:
            return None
        extra = {**last.extra, **self._kept["extra"]}
        return KeptBest(self._best, lambda: last.replace(**{**self._kept, "extra": extra}))
