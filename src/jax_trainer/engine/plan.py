"""`Plan`: how long to train, and when to evaluate and save. `Every`: a schedule."""

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Literal

from jax_trainer.core.by_epoch import epochs_until, total_until
from jax_trainer.diagnostics.returned import checked_int


@dataclass(frozen=True, kw_only=True)
class Every:
    """A schedule: every so many steps, epochs or minutes. `Every()` is never due.

    >>> Every(steps=10).at_step(30), Every(epochs=2).at_epoch(3), Every().at_step(30)
    (True, False, False)
    """

    steps: int = 0
    epochs: int = 0
    minutes: float = 0.0

    def __post_init__(self) -> None:
        for name in ("steps", "epochs", "minutes"):
            value = getattr(self, name)
            if value < 0 or (name != "minutes" and value != int(value)):
                raise ValueError(f"`Every({name}=…)` must be an integer of at least 0, got {value}. 0 is never.")

    def at_step(self, step: int) -> bool:
        """Whether it is due after this step."""
        return self.steps > 0 and step % self.steps == 0

    def at_epoch(self, epoch: int) -> bool:
        """Whether it is due after this epoch (counted from 1)."""
        return self.epochs > 0 and epoch % self.epochs == 0

    def after(self, seconds: float) -> bool:
        """Whether it is due `seconds` after the last time."""
        return self.minutes > 0 and seconds >= 60 * self.minutes

    def steps_left(self, step: int) -> int | None:
        """Steps from `step` to the next one that is due; None if none is."""
        return self.steps - step % self.steps if self.steps else None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How long to train, and when and how much to evaluate.

    Args:
        max_steps, max_epochs, max_time: training ends at whichever comes first (time: seconds or a timedelta).
        steps_per_epoch: at most this many batches per epoch; needed for endless data.
        eval_every: when to evaluate.
        evals_every: when to evaluate the sets that have a schedule of their own, by name; in steps and epochs.
        eval_batches: at most this many batches of each evaluation set.
        eval_at_start, eval_at_end: evaluate before the first step; after the last, unless just done.
        steps_per_call: optimizer steps per dispatch: 1, a number, or "epoch".
        overfit_batches: train on the first so many batches of the first epoch, in every epoch.
        fast_dev_run: run only so many training steps and evaluation batches, as a smoke test.
        metrics_every: fetch step metrics from the device once per so many steps.
        max_in_flight: maximum number of dispatches in flight on several devices.
        cuts: when else an observer needs the state between steps; see `with_observers`.
        saves: when a save is due besides epochs and evaluations; see `with_observers`.
        grads: when an observer needs gradients; see `with_observers`.
        skipped_batches: batches to skip, as (epoch from 1, index from 0).
    """

    max_steps: int | None = None
    max_epochs: int | None = None
    max_time: float | timedelta | None = None
    steps_per_epoch: int | None = None
    eval_every: Every = Every()
    evals_every: Mapping[str, Every] = field(default_factory=dict, hash=False)
    eval_batches: int | None = None
    eval_at_start: bool = False
    eval_at_end: bool = False
    steps_per_call: int | Literal["epoch"] = 1
    overfit_batches: int = 0
    fast_dev_run: int = 0
    metrics_every: int = 50
    max_in_flight: int = 8
    cuts: tuple[Every, ...] = ()
    saves: tuple[Every, ...] = ()
    grads: tuple[Every, ...] = ()
    skipped_batches: frozenset[tuple[int, int]] = frozenset()

    def __post_init__(self) -> None:
        if self.max_steps is None and self.max_epochs is None and self.max_time is None and not self.fast_dev_run:
            raise ValueError("The plan never ends: set `max_steps`, `max_epochs` or `max_time`.")
        least = dict.fromkeys(
            ("steps_per_epoch", "eval_batches", "metrics_every", "max_in_flight", "steps_per_call"), 1
        )
        least |= dict.fromkeys(("max_steps", "max_epochs", "overfit_batches", "fast_dev_run"), 0)
        for name, low in least.items():
            if (value := getattr(self, name)) is None or (name == "steps_per_call" and value == "epoch"):
                continue
            alternative = ' or "epoch"' if name == "steps_per_call" else ""
            object.__setattr__(self, name, checked_int(name, value, low, alternative))
        if self.max_seconds is not None and not self.max_seconds > 0:
            raise ValueError(f"`max_time` must be above 0, got {self.max_time}.")

    @property
    def max_seconds(self) -> float | None:
        """`max_time` in seconds."""
        return self.max_time.total_seconds() if isinstance(self.max_time, timedelta) else self.max_time

    def resolved(self) -> "Plan":
        """The plan with `fast_dev_run` expanded into the other fields."""
        if not self.fast_dev_run:
            return self
        n = self.fast_dev_run
        return replace(
            self,
            fast_dev_run=0,
            max_steps=n,
            max_epochs=None,
            max_time=None,
            eval_every=Every(),
            evals_every={},
            eval_batches=n,
            eval_at_start=False,
            eval_at_end=True,
        )

    def with_observers(self, observers: Iterable[object]) -> "Plan":
        """The plan with the schedules of the observers: `sees_state_every`, `sees_grads_every` and `saves_every`."""
        observers = list(observers)

        def schedules(name: str, *units: str) -> list[Every]:
            found = [getattr(observer, name, Every()) for observer in observers]
            return [every for every in found if any(getattr(every, unit) for unit in units)]

        cuts, saves = schedules("sees_state_every", "steps"), schedules("saves_every", "steps", "minutes")
        grads = schedules("sees_grads_every", "steps", "epochs")
        return replace(self, cuts=(*self.cuts, *cuts), saves=(*self.saves, *saves), grads=(*self.grads, *grads))

    @property
    def evaluates(self) -> bool:
        """Whether any evaluation is due before the end."""
        return any(every != Every() for every in self._eval_schedules)

    def evals_at_step(self, sets: Iterable[str], step: int, *, by_time: bool = False) -> list[str] | None:
        """The evaluation sets that are due after this step; None: no evaluation is. `by_time`: one by time is due."""
        own = self.evals_every
        if not (by_time or self.eval_every.at_step(step) or any(every.at_step(step) for every in own.values())):
            return None
        is_due = lambda name: self.eval_schedule(name).at_step(step) or (by_time and name not in own)
        return [name for name in sets if is_due(name)]

    def evals_at_epoch(self, sets: Iterable[str], epoch: int) -> list[str] | None:
        """The evaluation sets that are due after this epoch (counted from 1); None: no evaluation is."""
        if not any(every.at_epoch(epoch) for every in self._eval_schedules):
            return None
        return [name for name in sets if self.eval_schedule(name).at_epoch(epoch)]

    def eval_schedule(self, name: str) -> Every:
        """When the evaluation set of this name is due."""
        return self.evals_every.get(name, self.eval_every)

    @property
    def _eval_schedules(self) -> tuple[Every, ...]:
        return (self.eval_every, *self.evals_every.values())

    def saves_at(self, step: int, seconds: float) -> bool:
        """Whether a save is due after this step, `seconds` after the last save."""
        return any(every.at_step(step) or every.after(seconds) for every in self.saves)

    def sees_grads_at(self, step: int, epoch: int, epoch_step: int) -> bool:
        """Whether an observer needs the gradients of the step after `step`, at `epoch_step` of the epoch."""
        return any(every.at_step(step) or (not epoch_step and every.at_epoch(epoch)) for every in self.grads)

    def skipped_in(self, epoch: int) -> list[int]:
        """The indices of the batches of an epoch that are skipped."""
        return sorted(index for skipped_epoch, index in self.skipped_batches if skipped_epoch == epoch)

    def finished(self, step: int, epoch: int, seconds: float) -> bool:
        """Whether training is over after `step` steps, `epoch` epochs and `seconds`."""
        return (
            (self.max_steps is not None and step >= self.max_steps)
            or (self.max_epochs is not None and epoch >= self.max_epochs)
            or self.out_of_time(seconds)
        )

    def out_of_time(self, seconds: float) -> bool:
        """Whether `max_time` has passed."""
        return self.max_seconds is not None and seconds >= self.max_seconds

    def epoch_steps(self, step: int, epoch_step: int, length: int | None) -> int | None:
        """Steps left in the epoch; `length` is that of the data, None if unknown. None: no limit."""
        return shortest(
            None if self.max_steps is None else self.max_steps - step,
            None if self.steps_per_epoch is None else self.steps_per_epoch - epoch_step,
            None if length is None else length - epoch_step,
        )

    def ends_at(self, length: int | Mapping[int, int] | None) -> tuple[int | None, int | None]:
        """The last epoch and the last step, None if unknown.

        Args:
            length: that of the data, in batches; or several, by the number of complete epochs.
        """
        plan = self.resolved()
        lengths = dict(length) if isinstance(length, Mapping) else {0: length}
        if plan.overfit_batches:  # of the first epoch
            lengths = {0: lengths[0]}
        limits = (plan.overfit_batches or None, plan.steps_per_epoch)
        sizes = {start: shortest(one, *limits) or 0 for start, one in lengths.items()}
        is_known = all(sizes.values())
        by_steps = epochs_until(sizes, plan.max_steps) if plan.max_steps is not None and is_known else None
        by_epochs = total_until(sizes, plan.max_epochs) if plan.max_epochs is not None and is_known else None
        return shortest(plan.max_epochs, by_steps), shortest(plan.max_steps, by_epochs)

    def steps_until_cut(self, step: int, left: int | None) -> int:
        """Steps until an observer needs the state; `left` is the number of steps left in the epoch."""
        due = (every.steps_left(step) for every in (*self._eval_schedules, *self.cuts, *self.saves, *self.grads))
        steps = shortest(left, *due)
        return sys.maxsize if steps is None else max(0, steps)


def shortest(*lengths: int | None) -> int | None:
    """The smallest of the lengths that are known; None if none is."""
    return min((length for length in lengths if length is not None), default=None)
