"""Objectives: the protocol, and user functions as objectives."""

from collections.abc import Callable
from typing import Any, Protocol

from jax_trainer.callbacks.monitored import Mode, best_mode
from jax_trainer.tuning.dimensions import Values

Function = Callable[[Values, Any], float]  # of the values and an Optuna trial; may raise `optuna.TrialPruned`


class Objective(Protocol):
    """What a study optimizes: called with the values of a trial, returns a number."""

    monitor: str
    mode: Any

    @property
    def secrets(self) -> frozenset[str]:
        """Texts to redact from messages."""
        ...

    @property
    def identity(self) -> dict[str, str]:
        """The configuration besides the tuned keys, to detect that a resumed study changed."""
        ...

    def rehearse(self) -> None:
        """Raises what would make every trial fail."""
        ...

    def __call__(self, values: Values, trial: Any) -> float:
        """The value of the objective for these hyperparameters."""
        ...

    def config_text(self, values: Values) -> str | None:
        """The experiment with these values as YAML; None for a function."""
        ...


class FunctionTrials:
    """A user's function as an objective, minimized by default, as in Optuna.

    Args:
        function: takes the values and the Optuna trial, returns a number.
        monitor: the name of the returned value; None: "value".
        mode: min, max, or auto (by the name; min without one).
    """

    def __init__(self, function: Function, monitor: str | None = None, mode: Mode = "auto") -> None:
        self._function, self.monitor = function, monitor or "value"
        self.mode = "min" if monitor is None and mode == "auto" else best_mode(mode, self.monitor)

    @property
    def secrets(self) -> frozenset[str]:
        return frozenset()

    @property
    def identity(self) -> dict[str, str]:
        return {}

    def rehearse(self) -> None:
        """Does nothing: a function cannot be checked without calling it."""

    def __call__(self, values: Values, trial: Any) -> float:
        return self._function(values, trial)

    def config_text(self, values: Values) -> str | None:
        return None
