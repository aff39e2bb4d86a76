"""`ModelCheckpoint`: saves after validations, every n steps or minutes, and at the end of a run."""

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from compoconf import register

from jax_trainer.callbacks.callback import Callback, RunContext
from jax_trainer.callbacks.monitored import MonitoringConfig, monitored
from jax_trainer.checkpoint.errors import SaveError
from jax_trainer.config.settings import AtLeast
from jax_trainer.engine import Edited, Every, LoopState, SavePoint, StepMetrics, StopTraining
from jax_trainer.engine.processes import peers
from jax_trainer.logger import RecordMark

LOG = logging.getLogger("jax_trainer")


@dataclass
class ModelCheckpointConfig(MonitoringConfig):
    """When checkpoints are saved, and which are kept.

    Args:
        every_n_epochs: save every n epochs; -1: every epoch, 0: not by epochs.
        every_n_minutes: also save every n minutes; -1 or 0: not by time.
        every_n_steps: also save every n steps; 0: not by steps.
        monitor: the metric that ranks checkpoints, by its full name.
        save_top_k: number of best checkpoints to keep, in addition to the latest.
        save_optimizer_state: keep the optimizer state in the best checkpoints; otherwise they become weights-only once
            they are no longer among the latest. The latest always have it, to resume from.
        keep_latest: number of newest checkpoints to keep, to resume from; with 2, one may be damaged.
        keep_every_n_steps: also keep checkpoints whose step is a multiple of this; 0: none.
        save_on_exception: also save when training fails, if there is a state to resume from.
        on_save_failure: if a checkpoint cannot be saved, stop with an error, or continue and retry at the next save.
            A failure of the last save of a run is always an error.
    """

    every_n_steps: Annotated[int, AtLeast(0)] = 0
    save_top_k: Annotated[int, AtLeast(0)] = 1
    save_optimizer_state: bool = False
    keep_latest: Annotated[int, AtLeast(1)] = 2
    keep_every_n_steps: Annotated[int, AtLeast(0)] = 0
    save_on_exception: bool = True
    on_save_failure: Literal["stop", "continue"] = "stop"

    @property
    def saves_at_all(self) -> bool:
        """Whether any checkpoint is ever saved."""
        return bool(self.every_n_epochs or self.every_n_steps or self.every_n_minutes > 0)

    def store_options(self, *, validates: bool = True, monitors: bool = True) -> dict[str, Any]:
        """The options of the `CheckpointStore` for this configuration.

        Args:
            validates: whether the run has metrics to rank checkpoints by.
            monitors: whether `monitor` ranks them; otherwise the store has another comparison.
        """
        always = {"keep_latest": self.keep_latest, "keep_every": self.keep_every_n_steps}
        if not validates:
            return {**always, "keep_best": 0}
        by_metric = {"monitor": self.monitor, "mode": self.best_mode} if monitors else {}
        return {**always, "keep_best": self.save_top_k, "weights_only_best": not self.save_optimizer_state, **by_metric}


class _Mark(NamedTuple):
    """The metadata to resume from a point, besides the state."""

    loop_state: LoopState
    states: Mapping[str, Any]  # of callbacks and loggers, by name
    record: Callable[[], RecordMark | None]  # position in metrics.jsonl, once the rows are written
    devices: int  # number of devices of the state
    transforms: str  # description of the transforms of batches on the device; "" without a trainer

    def data(self) -> dict[str, Any]:
        record = self.record()
        rows: dict[str, Any] = {"record": None if record is None else record.size}
        if record is not None and record.unwritten:
            rows["unwritten"] = list(record.unwritten)
        seen = {"transforms": self.transforms} if self.transforms else {}
        return {"loop": self.loop_state.to_data(), **rows, **seen, "devices": self.devices}


