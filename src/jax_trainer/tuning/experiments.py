"""Trials of an experiment: trains a YAML file with the values of a trial, and evaluates it on validation data."""

import gc
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from jax_trainer.callbacks import OptunaPruning, full_names
from jax_trainer.callbacks.monitored import Mode, best_mode
from jax_trainer.config import Loaded, as_data, dump_config, redact
from jax_trainer.redaction import secret_values
from jax_trainer.settings import SettingsError
from jax_trainer.trainer import TrainerModule, Validation, build, load_experiment
from jax_trainer.tuning.checking import checked, located
from jax_trainer.tuning.choosing import StudyError
from jax_trainer.tuning.dimensions import Space, Values, as_overrides

DEFAULT_MONITOR = "val/loss"
_NO_VALIDATION = "trials are compared by a validation metric"


class NotFinite(FloatingPointError):
    """The monitored metric of a trial is NaN or infinite."""


class ExperimentTrials:
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
        self.monitor = monitor or (DEFAULT_MONITOR if saver is None else saver.monitor)
        if saver is not None and mode == "auto" and self.monitor == saver.monitor:
            mode = saver.mode
        self.mode: Literal["min", "max"] = best_mode(mode, self.monitor)

    def _load(self, values: Values) -> Loaded[Any]:
        return load_experiment(self._file, [*self._overrides, *as_overrides(values)])

    @property
    def secrets(self) -> frozenset[str]:
        """Secrets in the configuration, to redact from messages."""
        return secret_values(self._first.tree.data())

    @property
    def identity(self) -> dict[str, str]:
        """The configuration without the tuned keys, by dotted key, secrets redacted."""
        flat = _flat(redact(as_data(self._first.value)))
        return {key: json.dumps(value, default=str) for key, value in flat.items() if self._space.owner(key) is None}

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
            raise located(self._first.error(error), self._space) from None
        may_add = type(trainer).on_validation_epoch_end is not TrainerModule.on_validation_epoch_end
        if self.monitor not in known and not may_add:
            raise StudyError(f"No metric {self.monitor!r} to monitor. Logged metrics: {', '.join(sorted(known))}.")

    def __call__(self, values: Values, trial: Any) -> float:
        """Trains with these values; returns the best value of the monitored metric over all validations."""
        gc.collect()  # frees the arrays of the previous trial
        loaded = self._load(values)
        _write_into(loaded.value.trainer.logger, self._folder / f"{trial.number:04}")
        try:
            trainer = build(loaded.value, callbacks=[OptunaPruning(trial, self.monitor)])
            data = trainer.dataset
            results = trainer.train_model(data.train_loader, data.val_loader, quiet=True)
        except SettingsError as error:
            raise located(loaded.error(error), self._space) from None
        return best_value(results.validations, self.monitor, self.mode)

    def config_text(self, values: Values) -> str:
        """The experiment with these values as YAML."""
        return dump_config(self._load(values).value)


def best_value(validations: Sequence[Validation], monitor: str, mode: str) -> float:
    """The best value of a metric over these validations; raises `NotFinite` if any of its values is not finite.

    >>> best_value([Validation(1, 40, {"val/acc": 0.5}), Validation(1, 80, {"val/acc": 0.75})], "val/acc", "max")
    0.75
    """
    found = {one[:2]: float(one.metrics[monitor]) for one in validations if monitor in one.metrics}
    for (epoch, step), value in found.items():
        if not math.isfinite(value):
            raise NotFinite(f"`{monitor}` is {value} in epoch {epoch}, step {step}.")
    if not found:
        raise ValueError(f"No validation has reported `{monitor}`.")
    return (max if mode == "max" else min)(found.values())


def _write_into(logger: Any, folder: Path) -> None:
    """Makes the logger and its tools write into the folder of the trial."""
    logger.log_dir = str(folder)
    tools = logger.tool_config
    for tool in tools if isinstance(tools, list | tuple) else [tools]:
        if getattr(tool, "save_dir", ""):
            tool.save_dir = ""


def _flat(data: Any, above: str = "") -> dict[str, Any]:
    if not isinstance(data, Mapping):
        return {above: data}
    return {key: value for name in data for key, value in _flat(data[name], f"{above}.{name}".lstrip(".")).items()}
