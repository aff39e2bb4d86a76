"""Objectives: what makes a number of values, an experiment or any function in Python."""

from collections.abc import Callable
from typing import Any, Protocol

from jax_trainer.callbacks.monitored import Mode, best_mode
from jax_trainer.tuning.dimensions import Values

Function = Callable[[Values, Any], float]  # of values by key, and an Optuna trial; it may raise `optuna.TrialPruned`


class Objective(Protocol):
    """What trials are made of."""

    monitor: str
    mode: Any

    @property
    def secrets(self) -> frozenset[str]:
        """What nobody is to be shown."""
        ...

    @property
    def identity(self) -> dict[str, str]:
        """What it is besides the values that are tried."""
        ...

    def rehearse(self) -> None:
        """Finds what would make every trial fail."""
        ...

    def __call__(self, values: Values, trial: Any) -> float:
        """What comes out with these values."""
        ...

    def config_text(self, values: Values) -> str | None:
        """The experiment with these values as a file, if it is one."""
        ...


class FunctionTrials:
    """A function of the user's as an objective. What it returns is minimised, as by Optuna, unless something says else.

    Args:
        function: of the values and the trial.
        monitor: what it returns; None: a value without a name.
        mode: whether a small value is good or a large one; auto: as the name says, and small without one.
    """

    def __init__(self, function: Function, monitor: str | None = None, mode: Mode = "auto") -> None:
        self._function, self.monitor = function, monitor or "value"
        self.mode = "min" if monitor is None and mode == "auto" else best_mode(mode, self.monitor)

    @property
    def secrets(self) -> frozenset[str]:
        """None that we know of."""
        return frozenset()

    @property
    def identity(self) -> dict[str, str]:
        """Nothing that could be compared."""
        return {}

    def rehearse(self) -> None:
        """A function is its author's business."""

    def __call__(self, values: Values, trial: Any) -> float:
        """Calls the function."""
        return self._function(values, trial)

    def config_text(self, values: Values) -> str | None:
        """A function has no file."""
        return None
