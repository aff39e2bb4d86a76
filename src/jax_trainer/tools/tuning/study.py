"""`Study`: an Optuna study that several processes share, with repeated trials after interruptions."""

import json
import logging
import math
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Literal, SupportsFloat, get_args

import numpy as np

from jax_trainer.tools.tuning.objectives import Objective
from jax_trainer.tools.tuning.space import Space, StudyError
from jax_trainer.tools.tuning.storage import PROCESS, beating, is_running, optuna

LOG = logging.getLogger("jax_trainer")
SamplerName = Literal["tpe", "random", "grid"]
PrunerName = Literal["median", "halving", "hyperband", "none"]
SAMPLERS: tuple[str, ...] = get_args(SamplerName)
PRUNERS: tuple[str, ...] = get_args(PrunerName)
AGAIN, DEATHS, REPEATS, ERROR = "again", "deaths", "repeats", "error"  # user attributes of a trial
MAX_FAILURES = 3  # in a row from the first trial on: then the experiment is wrong, not the values
_MAX_DEATHS = 5  # with the same values: then they are assumed to kill the process, e.g. by memory
_INITIAL, _EXPERIMENT = "initial", "experiment"  # user attributes of a study

Record = dict[str, Any]  # a trial as plain data: `trial`, `state`, `value`, `reports`, `seconds`, `params`, `error`


