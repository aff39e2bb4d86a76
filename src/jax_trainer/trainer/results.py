"""What a training gives back: the metrics of its validations and tests."""

from collections.abc import Mapping
from typing import Any

from jax_trainer.callbacks import full_names
from jax_trainer.engine import EvalEnd, Event, FitEnd
from jax_trainer.engine.events import Status


class Results:
    """Remembers the metrics of every validated epoch, those of the tests under "test", and where training ended."""

    def __init__(self) -> None:
        self.metrics: dict[int | str, dict[str, Any]] = {}
        self.status: Status = "failed"
        self.epoch = 0

    def handle(self, event: Event) -> None:
        """Takes the metrics of an evaluation."""
        match event:
            case EvalEnd():
                self._add("test" if event.name.startswith("test") else event.epoch, event.name, event.metrics)
            case FitEnd():
                self.status, self.epoch = event.status, event.epoch

    def _add(self, place: int | str, name: str, metrics: Mapping[str, Any]) -> None:
        self.metrics[place] = {**self.metrics.get(place, {}), **full_names(metrics, name)}


def named_sets(kind: str, loaders: Any) -> dict[str, Any]:
    """Evaluation sets by the names that metrics carry: one loader is "val", several are "val_<name>".

    >>> named_sets("val", {"clean": [1], "noisy": [2]})
    {'val_clean': [1], 'val_noisy': [2]}
    """
    if loaders is None:
        return {}
    if isinstance(loaders, Mapping):
        return {kind if name == kind else f"{kind}_{name}": loader for name, loader in loaders.items()}
    return {kind: loaders}
