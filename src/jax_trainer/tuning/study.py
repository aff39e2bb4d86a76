"""`Study`: what Optuna knows of all trials, whoever made them, and in which process."""

import json
import logging
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from jax_trainer.tuning.choosing import SearchOptions, StudyError, untried
from jax_trainer.tuning.dimensions import Space, Values
from jax_trainer.tuning.liveness import PROCESS, is_made
from jax_trainer.tuning.storage import optuna

LOG = logging.getLogger("jax_trainer")
AGAIN, DEATHS, REPEATS, ERROR = "again", "deaths", "repeats", "error"  # notes at a trial
_MOST_DEATHS = 5  # of the same values: a process that is killed by them so often would be killed again
_BEGUN_WITH, _EXPERIMENT = "begun with", "experiment"  # notes at a study

State = Literal["complete", "pruned", "failed", "interrupted", "running"]


@dataclass(frozen=True)
class TrialRecord:
    """One trial: how it ended, its values, and what came out."""

    number: int
    state: State
    value: float | None
    values: Values
    reports: int
    seconds: float | None
    error: str = ""

    def data(self) -> dict[str, Any]:
        """The same as plain data."""
        return {
            "trial": self.number,
            "state": self.state,
            "value": self.value,
            "reports": self.reports,
            "seconds": self.seconds,
            "params": self.values,
            "error": self.error,
        }


def study_exists(storage: Any, name: str) -> bool:
    """Whether there is a study of this name."""
    return name in optuna().study.get_all_study_names(storage)


