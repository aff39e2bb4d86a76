"""How fast training goes, and how much of the time it waits for data."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np
from compoconf import register

from jax_trainer.callbacks.callback import Callback, CallbackConfig
from jax_trainer.engine import EpochEnd, StepEnd, StepMetrics
from jax_trainer.settings import checked

PERCENTILES = (50, 90, 99)


@dataclass
class ThroughputMonitorConfig(CallbackConfig):
    """When the speed is logged.

    Args:
        every_n_epochs: epochs between two that are logged; -1: every epoch, 0: never.
        every_n_minutes: has no meaning here.
    """


@register
class ThroughputMonitor(Callback):
    """Logs per epoch how fast training went: examples and steps per second, time per step, share of waiting for data.

    `throughput/step_time_p50`, `_p90` and `_p99` are seconds per step. The numbers of steps arrive in windows (of 50,
    if nobody says otherwise), and asking the device for more would slow it down: so they are percentiles of the means
    of windows, each counted as often as it has steps, and the first window of a run has compiling in it. Windows that
    arrive with no step in between are one. `throughput/data_wait_share` is the share of the time for which the device
    had nothing to do because there was no batch. Evaluations do not count.
    """

    config: ThroughputMonitorConfig

    def reset(self) -> None:
        """Has measured nothing."""
        self._epoch = 0  # that is measured; 0: none
        self._examples = 0.0
        self._steps = 0
        self._windows: list[tuple[float, int]] = []  # seconds per step, steps
        self._mark: float | None = None  # when the window began; None: with the next step
        self._arrived, self._arrived_at, self._pending = 0.0, -1, 0  # reports that may not be all of a window

    def state_dict(self) -> dict[str, Any]:
        """What was measured of an epoch that is not over."""
        steps_told = {"epoch": self._epoch, "examples": self._examples, "steps": self._steps}
        return {**steps_told, "windows": [*self._windows, *self._open_window()]} if self._epoch else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on measuring that epoch: the time between the two runs does not count."""
        self.reset()
        if state != {}:
            windows = list[tuple[Real, int]]
            checked(state, {"epoch": int, "examples": Real, "steps": int, "windows": windows})
            self._epoch, self._examples, self._steps = state["epoch"], state["examples"], state["steps"]
            self._windows = [(seconds, steps) for seconds, steps in state["windows"]]

    def on_training_epoch_start(self, epoch: int) -> None:
        """Begins to measure."""
        if epoch != self._epoch:  # otherwise a run goes on in the middle of it
            self.reset()
        self._epoch, self._mark = epoch, time.perf_counter()

    def on_step_end(self, event: StepEnd) -> None:
        """Begins a window, if an evaluation has ended the one before."""
        if self._mark is None:
            self._mark = time.perf_counter()

    def on_steps_reported(self, event: StepMetrics) -> None:
        """Takes in which steps are done by now."""
        if event.step != self._arrived_at:
            self._close()
        rows = event.rows
        self._arrived, self._arrived_at = time.perf_counter(), event.step
        self._pending += len(rows.words)
        self._steps += len(rows.words)
        self._examples += float(rows.format.default_weight.read(rows.words).sum())

    def on_validation_epoch_start(self, epoch: int) -> None:
        """Stops measuring; what is saved after an evaluation does not count either."""
        self._close()
        self._mark = None

    def on_training_epoch_end(self, train_metrics: dict[str, Any], epoch: int) -> None:
        """Ends the last window."""
        self._close()
        self._epoch = 0

    def on_filtered_training_epoch_end(self, train_metrics: dict[str, Any], epoch: int) -> None:
        """Logs."""
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
