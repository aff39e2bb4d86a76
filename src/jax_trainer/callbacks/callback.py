"""`Callback`: the base class of callbacks, with a hook for every event of a run; its `RunContext`; `LambdaCallback`."""

import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import optax
from compoconf import RegistrableConfigInterface, register_interface

from jax_trainer.callbacks.hook_calls import FOREIGN, call_hook, calling, check_hooks, hooks_of
from jax_trainer.callbacks.log_metrics import full_names, merged_names
from jax_trainer.checkpoint.store import CheckpointStore
from jax_trainer.config.settings import AtLeast, Settings, checked, config_of
from jax_trainer.core import Program, TrainState
from jax_trainer.core.metric_accumulator import step_values
from jax_trainer.datasets import DatasetModule
from jax_trainer.diagnostics.suggestions import check_keywords, keywords_of, nearest
from jax_trainer.engine import Edit, StepEnd, events
from jax_trainer.logger import Logger
from jax_trainer.sharding.placement import is_primary

Need = Literal["folder", "validation", "end"]  # a run folder with its logger, evaluations, a known last epoch


class NoFolder:
    """In place of the folder and the logger of a run that has none."""

    def __init__(self, style: str) -> None:
        self._style = style

    def __str__(self) -> str:
        return f"no folder, a `{self._style}`"

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(
            f"`{self._style}` has no run folder and no logger. Use `fit` or `TrainerModule` for a callback that writes."
        )


@dataclass(frozen=True)
class RunContext:
    """What a callback may use besides events.

    Args:
        folder: the run folder.
        logger: logs metrics, figures and texts.
        checkpoints: the checkpoint store, if the run saves.
        dataset: the dataset module, if the run has one.
        validates: whether the plan has evaluations.
        trainer: the trainer of the run, if it has one.
        callback_states: returns the states of all callbacks and loggers of the run, by name.
        monitors: whether a metric ranks the checkpoints; otherwise the store has another comparison.
        epochs: total number of epochs, if known.
        steps: the last step of training, if known.
        transforms: description of the transforms of batches on the device; "" without a trainer.
        writes: whether this process writes files and logs; of several, only the primary one does.
        eval_sets: names of the validation sets, if they have schedules of their own: a round may leave some out.
    """

    folder: Path
    logger: Logger
    checkpoints: CheckpointStore | None = None
    dataset: DatasetModule | None = None
    validates: bool = True
    trainer: Any = None
    callback_states: Callable[[], Mapping[str, Any]] = dict
    monitors: bool = True
    epochs: int | None = None
    steps: int | None = None
    transforms: str = ""
    writes: bool = field(default_factory=is_primary)
    eval_sets: tuple[str, ...] = ()

    def leaves_out(self, monitor: str | None, metrics: Collection[str]) -> bool:
        """Whether a round that reports these metrics has no `monitor`, because the set of that metric was not due.

        None: whether it leaves out the first set, which is "val" if there is one of this name.
        """
        if not self.eval_sets:
            return False
        if monitor is not None:
            return monitor not in metrics and monitor.partition("/")[0] in self.eval_sets
        first = "val" if "val" in self.eval_sets else self.eval_sets[0]
        return not any(name.startswith(f"{first}/") for name in metrics)


@dataclass
class CallbackConfig(Settings):
    """When a callback acts; the base class of all callback configurations.

    Args:
        every_n_epochs: call the "filtered" hooks every n epochs; -1: every epoch, 0: never.
        every_n_minutes: for callbacks that act by time, every n minutes; -1 or 0: not by time.
    """

    every_n_epochs: Annotated[int, AtLeast(-1)] = 1
    every_n_minutes: Annotated[float, AtLeast(-1)] = -1.0

    def due_at(self, epoch: int) -> bool:
        """Whether the filtered hooks are called in this epoch."""
        return self.every_n_epochs == -1 or (self.every_n_epochs > 0 and epoch % self.every_n_epochs == 0)


def state_in_use() -> RuntimeError:
    """The error for assigning `state` during training."""
    return RuntimeError(
        "`state` cannot be assigned during training: the next step uses the loop's own. Assign it before training, "
        "load weights with `load_weights`, or override `init_model`; `on_training_start` may still assign it. To "
        "change it during training, return an `Edit` from `on_training_epoch_end` or `on_validation_epoch_end`."
    )


