"""The best weights of a run that saves none."""

import math
from typing import Any

from jax_trainer.callbacks import merged_names
from jax_trainer.core import TrainState, copy_state
from jax_trainer.engine import EvalRoundEnd, Event
from jax_trainer.runs import Best, KeptBest


class BestWeights:
    """Keeps a copy of the weights of the best validation so far, on the device: as much memory as they take.

    Args:
        trainer: who says which weights are better.
        must_compare: whether it is an error if nobody can say so; otherwise there are no best ones.
    """

    def __init__(self, trainer: Any, *, must_compare: bool) -> None:
        self._trainer, self._must_compare = trainer, must_compare
        self._best: Best | None = None
        self._kept: dict[str, Any] = {}

    def handle(self, event: Event) -> None:
        """Looks at what an evaluation found."""
        if not isinstance(event, EvalRoundEnd) or all(name.startswith("test") for name in event.metrics):
            return
        metrics, trainer = merged_names(event.metrics), self._trainer
        by = None if trainer.compares_itself else trainer.compared_by(metrics)
        if by is None and not (self._must_compare or trainer.compares_itself):
            return
        if by is not None and math.isnan(metrics[by[0]]):
            return
        if trainer.is_new_model_better(metrics, None if self._best is None else self._best.metrics):
            self._best = Best(event.epoch, event.step, metrics, *(by or (None, None)))
            state = event.state
            ema = {name: value for name, value in state.extra.items() if name == "ema"}
            weights = {"params": state.params, "model_state": state.model_state, "extra": ema}
            self._kept = copy_state(weights)  # the next step reuses the memory of its state

    def kept(self, last: TrainState) -> KeptBest | None:
        """The best weights in a run that ended with the state `last`, if there are some."""
        if self._best is None:
            return None
        extra = {**last.extra, **self._kept["extra"]}
        return KeptBest(self._best, lambda: last.replace(**{**self._kept, "extra": extra}))
