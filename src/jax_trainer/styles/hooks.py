"""Hooks of `train_fn`: functions called after steps, with the caller's model and the metrics so far; averages."""

import functools
import inspect
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_trainer.adapters.handles import module_kind
from jax_trainer.adapters.nnx_objects import NnxObjects, evaluation_clone, params_of
from jax_trainer.callbacks import Callback
from jax_trainer.callbacks.log_metrics import full_names, merged_names
from jax_trainer.config.settings import checked
from jax_trainer.core import (
    Batch,
    Compute,
    LogMode,
    Program,
    PyTree,
    TrainState,
    WindowAccumulator,
    copy_state,
    with_ema,
)
from jax_trainer.diagnostics.leaves import differing_leaf
from jax_trainer.diagnostics.returned import checked_int, class_of
from jax_trainer.diagnostics.suggestions import checks_keywords
from jax_trainer.engine import EvalRoundEnd, Event, Every, FitEnd, Plan, SavePoint, StepMetrics
from jax_trainer.logger.wandb import ActiveWandb

LOG = logging.getLogger("jax_trainer")
Hook = Callable[..., Any]


def every_n_steps(n: int) -> Callable[[Hook], Hook]:
    """Decorator: calls a hook only after every `n`-th step, so that the other steps cost nothing.

    >>> @every_n_steps(100)
    ... def hook(step, *, model, **kwargs): ...
    >>> hook.every_n_steps
    100
    """
    n = checked_int("every_n_steps", n, 1)

    def decorate(hook: Hook) -> Hook:
        if isinstance(hook, TrainingHook):
            raise TypeError(f"`every_n_steps` cannot wrap a {type(hook).__name__}: it has its own interval.")

        @functools.wraps(hook)
        def sometimes(step: int, **kwargs: Any) -> None:
            if step % n == 0:  # also when called outside of `train_fn`
                hook(step, **kwargs)

        sometimes.every_n_steps = n  # type: ignore[attr-defined]
        return sometimes

    return decorate


class TrainingHook:
    """A hook that `train_fn` makes a part of the training, instead of calling it after steps."""


class Training:
    """One call of `train`, as its hooks see it.

    Attributes:
        evaluations: when evaluations are due.
        last: the last step.
        key: the root random key.
        report: the metrics so far.
        mirror: the caller's objects.
        callers: call the hooks.
        callbacks: by name.
    """

    def __init__(
        self,
        plan: Plan,
        key: jax.Array,
        objects: NnxObjects,
        hooks: Iterable[Hook],
        writer: ActiveWandb | None,
        computes: Mapping[str, Compute] | None,
        callbacks: Mapping[str, Callback],
    ) -> None:
        assert plan.max_steps is not None
        self.callbacks = callbacks
        self.evaluations, self.last, self.key = plan.eval_every, plan.max_steps, key
        self.report = MetricReport(plan.eval_every, writer, computes)
        self.mirror = Mirror(objects)
        self.callers = [HookCaller(hook, self) for hook in hooks]

    def states(self) -> dict[str, Any]:
        """What a checkpoint has of the report and the hooks."""
        states = {name: state for name, one in self.callbacks.items() if (state := one.state_dict())}
        own = {"report": self.report.state_dict(), "hooks": {"called_at": [one.called_at for one in self.callers]}}
        return {**own, "callbacks": states} if states else own

    def load_states(self, states: Mapping[str, Any]) -> None:
        """Restores the result of `states`; a checkpoint of a custom loop has none."""
        if "report" in states:
            self.report.load_state_dict(states["report"])
            for caller, step in zip(self.callers, states["hooks"]["called_at"], strict=False):
                caller.called_at = step
        for name, state in states.get("callbacks", {}).items():
            if name in self.callbacks:
                self.callbacks[name].load_state_dict(state)


class HookCaller:
    """Calls a hook after its steps, once their metrics are known, including the evaluation."""

    def __init__(self, hook: Hook, training: Training) -> None:
        self._hook, self._training = hook, training
        self.saves_every = Every(steps=interval_of(hook) or 1)
        self.called_at = 0  # the step after which it was called last

    def handle(self, event: Event) -> None:
        if not isinstance(event, SavePoint) or event.step == self.called_at:
            return
        if self.saves_every.at_step(event.step) and self._training.report.is_settled(event):
            objects = self._training.mirror.synced(event)
            metrics = self._training.report.metrics()
            self._hook(event.step, model=objects.model, optimizer=objects.optimizer, metrics=metrics)
            self.called_at = event.step


