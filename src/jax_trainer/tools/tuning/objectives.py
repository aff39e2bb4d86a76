"""Objectives of a study: a user's function, or the training of an experiment in a YAML file."""

import gc
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from jax_trainer.callbacks import OptunaPruning, full_names
from jax_trainer.checkpoint.ranking import Direction, Mode, best_mode
from jax_trainer.config import ConfigError, ConfigProblem, Loaded, Location, as_data, dump_config, redact
from jax_trainer.config.problems import shown
from jax_trainer.config.redaction import secret_values
from jax_trainer.config.settings import SettingsError
from jax_trainer.logger.values import flat
from jax_trainer.tools.tuning.space import Range, Space, StudyError, Values, as_overrides
from jax_trainer.trainer import TrainerModule, Validation, build, load_experiment
from jax_trainer.trainer.run_folder import write_into

DEFAULT_MONITOR = "val/loss"
_NO_VALIDATION = "trials are compared by a validation metric"
_NOT_IN_A_FILE = Location("command line")  # the location of overrides, which trials are made with

Load = Callable[[Values], Loaded[Any]]  # the experiment with these values
Function = Callable[[Values, Any], float]  # of the values and an Optuna trial; may raise `optuna.TrialPruned`


class Objective:
    """What a study optimizes: a user's function of the values and the Optuna trial, minimized by default, as in Optuna.

    Args:
        function: takes the values and the Optuna trial, returns a number.
        monitor: the name of the returned value; None: "value".
        mode: min, max, or auto (by the name; min without one).

    Attributes:
        monitor: the name of the number.
        mode: min or max.
        secrets: texts to redact from messages.
        identity: the configuration besides the tuned keys, to detect that a resumed study changed.
    """

    secrets: frozenset[str] = frozenset()
    identity: Mapping[str, str] = MappingProxyType({})

    def __init__(self, function: Function, monitor: str | None = None, mode: Mode = "auto") -> None:
        self.monitor = monitor or "value"
        self.mode: Direction = "min" if monitor is None and mode == "auto" else best_mode(mode, self.monitor)
        self._function = function

    def __call__(self, values: Values, trial: Any) -> float:
        return self._function(values, trial)

    def rehearse(self) -> None:
        """Raises what would make every trial fail; a function cannot be checked without calling it."""

    def config_text(self, values: Values) -> str | None:
        """The experiment with these values as YAML; None for a function."""
        return None


class ExperimentTrials(Objective):
    """The objective that trains an experiment. The constructor checks every key and extreme value of the space.

    Args:
        file: the experiment.
        overrides: of the experiment, for all trials.
        space: the search space.
        monitor: the validation metric to optimize; None: that of `ModelCheckpoint`, or `val/loss`.
        mode: min, max, or auto (by the name of the metric).
        folder: the parent of the trials' run folders.
    """

    def __init__(
        self,
        file: Path,
        overrides: Sequence[str],
        space: Space,
        *,
        monitor: str | None = None,
        mode: Mode = "auto",
        folder: Path,
    ) -> None:
        self._file, self._overrides, self._space, self._folder = file, list(overrides), space, folder
        self._first = checked(space, self._load)
        saver = self._first.value.trainer.saver
        monitor = monitor or (DEFAULT_MONITOR if saver is None else saver.monitor)
        mode = saver.mode if saver and (mode, monitor) == ("auto", saver.monitor) else mode
        super().__init__(self._train, monitor, mode)
        self.secrets = secret_values(self._first.tree.data())
        known = flat(redact(as_data(self._first.value)))
        self.identity = {key: json.dumps(one, default=str) for key, one in known.items() if space.owner(key) is None}

    def _load(self, values: Values) -> Loaded[Any]:
        return load_experiment(self._file, [*self._overrides, *as_overrides(values)])

    def rehearse(self) -> None:
        """Builds and traces the experiment with the first values: finds what would fail in every trial."""
        try:
            self._first.value.trainer.check_limited()  # before the data is loaded
            trainer = build(self._first.value)
            if not trainer.config.validates:
                raise SettingsError([("trainer.check_val_every_n_epoch", f"{_NO_VALIDATION}, but validation is off.")])
            if trainer.dataset.val_loader is None:
                raise SettingsError([("dataset", f"{_NO_VALIDATION}, but the dataset has no validation data.")])
            known = full_names(dict.fromkeys(trainer.dry_run().evaluated), "val")
        except SettingsError as error:
            raise self._located(self._first, error) from None
        may_add = type(trainer).on_validation_epoch_end is not TrainerModule.on_validation_epoch_end
        if self.monitor not in known and not may_add:
            raise StudyError(f"No metric {self.monitor!r} to monitor. Logged metrics: {', '.join(sorted(known))}.")

    def _train(self, values: Values, trial: Any) -> float:
        """Trains with these values; returns the best value of the monitored metric over all validations."""
        gc.collect()  # frees the arrays of the previous trial
        loaded = self._load(values)
        write_into(loaded.value.trainer.logger, self._folder / f"{trial.number:04}")
        try:
            trainer = build(loaded.value, callbacks=[OptunaPruning(trial, self.monitor)])
            data = trainer.dataset
            results = trainer.train_model(data.train_loader, data.val_loader, quiet=True)
        except SettingsError as error:
            raise self._located(loaded, error) from None
        return best_value(results.validations, self.monitor, self.mode)

    def _located(self, loaded: Loaded[Any], problem: SettingsError) -> ConfigError:
        """`problem` with the lines of the space for values that come from it."""
        error = loaded.error(problem)
        return ConfigError([_located(one, self._space) for one in error.problems], more=error.more)

    def config_text(self, values: Values) -> str:
        return dump_config(self._load(values).value)


