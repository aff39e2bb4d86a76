"""Hooks of `train_fn`: functions that are called now and then, and those that take part in the training instead."""

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
    """Lets a hook be called after every `n`-th step only, so that the other steps cost nothing.

    >>> @every_n_steps(100)
    ... def hook(step, *, model, **kwargs): ...
    >>> hook.every_n_steps
    100
    """
    n = checked_int("every_n_steps", n, 1)

    def decorate(hook: Hook) -> Hook:
        if isinstance(hook, TrainingHook):
            raise TypeError(f"The {type(hook).__name__} is not called in a training: it knows itself when to act.")

        @functools.wraps(hook)
        def sometimes(step: int, **kwargs: Any) -> None:
            if step % n == 0:  # whoever calls it
                hook(step, **kwargs)

        sometimes.every_n_steps = n  # type: ignore[attr-defined]
        return sometimes

    return decorate


class ResumePoint(NamedTuple):
    """What a training goes on from."""

    state: TrainState
    at: "Position | LoopState"
    remembered: Mapping[str, Any]  # by those who watch, as `Training.states` gave it


@dataclass(frozen=True, kw_only=True)
class Training:
    """What one who takes part may know of a training.

    Args:
        evaluations: when there are evaluations.
        last: the last step.
        report: what is known about the training so far.
        key: the root key.
        states: gives what those who watch would have to remember now.
    """

    evaluations: Every
    last: int
    report: MetricReport
    key: jax.Array
    states: Callable[[], dict[str, Any]]


class TrainingHook:
    """A hook that takes part in a training of `train_fn` in these ways, instead of being called."""

    is_alone = False  # whether there can be only one of its kind

    def check(self, reported: Iterable[str] | None, first: int, training: Training) -> None:
        """Raises or warns about what cannot be, before anything is done; `reported` is what evaluations report."""

    def wrap(self, program: Program) -> Program:
        """The program that is trained instead of `program`."""
        return program

    def continued(self, state: TrainState, training: Training) -> ResumePoint | None:
        """What the training that begins with `state` goes on from, where it goes on with an earlier one."""
        return None

    def follow(self, state: TrainState) -> None:
        """Told whenever the caller's model is brought up to `state`."""

    def observers(self, training: Training) -> list[Observer]:
        """Who watches the training; told last."""
        return []


class HookCaller:
    """Calls a hook after the steps that it asks for, when everything about them is known, their evaluation included."""

    def __init__(self, hook: Hook, mirror: Mirror, training: Training) -> None:
        self._hook, self._mirror, self._training = hook, mirror, training
        self.saves_every = Every(steps=interval_of(hook) or 1)
        self.called_at = 0  # the step after which it was called last

    def handle(self, event: Event) -> None:
        """Calls it if it is time."""
        if not isinstance(event, SavePoint) or event.step == self.called_at:
            return
        if self.saves_every.at_step(event.step) and is_settled(event, self._training.evaluations):
            model, optimizer = self._mirror.shown(event)
            self._hook(event.step, model=model, optimizer=optimizer, metrics=self._training.report.metrics())
            self.called_at = event.step


def interval_of(hook: Hook) -> int | None:
    """The number of steps between two calls of `hook`; None where it does not say."""
    n = getattr(hook, "every_n_steps", None)
    return None if n is None else checked_int(f"every_n_steps` of the hook `{name_of(hook)}", n, 1)


def checked_hooks(hooks: Iterable[Hook]) -> tuple[list[Hook], list[TrainingHook]]:
    """The hooks that are called, and those that take part instead. Refuses what could not be called."""
    if not callable(hooks) and not isinstance(hooks, Iterable):
        raise TypeError(f"`hooks` is a list of functions `fn(step, *, model, **kwargs)`, got {hooks!r}.")
    hooks = [hooks] if callable(hooks) else list(hooks)
    called = [hook for hook in hooks if not isinstance(hook, TrainingHook)]
    for hook in called:
        if not callable(hook):
            raise TypeError(f"A hook is a function `fn(step, *, model, **kwargs)`, got a {type(hook).__name__}.")
        interval_of(hook)
        _check_signature(hook)
    taking_part = [hook for hook in hooks if isinstance(hook, TrainingHook)]
    kinds = [type(one) for one in taking_part if one.is_alone]
    if len(kinds) > len(set(kinds)):
        raise ValueError("Only one hook of `get_ema_hook` can take part in a training.")
    return called, taking_part


def tell_costs(hooks: Iterable[Hook]) -> None:
    """Says once per training which hooks make every step wait."""
    for hook in hooks:
        if interval_of(hook) is None:
            LOG.warning(
                f"The hook `{name_of(hook)}` is called after every step, and every step waits for it: the weights are "
                "copied into the model first. If it has nothing to do at most steps, say so: "
                f"`every_n_steps(100)({name_of(hook)})`."
            )


def name_of(hook: Any) -> str:
    """What people call the hook."""
    return getattr(hook, "__qualname__", type(hook).__name__).rpartition("<locals>.")[2]


def _check_signature(hook: Hook) -> None:
    try:
        inspect.signature(hook).bind(0, model=None, optimizer=None, metrics={})
    except TypeError as error:
        raise TypeError(
            f"The hook `{name_of(hook)}` cannot be called as `hook(step, model=…, optimizer=…, metrics=…)`: {error}. "
            "Write it as `def fn(step, *, model, **kwargs)`."
        ) from None
    except ValueError:  # something built in, which does not tell
        return
