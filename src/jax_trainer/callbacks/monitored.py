"""Callbacks that act on a monitored metric: their base class, `EarlyStopping`, and `OptunaPruning`."""

import logging
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, get_args

import numpy as np
from compoconf import register

from jax_trainer.callbacks.callback import Callback, CallbackConfig, RunContext
from jax_trainer.checkpoint.ranking import Direction, Mode, best_mode
from jax_trainer.config.settings import AtLeast, Problem, SettingsError
from jax_trainer.diagnostics.optional_import import from_extra
from jax_trainer.diagnostics.suggestions import suggestion
from jax_trainer.engine import Edit, StopTraining

LOG = logging.getLogger("jax_trainer")
Axis = Literal["epoch", "step"]


@dataclass
class MonitoringConfig(CallbackConfig):
    """Options of callbacks that monitor a metric.

    Args:
        every_n_epochs: check every n epochs; -1: every epoch, 0: never.
        every_n_minutes: not used.
        monitor: the metric to monitor, by its full name.
        mode: min: lower is better; max: higher is better; auto: infer it from the metric's name (loss, error, …: min;
            accuracy, f1, …: max); other names need min or max.
    """

    monitor: str = "val/loss"
    mode: Mode = "auto"

    def problems(self) -> Iterator[Problem]:
        """A metric for which `mode: auto` is ambiguous."""
        try:
            best_mode(self.mode, self.monitor)
        except SettingsError as error:
            yield from error.problems

    @property
    def best_mode(self) -> Direction:
        """`mode`, with "auto" inferred from the metric's name."""
        return best_mode(self.mode, self.monitor)


def may_add_metrics(one: Any) -> bool:
    """Whether a callback may add metrics to validations; built-in ones add none.

    >>> may_add_metrics(Callback())
    False
    """
    kind, hook = type(one), "on_validation_epoch_end"
    is_own = not kind.__module__.startswith("jax_trainer.") and isinstance(one, Callback)
    return hook in vars(one) or (is_own and getattr(kind, hook) is not getattr(Callback, hook))


def check_names(callbacks: Mapping[str, Any], shown: str | None, known: Collection[str], of_training: Any) -> None:
    """Refuses names of metrics that are not reported, unless a callback may add metrics to those of an evaluation.

    Args:
        callbacks: callbacks or configurations by name, which monitor metrics.
        shown: the `progress_metric` of the run.
        known: full names of the metrics of evaluations; none: what callbacks monitor is not checked.
        of_training: full names of the metrics of the training.
    """
    if any(map(may_add_metrics, callbacks.values())):
        return
    wanted = [("trainer.progress_metric", "`progress_metric` is", shown, {*known, *of_training})]
    for name, one in callbacks.items():
        config = one.config if isinstance(one, Callback) else one
        if known and config.every_n_epochs and not getattr(config, "check_on_train_epoch_end", False):
            key = f"trainer.callbacks.{name}.monitor"
            wanted.append((key, f"`{name}` monitors", getattr(config, "monitor", None), {*known}))
    for key, text, metric, names in wanted:
        if metric not in (None, *names):
            reported = f"which is not reported. Reported metrics: {', '.join(sorted(names))}."
            raise SettingsError([(key, f"{text} {metric!r}, {reported}{suggestion(metric, names)}")])


def monitored(metrics: Mapping[str, Any], monitor: str) -> float:
    """The value of the metric called `monitor`, which must be one of `metrics` and a number."""
    if monitor not in metrics:
        logged = ", ".join(sorted(metrics)) or "none"
        raise ValueError(f"No metric {monitor!r} to monitor. Logged metrics: {logged}.{suggestion(monitor, metrics)}")
    if shape := np.shape(metrics[monitor]):
        raise ValueError(f"`monitor: {monitor}` must name a scalar, got an array of shape {shape}.")
    return float(metrics[monitor])


class MetricWatcher(Callback):
    """Base of callbacks that act on the course of a monitored metric; a subclass implements `check`."""

    kept: ClassVar[Mapping[str, Any]] = {"best": float | None, "waited": int, "evaluated_step": int}
    needs = ("validation",)

    def attach(self, run: RunContext) -> None:
        config = self.config
        if not (run.validates or config.check_on_train_epoch_end or config.every_n_epochs == 0):
            raise ValueError(
                f"`{type(self).__name__}` cannot monitor {config.monitor!r}: this run has no validation. Give it "
                "validation data, or set `check_on_train_epoch_end: true` and `monitor: train/loss`."
            )
        super().attach(run)

    def reset(self) -> None:
        self.best: float | None = None
        self.waited = 0  # validations since the best one
        self.evaluated_step = -1  # the last one that was checked

    def on_filtered_training_epoch_end(self, train_metrics: dict[str, Any], epoch: int) -> Edit | None:
        return self._check_once(train_metrics) if self.config.check_on_train_epoch_end else None

    def on_filtered_validation_epoch_end(self, eval_metrics: dict[str, Any], epoch: int) -> Edit | None:
        if self.config.check_on_train_epoch_end or self._is_left_out(self.config.monitor, eval_metrics):
            return None
        return self._check_once(eval_metrics)

    def check(self, value: float) -> Edit | None:
        """Called with every new value of the metric."""
        raise NotImplementedError

    def _check_once(self, metrics: Mapping[str, Any]) -> Edit | None:
        value = monitored(metrics, self.config.monitor)
        if self.event.step == self.evaluated_step:  # a resumed run may repeat the last validation
            return None
        self.evaluated_step = self.event.step
        return self.check(value)

    def describe_best(self) -> str:
        """The best value so far, for messages."""
        return "no value was finite" if self.best is None else f"the best was {self.best:.6g}"


