"""`Callback`: an observer with a hook for everything that happens in a run, and what it may use."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any

from compoconf import RegistrableConfigInterface, register_interface

from jax_trainer.callbacks.hook_calls import call_hook, calling, check_hooks
from jax_trainer.callbacks.log_metrics import full_names, merged_names
from jax_trainer.callbacks.run import Checkpoints, RunContext
from jax_trainer.core import MetricWindow, TrainState
from jax_trainer.datasets import DatasetModule
from jax_trainer.engine import (
    EpochEnd,
    EpochStart,
    EvalRoundEnd,
    EvalStart,
    Event,
    FitEnd,
    FitStart,
    SavePoint,
    StepEnd,
    StepMetrics,
)
from jax_trainer.processes import process_group
from jax_trainer.settings import AtLeast, Settings, config_of
from jax_trainer.suggestions import check_keywords, keywords_of

__all__ = ["Callback", "CallbackConfig", "Checkpoints", "RunContext"]


@dataclass
class CallbackConfig(Settings):
    """When a callback acts; the base of every callback's own configuration.

    Args:
        every_n_epochs: epochs between two calls of the hooks called "filtered"; -1: every epoch, 0: never.
        every_n_minutes: minutes between two actions of a callback that acts by time; -1 or 0: not by time.
    """

    every_n_epochs: Annotated[int, AtLeast(-1)] = 1
    every_n_minutes: Annotated[float, AtLeast(-1)] = -1.0

    def due_at(self, epoch: int) -> bool:
        """Whether the filtered hooks are called in this epoch."""
        return self.every_n_epochs == -1 or (self.every_n_epochs > 0 and epoch % self.every_n_epochs == 0)


def state_in_use() -> RuntimeError:
    """What is raised where somebody assigns the state of a run in the middle of it."""
    return RuntimeError(
        "`state` cannot be assigned while a run trains it: the next step begins with the run's own. Before training, "
        "assign it, take other weights by `load_weights`, or override `init_model`; in a run `on_training_start` may "
        "still assign it. What is to change with the step belongs into the optimizer (a schedule of the learning rate, "
        "a transformation of updates) or into a step of your own (`create_training_function`)."
    )


@register_interface
class Callback(RegistrableConfigInterface):
    """Watches a run: override the hooks you need. Epochs count from 1; metrics have full names, as in "val/acc".

    A hook is called by the names of its parameters, which may stand in any order, and may leave some out; a method
    called `on_…` that is no hook is refused. While a hook runs, `self.event` is what happened and `self.state` is the
    state after it; both are gone afterwards. A hook may raise `StopTraining`; whatever else it raises ends the run with
    that error.

    Args:
        config: when it acts, and its own keys; instead of it, they can be given by name, as in `every_n_epochs=2`.
        run: what it may use; left out, it is attached later.

    >>> from compoconf import register
    >>> @dataclass
    ... class PatienceConfig(CallbackConfig):
    ...     limit: float = 0.5
    >>> @register
    ... class Patience(Callback):
    ...     config: PatienceConfig
    ...
    ...     def on_validation_epoch_end(self, eval_metrics, epoch):
    ...         left = self.config.limit - eval_metrics["val/loss"]
    ...         self.run.logger.log_scalar("patience/left", left, self.event.step)
    """

    config: Any

    def __init__(self, config: Any = None, run: RunContext | None = None, **settings: Any) -> None:
        check_hooks(self, Callback)
        if config is not None and settings:
            raise TypeError(f"{', '.join(settings)}: put what `config` has into it; `{type(self).__name__}` takes one.")
        self.config = _config(type(self), settings) if config is None else config
        self._run: RunContext | None = None
        self._event: Event | None = None
        self._is_running = False  # between the first event and the last
        self._is_training = False  # the same without the test at the end
        self._is_evaluating = False  # between the start of the first evaluation set and the end of the last
        self.reset()
        if run is not None:
            self.attach(run)

    def attach(self, run: RunContext) -> None:
        """Watches `run` from now on. One that has watched another run, which is over, begins anew."""
        if self._is_running:
            raise RuntimeError(
                f"{type(self).__name__} watches the run in {self.run.folder}, which has not ended. "
                "Make another one for a run at the same time."
            )
        if self._run is not None:
            self.reset()
        self._run, self._is_evaluating = run, False
        if run.dataset is not None:
            self.set_dataset(run.dataset)

    @property
    def run(self) -> RunContext:
        """What it may use besides events."""
        if self._run is None:
            text = "A trainer attaches it when training begins; otherwise call `attach(run)`."
            raise RuntimeError(f"{type(self).__name__} belongs to no run yet. {text}")
        return self._run

    @property
    def trainer(self) -> Any:
        """Whose run it is; None where no trainer made it."""
        return self.run.trainer

    @property
    def data_module(self) -> DatasetModule | None:
        """The dataset of the run, where it is a module."""
        return self.run.dataset

    @property
    def is_primary(self) -> bool:
        """Whether this process is the one that writes, of several that train together."""
        return process_group().is_primary

    def reset(self) -> None:
        """Forgets all that an earlier run has taught; a callback that remembers sets its attributes here."""

    def set_dataset(self, dataset: DatasetModule) -> None:
        """The run has this dataset; comes when the callback is attached."""

    def state_dict(self) -> dict[str, Any]:
        """What it must know to go on after an interruption, as plain JSON data; saved with every checkpoint."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on with what `state_dict` gave; comes before training does."""

    @property
    def event(self) -> Event:
        """What has just happened."""
        if self._event is None:
            raise RuntimeError(f"{type(self).__name__} has an event, and a state, only while one of its hooks runs.")
        return self._event

    @property
    def state(self) -> TrainState:
        """The state after it; the next step reuses its memory, so copy what is to stay."""
        return self.event.state

    @state.setter
    def state(self, state: TrainState) -> None:
        raise state_in_use()

    def handle(self, event: Event) -> None:
        """Calls the hooks that belong to `event`."""
        if isinstance(event, StepEnd) and not self._wants_steps:
            return
        self._event = event
        try:
            self._tell(event)
        finally:
            self._event = None

    @cached_property
    def _wants_steps(self) -> bool:
        return self._overrides("on_step_end")  # it comes at every step, and most callbacks do not want it

    @cached_property
    def _call_step_end(self) -> Callable[[Mapping[str, Any]], Any]:
        return calling(self.on_step_end, ("event",))

    @cached_property
    def _wants_step_metrics(self) -> bool:
        return self._overrides("on_training_step")

    def _overrides(self, hook: str) -> bool:
        return hook in vars(self) or getattr(type(self), hook) is not getattr(Callback, hook)

    def _tell(self, event: Event) -> None:
        due = self.config.due_at(event.epoch)
        match event:
            case StepEnd():
                self._call_step_end({"event": event})
            case StepMetrics():
                call_hook(self.on_steps_reported, event=event)
                if self._wants_step_metrics:
                    self._tell_steps(event.rows, event.epoch)
            case SavePoint():
                call_hook(self.on_save_point, event=event)
            case FitStart():
                self._is_running = self._is_training = True
                self.on_training_start()
            case EpochStart():
                call_hook(self.on_training_epoch_start, epoch=event.epoch)
                if due:
                    call_hook(self.on_filtered_training_epoch_start, epoch=event.epoch)
            case EpochEnd():
                metrics = full_names(event.metrics, "train")
                call_hook(self.on_training_epoch_end, train_metrics=metrics, epoch=event.epoch)
                if due:
                    call_hook(self.on_filtered_training_epoch_end, train_metrics=metrics, epoch=event.epoch)
            case EvalStart() if not self._is_evaluating:
                self._is_evaluating = True
                self._tell_eval_start(event, due)
            case EvalRoundEnd():
                self._is_evaluating = False
                self._tell_eval_end(event, due)
            case FitEnd():
                self._tell_end(event)

    def _tell_eval_start(self, event: EvalStart, due: bool) -> None:
        if event.name.startswith("test"):
            self._end_training()
            call_hook(self.on_test_epoch_start, epoch=event.epoch)
            return
        call_hook(self.on_validation_epoch_start, epoch=event.epoch)
        if due:
            call_hook(self.on_filtered_validation_epoch_start, epoch=event.epoch)

    def _tell_eval_end(self, event: EvalRoundEnd, due: bool) -> None:
        metrics = merged_names(event.metrics)
        if all(name.startswith("test") for name in event.metrics):
            call_hook(self.on_test_epoch_end, test_metrics=metrics, epoch=event.epoch)
            return
        call_hook(self.on_validation_epoch_end, eval_metrics=metrics, epoch=event.epoch)
        if due:
            call_hook(self.on_filtered_validation_epoch_end, eval_metrics=metrics, epoch=event.epoch)

    def _tell_steps(self, rows: MetricWindow, epoch: int) -> None:
        call = calling(self.on_training_step, ("step_metrics", "epoch_idx", "step_idx"))
        for index, step in enumerate(range(rows.first, rows.last + 1)):
            values = {name: column.values[index] for name, column in rows.columns.items()}
            call({"step_metrics": full_names(values, "train"), "epoch_idx": epoch, "step_idx": step})

    def _tell_end(self, event: FitEnd) -> None:
        self._is_running = False
        try:
            if event.status != "failed":
                self._end_training()
            elif (error := sys.exception()) is not None:  # `drive` tells of the end while the error is on its way
                call_hook(self.on_exception, exception=error)
        finally:
            call_hook(self.finalize, status=event.status)

    def _end_training(self) -> None:
        if self._is_training:
            self._is_training = False
            self.on_training_end()

    def on_training_start(self) -> None:
        """Training is about to begin."""

    def on_training_end(self) -> None:
        """Training is over: done, stopped or interrupted. A test may follow."""

    def on_training_epoch_start(self, epoch: int) -> None:
        """An epoch begins."""

    def on_training_epoch_end(self, train_metrics: dict[str, Any], epoch: int) -> None:
        """An epoch is over; an evaluation may follow."""

    def on_filtered_training_epoch_start(self, epoch: int) -> None:
        """An epoch begins; every `every_n_epochs`-th only."""

    def on_filtered_training_epoch_end(self, train_metrics: dict[str, Any], epoch: int) -> None:
        """An epoch is over; every `every_n_epochs`-th only."""

    def on_validation_epoch_start(self, epoch: int) -> None:
        """An evaluation of all validation sets begins."""

    def on_validation_epoch_end(self, eval_metrics: dict[str, Any], epoch: int) -> None:
        """All validation sets are done, and `self.state` is what was judged on them."""

    def on_filtered_validation_epoch_start(self, epoch: int) -> None:
        """An evaluation of all validation sets begins; in every `every_n_epochs`-th epoch only."""

    def on_filtered_validation_epoch_end(self, eval_metrics: dict[str, Any], epoch: int) -> None:
        """All validation sets are done; in every `every_n_epochs`-th epoch only."""

    def on_test_epoch_start(self, epoch: int) -> None:
        """An evaluation of all test sets begins."""

    def on_test_epoch_end(self, test_metrics: dict[str, Any], epoch: int) -> None:
        """All test sets are done."""

    def on_step_end(self, event: StepEnd) -> None:
        """One or more steps were dispatched, as `event` says. Their numbers are not known yet."""

    def on_steps_reported(self, event: StepMetrics) -> None:
        """The numbers of some steps have arrived, some steps later: `event.rows` has those of each."""

    def on_training_step(self, step_metrics: dict[str, Any], epoch_idx: int, step_idx: int) -> None:
        """The numbers of one step have arrived, some steps later: `self.state` is not that step's."""

    def on_save_point(self, event: SavePoint) -> None:
        """From the state as it is now a run can go on exactly: everybody was told everything about the steps so far."""

    def on_exception(self, exception: BaseException) -> None:
        """Training failed with `exception`, which goes on afterwards."""

    def finalize(self, status: str) -> None:
        """The last hook of a training, however it ended; `status` says how."""


def _config(cls: type[Callback], settings: Mapping[str, Any]) -> Any:
    """The configuration of `cls` with these keys."""
    kind = CallbackConfig if config_of(cls) is Any else config_of(cls)
    check_keywords(cls.__name__, settings, keywords_of(kind) or settings)
    try:
        return kind(**settings)
    except TypeError as missing:
        raise TypeError(f"{cls.__name__} cannot do without a configuration: {missing}.") from None
