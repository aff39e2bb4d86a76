"""The search space: ranges of numbers and categorical choices by dotted key, read from a YAML file or a dict.

All problems of a file are reported at once, with their lines.
"""

import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

from jax_trainer.config import ConfigError, Location
from jax_trainer.config.files import read_dotted
from jax_trainer.config.problems import BROKEN, Node, Problems, shown
from jax_trainer.config.redaction import is_secret
from jax_trainer.config.settings import plain
from jax_trainer.config.yaml_text import key_problem

MAX_GRID = 10_000
MAX_CHOICES = 200  # each is checked against the experiment before the first trial
_FORMS = "a list of values, or `{low: …, high: …}`, optionally with `step` or `log: true`"
_OF_RANGES = ("low", "high", "step", "log")

Values = dict[str, Any]  # by dotted key


class StudyError(ValueError):
    """A study that cannot be created, or that belongs to another experiment or space."""


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
        kind = int if self.is_integer else float
        # 0.1 + 2 * 0.1 is 0.3, as it is written
        return tuple(kind(first + number * step) for number in range(count)) if count <= MAX_GRID else None

    def suggest(self, trial: Any) -> int | float:
        """The value that an Optuna trial is to use."""
        if self.is_integer:
            return trial.suggest_int(self.key, self.low, self.high, step=self.step or 1, log=self.log)
        return trial.suggest_float(self.key, self.low, self.high, step=self.step, log=self.log)


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

    grid = extremes

    def suggest(self, trial: Any) -> Any:
        """The value that an Optuna trial is to use, as Optuna stores it."""
        return trial.suggest_categorical(self.key, [*map(_stored, self.values)])


Dimension = Range | Choice


@dataclass(frozen=True)
class Space:
    """All dimensions, in the order of the file."""

    dimensions: tuple[Dimension, ...]

    def suggest(self, trial: Any) -> Values:
        """The values that an Optuna trial is to use."""
        return self.values({one.key: one.suggest(trial) for one in self.dimensions})

    def values(self, stored: Mapping[str, Any]) -> Values:
        """The values of a trial from Optuna's parameters; an interrupted trial may lack some."""
        found = {one.key: stored[one.key] for one in self.dimensions if one.key in stored}
        for one in self.dimensions:
            if isinstance(one, Choice) and one.key in found:
                known = (value for value in one.values if _stored(value) == found[one.key])
                found[one.key] = next(known, found[one.key])
        return found

    def stored(self, values: Values) -> dict[str, Any]:
        """Values as Optuna stores them."""
        return {one.key: _stored(values[one.key]) for one in self.dimensions}

    def combinations(self) -> Iterator[Values]:
        """The grid: every combination, the last key changing fastest; an error if there are too many."""
        for one in self.dimensions:
            if one.grid is None:
                raise StudyError(f"`{one.key}` has too many values for a grid: give it a larger `step`, or a list.")
        grids = {one.key: one.grid or () for one in self.dimensions}
        if (count := math.prod(map(len, grids.values()))) > MAX_GRID:
            raise StudyError(f"A grid of {count:,} combinations is too large. Remove values, or use another sampler.")
        return (dict(zip(grids, values, strict=True)) for values in itertools.product(*grids.values()))

    def data(self) -> dict[str, Any]:
        """The same as plain data."""
        return {
            one.key: list(one.values) if isinstance(one, Choice) else {name: getattr(one, name) for name in _OF_RANGES}
            for one in self.dimensions
        }

    def owner(self, path: str) -> Dimension | None:
        """The dimension at this dotted path, or of an ancestor or descendant of it."""
        found = [one for one in self.dimensions if path and _are_related(one.key, path)]
        above = [one for one in found if len(one.key) <= len(path)]
        return max(above, key=lambda one: len(one.key), default=None) or next(iter(found), None)


def _stored(value: Any) -> Any:
    """A value as Optuna stores it: lists and sections as JSON, because it stores only scalars."""
    return as_text(value) if isinstance(value, list | dict) else value


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


def read_space(source: str | Path | Mapping[str, Any]) -> Space:
    """Reads a search space from a YAML file or a dict: a list or a range for each dotted key of the experiment.

    >>> read_space({"model.c_hid": {"low": 8, "high": 64, "step": 8}, "optimizer.class_name": ["AdamW", "SGD"]}).data()
    {'model.c_hid': {'low': 8, 'high': 64, 'step': 8, 'log': False}, 'optimizer.class_name': ['AdamW', 'SGD']}
    """
    space, problems = readable_space(source)
    if problems:
        raise problems.error()
    return space


def readable_space(source: str | Path | Mapping[str, Any]) -> tuple[Space, Problems]:
    """The valid dimensions of a space, and the problems of the others."""
    problems = Problems()
    tree = _as_node(source) if isinstance(source, Mapping) else read_dotted(Path(source), problems)
    if not problems and not tree.section:
        found = "nothing" if tree.value in (None, {}) else shown(tree.data())
        text = f"expected keys of the experiment, such as `optimizer.learning_rate: {{…}}`, found {found}."
        problems.add(tree.location, "", text)
    read = [_dimension(key, node, problems) for key, node in tree.section.items()]
    return Space(tuple(one for one in read if one is not None)), problems


