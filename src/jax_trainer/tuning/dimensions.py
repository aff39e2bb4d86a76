"""The search space: ranges of numbers and categorical choices, by dotted key."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from jax_trainer.config import Location

MAX_GRID = 10_000
Values = dict[str, Any]  # by dotted key


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`, both included; integers if `low`, `high` and `step` are."""

    key: str
    low: int | float
    high: int | float
    step: int | float | None = None
    log: bool = False
    location: Location = field(default=Location("space"), compare=False)

    @property
    def is_integer(self) -> bool:
        """Whether only integers are sampled."""
        return all(isinstance(value, int) for value in (self.low, self.high, self.step) if value is not None)

    @property
    def extremes(self) -> tuple[Any, ...]:
        """The lowest and highest value."""
        return (self.low, self.high) if self.is_integer else (float(self.low), float(self.high))

    @property
    def grid(self) -> tuple[Any, ...] | None:
        """All values; None for a continuous or too large range."""
        if self.step is None and not self.is_integer:
            return None
        first, last, step = (Fraction(str(number)) for number in (self.low, self.high, self.step or 1))
        count = int((last - first) / step) + 1
        if count > MAX_GRID:
            return None
        kind = int if self.is_integer else float
        return tuple(kind(first + number * step) for number in range(count))  # 0.1 + 2 * 0.1 is 0.3, as it is written

    def suggest(self, trial: Any) -> int | float:
        """The value that an Optuna trial is to use."""
        if self.is_integer:
            return trial.suggest_int(self.key, self.low, self.high, step=self.step or 1, log=self.log)
        return trial.suggest_float(self.key, self.low, self.high, step=self.step, log=self.log)

    def stored(self, value: Any) -> Any:
        """A value as Optuna keeps it."""
        return value

    def value(self, stored: Any) -> Any:
        """A value out of what Optuna keeps."""
        return stored

    def data(self) -> dict[str, Any]:
        """The same as plain data."""
        return {"low": self.low, "high": self.high, "step": self.step, "log": self.log}


@dataclass(frozen=True)
class Choice:
    """One of several values: numbers, strings, lists or sections."""

    key: str
    values: tuple[Any, ...]
    location: Location = field(default=Location("space"), compare=False)

    @property
    def extremes(self) -> tuple[Any, ...]:
        """All values: each is checked against the experiment."""
        return self.values

    @property
    def grid(self) -> tuple[Any, ...]:
        """All values."""
        return self.values

    def suggest(self, trial: Any) -> Any:
        """The value that an Optuna trial is to use."""
        return self.value(trial.suggest_categorical(self.key, [self.stored(value) for value in self.values]))

    def stored(self, value: Any) -> Any:
        """A value as Optuna stores it: lists and sections as JSON, because it stores only scalars."""
        return as_text(value) if isinstance(value, list | dict) else value

    def value(self, stored: Any) -> Any:
        """A value out of what Optuna keeps."""
        return next((value for value in self.values if self.stored(value) == stored), stored)

    def data(self) -> list[Any]:
        """The same as plain data."""
        return list(self.values)


Dimension = Range | Choice


@dataclass(frozen=True)
class Space:
    """All dimensions, in the order of the file."""

    dimensions: tuple[Dimension, ...]

    def suggest(self, trial: Any) -> Values:
        """The values that an Optuna trial is to use."""
        return {one.key: one.suggest(trial) for one in self.dimensions}

    def values(self, stored: Mapping[str, Any]) -> Values:
        """The values of a trial from Optuna's parameters; an interrupted trial may lack some."""
        return {one.key: one.value(stored[one.key]) for one in self.dimensions if one.key in stored}

    def stored(self, values: Values) -> dict[str, Any]:
        """Values as Optuna stores them."""
        return {one.key: one.stored(values[one.key]) for one in self.dimensions}

    def data(self) -> dict[str, Any]:
        """The same as plain data."""
        return {one.key: one.data() for one in self.dimensions}

    def owner(self, path: str) -> Dimension | None:
        """The dimension at this dotted path, or of an ancestor or descendant of it."""
        found = [one for one in self.dimensions if f"{path}.".startswith(f"{one.key}.")]
        around = [one for one in self.dimensions if path and one.key.startswith(f"{path}.")]
        return max(found, key=lambda one: len(one.key), default=None) or next(iter(around), None)


def as_overrides(values: Values) -> list[str]:
    """Values as `path.to.key=value`; a section comes before the keys inside it."""
    ordered: Sequence[str] = sorted(values, key=lambda key: key.count("."))
    return [f"{key}={as_text(values[key])}" for key in ordered]


def as_text(value: Any) -> str:
    """A value as JSON, which is valid YAML on one line.

    >>> as_text(1e-05), as_text("no"), as_text([16, 32]), as_text(None)
    ('1e-05', '"no"', '[16, 32]', 'null')
    """
    return json.dumps(value, ensure_ascii=False)


def is_number(value: Any) -> bool:
    """Whether `value` is a finite int or float, not a bool."""
    return type(value) in (int, float) and math.isfinite(value)