@register
class ModelCheckpoint(Callback):
    """Saves checkpoints after validations (or epochs, without validation), by steps or time, and at the end of a run.

    Checkpoints are written in the background.
    """

    config: ModelCheckpointConfig

    def attach(self, run: RunContext) -> None:
        if run.checkpoints is None:
            raise ValueError("`ModelCheckpoint` needs a checkpoint store: pass `checkpoints` to the `RunContext`.")
        self._checkpoints = run.checkpoints
        super().attach(run)

    def reset(self) -> None:
        self._first = 0  # the first step of this run
        self._mark: _Mark | None = None  # the last point to resume from
        self._evaluated: tuple[int, dict[str, Any]] = (-1, {})  # the step and the metrics of the last evaluation
        self._saw_nan = False  # in the monitored metric
        self._wants = False  # save at the next save point
        self._saved: tuple[Any, ...] = ()  # key of the last save
        self._last = -1  # its step
        self._lost: SaveError | None = None  # the error of the last save

    @property
    def saves_every(self) -> Every:
        """How often a save is due, in addition to epochs and evaluations."""
        return Every(steps=self.config.every_n_steps, minutes=max(0.0, self.config.every_n_minutes))

    def on_training_start(self) -> None:
        """Checks that checkpoints can be saved; warns if there is nothing to monitor."""
        self._first = self.event.step
        if self.config.saves_at_all:
            self._checkpoints.prepare(self.state)
        if not self.run.validates and self.run.monitors:
            LOG.warning(
                "This run has no validation: ModelCheckpoint saves at the end of epochs, and "
                f"`monitor: {self.config.monitor}` is not used."
            )

    def on_filtered_training_epoch_end(self, train_metrics: dict[str, Any], epoch: int) -> None:
        if not self.run.validates:
            self._evaluated, self._wants = (self.event.step, train_metrics), True

    def on_filtered_validation_epoch_end(self, eval_metrics: dict[str, Any], epoch: int) -> None:
        """Saves the evaluated state at the next save point; not before the first step."""
        step, earlier = self._evaluated  # sets with schedules of their own may be evaluated one after the other
        self._evaluated = (self.event.step, {**(earlier if step == self.event.step else {}), **eval_metrics})
        if self._leaves_out(eval_metrics):
            return
        if self.run.monitors:
            value = monitored(eval_metrics, self.config.monitor)  # a wrong name fails at the first validation
            self._saw_nan |= math.isnan(value)
        self._wants = self.event.step > 0

    def on_steps_reported(self, event: StepMetrics) -> None:
        """Raises errors of background saves early."""
        self._tolerating(self._checkpoints.check)

    def on_edited(self, event: Edited) -> None:
        """A function of the state may have changed the evaluated weights: the metrics are not those of the new ones."""
        if any(edit.changes_weights for edit in event.edits):
            self._evaluated = (-1, {})

    def on_save_point(self, event: SavePoint) -> None:
        """Stores the metadata to resume from, and saves if that is due."""
        loop_state = event.loop_state
        if not loop_state.is_at(None if self._mark is None else self._mark.loop_state):
            devices = len(event.state.step.sharding.device_set)
            states, rows, transforms = self.run.callback_states(), self.run.logger.mark(), self.run.transforms
            self._mark = _Mark(loop_state, states, rows, devices, transforms)
        wanted, self._wants = self._wants or (event.due and event.step > self._first), False
        failed = isinstance(event.reason, Exception) and not isinstance(event.reason, StopTraining | SaveError)
        may_save = self.config.save_on_exception if failed else not isinstance(event.reason, SaveError)
        if wanted and self.config.saves_at_all and may_save:
            self._tolerating(self._checkpoints.check)
            self._tolerating(lambda: self._save(due=event.due))

    def on_training_end(self) -> None:
        """Waits for pending saves: a test may need the best checkpoint."""
        self._tolerating(self._checkpoints.wait)
        if self._saw_nan and self._checkpoints.best() is None:
            LOG.warning(
                f"`{self.config.monitor}` was NaN in every validation: no checkpoint is the best, and the last weights "
                "are used."
            )

    def finalize(self, status: str) -> None:
        """Waits for pending saves. If the last one failed, the run fails regardless of `on_save_failure`.

        In a multi-process job, a process that failed does not wait: the others may never finish the save.
        """
        if status == "failed" and peers().is_multi_process:
            return
        try:
            (self._checkpoints.completed if status in ("completed", "stopped") else self._checkpoints.wait)()
        except SaveError as error:
            self._note(error)
            if self._lost is None:
                LOG.warning(str(error))
        if self._lost is None:
            return
        if status == "failed":  # its own error is propagating
            LOG.error(str(self._lost))
        else:
            raise self._lost

    def _save(self, *, due: bool) -> None:
        """Saves; a save that is due by steps or time, or at the end of the run, is never skipped."""
        mark, (step, found) = self._mark, self._evaluated
        assert mark is not None
        metrics = {name: float(value) for name, value in found.items() if np.ndim(value) == 0}
        if step != self.event.step or self._leaves_out(metrics):
            metrics = {}
        what = (mark.loop_state.key, self.event.step, bool(metrics))
        if what != self._saved:
            position = mark.loop_state.position
            more: dict[str, Any] = {"callbacks": mark.states, "run": mark.data, "wait": False, "coalesce": not due}
            self._checkpoints.save(self.state, position, metrics, **more)
            self._saved, self._lost, self._last = what, None, self.event.step

    def _leaves_out(self, metrics: Mapping[str, Any]) -> bool:
        """Whether these metrics are of sets that do not rank checkpoints."""
        return self._is_left_out(self.config.monitor if self.run.monitors else None, metrics)

    def _tolerating(self, act: Callable[[], object]) -> None:
        """Calls `act`; with `on_save_failure: continue` a `SaveError` is only logged."""
        try:
            act()
        except SaveError as error:
            if self.config.on_save_failure == "stop":
                raise
            self._note(error)
            LOG.warning(f"{error} Training continues, and retries at the next save.")

    def _note(self, error: SaveError) -> None:
        """Stores the error of a failed save, unless a newer save is pending."""
        if self.config.on_save_failure == "stop" or error.step in (None, self._last):
            self._saved, self._lost = (), error