class Study:
    """A study in a storage, which other processes may use at the same time.

    A new sampler is created for every trial, so that its choice depends only on the seed and the finished trials: a
    resumed study continues with the same trials as an uninterrupted one. An interrupted trial is repeated with its
    values and not counted. Several processes with the same seed choose different values, because the seed of a trial
    also depends on its number and on whether other processes are running.

    Args:
        storage: Optuna's storage.
        name: of the study, which is created if missing.
        space: the search space.
        notes: what else must be equal in all processes that use the study, including `mode`.
        sampler: the name of the sampler.
        pruner: the name of the pruner.
        startup: number of trials before the median pruner and the TPE sampler start.
        seed: of the sampler; None: a random one.
    """

    def __init__(
        self,
        storage: Any,
        name: str,
        space: Space,
        notes: Mapping[str, Any],
        *,
        sampler: SamplerName = "tpe",
        pruner: PrunerName = "median",
        startup: int = 5,
        seed: int | None = None,
    ) -> None:
        direction, known = "maximize" if notes["mode"] == "max" else "minimize", optuna().pruners
        pruners = {
            "halving": known.SuccessiveHalvingPruner,
            "hyperband": known.HyperbandPruner,
            "none": known.NopPruner,
        }
        used = (
            known.MedianPruner(n_startup_trials=startup, n_warmup_steps=0) if pruner == "median" else pruners[pruner]()
        )
        created = {"direction": direction, "load_if_exists": True, "pruner": used}
        self._study = optuna().create_study(storage=storage, study_name=name, **created)
        self._storage, self.space, self._sampler, self._startup, self._seed = storage, space, sampler, startup, seed
        self._states = optuna().trial.TrialState
        self.name = name
        self._failures: int | None = 0  # in a row; None after the first trial that did not fail
        ours, initial = {**notes, "space": space.data()}, self._study.user_attrs.get(_INITIAL)
        # it may have been created with plain Optuna
        mode = "max" if self._study.direction.name == "MAXIMIZE" else "min"
        theirs = {**(initial or ours), "mode": mode}
        for what in ours:
            before, now = (json.dumps(notes.get(what), sort_keys=True) for notes in (theirs, ours))
            if before != now:
                raise StudyError(
                    f"The study {self.name!r} was created with another {what}: {before:.300}, now {now:.300}. "
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
        ended = [trial.user_attrs for trial in self._frozen() if trial.state.is_finished()]
        return sum(not notes.get(AGAIN) and notes.get(DEATHS, 0) < _MAX_DEATHS for notes in ended)

    def running(self) -> int:
        """The number of running trials, of all processes."""
        return len(self._frozen(self._states.RUNNING))

    def ask(self) -> Any:
        """The next trial; None if the grid is exhausted.

        Interrupted trials do not influence the choice: the sequence of values is the same as without interruptions.
        """
        if not self.running():
            self._repeat_missing()
        if self._sampler == "grid" and not self._frozen(self._states.WAITING):
            tried = [self.space.values({**trial.params, **_fixed(trial)}) for trial in self._frozen()]
            following = next((one for one in self.space.combinations() if one not in tried), None)
            if following is None:
                return None
            self._study.enqueue_trial(self.space.stored(following))
        self._study.sampler = self._new_sampler(math.inf, os.getpid() if self.running() else 0)  # for relative sampling
        trial = self._study.ask()
        self._study.sampler = self._new_sampler(trial.number, 1)  # for independent sampling
        return trial

    def _new_sampler(self, number: float, salt: int) -> Any:
        """A sampler whose seed depends on how many trials before this number were not interrupted."""
        trials = [trial for trial in self._frozen() if trial.state.name != "WAITING" and trial.number < number]
        parts = [sum(not trial.user_attrs.get(AGAIN) for trial in trials), salt]
        seed = None if self._seed is None else int(np.random.SeedSequence([self._seed, *parts]).generate_state(1)[0])
        if self._sampler != "tpe":
            return optuna().samplers.RandomSampler(seed=seed)
        options = {"n_startup_trials": self._startup, "multivariate": True, "constant_liar": True}
        return optuna().samplers.TPESampler(seed=seed, **options)

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
            if any(PROCESS not in trial.user_attrs for trial in self._frozen(self._states.RUNNING)):
                time.sleep(0.1)  # its process is about to claim it, or was killed before that
                continue
            if self.finished() + self.running() >= wanted or (trial := self.ask()) is None:
                return
            self._try(trial, objective, hide)
            after(trial.number)

    def _try(self, trial: Any, objective: Objective, hide: Callable[[str], str]) -> None:
        try:
            with beating(trial):
                value = objective(self.space.suggest(trial), trial)
                if not isinstance(value, SupportsFloat):
                    raise TypeError(f"The objective must return a number, got {value!r}.")
                if not math.isfinite(value):
                    raise FloatingPointError(f"The objective returned {value}.")
        except optuna().TrialPruned:
            reported = self._storage.get_trial(trial._trial_id).intermediate_values
            if reported and not math.isfinite(reported[max(reported)]):
                self._fail(trial, FloatingPointError("The last reported value is not finite."), hide)
            else:
                self._study.tell(trial, state=self._states.PRUNED, skip_if_finished=True)
                self._failures = None
        except Exception as error:
            self._fail(trial, error, hide)
        except BaseException:  # Ctrl-C, SIGTERM
            self.tell_interrupted(trial)
            raise
        else:
            self._study.tell(trial, float(value), skip_if_finished=True)
            self._failures = None

    def _fail(self, trial: Any, error: Exception, hide: Callable[[str], str]) -> None:
        with suppress(Exception):  # another process may have marked this trial as stale
            trial.set_user_attr(ERROR, hide(f"{type(error).__name__}: {error}"))
        self._study.tell(trial, state=self._states.FAIL, skip_if_finished=True)
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
        for trial in self._frozen(self._states.RUNNING):
            if not is_running(trial):
                deaths = trial.user_attrs.get(DEATHS, 0) + 1
                again = deaths < _MAX_DEATHS
                text = "" if again else f"The process was killed {deaths} times with these values."
                self._end(trial, {AGAIN: again, DEATHS: deaths, ERROR: text})

    def _end(self, trial: Any, notes: Mapping[str, Any]) -> None:
        """Fails a trial, and repeats it if the notes say so; another process may have done both."""
        try:
            for key, note in notes.items():
                self._storage.set_trial_user_attr(trial._trial_id, key, note)
            self._storage.set_trial_state_values(trial._trial_id, self._states.FAIL)
        except optuna().exceptions.UpdateFinishedTrialError:
            return
        if notes[AGAIN]:
            self._repeat(trial, {**trial.user_attrs, **notes}.get(DEATHS, 0))

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

    def records(self) -> list[Record]:
        """All trials that have started."""
        found = []
        for trial in (trial for trial in self._frozen() if trial.state.name != "WAITING"):
            ended = "interrupted" if trial.user_attrs.get(AGAIN) else "failed"
            # versions of Optuna differ in whether times have a time zone
            began, end = (one and one.timestamp() for one in (trial.datetime_start, trial.datetime_complete))
            found.append(
                {
                    "trial": trial.number,
                    "state": ended if trial.state.name == "FAIL" else trial.state.name.lower(),
                    "value": trial.value,
                    "reports": len(trial.intermediate_values),
                    "seconds": None if began is None or end is None else round(end - began, 3),
                    "params": self.space.values(trial.params),
                    "error": str(trial.user_attrs.get(ERROR, "")),
                }
            )
        return found

    def _frozen(self, *states: Any) -> list[Any]:
        return self._study.get_trials(deepcopy=False, states=states or None)


def _fixed(trial: Any) -> Mapping[str, Any]:
    """The enqueued values of a trial that has not sampled them yet."""
    return trial.system_attrs.get("fixed_params", {})
