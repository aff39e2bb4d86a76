"""Prunes unpromising trials of a hyperparameter search."""

from collections.abc import Mapping
from typing import Any, Literal, get_args

from jax_trainer.callbacks.callback import Callback, CallbackConfig
from jax_trainer.callbacks.monitored import monitored
from jax_trainer.core import lazy_import
from jax_trainer.engine import StopTraining
from jax_trainer.settings import checked

Axis = Literal["epoch", "step"]


class OptunaPruning(Callback):
    """Reports every validation to an Optuna trial, and stops training when the trial should be pruned.

    `optuna.TrialPruned` is raised after all callbacks have been notified of the end. Needs the extra `tune`.

    Args:
        trial: the `optuna.Trial` of this run.
        monitor: the metric to report, by its full name.
        report: the step of reports, "epoch" or "step"; of several validations in an epoch, the first is reported.
    """

    config: CallbackConfig

    def __init__(self, trial: Any, monitor: str = "val/loss", report: Axis = "epoch") -> None:
        if report not in get_args(Axis):
            raise ValueError(f"`report` must be 'epoch' or 'step', got {report!r}.")
        self.trial, self.monitor, self.report = trial, monitor, report
        self._pruned = lazy_import("optuna", extra="tune").TrialPruned
        super().__init__()

    def reset(self) -> None:
        self._reported = -1

    def state_dict(self) -> dict[str, Any]:
        """The epoch or step of the last report."""
        return {"reported": self._reported}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._reported = checked(state, {"reported": int})["reported"]

    def on_validation_epoch_end(self, eval_metrics: dict[str, Any], epoch: int) -> None:
        """Reports the metric, and stops training if the trial should be pruned."""
        value = monitored(eval_metrics, self.monitor)
        at = epoch if self.report == "epoch" else self.event.step
        if at <= self._reported:
            return
        self._reported = at
        self.trial.report(value, step=at)
        if self.trial.should_prune():
            text = f"Pruned after {self.report} {at}: `{self.monitor}` is {value:.6g}."
            raise StopTraining(text, then=self._pruned(text))