@register_interface
class Callback(RegistrableConfigInterface):
    """Base class of callbacks: override the hooks you need. Epochs count from 1; metric names are full, as "val/acc".

    Hooks are called with keyword arguments: they may have their parameters in any order, and omit some. A method
    called `on_…` that is not a hook is an error. During a hook, `self.event` is the current event and `self.state` the
    state after it; both are unavailable afterwards. A hook may raise `StopTraining`; any other error ends the run. The
    hooks at the end of training epochs and validations may return an `Edit` of the state; all others return None.

    `needs` is what it uses of a run besides its events: a run "folder" with its logger (the default), "validation", or
    a known "end". `train_fn` and `TrainLoop` accept callbacks that need no folder. `changes_training` is whether its
    settings change what is trained: then a run with other settings of it is another run. One that has returned an
    `Edit` counts as such. `kept` are the attributes that checkpoints keep, with their types.

    Args:
        config: its configuration; its keys may be passed as keywords instead, as in `every_n_epochs=2`.
        run: the run to attach to; by default it is attached later.

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
    # of a run besides its events: a style that lacks one of them refuses the callback
    needs: ClassVar[tuple[Need, ...]] = ("folder",)
    changes_training: ClassVar[bool] = False
    kept: ClassVar[Mapping[str, Any]] = {}

    def __init__(self, config: Any = None, run: RunContext | None = None, *earlier: Any, **settings: Any) -> None:
        if isinstance(config, str):
            kind, keys = type(self).__name__, keywords_of(_config_class(type(self))) or ["config"]
            example = f"monitor={config!r}" if "monitor" in keys else f"{keys[0]}=…"
            raise TypeError(f"{kind} takes its options by keyword, `{kind}({example})`, got {config!r}.")
        # `Callback(config, trainer, data_module)` of earlier packages
        others = earlier or (config is not None and settings.keys() & {"trainer", "data_module"})
        if others or not isinstance(run, RunContext | None):
            text = "takes `config` alone: it has `self.trainer` and `self.data_module` once a run attaches it."
            raise TypeError(f"{type(self).__name__} {text}")
        check_hooks(self, Callback)
        if config is not None and settings:
            raise TypeError(
                f"`{type(self).__name__}` takes either `config` or keywords: move {', '.join(settings)} into it."
            )
        self.config = _config(type(self), settings) if config is None else config
        self._run: RunContext | None = None
        self._event: events.Event | None = None
        self._is_running = False  # between the first and the last event
        self._is_training = False  # the same, without the final test
        self._is_evaluating = False  # between the start of the first and the end of the last evaluation set
        self.reset()
        if run is not None:
            self.attach(run)

    def attach(self, run: RunContext) -> None:
        """Attaches the callback to `run`. If it was attached to an earlier run, it is reset."""
        if self._is_running:
            raise RuntimeError(
                f"{type(self).__name__} is attached to the run in {self.run.folder}, which has not ended. "
                "Create another one for a concurrent run."
            )
        if self._run is not None:
            self.reset()
        self._run, self._is_evaluating = run, False
        if run.dataset is not None:
            self.set_dataset(run.dataset)

    @property
    def run(self) -> RunContext:
        """The context of the run: folder, logger, checkpoints, dataset."""
        if self._run is None:
            text = "A trainer attaches it when training starts; otherwise call `attach(run)`."
            raise RuntimeError(f"{type(self).__name__} is not attached to a run. {text}")
        return self._run

    @property
    def trainer(self) -> Any:
        """The trainer of the run; None if it has none."""
        return self.run.trainer

    @property
    def data_module(self) -> DatasetModule | None:
        """The dataset module of the run, if it has one."""
        return self.run.dataset

    @property
    def is_primary(self) -> bool:
        """Whether this process is the primary one, which writes files."""
        return self.run.writes

    def reset(self) -> None:
        """Resets the state of the callback; a stateful callback sets its attributes here."""

    def set_dataset(self, dataset: DatasetModule) -> None:
        """Called with the dataset of the run when the callback is attached."""

    def wrap(self, program: Program) -> Program:
        """`program` with what this callback adds to its steps or its state; depends on the configuration alone.

        Called before the run starts, also on a copy of the callback that a run never attaches.
        """
        return program

    def wrap_optimizer(self, tx: optax.GradientTransformation) -> optax.GradientTransformation:
        """The optimizer of the program with what this callback adds to it; depends on the configuration alone."""
        return tx

    def state_dict(self) -> dict[str, Any]:
        """The state to resume from, as plain JSON data, saved with every checkpoint: the attributes in `kept`."""
        return {name: getattr(self, name) for name in self.kept}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the result of `state_dict`; called before training."""
        for name, value in checked(state, self.kept).items() if self.kept else ():
            setattr(self, name, value)

    @property
    def event(self) -> events.Event:
        """The current event."""
        if self._event is None:
            raise RuntimeError(f"{type(self).__name__} has an event and a state only during a hook.")
        return self._event

    @property
    def state(self) -> TrainState:
        """The state after the event; the next step donates its buffers, so copy what you keep."""
        return self.event.state

    @state.setter
    def state(self, state: TrainState) -> None:
        raise state_in_use()

    def handle(self, event: events.Event) -> Edit | None:
        """Calls the hooks that belong to `event`; returns what a hook returned."""
        if isinstance(event, StepEnd) and not self.wants_steps:
            return None
        self._event = event
        try:
            returned = [one for one in self._call_hooks(event) if one is not None]
            if len(returned) > 1:
                raise TypeError(
                    f"Two hooks of `{type(self).__name__}` returned something for one `{type(event).__name__}`: "
                    f"{returned[0]!r:.80} and {returned[1]!r:.80}. Return one `Edit`."
                )
            return returned[0] if returned else None
        finally:
            self._event = None

    @cached_property
    def wants_steps(self) -> bool:
        """Whether it overrides `on_step_end`, which is called at every step."""
        return self._overrides("on_step_end")

    @cached_property
    def _call_step_end(self) -> Callable[[Mapping[str, Any]], Any]:
        return calling(self.on_step_end, ("event",))

    def _overrides(self, hook: str) -> bool:
        return hook in vars(self) or getattr(type(self), hook) is not getattr(Callback, hook)

    def _call(self, hook: str, **arguments: Any) -> Any:
        return call_hook(getattr(self, hook), **arguments) if self._overrides(hook) else None

    def _call_hooks(self, event: events.Event) -> Iterator[Any]:
        """Calls the hooks, and yields what they return."""
        match event:
            case StepEnd():
                yield self._call_step_end({"event": event})
            case events.StepMetrics():
                yield self._call("on_steps_reported", event=event)
                if self._overrides("on_training_step"):
                    call = calling(self.on_training_step, ("step_metrics", "epoch_idx", "step_idx"))
                    for index, step in enumerate(range(event.rows.first, event.rows.last + 1)):
                        metrics = full_names(step_values(event.rows.columns, index), "train")
                        yield call({"step_metrics": metrics, "epoch_idx": event.epoch, "step_idx": step})
            case events.SavePoint():
                yield self._call("on_save_point", event=event)
            case events.Edited():
                yield self._call("on_edited", event=event)
            case events.FitStart():
                self._is_running = self._is_training = True
                yield self.on_training_start()
            case events.EpochStart():
                yield from self._call_filtered("training_epoch_start", epoch=event.epoch)
            case events.EpochEnd():
                metrics = full_names(event.metrics, "train")
                yield from self._call_filtered("training_epoch_end", train_metrics=metrics, epoch=event.epoch)
            case events.EvalStart() if not self._is_evaluating:
                self._is_evaluating = True
                if event.name.startswith("test"):
                    yield from self._end_training()
                    yield self._call("on_test_epoch_start", epoch=event.epoch)
                else:
                    yield from self._call_filtered("validation_epoch_start", epoch=event.epoch)
            case events.EvalRoundEnd():
                self._is_evaluating = False
                metrics = merged_names(event.metrics)
                if all(name.startswith("test") for name in event.metrics):
                    yield self._call("on_test_epoch_end", test_metrics=metrics, epoch=event.epoch)
                else:
                    yield from self._call_filtered("validation_epoch_end", eval_metrics=metrics, epoch=event.epoch)
            case events.FitEnd():
                self._is_running = False
                try:
                    if event.status != "failed":
                        yield from self._end_training()
                    elif (error := sys.exception()) is not None:  # `drive` sends the end while the error propagates
                        yield self._call("on_exception", exception=error)
                finally:
                    yield self._call("finalize", status=event.status)

    def _call_filtered(self, name: str, *, epoch: int, **metrics: Any) -> Iterator[Any]:
        """Calls a hook, and its filtered form if that is due."""
        yield self._call(f"on_{name}", **metrics, epoch=epoch)
        if self.config.due_at(epoch):
            yield self._call(f"on_filtered_{name}", **metrics, epoch=epoch)

    def _end_training(self) -> Iterator[Any]:
        if self._is_training:
            self._is_training = False
            yield self.on_training_end()

    def _is_left_out(self, monitor: str | None, metrics: Mapping[str, Any]) -> bool:
        """`RunContext.leaves_out`; False outside of a run."""
        return self._run is not None and self._run.leaves_out(monitor, metrics)

    def on_training_start(self) -> None:
        """Called before training starts."""

    def on_training_end(self) -> None:
        """Called after training has completed, stopped or been interrupted. A test may follow."""

    def on_training_epoch_start(self, epoch: int) -> None:
        """Called at the start of an epoch."""

    def on_training_epoch_end(self, train_metrics: dict[str, Any], epoch: int) -> Edit | None:
        """Called at the end of an epoch; an evaluation may follow. May return an `Edit` of the state."""

    def on_filtered_training_epoch_start(self, epoch: int) -> None:
        """Called at the start of every `every_n_epochs`-th epoch."""

    def on_filtered_training_epoch_end(self, train_metrics: dict[str, Any], epoch: int) -> Edit | None:
        """Called at the end of every `every_n_epochs`-th epoch. May return an `Edit` of the state."""

    def on_validation_epoch_start(self, epoch: int) -> None:
        """Called before the evaluation of all validation sets."""

    def on_validation_epoch_end(self, eval_metrics: dict[str, Any], epoch: int) -> Edit | None:
        """Called after the evaluation of all validation sets; `self.state` is the evaluated state.

        May return an `Edit` of it.
        """

    def on_filtered_validation_epoch_start(self, epoch: int) -> None:
        """Called before validations in every `every_n_epochs`-th epoch."""

    def on_filtered_validation_epoch_end(self, eval_metrics: dict[str, Any], epoch: int) -> Edit | None:
        """Called after validations in every `every_n_epochs`-th epoch. May return an `Edit` of the state."""

    def on_test_epoch_start(self, epoch: int) -> None:
        """Called before the evaluation of all test sets."""

    def on_test_epoch_end(self, test_metrics: dict[str, Any], epoch: int) -> None:
        """Called after the evaluation of all test sets."""

    def on_step_end(self, event: StepEnd) -> None:
        """Called after one or more steps were dispatched. Their metrics are not available yet."""

    def on_steps_reported(self, event: events.StepMetrics) -> None:
        """Called when metrics of some steps arrive, several steps later: `event.rows` has those of each."""

    def on_training_step(self, step_metrics: dict[str, Any], epoch_idx: int, step_idx: int) -> None:
        """Called with the metrics of one step, several steps later: `self.state` is that of a later step."""

    def on_edited(self, event: events.Edited) -> None:
        """Called when the loop has applied edits of callbacks; `self.state` is the edited state."""

    def on_save_point(self, event: events.SavePoint) -> None:
        """Called where a run can be resumed exactly: all callbacks have all events of the steps so far."""

    def on_exception(self, exception: BaseException) -> None:
        """Called when training fails with `exception`, which is raised afterwards."""

    def finalize(self, status: str) -> None:
        """The last hook of a run; `status` is how it ended."""


