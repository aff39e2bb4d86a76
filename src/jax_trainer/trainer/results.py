"""What a training gives back: the metrics of its validations and tests."""

from collections.abc import Mapping
from typing import Any

from jax_trainer.callbacks import full_names
from jax_trainer.engine import EvalEnd, EvalRoundEnd, Event, FitEnd
from jax_trainer.engine.events import Status

TEST = "test"


class Results:
    """Remembers the metrics of every validated epoch, those of the tests under "test", and how training ended."""

    def __init__(self) -> None:
        self.metrics: dict[int | str, dict[str, Any]] = {}
        self.status: Status = "failed"

    def handle(self, event: Event) -> None:
        """Takes the metrics of an evaluation."""
        match event:
            case EvalEnd():
                place = TEST if event.name.startswith("test") else event.epoch
                self._add(place, full_names(event.metrics, event.name))
            case FitEnd():
                self.status = event.status

    def add(self, event: EvalRoundEnd, metrics: Mapping[str, Any]) -> None:
        """Takes what was found out besides about the weights of an evaluation."""
        self._add(TEST if all(name.startswith("test") for name in event.metrics) else event.epoch, metrics)

    def state_dict(self) -> dict[str, Any]:
        """All metrics so far."""
        return {"metrics": self.metrics}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on with those of a run that was interrupted."""
        self.metrics = dict(state["metrics"])

    @property
    def final(self) -> dict[str, Any]:
        """The metrics of the last validation and of the test."""
        validated = [epoch for epoch in self.metrics if isinstance(epoch, int)]
        return {**(self.metrics[max(validated)] if validated else {}), **self.metrics.get(TEST, {})}

    def _add(self, place: int | str, metrics: Mapping[str, Any]) -> None:
        self.metrics[place] = {**self.metrics.get(place, {}), **metrics}


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