class Mirror:
    """Updates the caller's objects with copies of a training's arrays, on request and at the end.

    The module is in evaluation mode during training.

    Attributes:
        followers: called with every state that is copied.
    """

    def __init__(self, objects: NnxObjects) -> None:
        self._objects = objects
        self.followers: list[Callable[[TrainState], None]] = []
        self._step = -1  # of the last copy
        objects.model.eval()

    def synced(self, event: Event) -> NnxObjects:
        """The caller's objects, updated to the state of `event`."""
        if event.step != self._step:
            self._write(event.state)
            self._step = event.step
        return self._objects

    def handle(self, event: Event) -> None:
        is_deleted = lambda leaf: isinstance(leaf, jax.Array) and leaf.is_deleted()
        if isinstance(event, FitEnd) and not any(map(is_deleted, event.flat_state.leaves)):
            self._write(event.state)

    def _write(self, state: TrainState) -> None:
        self._objects.update(state)
        for follow in self.followers:
            follow(state)


# checks


def checked_hooks(hooks: Iterable[Hook]) -> tuple[list[Hook], list[TrainingHook]]:
    """Splits hooks into functions and training hooks; refuses wrong signatures."""
    if not callable(hooks) and not isinstance(hooks, Iterable):
        raise TypeError(f"`hooks` must be a list of functions `fn(step, *, model, **kwargs)`, got {hooks!r}.")
    hooks = [hooks] if callable(hooks) else list(hooks)
    called = [hook for hook in hooks if not isinstance(hook, TrainingHook)]
    for hook in called:
        if not callable(hook):
            raise TypeError(f"A hook must be a function `fn(step, *, model, **kwargs)`, got a {type(hook).__name__}.")
        interval_of(hook)
        try:
            inspect.signature(hook).bind(0, model=None, optimizer=None, metrics={})
        except TypeError as error:
            raise TypeError(
                f"The hook `{_name_of(hook)}` cannot be called as `hook(step, model=…, optimizer=…, metrics=…)`: "
                f"{error}. Write it as `def fn(step, *, model, **kwargs)`."
            ) from None
        except ValueError:  # some builtins have no signature
            continue
    return called, [hook for hook in hooks if isinstance(hook, TrainingHook)]


def warn_about_slow_hooks(hooks: Iterable[Hook]) -> None:
    """Warns once per training about hooks that make every step wait."""
    for hook in hooks:
        if interval_of(hook) is None:
            LOG.warning(
                f"The hook `{_name_of(hook)}` is called after every step, and every step waits for it: the weights are "
                f"copied to the model first. To call it less often: `every_n_steps(100)({_name_of(hook)})`."
            )


def interval_of(hook: Hook) -> int | None:
    """Steps between two calls of `hook`; None if it does not set `every_n_steps`."""
    n = getattr(hook, "every_n_steps", None)
    return None if n is None else checked_int(f"every_n_steps` of the hook `{_name_of(hook)}", n, 1)


def _name_of(hook: Any) -> str:
    return getattr(hook, "__qualname__", type(hook).__name__).rpartition("<locals>.")[2]


# metrics


@dataclass(frozen=True, kw_only=True)
class EveryAndLast(Every):
    """Every `steps` steps, and after the step `last`.

    >>> [step for step in range(1, 9) if EveryAndLast(steps=3, last=8).at_step(step)]
    [3, 6, 8]
    """

    last: int

    def at_step(self, step: int) -> bool:
        return step == self.last or super().at_step(step)

    def steps_left(self, step: int) -> int | None:
        left = super().steps_left(step)
        return left if left is None or step >= self.last else min(left, self.last - step)


