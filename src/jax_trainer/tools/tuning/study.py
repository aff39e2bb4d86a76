"""`Study`: an Optuna study that several processes share, with repeated trials after interruptions."""

import json
import logging
import math
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from jax_trainer.tools.tuning.choosing import SearchOptions, StudyError, untried
from jax_trainer.tools.tuning.objectives import NotFinite, Objective
from jax_trainer.tools.tuning.space import Space, Values
from jax_trainer.tools.tuning.storage import PROCESS, beating, is_running, optuna

LOG = logging.getLogger("jax_trainer")
AGAIN, DEATHS, REPEATS, ERROR = "again", "deaths", "repeats", "error"  # user attributes of a trial
MAX_FAILURES = 3  # in a row from the first trial on: then the experiment is wrong, not the values
_MAX_DEATHS = 5  # with the same values: then they are assumed to kill the process, e.g. by memory
_INITIAL, _EXPERIMENT = "initial", "experiment"  # user attributes of a study

State = Literal["complete", "pruned", "failed", "interrupted", "running"]


@dataclass(frozen=True)
class TrialRecord:
    """One trial: its number, state, hyperparameters and result."""

    trial: int
    state: State
    value: float | None
    reports: int
    seconds: float | None
    params: Values
    error: str = ""


def study_exists(storage: Any, name: str) -> bool:
    """Whether the storage has a study of this name."""
    return name in optuna().study.get_all_study_names(storage)


