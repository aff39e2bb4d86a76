"""Monitors of a run: the learning rate and the speed."""

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

import jax
import numpy as np
from compoconf import register

from jax_trainer.callbacks.callback import Callback, CallbackConfig
from jax_trainer.engine import EpochEnd, StepEnd, StepMetrics
from jax_trainer.optimizer.reported import METRIC, rates_in
from jax_trainer.settings import checked

LOG = logging.getLogger("jax_trainer")
PERCENTILES = (50, 90, 99)


@dataclass
class LearningRateMonitorConfig(CallbackConfig):
    """When the learning rate is logged.

    Args:
        every_n_epochs: log every n epochs; -1: every epoch, 0: never.
        every_n_minutes: not used.
    """


@register
class LearningRateMonitor(Callback):
    """Logs the learning rate as `optimizer/lr`, before training and at the start of each epoch.

    A trainer with this callback also logs it with the step metrics, as `optimizer/lr_step`. Parameter groups with their
    own rate are `optimizer/lr_<group>`. The rate is read from the state of this library's optimizers and of
    `optax.inject_hyperparams`. The rate of another optimizer cannot be seen and is not logged, with one warning; if
    `ReduceLROnPlateau` scales it, `optimizer/lr_scale` is logged.
    """

    config: LearningRateMonitorConfig

    def reset(self) -> None:
        self._logged_epoch = -1

    def state_dict(self) -> dict[str, Any]:
        """The last logged epoch."""
        return {"logged_epoch": self._logged_epoch}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._logged_epoch = checked(state, {"logged_epoch": int})["logged_epoch"]

    def on_training_start(self) -> None:
        """Logs the initial rate, unless the run is resumed."""
        if self.event.epoch == 0 and self.config.every_n_epochs:
            self._log()

    def on_filtered_training_epoch_start(self, epoch: int) -> None:
        self._log()

    def _log(self) -> None:
        epoch = self.event.epoch
        if epoch == self._logged_epoch:
            return
        is_first, self._logged_epoch = self._logged_epoch < 0, epoch
        rates = jax.device_get(rates_in(self.state))
        if rates:
            self.run.logger.write(self.event.step, {"epoch": epoch, **{name: float(rates[name]) for name in rates}})
        elif is_first:
            LOG.warning(
                f"`LearningRateMonitor` logs no {METRIC!r}: the state of this optimizer does not contain the rate. "
                "Use `optax.inject_hyperparams(optax.adam)(learning_rate=…)`, or an optimizer of "
                "`jax_trainer.optimizer`."
            )


@dataclass
class ThroughputMonitorConfig(CallbackConfig):
    """When the speed is logged.

    Args:
        every_n_epochs: log every n epochs; -1: every epoch, 0: never.
        every_n_minutes: not used.
    """


@register
class ThroughputMonitor(Callback):
    """Logs per epoch: examples and steps per second, time per step, and the fraction of time waiting for data.

    `throughput/step_time_p50`, `_p90` and `_p99` are seconds per step. Step metrics arrive in windows (of 50 steps by
    default), since more frequent reads would slow the device down: so these are percentiles of window means, weighted
    by steps, and the first window of a run includes compiling. Windows that arrive with no step in between are merged.
    `throughput/data_wait_share` is the fraction of time that the device was idle because no batch was ready.
    Evaluations do not count.
    """

    config: ThroughputMonitorConfig

    def reset(self) -> None:
        self._epoch = 0  # that is being measured; 0: none
        self._examples = 0.0
        self._steps = 0
        self._windows: list[tuple[float, int]] = []  # seconds per step, steps
        self._mark: float | None = None  # start of the window; None: it starts with the next step
        self._arrived, self._arrived_at, self._pending = 0.0, -1, 0  # the current window, which may be incomplete

    def state_dict(self) -> dict[str, Any]:
        """The measurements of an unfinished epoch."""
        progress = {"epoch": self._epoch, "examples": self._examples, "steps": self._steps}
        return {**progress, "windows": [*self._windows, *self._open_window()]} if self._epoch else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the measurements; the time between the two runs does not count."""
        self.reset()
        if state != {}:
            windows = list[tuple[Real, int]]
            checked(state, {"epoch": int, "examples": Real, "steps": int, "windows": windows})
            self._epoch, self._examples, self._steps = state["epoch"], state["examples"], state["steps"]
            self._windows = [(seconds, steps) for seconds, steps in state["windows"]]

    def on_training_epoch_start(self, epoch: int) -> None:
        if epoch != self._epoch:  # otherwise the run was resumed inside it
            self.reset()
        self._epoch, self._mark = epoch, time.perf_counter()

    def on_step_end(self, event: StepEnd) -> None:
        """Starts a window after an evaluation."""
        if self._mark is None:
            self._mark = time.perf_counter()

    def on_steps_reported(self, event: StepMetrics) -> None:
        """Counts the steps that are done."""
        if event.step != self._arrived_at:
            self._close()
        rows = event.rows
        self._arrived, self._arrived_at = time.perf_counter(), event.step
        self._pending += len(rows.words)
        self._steps += len(rows.words)
        self._examples += float(rows.format.default_weight.read(rows.words).sum())

    def on_validation_epoch_start(self, epoch: int) -> None:
        """Stops measuring; saves after an evaluation do not count either."""
        self._close()
        self._mark = None

    def on_training_epoch_end(self, train_metrics: dict[str, Any], epoch: int) -> None:
        self._close()
        self._epoch = 0

    def on_filtered_training_epoch_end(self, train_metrics: dict[str, Any], epoch: int) -> None:
        event = self.event
        if not isinstance(event, EpochEnd) or not self._steps or event.seconds <= 0:
            return
        speed = {
            "examples_per_second": self._examples / event.seconds,
            "steps_per_second": self._steps / event.seconds,
            **self._step_times(),
            "data_wait_share": event.waited / event.seconds,
        }
        named = {f"throughput/{name}": value for name, value in speed.items()}
        self.run.logger.write(event.step, {"epoch": epoch, **named})

    def _close(self) -> None:
        if window := self._open_window():
            self._windows += window
            self._mark = self._arrived
        self._pending = 0

    def _open_window(self) -> list[tuple[float, int]]:
        if not self._pending or self._mark is None:
            return []
        return [((self._arrived - self._mark) / self._pending, self._pending)]

    def _step_times(self) -> dict[str, float]:
        if not self._windows:
            return {}
        times, steps = zip(*self._windows, strict=True)
        found = np.percentile(times, PERCENTILES, weights=steps, method="inverted_cdf")
        return {f"step_time_p{percent}": float(value) for percent, value in zip(PERCENTILES, found, strict=True)}
