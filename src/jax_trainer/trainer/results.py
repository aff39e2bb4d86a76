"""The result of `train_model`: the metrics of validations and tests."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from jax_trainer.callbacks import full_names
from jax_trainer.checkpoint.json_codec import Fixed
from jax_trainer.engine import EvalEnd, EvalRoundEnd, Event, FitEnd
from jax_trainer.engine.events import Status
from jax_trainer.runs import Best, Weights
from jax_trainer.settings import checked

TEST = "test"


class Validation(NamedTuple):
    """One validation: its epoch, step and metrics."""

    epoch: int
    step: int
    metrics: dict[str, Any]


class TrainResults(dict[int | str, dict[str, Any]]):
    """The metrics of the last validation of every epoch, by epoch, and those of the test under "test".

    Attributes:
        validations: all validations in order, also those inside epochs: `(epoch, step, metrics)` each.
        status: "completed", or "stopped" if a callback ended the training.
        reason: why it was stopped.
        best: epoch, step and metrics of the best weights in validation, which the trainer now uses; None: it uses the
            last ones.
        tested: which weights were tested, "best" or "last"; None: no test.
    """

    def __init__(self) -> None:
        super().__init__()
        self.validations: list[Validation] = []
        self.status: Status = "failed"
        self.reason = ""
        self.best: Best | None = None
        self.tested: Weights | None = None


class Results:
    """Collects the metrics of a training's validations and tests, and how it ended."""

    def __init__(self) -> None:
        self.metrics = TrainResults()

    @property
    def status(self) -> Status:
        """How the training ended."""
        return self.metrics.status

    def handle(self, event: Event) -> None:
        match event:
            case EvalEnd():
                metrics = full_names(event.metrics, event.name)
                self._test(metrics) if event.name.startswith(TEST) else self._validate(event.epoch, event.step, metrics)
            case FitEnd():
                self.metrics.status, self.metrics.reason = event.status, event.reason

    def add(self, event: EvalRoundEnd, metrics: Mapping[str, Any]) -> None:
        """Adds metrics to those of an evaluation."""
        is_test = all(name.startswith(TEST) for name in event.metrics)
        self._test(metrics) if is_test else self._validate(event.epoch, event.step, metrics)

    def state_dict(self) -> dict[str, Any]:
        others = {key: metrics for key, metrics in self.metrics.items() if key == TEST}
        return {"metrics": others, "validations": [list(one) for one in self.metrics.validations]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        validation = tuple[int, int, dict[str, Any]]
        checked(state, {"metrics": dict[str, dict[str, object]], "validations": list[validation]})
        self.metrics = TrainResults()
        self.metrics.update(state["metrics"])
        for epoch, step, metrics in state["validations"]:
            self._validate(epoch, step, metrics)

    @property
    def final(self) -> dict[str, Any]:
        """The metrics of the last validation and of the test."""
        validated = [epoch for epoch in self.metrics if isinstance(epoch, int)]
        return {**(self.metrics[max(validated)] if validated else {}), **self.metrics.get(TEST, {})}

    def _test(self, metrics: Mapping[str, Any]) -> None:
        self.metrics[TEST] = {**self.metrics.get(TEST, {}), **metrics}

    def _validate(self, epoch: int, step: int, metrics: Mapping[str, Any]) -> None:
        # several sets, and metrics added by hooks, are one validation
        known = self.metrics.validations
        if not known or known[-1][:2] != (epoch, step):
            known.append(Validation(epoch, step, {}))
        known[-1] = Validation(epoch, step, Fixed({**known[-1].metrics, **metrics}))
        self.metrics[epoch] = {**self.metrics.get(epoch, {}), **metrics}


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