class Study:
    """A study in a storage, which other processes may use at the same time.

    Args:
        storage: Optuna's.
        name: of the study; it is made where there is none.
        space: what is tuned.
        notes: what else must be the same for all that use it, among it the `mode`.
        choosing: who chooses what to try next, and what is cut.
    """

    def __init__(
        self, storage: Any, name: str, space: Space, notes: Mapping[str, Any], choosing: SearchOptions
    ) -> None:
        direction = "maximize" if notes["mode"] == "max" else "minimize"
        options = {"direction": direction, "load_if_exists": True, "pruner": choosing.make_pruner()}
        self._study = optuna().create_study(storage=storage, study_name=name, **options)
        self._storage, self._space, self._choosing = storage, space, choosing
        self.name = name
        self._agree({**notes, "space": space.data()})

    def _agree(self, ours: dict[str, Any]) -> None:
        begun = self._study.user_attrs.get(_BEGUN_WITH)
        mode = "max" if self._study.direction.name == "MAXIMIZE" else "min"  # somebody may have begun with Optuna alone
        theirs = {**(begun or ours), "mode": mode}
        for what in ours:
            before, now = (json.dumps(notes.get(what), sort_keys=True) for notes in (theirs, ours))
            if before != now:
                found = f"it was {_short(before)}, and now it is {_short(now)}"
                hint = "Use another `name`, or what it was begun with."
                raise StudyError(f"The study {self.name!r} was begun with another {what}: {found}. {hint}")
        if begun is None:
            self._study.set_user_attr(_BEGUN_WITH, ours)

    def compare(self, now: Mapping[str, str]) -> None:
        """Warns where the experiment is not the one with which the study was begun: a folder may differ, by machine."""
        before = self._study.user_attrs.get(_EXPERIMENT)
        if before is None:
            self._study.set_user_attr(_EXPERIMENT, dict(now))
            return
        changed = sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))
        told = [f"`{key}` was {before.get(key, 'absent')}, is {now.get(key, 'absent')}" for key in changed[:5]]
        told += [f"and {len(changed) - 5} more"] * (len(changed) > 5)
        if told:
            LOG.warning(f"The study {self.name!r} was begun with another experiment: {'; '.join(told)}.")

    def finished(self) -> int:
        """How many trials came to an end of their own; not those that are repeated, nor those whose process died."""
        is_over = optuna().trial.TrialState.is_finished
        ended = [trial.user_attrs for trial in self._frozen() if is_over(trial.state)]
        return sum(not notes.get(AGAIN) and notes.get(DEATHS, 0) < _MOST_DEATHS for notes in ended)

    def running(self) -> int:
        """How many trials are being made now."""
        return len(self._frozen(optuna().trial.TrialState.RUNNING))

    def is_unsure(self) -> bool:
        """Whether there is a running trial of which nobody has said yet that they make it; it may be a dead one's."""
        return any(PROCESS not in trial.user_attrs for trial in self._frozen(optuna().trial.TrialState.RUNNING))

    def ask(self) -> Any:
        """The next trial; None where everything was tried.

        What is chosen depends on the trials so far without those that were interrupted: it is the same as if none were.
        """
        if not self.running():
            self._repeat_what_was_forgotten()
        if self._choosing.sampler == "grid" and not self._frozen(optuna().trial.TrialState.WAITING):
            tried = [self._space.values({**trial.params, **_fixed(trial)}) for trial in self._frozen()]
            following = next(untried(self._space, tried), None)
            if following is None:
                return None
            self._study.enqueue_trial(self._space.stored(following))
        return self._choosing.ask(self._study, self._place_of, self.running())

    def _place_of(self, number: int | None = None) -> int:
        """The place of a trial among those that were not interrupted; of the next one, if none is given."""
        trials = [trial for trial in self._frozen() if trial.state.name != "WAITING"]
        return sum(not trial.user_attrs.get(AGAIN) and (number is None or trial.number < number) for trial in trials)

    def tell(self, trial: Any, value: float) -> None:
        """The trial is over, and this came out."""
        self._study.tell(trial, value, skip_if_finished=True)

    def tell_pruned(self, trial: Any) -> None:
        """The trial was not worth going on with."""
        self._study.tell(trial, state=optuna().trial.TrialState.PRUNED, skip_if_finished=True)

    def diverged(self, trial: Any) -> bool:
        """Whether the last value that the trial has reported is not finite."""
        reported = self._storage.get_trial(trial._trial_id).intermediate_values
        return bool(reported) and not math.isfinite(reported[max(reported)])

    def tell_failed(self, trial: Any, error: str) -> None:
        """Nothing came out of the trial."""
        with suppress(Exception):  # another process has taken us for dead
            trial.set_user_attr(ERROR, error)
        self._study.tell(trial, state=optuna().trial.TrialState.FAIL, skip_if_finished=True)

    def tell_interrupted(self, trial: Any) -> None:
        """The trial was not ended by itself: its values are tried again."""
        self._end(self._storage.get_trial(trial._trial_id), {AGAIN: True})

    def fail_stale_trials(self) -> None:
        """Ends the trials of processes that are gone; their values are tried again."""
        for trial in self._frozen(optuna().trial.TrialState.RUNNING):
            if not is_made(trial):
                self._bury(trial)

    def _bury(self, trial: Any) -> None:
        deaths = trial.user_attrs.get(DEATHS, 0) + 1
        again = deaths < _MOST_DEATHS
        text = "" if again else f"The process was killed {deaths} times while it tried these values."
        self._end(trial, {AGAIN: again, DEATHS: deaths, ERROR: text})

    def _end(self, trial: Any, notes: Mapping[str, Any]) -> None:
        if self._give_up(trial, notes) and notes[AGAIN]:
            self._repeat(trial, {**trial.user_attrs, **notes}.get(DEATHS, 0))

    def _give_up(self, trial: Any, notes: Mapping[str, Any]) -> bool:
        """Ends a trial; False where another process was quicker, and has done all that is to be done."""
        try:
            for key, note in notes.items():
                self._storage.set_trial_user_attr(trial._trial_id, key, note)
            self._storage.set_trial_state_values(trial._trial_id, optuna().trial.TrialState.FAIL)
        except optuna().exceptions.UpdateFinishedTrialError:
            return False
        return True

    def _repeat(self, trial: Any, deaths: int) -> None:
        stored = {**_fixed(trial), **trial.params}
        if stored:  # otherwise none were chosen yet, and the next trial takes its place
            self._study.enqueue_trial(stored, user_attrs={DEATHS: deaths, REPEATS: trial.number})

    def _repeat_what_was_forgotten(self) -> None:
        """A process may have been killed between ending a trial and seeing to it that it is repeated."""
        trials = self._frozen()
        repeated = {trial.user_attrs.get(REPEATS) for trial in trials}
        for trial in trials:
            if trial.user_attrs.get(AGAIN) and trial.state.is_finished() and trial.number not in repeated:
                self._repeat(trial, trial.user_attrs.get(DEATHS, 0))

    def records(self) -> list[TrialRecord]:
        """All trials that have begun."""
        return [self._record(trial) for trial in self._frozen() if trial.state.name != "WAITING"]

    def best(self) -> TrialRecord | None:
        """The best trial that was not cut."""
        sign = -1 if self._study.direction.name == "MAXIMIZE" else 1
        complete = [record for record in self.records() if record.state == "complete" and record.value is not None]
        return min(complete, key=lambda record: sign * (record.value or 0.0), default=None)

    def _record(self, trial: Any) -> TrialRecord:
        notes = trial.user_attrs
        states: dict[str, State] = {"COMPLETE": "complete", "PRUNED": "pruned", "RUNNING": "running"}
        ended: State = "interrupted" if notes.get(AGAIN) else "failed"
        return TrialRecord(
            number=trial.number,
            state=states.get(trial.state.name, ended),
            value=trial.value,
            values=self._space.values(trial.params),
            reports=len(trial.intermediate_values),
            seconds=_seconds(trial),
            error=str(notes.get(ERROR, "")),
        )

    def _frozen(self, *states: Any) -> list[Any]:
        return self._study.get_trials(deepcopy=False, states=states or None)


def _fixed(trial: Any) -> Mapping[str, Any]:
    """What a trial has to try that waits for its turn, or has not come to it yet."""
    return trial.system_attrs.get("fixed_params", {})


def _seconds(trial: Any) -> float | None:
    """How long it took. Times with and without a zone may meet, of different versions of Optuna."""
    ends = (trial.datetime_start, trial.datetime_complete)
    return None if None in ends else round(ends[1].timestamp() - ends[0].timestamp(), 3)


def _short(text: str) -> str:
    return text if len(text) <= 300 else f"{text[:299]}…"