def with_problems(problems: Problems, error: ConfigError) -> ConfigError:
    """The problems of a space and of the experiment, without those that follow from invalid dimensions."""
    unread = [problem.key for problem in problems]
    others = [one for one in error.problems if not any(_are_related(one.key, key) for key in unread)]
    return ConfigError([*problems, *others], more=error.more)


def _are_related(key: str, other: str) -> bool:
    """Whether one of two dotted keys equals or contains the other."""
    return f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}.")


def _as_node(data: Any) -> Node:
    location = Location("space")
    if isinstance(data, Mapping):
        return Node({str(name): _as_node(value) for name, value in data.items()}, location)
    return Node([_as_node(value) for value in data] if isinstance(data, list | tuple) else plain(data), location)


def _dimension(key: str, node: Node, problems: Problems) -> Dimension | None:
    """The dimension of one entry; None if something is wrong with it, which is added to `problems`."""
    found = [*_odd_entry(key, node)]
    if not found and isinstance(node.value, list):
        return Choice(key, tuple(node.data()), node.location)
    known = {}
    if not found and node.value is not BROKEN:
        known = node.data()
        found = [*_odd_range(known, problems)]
    for inside, text in found:
        location = node.location_of(inside) if inside else node.location
        problems.add(location, f"{key}.{inside}".rstrip("."), text)
    if found or node.value is BROKEN:
        return None
    return Range(key, known["low"], known["high"], known.get("step"), known.get("log", False), node.location)


def _odd_entry(key: str, node: Node) -> Iterator[tuple[str, str]]:
    """What is wrong with an entry that is neither a range nor a choice, each with the key inside of it."""
    wrong = [text for part in key.split(".") if (text := key_problem(part))]
    if wrong:
        yield "", f"expected the dotted path of a key. {wrong[0]}"
    elif is_secret(key):
        yield "", "this key names a secret, and a study stores the values that it tries."
    elif isinstance(node.value, list):
        values = node.data()
        if not 0 < len(values) <= MAX_CHOICES:
            yield "", f"expected a list of 1 to {MAX_CHOICES} values, found {shown(values)}."
        elif odd := [value for value in values if not _is_plain(value)]:
            yield "", f"{shown(odd[0])} cannot be written to YAML."
        else:  # 1, 1.0 and true are equal to Optuna
            stored = [*map(_stored, values)]
            yield from (
                ("", f"duplicate value {shown(value)}.")
                for place, value in enumerate(values)
                if stored.index(stored[place]) < place
            )
    elif node.value is not BROKEN and not (node.is_section and node.section.keys() & set(_OF_RANGES)):
        inner = next(iter(node.section), "") if node.is_section else ""
        hint = f" For a key inside a section, write `{key}.{inner}:`." if inner else ""
        hint = hint if node.is_section else " Set a fixed value with an override."
        yield "", f"expected {_FORMS}, found {shown(node.data(), key)}.{hint}"


def _odd_range(known: dict[str, Any], problems: Problems) -> Iterator[tuple[str, str]]:
    """What is wrong with a range, each with the key that is."""
    for name in known.keys() - set(_OF_RANGES):
        yield name, f"a range has no key `{name}`.{problems.suggestion(name, _OF_RANGES)}"
    for name in sorted({"low", "high"} - known.keys()):
        yield "", f"the key `{name}` is missing: a range needs `low` and `high`."
    if not {"low", "high"} <= known.keys() <= set(_OF_RANGES):
        return
    low, high, step, log = known["low"], known["high"], known.get("step"), known.get("log", False)
    numbers = {"low": low, "high": high, "step": 1 if step is None else step}
    odd = [name for name, value in numbers.items() if not _is_number(value)]
    yield from ((name, f"expected a number, found {shown(known[name])}.") for name in odd)
    if not isinstance(log, bool):
        yield "log", f"expected true or false, found {shown(log)}."
    if odd or not isinstance(log, bool):
        return
    if low >= high:
        yield "low", f"`low` must be below `high`, found {shown(low)} and {shown(high)}."
    if log and low <= 0:
        yield "low", f"with `log: true`, `low` must be above 0, found {shown(low)}."
    if step is not None and log:
        yield "step", "`step` and `log: true` exclude each other."
    elif step is not None and step <= 0:
        yield "step", f"expected a number above 0, found {shown(step)}."
    elif step is not None and low < high:
        first, last, each = (Fraction(str(number)) for number in (low, high, step))  # as written: 0.3 is three tenths
        count, rest = divmod(last - first, each)
        if rest:
            near = [float(first + each * n) for n in (count, count + 1) if first + each * n > first]
            ends = " or ".join(f"{end:.12g}" for end in near)
            yield "high", f"steps of {shown(step)} from {shown(low)} do not reach {shown(high)}. Use {ends}."


def _is_number(value: Any) -> bool:
    """Whether `value` is a finite int or float, not a bool."""
    return type(value) in (int, float) and math.isfinite(value)


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(name, str) and _is_plain(part) for name, part in value.items())
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | str) or _is_number(value)
