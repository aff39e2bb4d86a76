"""Hooks of `train_fn`: functions called after steps, and training hooks that extend the training itself."""

import functools
import inspect
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from jax_trainer.core import Program, TrainState, checked_int
from jax_trainer.datasets import Position
from jax_trainer.engine import Event, Every, LoopState, Observer, SavePoint
from jax_trainer.styles.functional.mirror import Mirror
from jax_trainer.styles.functional.report import MetricReport, is_settled

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


class ResumePoint(NamedTuple):
    """What a training resumes from."""

    state: TrainState
    at: "Position | LoopState"
    hook_states: Mapping[str, Any]  # as returned by `Training.states`


@dataclass(frozen=True, kw_only=True)
class Training:
    """What a training hook knows of a training.

    Args:
        evaluations: when evaluations are due.
        last: the last step.
        report: the metrics so far.
        key: the root random key.
        states: returns the states of the report and of the hooks, to be saved.
    """

    evaluations: Every
    last: int
    report: MetricReport
    key: jax.Array
    states: Callable[[], dict[str, Any]]


class TrainingHook:
    """A hook that extends a training of `train_fn`, instead of being called after steps."""

    is_unique = False  # whether a training can have only one hook of this class

    def check(self, reported: Iterable[str] | None, first: int, training: Training) -> None:
        """Raises an error or warns about wrong settings before training; `reported` are the names of the metrics."""

    def wrap(self, program: Program) -> Program:
        """Returns the program to train instead of `program`."""
        return program

    def resume_point(self, state: TrainState, training: Training) -> ResumePoint | None:
        """The checkpoint that `state` belongs to, from which this training resumes; None: a new training."""
        return None

    def follow(self, state: TrainState) -> None:
        """Called whenever the caller's model is updated to `state`."""

    def observers(self, training: Training) -> list[Observer]:
        """Further observers of the training, notified last."""
        return []


class HookCaller:
    """Calls a hook after its steps, once their metrics are known, including the evaluation."""

    def __init__(self, hook: Hook, mirror: Mirror, training: Training) -> None:
        self._hook, self._mirror, self._training = hook, mirror, training
        self.saves_every = Every(steps=interval_of(hook) or 1)
        self.called_at = 0  # the step after which it was called last

    def handle(self, event: Event) -> None:
        if not isinstance(event, SavePoint) or event.step == self.called_at:
            return
        if self.saves_every.at_step(event.step) and is_settled(event, self._training.evaluations):
            model, optimizer = self._mirror.synced(event)
            self._hook(event.step, model=model, optimizer=optimizer, metrics=self._training.report.metrics())
            self.called_at = event.step


def interval_of(hook: Hook) -> int | None:
    """Steps between two calls of `hook`; None if it does not set `every_n_steps`."""
    n = getattr(hook, "every_n_steps", None)
    return None if n is None else checked_int(f"every_n_steps` of the hook `{name_of(hook)}", n, 1)


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
        _check_signature(hook)
    training_hooks = [hook for hook in hooks if isinstance(hook, TrainingHook)]
    kinds = [type(one) for one in training_hooks if one.is_unique]
    if len(kinds) > len(set(kinds)):
        raise ValueError("`hooks` has more than one hook of `get_ema_hook`. Pass one.")
    return called, training_hooks


def warn_about_slow_hooks(hooks: Iterable[Hook]) -> None:
    """Warns once per training about hooks that make every step wait."""
    for hook in hooks:
        if interval_of(hook) is None:
            LOG.warning(
                f"The hook `{name_of(hook)}` is called after every step, and every step waits for it: the weights are "
                f"copied to the model first. To call it less often: `every_n_steps(100)({name_of(hook)})`."
            )


def name_of(hook: Any) -> str:
    """The name of a hook in messages."""
    return getattr(hook, "__qualname__", type(hook).__name__).rpartition("<locals>.")[2]


def _check_signature(hook: Hook) -> None:
    try:
        inspect.signature(hook).bind(0, model=None, optimizer=None, metrics={})
    except TypeError as error:
        raise TypeError(
            f"The hook `{name_of(hook)}` cannot be called as `hook(step, model=…, optimizer=…, metrics=…)`: {error}. "
            "Write it as `def fn(step, *, model, **kwargs)`."
        ) from None
    except ValueError:  # some builtins have no signature
        return
