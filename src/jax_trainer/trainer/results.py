"""The result of `train_model`: the metrics of validations and tests."""

from collections.abc import Mapping
from typing import Any

from jax_trainer.engine.events import Status
from jax_trainer.runs import Best, History, Validation, Weights

__all__ = ["TrainResults", "Validation", "named_sets"]


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

    def __init__(self, history: History, best: Best | None, tested: Weights | None) -> None:
        super().__init__()
        for epoch, metrics in history.validated().items():
            self[epoch] = metrics
        if history.tests:
            self["test"] = history.tests
        self.validations: list[Validation] = history.validations
        self.status: Status = history.status
        self.reason = history.reason
        self.best, self.tested = best, tested


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
