"""Saves the state: after validations, every so many steps or minutes, and however a run ends."""

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from compoconf import register

from jax_trainer.callbacks.callback import Callback
from jax_trainer.callbacks.monitored import MonitoringConfig, monitored
from jax_trainer.callbacks.run import RunContext
from jax_trainer.checkpoint.disk import SaveError
from jax_trainer.engine import Every, LoopState, SavePoint, StepMetrics, StopTraining
from jax_trainer.logger import RecordMark
from jax_trainer.processes import process_group
from jax_trainer.settings import AtLeast

LOG = logging.getLogger("jax_trainer")


@dataclass
class ModelCheckpointConfig(MonitoringConfig):
    """What is saved, when, and which states are kept.

    Args:
        every_n_epochs: epochs between two saved states; -1: every epoch, 0: not by epochs.
        every_n_minutes: save every so many minutes as well; -1 or 0: not by time.
        every_n_steps: save every so many steps as well; 0: not by steps.
        monitor: the metric by which states are compared, by its full name.
        mode: min: a small value is good; max: a large one; auto: as the metric's name says (loss, error, …: small;
            accuracy, f1, …: large). A name that does not say needs one of the others.
        save_top_k: how many of the best states are kept, besides the latest.
        save_optimizer_state: keep the optimizer's state in the best checkpoints as well; otherwise they drop it once
            they are no longer the latest. The latest always have it: training cannot go on without.
        keep_latest: how many of the newest states are kept, to go on from; with 2, damage to one costs no run.
        keep_every_n_steps: keep the states of these steps for good; 0: none.
        save_on_exception: save when training fails, too, if there is a state to go on from.
        on_save_failure: what happens when a state cannot be saved: stop with an error, or continue and try again the
            next time. If the last one of a run cannot be saved, that is an error in any case.
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
        """Whether anything is ever to be saved."""
        return bool(self.every_n_epochs or self.every_n_steps or self.every_n_minutes > 0)

    def store_options(self, *, validates: bool = True, monitors: bool = True) -> dict[str, Any]:
        """The options of the `CheckpointStore` that this configuration asks for.

        Args:
            validates: whether there will be anything to compare states by.
            monitors: whether `monitor` compares them; otherwise the store is told how by somebody else.
        """
        always = {"keep_latest": self.keep_latest, "keep_every": self.keep_every_n_steps}
        if not validates:
            return {**always, "keep_best": 0}
        by_metric = {"monitor": self.monitor, "mode": self.best_mode} if monitors else {}
        return {**always, "keep_best": self.save_top_k, "weights_only_best": not self.save_optimizer_state, **by_metric}


class _Mark(NamedTuple):
    """What a run that goes on from a place must know besides the state."""

    loop_state: LoopState
    states: Mapping[str, Any]  # of callbacks and others that watch
    record: Callable[[], RecordMark | None]  # of the run's rows, as soon as they are written
    devices: int  # that share the state
    transforms: str  # of batches on the device, in words; "" where a trainer has none

    def data(self) -> dict[str, Any]:
        record = self.record()
        rows: dict[str, Any] = {"record": None if record is None else record.size}
        if record is not None and record.unwritten:
            rows["unwritten"] = list(record.unwritten)
        seen = {"transforms": self.transforms} if self.transforms else {}
        return {"loop": self.loop_state.to_data(), **rows, **seen, "devices": self.devices}


@register
class ModelCheckpoint(Callback):
    """Saves the state after validations (after epochs, if there are none), by steps or time, and however a run ends.

    Saving goes on in the background while training does.
    """

    config: ModelCheckpointConfig

    def attach(self, run: RunContext) -> None:
        """Watches `run`, which must have a place to save to."""
        if run.checkpoints is None:
            raise ValueError("`ModelCheckpoint` needs a place to save to: give the run `checkpoints`.")
        self._checkpoints = run.checkpoints
        super().attach(run)

    def reset(self) -> None:
        """Has saved nothing."""
        self._first = 0  # step of this training
        self._mark: _Mark | None = None  # the last place that a run can go on from
        self._evaluated: tuple[int, dict[str, Any]] = (-1, {})  # the step of the last evaluation, and what it found
        self._saw_nan = False  # in the monitored metric
        self._wants = False  # to save at the next point
        self._saved: tuple[Any, ...] = ()  # what was saved last
        self._last = -1  # its step
        self._lost: SaveError | None = None  # the last save, if it failed

    @property
    def saves_every(self) -> Every:
        """How often a save is due besides epochs and evaluations."""
        return Every(steps=self.config.every_n_steps, minutes=max(0.0, self.config.every_n_minutes))

    def on_training_start(self) -> None:
        """Sees to it that there is a place to save to; says so where there is nothing to monitor."""
        self._first = self.event.step
        if self.config.saves_at_all:
            self._checkpoints.prepare(self.state)
        if not self.run.validates and self.run.monitors:
            LOG.warning(
                "This run has no validation: ModelCheckpoint saves at the end of epochs, and "
                f"`monitor: {self.config.monitor}` is not used."
            )

    def on_filtered_training_epoch_end(self, train_metrics: dict[str, Any], epoch: int) -> None:
        """Saves soon, where no validation will come."""
        if not self.run.validates:
            self._evaluated, self._wants = (self.event.step, train_metrics), True

    def on_filtered_validation_epoch_end(self, eval_metrics: dict[str, Any], epoch: int) -> None:
        """Saves soon what was judged; not before the first step, when there is nothing to save."""
        if self.run.monitors:
            value = monitored(eval_metrics, self.config.monitor)  # a wrong name fails at the first validation
            self._saw_nan |= math.isnan(value)
        self._evaluated, self._wants = (self.event.step, eval_metrics), self.event.step > 0

    def on_steps_reported(self, event: StepMetrics) -> None:
        """Learns in time that a state could not be saved."""
        self._tolerating(self._checkpoints.check)

    def on_save_point(self, event: SavePoint) -> None:
        """Takes note of a place to go on from, and saves if that is due."""
        loop_state = event.loop_state
        if not loop_state.is_at(None if self._mark is None else self._mark.loop_state):
            devices = len(event.state.step.sharding.device_set)
            states, rows, transforms = self.run.callback_states(), self.run.logger.mark(), self.run.transforms
            self._mark = _Mark(loop_state, states, rows, devices, transforms)
        wanted, self._wants = self._wants or (event.due and event.step > self._first), False
        if wanted and self.config.saves_at_all and self._saves_for(event.reason):
            self._tolerating(self._checkpoints.check)
            self._tolerating(lambda: self._save(due=event.due))

    def on_training_end(self) -> None:
        """Waits until everything is saved: a test may want the best state."""
        self._tolerating(self._checkpoints.wait)
        if self._saw_nan and self._checkpoints.best() is None:
            LOG.warning(
                f"`{self.config.monitor}` was NaN in every validation: no checkpoint is the best, and the last weights "
                "are used."
            )

    def finalize(self, status: str) -> None:
        """Waits until everything is saved. Whatever the policy is, a run whose last state is lost has failed.

        Of several processes one that failed does not wait: the others may never come to finish a save.
        """
        if status == "failed" and process_group().is_multi_process:
            return
        try:
            (self._checkpoints.completed if status in ("completed", "stopped") else self._checkpoints.wait)()
        except SaveError as error:
            self._note(error)
            if self._lost is None:
                LOG.warning(str(error))
        if self._lost is None:
            return
        if status == "failed":  # what it failed with is on its way
            LOG.error(str(self._lost))
        else:
            raise self._lost

    def _saves_for(self, reason: BaseException | None) -> bool:
        failed = isinstance(reason, Exception) and not isinstance(reason, StopTraining | SaveError)
        return self.config.save_on_exception if failed else not isinstance(reason, SaveError)

    def _save(self, *, due: bool) -> None:
        """Saves; what is due by steps or time, or because the run ends, is written before the next one is taken."""
        mark, (step, found) = self._mark, self._evaluated
        assert mark is not None
        metrics = {name: float(value) for name, value in found.items() if np.ndim(value) == 0}
        metrics = metrics if step == self.event.step else {}
        what = (mark.loop_state.place, self.event.step, bool(metrics))
        if what != self._saved:
            position = mark.loop_state.position
            more: dict[str, Any] = {"callbacks": mark.states, "run": mark.data, "wait": False, "coalesce": not due}
            self._checkpoints.save(self.state, position, metrics, **more)
            self._saved, self._lost, self._last = what, None, self.event.step

    def _tolerating(self, act: Callable[[], object]) -> None:
        """Does `act`; where the configuration says so, what could not be saved is no reason to stop."""
        try:
            act()
        except SaveError as error:
            if self.config.on_save_failure == "stop":
                raise
            self._note(error)
            LOG.warning(f"{error} Training goes on, and the next state is tried again.")

    def _note(self, error: SaveError) -> None:
        """Takes note of a state that could not be saved; one that waits to be written may be newer."""
        if self.config.on_save_failure == "stop" or error.step in (None, self._last):
            self._saved, self._lost = (), error
