"""Ends trials of a search that promise little."""

from collections.abc import Mapping
from typing import Any, Literal, get_args

from jax_trainer.callbacks.callback import Callback, CallbackConfig
from jax_trainer.callbacks.monitored import monitored
from jax_trainer.core import lazy_import
from jax_trainer.engine import StopTraining
from jax_trainer.settings import checked

Axis = Literal["epoch", "step"]


class OptunaPruning(Callback):
    """Tells an Optuna trial the result of every validation, and ends training when the trial should be pruned.

    Then `optuna.TrialPruned` is raised, after everybody was told that training is over. Needs the extra `tune`.

    Args:
        trial: the `optuna.Trial` of this run.
        monitor: the metric to report, by its full name.
        report: on which axis; of several validations with the same number, the first is reported.
    """

    config: CallbackConfig

    def __init__(self, trial: Any, monitor: str = "val/loss", report: Axis = "epoch") -> None:
        if report not in get_args(Axis):
            raise ValueError(f"`report` must be 'epoch' or 'step', got {report!r}.")
        self.trial, self.monitor, self.report = trial, monitor, report
        self._pruned = lazy_import("optuna", extra="tune").TrialPruned
        super().__init__()

    def reset(self) -> None:
        """Has reported nothing."""
        self._reported = -1

    def state_dict(self) -> dict[str, Any]:
        """Where on the axis the last report was."""
        return {"reported": self._reported}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """What was reported is not reported again."""
        self._reported = checked(state, {"reported": int})["reported"]

    def on_validation_epoch_end(self, eval_metrics: dict[str, Any], epoch: int) -> None:
        """Reports, and asks whether to go on."""
        value = monitored(eval_metrics, self.monitor)
        place = epoch if self.report == "epoch" else self.event.step
        if place <= self._reported:
            return
        self._reported = place
        self.trial.report(value, step=place)
        if self.trial.should_prune():
            text = f"Pruned after {self.report} {place}: `{self.monitor}` is {value:.6g}."
            raise StopTraining(text, then=self._pruned(text))
