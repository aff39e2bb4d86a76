"""The best weights of a run that saves none, for the test at its end."""

from collections.abc import Callable, Mapping
from typing import Any

from jax_trainer.callbacks import merged_names
from jax_trainer.core import TrainState, copy_state
from jax_trainer.engine import EvalRoundEnd, Event

Better = Callable[[Mapping[str, Any], Mapping[str, Any] | None], bool]


class BestWeights:
    """Keeps a copy of the weights of the best validation so far, on the device: as much memory as they take."""

    def __init__(self, better: Better) -> None:
        self._better = better
        self._metrics: dict[str, Any] | None = None
        self._kept: dict[str, Any] = {}

    def handle(self, event: Event) -> None:
        """Looks at what an evaluation found."""
        if not isinstance(event, EvalRoundEnd) or all(name.startswith("test") for name in event.metrics):
            return
        metrics = merged_names(event.metrics)
        if self._better(metrics, self._metrics):
            self._metrics = metrics
            state = event.state
            ema = {name: value for name, value in state.extra.items() if name == "ema"}
            weights = {"params": state.params, "model_state": state.model_state, "extra": ema}
            self._kept = copy_state(weights)  # the next step reuses the memory of its state

    def of(self, state: TrainState) -> TrainState:
        """`state` with the best weights, if there are any."""
        if not self._kept:
            return state
        return state.replace(**{**self._kept, "extra": {**state.extra, **self._kept["extra"]}})
