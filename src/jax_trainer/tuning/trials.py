"""Runs trials until the study has enough of them, including those of other processes."""

import time
from collections.abc import Callable
from typing import Any

from jax_trainer.tuning.dimensions import Space
from jax_trainer.tuning.experiments import NotFinite
from jax_trainer.tuning.functions import Objective
from jax_trainer.tuning.liveness import beating
from jax_trainer.tuning.storage import optuna
from jax_trainer.tuning.study import Study

MAX_FAILURES = 3  # in a row from the first trial on: then the experiment is wrong, not the values


class TrialRunner:
    """Asks the study for values, calls the objective, and reports the result to the study.

    Args:
        study: the study.
        objective: returns a number; may raise `optuna.TrialPruned`.
        space: the search space.
        hide: redacts the secrets in a text.
        after: called with the number of each finished trial.
    """

    def __init__(
        self,
        study: Study,
        objective: Objective,
        space: Space,
        *,
        hide: Callable[[str], str],
        after: Callable[[int], None],
    ) -> None:
        self._study, self._objective, self._space = study, objective, space
        self._hide, self._after = hide, after
        self._failures: int | None = 0  # None after the first trial that did not fail

    def run(self, wanted: int, timeout: float | None = None) -> None:
        """Runs trials until `wanted` are finished or running elsewhere; starts none after `timeout` seconds."""
        end = None if timeout is None else time.monotonic() + timeout
        while end is None or time.monotonic() < end:
            self._study.fail_stale_trials()
            if self._study.has_unclaimed_trial():
                time.sleep(0.1)  # its process is about to claim it, or was killed before that
                continue
            if self._study.finished() + self._study.running() >= wanted:
                return
            trial = self._study.ask()
            if trial is None:
                return
            self._try(trial)
            self._after(trial.number)

    def _try(self, trial: Any) -> None:
        try:
            with beating(trial):
                value = _number(self._objective(self._space.suggest(trial), trial))
        except optuna().TrialPruned:
            if self._study.diverged(trial):
                self._fail(trial, NotFinite("The last reported value is not finite."))
            else:
                self._study.tell_pruned(trial)
                self._failures = None
        except Exception as error:
            self._fail(trial, error)
        except BaseException:  # Ctrl-C, SIGTERM
            self._study.tell_interrupted(trial)
            raise
        else:
            self._study.tell(trial, value)
            self._failures = None

    def _fail(self, trial: Any, error: Exception) -> None:
        self._study.tell_failed(trial, self._hide(f"{type(error).__name__}: {error}"))
        if self._failures is None:
            return
        self._failures += 1
        if self._failures >= MAX_FAILURES:
            error.add_note(f"The first {self._failures} trials failed, the last one with this error: the study stops.")
            raise error


def _number(value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise TypeError(f"The objective must return a number, got {value!r}.") from None
    if number != number or number in (float("inf"), -float("inf")):
        raise NotFinite(f"The objective returned {number}.")
    return number