class Study:
    """A study in a storage, which other processes may use at the same time.

    Args:
        storage: Optuna's storage.
        name: of the study, which is created if missing.
        space: the search space.
        notes: what else must be equal in all processes that use the study, including `mode`.
        choosing: the sampler and the pruner.
    """

    def __init__(
        self, storage: Any, name: str, space: Space, notes: Mapping[str, Any], choosing: SearchOptions
    ) -> None:
        direction = "maximize" if notes["mode"] == "max" else "minimize"
        options = {"direction": direction, "load_if_exists": True, "pruner": choosing.make_pruner()}
        self._study = optuna().create_study(storage=storage, study_name=name, **options)
        self._storage, self._space, self._choosing = storage, space, choosing
        self.name = name
        self._failures: int | None = 0  # in a row; None after the first trial that did not fail
        self._check_unchanged({**notes, "space": space.data()})

    def _check_unchanged(self, ours: dict[str, Any]) -> None:
        initial = self._study.user_attrs.get(_INITIAL)
        mode = (
            "max" if self._study.direction.name == "MAXIMIZE" else "min"
        )  # it may have been created with plain Optuna
        theirs = {**(initial or ours), "mode": mode}
        for what in ours:
            before, now = (json.dumps(notes.get(what), sort_keys=True) for notes in (theirs, ours))
            if before != now:
                raise StudyError(
                    f"The study {self.name!r} was created with another {what}: {_short(before)}, now {_short(now)}. "
                    "Use another `name`, or the value that it was created with."
                )
        if initial is None:
            self._study.set_user_attr(_INITIAL, ours)

    def compare(self, now: Mapping[str, str]) -> None:
        """Warns if the experiment has changed since the study was created; folders may differ between machines."""
        before = self._study.user_attrs.get(_EXPERIMENT)
        if before is None:
            self._study.set_user_attr(_EXPERIMENT, dict(now))
            return
        changed = sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))
        changes = [f"`{key}` was {before.get(key, 'absent')}, is {now.get(key, 'absent')}" for key in changed[:5]]
        changes += [f"and {len(changed) - 5} more"] * (len(changed) > 5)
        if changes:
            LOG.warning(f"The study {self.name!r} was created with another experiment: {'; '.join(changes)}.")

    def finished(self) -> int:
        """The number of finished trials, without interrupted ones and those whose process died."""
        is_finished = optuna().trial.TrialState.is_finished
        ended = [trial.user_attrs for trial in self._frozen() if is_finished(trial.state)]
        return sum(not notes.get(AGAIN) and notes.get(DEATHS, 0) < _MAX_DEATHS for notes in ended)

    def running(self) -> int:
        """The number of running trials, of all processes."""
        return len(self._frozen(optuna().trial.TrialState.RUNNING))

    def _has_unclaimed_trial(self) -> bool:
        """Whether a running trial has no process attribute yet; its process may also have been killed."""
        return any(PROCESS not in trial.user_attrs for trial in self._frozen(optuna().trial.TrialState.RUNNING))

    def ask(self) -> Any:
        """The next trial; None if the grid is exhausted.

        Interrupted trials do not influence the choice: the sequence of values is the same as without interruptions.
        """
        if not self.running():
            self._repeat_missing()
        if self._choosing.sampler == "grid" and not self._frozen(optuna().trial.TrialState.WAITING):
            tried = [self._space.values({**trial.params, **_fixed(trial)}) for trial in self._frozen()]
            following = next(untried(self._space, tried), None)
            if following is None:
                return None
            self._study.enqueue_trial(self._space.stored(following))
        return self._choosing.ask(self._study, self._rank_of, self.running())

    def _rank_of(self, number: int | None = None) -> int:
        """The index of a trial among those that were not interrupted; of the next trial without a number."""
        trials = [trial for trial in self._frozen() if trial.state.name != "WAITING"]
        return sum(not trial.user_attrs.get(AGAIN) and (number is None or trial.number < number) for trial in trials)

    def run(
        self,
        objective: Objective,
        wanted: int,
        timeout: float | None = None,
        *,
        hide: Callable[[str], str],
        after: Callable[[int], None],
    ) -> None:
        """Runs trials until `wanted` are finished or running elsewhere; starts none after `timeout` seconds.

        Args:
            objective: called with the values of each trial; may raise `optuna.TrialPruned`.
            wanted: number of trials, including those of other processes.
            timeout: in seconds.
            hide: redacts the secrets in a text.
            after: called with the number of each finished trial.
        """
        end = None if timeout is None else time.monotonic() + timeout
        while end is None or time.monotonic() < end:
            self.fail_stale_trials()
            if self._has_unclaimed_trial():
                time.sleep(0.1)  # its process is about to claim it, or was killed before that
                continue
            if self.finished() + self.running() >= wanted or (trial := self.ask()) is None:
                return
            self._try(trial, objective, hide)
            after(trial.number)

    def _try(self, trial: Any, objective: Objective, hide: Callable[[str], str]) -> None:
        try:
            with beating(trial):
                value = _number(objective(self._space.suggest(trial), trial))
        except optuna().TrialPruned:
            reported = self._storage.get_trial(trial._trial_id).intermediate_values
            if reported and not math.isfinite(reported[max(reported)]):
                self._fail(trial, NotFinite("The last reported value is not finite."), hide)
            else:
                self._study.tell(trial, state=optuna().trial.TrialState.PRUNED, skip_if_finished=True)
                self._failures = None
        except Exception as error:
            self._fail(trial, error, hide)
        except BaseException:  # Ctrl-C, SIGTERM
            self.tell_interrupted(trial)
            raise
        else:
            self._study.tell(trial, value, skip_if_finished=True)
            self._failures = None

    def _fail(self, trial: Any, error: Exception, hide: Callable[[str], str]) -> None:
        with suppress(Exception):  # another process may have marked this trial as stale
            trial.set_user_attr(ERROR, hide(f"{type(error).__name__}: {error}"))
        self._study.tell(trial, state=optuna().trial.TrialState.FAIL, skip_if_finished=True)
        if self._failures is None:
            return
        self._failures += 1
        if self._failures >= MAX_FAILURES:
            error.add_note(f"The first {self._failures} trials failed, the last one with this error: the study stops.")
            raise error

    def tell_interrupted(self, trial: Any) -> None:
        """Marks a trial as interrupted; its values are tried again."""
        self._end(self._storage.get_trial(trial._trial_id), {AGAIN: True})

    def fail_stale_trials(self) -> None:
        """Fails the running trials of dead processes; their values are tried again."""
        for trial in self._frozen(optuna().trial.TrialState.RUNNING):
            if not is_running(trial):
                self._fail_stale(trial)

    def _fail_stale(self, trial: Any) -> None:
        deaths = trial.user_attrs.get(DEATHS, 0) + 1
        again = deaths < _MAX_DEATHS
        text = "" if again else f"The process was killed {deaths} times with these values."
        self._end(trial, {AGAIN: again, DEATHS: deaths, ERROR: text})

    def _end(self, trial: Any, notes: Mapping[str, Any]) -> None:
        if self._give_up(trial, notes) and notes[AGAIN]:
            self._repeat(trial, {**trial.user_attrs, **notes}.get(DEATHS, 0))

    def _give_up(self, trial: Any, notes: Mapping[str, Any]) -> bool:
        """Fails a trial; False if another process has already done so, and repeats it."""
        try:
            for key, note in notes.items():
                self._storage.set_trial_user_attr(trial._trial_id, key, note)
            self._storage.set_trial_state_values(trial._trial_id, optuna().trial.TrialState.FAIL)
        except optuna().exceptions.UpdateFinishedTrialError:
            return False
        return True

    def _repeat(self, trial: Any, deaths: int) -> None:
        stored = {**_fixed(trial), **trial.params}
        if stored:  # otherwise no values were sampled yet, and the next trial replaces it
            self._study.enqueue_trial(stored, user_attrs={DEATHS: deaths, REPEATS: trial.number})

    def _repeat_missing(self) -> None:
        """Repeats trials whose process was killed between failing the trial and enqueueing it again."""
        trials = self._frozen()
        repeated = {trial.user_attrs.get(REPEATS) for trial in trials}
        for trial in trials:
            if trial.user_attrs.get(AGAIN) and trial.state.is_finished() and trial.number not in repeated:
                self._repeat(trial, trial.user_attrs.get(DEATHS, 0))

    def records(self) -> list[TrialRecord]:
        """All trials that have started."""
        return [self._record(trial) for trial in self._frozen() if trial.state.name != "WAITING"]

    def best(self) -> TrialRecord | None:
        """The best completed trial."""
        sign = -1 if self._study.direction.name == "MAXIMIZE" else 1
        complete = [record for record in self.records() if record.state == "complete" and record.value is not None]
        return min(complete, key=lambda record: sign * (record.value or 0.0), default=None)

    def _record(self, trial: Any) -> TrialRecord:
        notes = trial.user_attrs
        states: dict[str, State] = {"COMPLETE": "complete", "PRUNED": "pruned", "RUNNING": "running"}
        ended: State = "interrupted" if notes.get(AGAIN) else "failed"
        return TrialRecord(
            trial=trial.number,
            state=states.get(trial.state.name, ended),
            value=trial.value,
            reports=len(trial.intermediate_values),
            seconds=_seconds(trial),
            params=self._space.values(trial.params),
            error=str(notes.get(ERROR, "")),
        )

    def _frozen(self, *states: Any) -> list[Any]:
        return self._study.get_trials(deepcopy=False, states=states or None)


def _fixed(trial: Any) -> Mapping[str, Any]:
    """The enqueued values of a trial that has not sampled them yet."""
    return trial.system_attrs.get("fixed_params", {})


def _seconds(trial: Any) -> float | None:
    """The duration. Versions of Optuna differ in whether times have a time zone."""
    ends = (trial.datetime_start, trial.datetime_complete)
    return None if None in ends else round(ends[1].timestamp() - ends[0].timestamp(), 3)


def _short(text: str) -> str:
    return text if len(text) <= 300 else f"{text[:299]}…"


def _number(value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise TypeError(f"The objective must return a number, got {value!r}.") from None
    if number != number or number in (float("inf"), -float("inf")):
        raise NotFinite(f"The objective returned {number}.")
    return number