def best_value(validations: Sequence[Validation], monitor: str, mode: str) -> float:
    """The best value of a metric over these validations; a `FloatingPointError` if any of its values is not finite.

    >>> best_value([Validation(1, 40, {"val/acc": 0.5}), Validation(1, 80, {"val/acc": 0.75})], "val/acc", "max")
    0.75
    """
    found = {one[:2]: float(one.metrics[monitor]) for one in validations if monitor in one.metrics}
    for (epoch, step), value in found.items():
        if not math.isfinite(value):
            raise FloatingPointError(f"`{monitor}` is {value} in epoch {epoch}, step {step}.")
    if not found:
        raise ValueError(f"No validation has reported `{monitor}`.")
    return (max if mode == "max" else min)(found.values())


def checked(space: Space, load: Load) -> Loaded[Any]:
    """The experiment with the first values of `space`; raises a `ConfigError` with the lines of invalid values.

    Starting from the first value of every key, sets each key to each of its extremes, one key at a time; then sets all
    keys to their last extreme.
    """
    first, last = ({one.key: one.extremes[place] for one in space.dimensions} for place in (0, -1))
    known: Sequence[ConfigProblem] = ()
    more = 0

    def refused(values: Values, trying: str = "") -> list[ConfigProblem]:
        nonlocal more
        try:
            load(values)
            return []
        except ConfigError as error:
            more += error.more * (values is first)
            return [
                problem if values is first else _located(problem, space, trying)
                for problem in error.problems
                if problem not in known
            ]

    known = refused(first)
    found = [_located(problem, space) for problem in known]

    for one in space.dimensions:
        for value in one.extremes[1:]:
            found += refused({**first, one.key: value}, f"`{one.key}: {shown(value)}`")
        if not isinstance(one, Range) or not one.is_integer or one.step is not None or known:
            continue
        if not refused({**first, one.key: (one.low + one.high) // 2 + 0.5}):
            text = f"{one.low} and {one.high} are integers, but this key takes floats: write `{one.low}.0` for floats"
            found.append(ConfigProblem(one.location, one.key, f"{text}, or add `step: 1` for integers."))
    found = found or refused(last, "all keys at their last values")
    if found:
        raise ConfigError(dict.fromkeys(found), more=more)
    return load(first)


def _located(problem: ConfigProblem, space: Space, trying: str = "") -> ConfigProblem:
    owner = space.owner(problem.key)
    if owner is not None and problem.location == _NOT_IN_A_FILE:
        return replace(problem, location=owner.location)
    return replace(problem, text=f"{problem.text} (Trying {trying}.)") if trying else problem
