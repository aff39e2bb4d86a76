"""Checks a search space against an experiment before the first trial: every key and its extreme values."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from jax_trainer.config import ConfigError, ConfigProblem, Loaded, Location
from jax_trainer.config.problems import shown
from jax_trainer.tuning.dimensions import Dimension, Range, Space, Values

Load = Callable[[Values], Loaded[Any]]  # the experiment with these values
_NOT_IN_A_FILE = Location("command line")  # the location of overrides, which trials are made with


def checked(space: Space, load: Load) -> Loaded[Any]:
    """The experiment with the first values of `space`; raises a `ConfigError` with the lines of invalid values.

    Starting from the first value of every key, sets each key to each of its extremes, one key at a time; then sets all
    keys to their last extreme.
    """
    first = {one.key: one.extremes[0] for one in space.dimensions}
    known, more = _problems(first, load)
    found = [_located(problem, space) for problem in known]
    found += [problem for one in space.dimensions for problem in _problems_of(one, first, space, load, known)]
    if not found:
        last = {one.key: one.extremes[-1] for one in space.dimensions}
        found = list(_refused(last, space, load, "all keys at their last values"))
    if found:
        raise ConfigError(dict.fromkeys(found), more=more)
    return load(first)


def _problems(values: Values, load: Load) -> tuple[Sequence[ConfigProblem], int]:
    """The problems of an experiment with these values, and the number of further ones."""
    try:
        load(values)
    except ConfigError as error:
        return error.problems, error.more
    return (), 0


def _problems_of(
    one: Dimension, first: Values, space: Space, load: Load, known: Sequence[ConfigProblem]
) -> Iterator[ConfigProblem]:
    for value in one.extremes[1:]:
        yield from _refused({**first, one.key: value}, space, load, f"`{one.key}: {shown(value)}`", known)
    if isinstance(one, Range) and one.is_integer and one.step is None and not known:
        between = (one.low + one.high) // 2 + 0.5
        if not list(_refused({**first, one.key: between}, space, load, "")):
            text = f"{one.low} and {one.high} are integers, but this key takes floats: write `{one.low}.0` for floats, "
            yield ConfigProblem(one.location, one.key, f"{text}or add `step: 1` for integers.")


def _refused(
    values: Values, space: Space, load: Load, trying: str, known: Sequence[ConfigProblem] = ()
) -> Iterable[ConfigProblem]:
    problems, _ = _problems(values, load)
    return [_located(problem, space, trying) for problem in problems if problem not in known]


def located(error: ConfigError, space: Space) -> ConfigError:
    """`error` with the lines of the space for values that come from it."""
    return ConfigError([_located(problem, space) for problem in error.problems], more=error.more)


def _located(problem: ConfigProblem, space: Space, trying: str = "") -> ConfigProblem:
    owner = space.owner(problem.key)
    if owner is not None and problem.location == _NOT_IN_A_FILE:
        return ConfigProblem(owner.location, problem.key, problem.text)
    return ConfigProblem(
        problem.location, problem.key, f"{problem.text} (Trying {trying}.)" if trying else problem.text
    )