def _config_class(cls: type[Callback]) -> Any:
    return CallbackConfig if config_of(cls) is Any else config_of(cls)


def _config(cls: type[Callback], settings: Mapping[str, Any]) -> Any:
    """The configuration of `cls` with these keys."""
    kind = _config_class(cls)
    check_keywords(cls.__name__, settings, keywords_of(kind) or settings)
    try:
        return kind(**settings)
    except TypeError as missing:
        raise TypeError(f"{cls.__name__} needs a configuration: {missing}.") from None


class LambdaCallback(Callback):
    """A callback made of functions: pass each by the name of its hook.

    >>> printing = LambdaCallback(on_validation_epoch_end=lambda metrics, epoch: print(epoch, metrics["val/acc"]))
    """

    config: CallbackConfig
    needs = ()

    def __init__(self, **hooks: Callable[..., Any]) -> None:
        names = [*hooks_of(Callback), "finalize", "set_dataset"]
        for name, function in hooks.items():
            if name not in names:
                near = FOREIGN.get(name) or nearest(name, names)
                hint = f"Did you mean `{near}`?" if near else f"The hooks are {', '.join(sorted(names))}."
                raise TypeError(f"Unknown hook {name!r}. {hint}")
            if not callable(function):
                raise TypeError(f"`{name}` must be a function, got {function!r}.")
            setattr(self, name, function)
        super().__init__()