@dataclass
class EarlyStoppingConfig(MonitoringConfig):
    """When training stops early.

    Args:
        patience: stop after this many validations in a row without improvement.
        min_delta: the minimum change that counts as an improvement.
        stopping_threshold: stop once the metric reaches this value.
        divergence_threshold: stop once the metric is worse than this value.
        check_finite: stop when the metric is NaN or infinite; otherwise such a value is no improvement.
        check_on_train_epoch_end: monitor the metrics of training epochs, such as train/loss, instead of validations.
    """

    patience: Annotated[int, AtLeast(1)] = 3
    min_delta: Annotated[float, AtLeast(0)] = 0.0
    stopping_threshold: float | None = None
    divergence_threshold: float | None = None
    check_finite: bool = True
    check_on_train_epoch_end: bool = False

    def problems(self) -> Iterator[Problem]:
        """An ambiguous mode, or contradictory thresholds."""
        unclear = list(super().problems())
        yield from unclear
        goal, limit = self.stopping_threshold, self.divergence_threshold
        if not unclear and goal is not None and limit is not None and not self.is_better(goal, limit):
            text = f"`divergence_threshold` {limit} must be worse than `stopping_threshold` {goal}"
            yield "divergence_threshold", f"{text} (mode {self.best_mode}): every value would end the run."

    def is_better(self, value: float, other: float, by: float = 0.0) -> bool:
        """Whether `value` is better than `other` by more than `by`."""
        return (value - other if self.best_mode == "max" else other - value) > by


@register
class EarlyStopping(MetricWatcher):
    """Stops training when the monitored metric no longer improves, is good enough, or diverges."""

    config: EarlyStoppingConfig

    kept: ClassVar[Mapping[str, Any]] = {**MetricWatcher.kept, "stopped": str}

    def reset(self) -> None:
        super().reset()
        self.stopped = ""  # why

    def on_training_start(self) -> None:
        """Stops a resumed run that had already stopped, unless `patience` was increased."""
        if 0 < self.waited < self.config.patience:
            self.stopped = ""
        if self.stopped:
            LOG.info(f"This run had already stopped. {self.stopped}")
            raise StopTraining(self.stopped)

    def check(self, value: float) -> None:
        """Stops training if there is a reason to."""
        if reason := self._reason(value):
            self.stopped = f"EarlyStopping after step {self.event.step}: `{self.config.monitor}` {reason}."
            LOG.info(self.stopped)
            raise StopTraining(self.stopped)

    def _reason(self, value: float) -> str:
        """Updates the state with `value`; returns why training should stop, or ""."""
        config = self.config
        goal, limit = config.stopping_threshold, config.divergence_threshold
        is_finite = math.isfinite(value)
        if not is_finite and config.check_finite:
            return f"is {value}"
        if goal is not None and (value == goal or config.is_better(value, goal)):
            return f"is {value:.6g} and reached the threshold {goal}"
        if limit is not None and config.is_better(limit, value):
            return f"is {value:.6g}, worse than the threshold {limit}"
        if is_finite and (self.best is None or config.is_better(value, self.best, config.min_delta)):
            self.best, self.waited = value, 0
            return ""
        self.waited += 1
        if self.waited < config.patience:
            return ""
        return f"has not improved in {self.waited} validations in a row; {self.describe_best()}"


class OptunaPruning(Callback):
    """Reports every validation to an Optuna trial, and stops training when the trial should be pruned.

    `optuna.TrialPruned` is raised after all callbacks have been notified of the end. Needs the extra `tune`.

    Args:
        trial: the `optuna.Trial` of this run.
        monitor: the metric to report, by its full name.
        report: the step of reports, "epoch" or "step"; of several validations in an epoch, the first is reported.
    """

    config: CallbackConfig
    kept: ClassVar[Mapping[str, Any]] = {"reported": int}

    def __init__(self, trial: Any, monitor: str = "val/loss", report: Axis = "epoch") -> None:
        if report not in get_args(Axis):
            raise ValueError(f"`report` must be 'epoch' or 'step', got {report!r}.")
        self.trial, self.monitor, self.report = trial, monitor, report
        with from_extra("tune"):
            from optuna import TrialPruned
        self._pruned = TrialPruned
        super().__init__()

    def reset(self) -> None:
        self.reported = -1  # the last epoch or step

    def on_validation_epoch_end(self, eval_metrics: dict[str, Any], epoch: int) -> None:
        """Reports the metric, and stops training if the trial should be pruned."""
        if self._is_left_out(self.monitor, eval_metrics):
            return
        value = monitored(eval_metrics, self.monitor)
        at = epoch if self.report == "epoch" else self.event.step
        if at <= self.reported:
            return
        self.reported = at
        self.trial.report(value, step=at)
        if self.trial.should_prune():
            text = f"Pruned after {self.report} {at}: `{self.monitor}` is {value:.6g}."
            raise StopTraining(text, then=self._pruned(text))
