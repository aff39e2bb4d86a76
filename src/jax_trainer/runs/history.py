"""The metrics of a run so far: training by epoch, every validation, the test, and how the run ended."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from jax_trainer.callbacks import full_names
from jax_trainer.checkpoint.json_codec import Fixed
from jax_trainer.engine import EpochEnd, EvalEnd, EvalRoundEnd, Event, FitEnd, Status
from jax_trainer.settings import checked

TEST = "test"
_NOT_OF_THE_MODEL = ("optimizer/", "guard/")  # prefixes of metrics


class Validation(NamedTuple):
    """One validation: its epoch, step and metrics."""

    epoch: int
    step: int
    metrics: dict[str, Any]


class History:
    """Collects the metrics of a run by full name; part of every checkpoint.

    Args:
        keeps_training: also keep the training metrics of every epoch.
    """

    def __init__(self, *, keeps_training: bool = True) -> None:
        self._keeps_training = keeps_training
        self.training: dict[int, dict[str, Any]] = {}  # by epoch
        self.validations: list[Validation] = []
        self.tests: dict[str, Any] = {}
        self.status: Status = "failed"
        self.reason = ""

    def handle(self, event: Event) -> None:
        """Adds the metrics of `event`."""
        match event:
            case EpochEnd() if self._keeps_training:
                self.training[event.epoch] = Fixed(full_names(event.metrics, "train"))
            case EvalEnd():
                self._add(event, full_names(event.metrics, event.name), is_test=event.name.startswith(TEST))
            case FitEnd():
                self.status, self.reason = event.status, event.reason

    def add(self, event: EvalRoundEnd, metrics: Mapping[str, Any]) -> None:
        """Adds metrics that a hook has computed to those of an evaluation."""
        self._add(event, metrics, is_test=all(name.startswith(TEST) for name in event.metrics))

    def by_epoch(self) -> dict[int, dict[str, Any]]:
        """The metrics of training and of the last validation of every epoch."""
        epochs = {epoch: dict(metrics) for epoch, metrics in self.training.items()}
        for epoch, metrics in self.validated().items():
            epochs[epoch] = {**epochs.get(epoch, {}), **metrics}
        return dict(sorted(epochs.items()))

    def validated(self) -> dict[int, dict[str, Any]]:
        """The metrics of the last validation of every epoch that has one."""
        epochs: dict[int, dict[str, Any]] = {}
        for epoch, _, metrics in self.validations:
            epochs[epoch] = {**epochs.get(epoch, {}), **metrics}
        return epochs

    def final(self) -> dict[str, float]:
        """The scalar metrics of the last epoch and of the test, without those of the optimizer."""
        epochs = self.by_epoch()
        last = {**(epochs[max(epochs)] if epochs else {}), **self.tests}
        return {
            name: float(value)
            for name, value in last.items()
            if np.ndim(value) == 0 and not name.startswith(_NOT_OF_THE_MODEL)
        }

    def state_dict(self) -> dict[str, Any]:
        """The metrics so far."""
        validations = [list(one) for one in self.validations]
        return {"training": dict(self.training), "validations": validations, "tests": self.tests}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the result of `state_dict`."""
        kinds = {
            "training": dict[int, dict[str, object]],
            "validations": list[tuple[int, int, dict[str, Any]]],
            "tests": dict[str, object],
        }
        checked(state, kinds)
        self.training = {epoch: Fixed(metrics) for epoch, metrics in state["training"].items()}
        self.validations = [Validation(epoch, step, Fixed(metrics)) for epoch, step, metrics in state["validations"]]
        self.tests = dict(state["tests"])

    def _add(self, event: Event, metrics: Mapping[str, Any], *, is_test: bool) -> None:
        if is_test:
            self.tests = {**self.tests, **metrics}
            return
        # several sets, and metrics that hooks add, are one validation
        if not self.validations or self.validations[-1][:2] != (event.epoch, event.step):
            self.validations.append(Validation(event.epoch, event.step, {}))
        known = self.validations[-1].metrics
        self.validations[-1] = Validation(event.epoch, event.step, Fixed({**known, **metrics}))