class MetricReport:
    """The training means since the last evaluation, and the metrics of that evaluation; logged at every evaluation.

    Args:
        evaluations: when evaluations are due; without validation data, when the training means are logged.
        writer: also receives the metrics.
        computes: the functions that compute training metrics, for those of a checkpoint.
    """

    def __init__(
        self, evaluations: Every, writer: ActiveWandb | None = None, computes: Mapping[str, Compute] | None = None
    ) -> None:
        self.saves_every, self._writer, self._computes = evaluations, writer, computes or {}
        self._meter = WindowAccumulator(LogMode.TRAIN)
        self._trained: dict[str, Any] = {}  # up to the last evaluation
        self._evaluated: dict[str, Any] = {}
        self._evaluated_at = self._reported_at = 0

    def handle(self, event: Event) -> None:
        match event:
            case StepMetrics():
                self._meter.add(event.rows)
            case EvalRoundEnd():
                self._evaluated, self._evaluated_at = merged_names(event.metrics), event.step
            case SavePoint() if event.step != self._reported_at and self.saves_every.at_step(event.step):
                if self.is_settled(event):
                    self._reported_at, self._trained = event.step, _named(self._meter.compute())
                    self._log(event.step)

    def is_settled(self, point: SavePoint) -> bool:
        """Whether all metrics of the step of `point` are known, including its evaluation; False if the run fails."""
        if point.reason is not None:
            return False
        return not self.saves_every.at_step(point.step) or point.loop_state.evaluated_step == point.step

    def metrics(self) -> dict[str, Any]:
        """The latest metrics: "train/loss" is the mean since the last evaluation, "val/loss" that of the last one."""
        return {**self._trained, **_named(self._meter.values()), **self._evaluated}

    def evaluated(self, step: int) -> dict[str, Any]:
        """The metrics of exactly this step, if it was evaluated; otherwise none."""
        return self.metrics() if step == self._evaluated_at else {}

    def state_dict(self) -> dict[str, Any]:
        """The metrics so far."""
        metrics = {"trained": numbers(self._trained), "evaluated": numbers(self._evaluated)}
        steps = {"evaluated_at": self._evaluated_at, "reported_at": self._reported_at}
        return {"window": self._meter.state(), **steps, **metrics}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` returned."""
        metrics = dict[str, Real]
        hints = {"window": dict[str, Any], "evaluated_at": int, "reported_at": int}
        hints |= {"trained": metrics, "evaluated": metrics}
        self._meter.load(checked(state, hints)["window"])
        self._meter.provide(self._computes)
        self._evaluated_at, self._reported_at = state["evaluated_at"], state["reported_at"]
        self._trained, self._evaluated = dict(state["trained"]), dict(state["evaluated"])

    def _log(self, step: int) -> None:
        values = numbers(self.metrics())
        shown = [f"{name} {value:.4g}" for name, value in values.items() if name.startswith(("train/", "val/"))]
        LOG.info(f"step {step}: {', '.join(shown)}")
        if self._writer is not None:
            self._writer.write(step, values)


def numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The scalar metrics."""
    return {name: float(value) for name, value in metrics.items() if np.ndim(value) == 0}


def _named(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Metrics by full name, without those of the finite guard, which are 0 as long as training runs."""
    named = full_names(metrics, "train")
    return {name: value for name, value in named.items() if not name.startswith("guard/")}


# averages of the weights


@checks_keywords
def get_ema_hook(model: Any, decay: float = 0.999) -> tuple["EmaHook", Callable[..., Any]]:
    """Returns a hook that averages the parameters of `model`, and a function that returns a module with the averages.

    The function optionally takes the module that has the other variables: `get_ema_model(model)`.

    In `train_fn` the average is part of the compiled step and of checkpoints. In a custom loop, call the hook after
    every step.

    Args:
        model: the trained nnx module; only its parameters are averaged, not its other variables.
        decay: EMA decay per step, 0 ≤ decay < 1.
    """
    hook = EmaHook(model, decay)
    return hook, hook.averaged


class EmaHook(TrainingHook):
    """Updates the EMA of the parameters."""

    def __init__(self, model: Any, decay: float) -> None:
        if isinstance(model, type) or module_kind(model) != "nnx":
            raise TypeError(f"`get_ema_hook` averages the weights of an nnx.Module, got a {class_of(model)}.")
        if not 0 <= decay < 1:
            raise ValueError(f"`decay` must be at least 0 and below 1, got {decay}.")
        self._model, self._decay = model, decay
        self._average: PyTree | None = None  # None: before the first step
        self._first: PyTree | None = copy_state(params_of(model))

    def __call__(self, step: int, *, model: Any, **kwargs: Any) -> None:
        """Updates the average after a step of a custom loop."""
        before = self._first if self._average is None else self._average
        self._average, self._first = jax.tree.map(self._mixed, before, params_of(model)), None

    def averaged(self, model: Any = None) -> Any:
        """A new module with the averaged parameters, in evaluation mode.

        Args:
            model: the module with the variables that are not averaged, such as BatchNorm statistics; default: the
                trained module.
        """
        module = self._model if model is None else model
        if self._average is not None:
            _check_alike(params_of(module), self._average)
        return evaluation_clone(module, self._average)

    def wrap(self, program: Program) -> Program:
        """`program` with the average in its state; an earlier average is continued."""
        averaging, before = with_ema(program, self._decay, warmup=False, evaluate=False), self._average
        expected = params_of(self._model) if before is None else before
        self._first = None

        def init(key: jax.Array, batch: Batch) -> TrainState:
            state = averaging.init(key, batch)
            _check_alike(state.params, expected)
            return state if before is None else state.replace(extra={**state.extra, "ema": before})

        return averaging._replace(init=init)

    def follow(self, state: TrainState) -> None:
        """Knows the average of this state from now on."""
        self._average = copy_state(state.extra["ema"])

    def _mixed(self, old: jax.Array, new: jax.Array) -> jax.Array:
        if not jnp.issubdtype(new.dtype, jnp.inexact):
            return new
        return (self._decay * old + (1 - self._decay) * new).astype(old.dtype)


def _check_alike(params: PyTree, average: PyTree) -> None:
    if (differs := differing_leaf(params, average)) is not None:
        name, shape, averaged = differs
        raise ValueError(
            f"This is not the model whose weights were averaged: the shape of {name} is "
            f"{'absent' if shape is None else shape}, and that of its average "
            f"{'absent' if averaged is None else averaged}."
        )
