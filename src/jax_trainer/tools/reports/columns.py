"""Columns of a table of runs: their values, and runs filtered and sorted by them.

A column is a property of the run (`status`), a metric (`val/acc`: its best value; `last:val/acc`, `min:…`, `max:…`), or
a key of the configuration (`model.class_name`).
"""

import fnmatch
import math
import operator
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from jax_trainer.config.redaction import redact
from jax_trainer.diagnostics.suggestions import suggestion
from jax_trainer.tools.reports.listing import RunSummary, direction_of

_PROPERTIES: dict[str, Callable[[RunSummary], Any]] = {
    **{name: operator.attrgetter(name) for name in ("status", "age", "duration", "epoch", "step")},
    "run": operator.attrgetter("name"),
    **{
        name: lambda run, name=name: run.facts.get(name)
        for name in ("created", "host", "commit", "parameters", "reason", "starts", "changes")
    },
}
_ALWAYS = ("run", "status", "age", "duration", "epoch", "step")
_OF_METRIC = ("best", "last", "min", "max")
_MAX_METRICS = 3  # columns, by default
_CONDITION = re.compile(r"(?P<column>.+?)\s*(?P<operator>!=|<=|>=|=|<|>)\s*(?P<value>.*)", re.DOTALL)
_ORDERS = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}


class ColumnError(ValueError):
    """A column that no run has, or a condition that cannot be read."""


def default_columns(runs: Sequence[RunSummary]) -> list[str]:
    """The properties of runs, the best and last values of what they monitor, and what was changed in the middle."""
    monitors = Counter(monitor[0] for run in runs if (monitor := run.monitor) is not None)
    names = [name for name, _ in monitors.most_common(_MAX_METRICS)]
    changes = ["changes"] if any("changes" in run.facts for run in runs) else []
    return [*_ALWAYS, *names, *(f"last:{name}" for name in names[:1] if len(names) == 1), *changes]


def value_of(run: RunSummary, column: str) -> Any:
    """The value of a column; None if the run has none. Secrets of the configuration are hidden."""
    if column in _PROPERTIES:
        return _PROPERTIES[column](run)
    kind, _, metric = column.partition(":")
    if kind in _OF_METRIC and metric in run.metrics:
        return run.best(metric) if kind == "best" else getattr(run.metrics[metric], kind)
    if column in run.metrics:
        return run.best(column)
    return redact(run.config[column], column) if column in run.config else None


def check_columns(runs: Sequence[RunSummary], columns: Sequence[str]) -> None:
    """Raises a `ColumnError` for a column that is no property, metric or key of any run."""
    for column in columns:
        kind, _, metric = column.partition(":")
        name = metric if kind in _OF_METRIC else column
        if runs and name not in _PROPERTIES and not any(name in run.metrics or name in run.config for run in runs):
            known = {*_PROPERTIES, *(key for run in runs for key in (*run.metrics, *run.config))}
            raise ColumnError(
                f"No run has the column {name[:100]!r}.{suggestion(name, known)} Columns are {', '.join(_PROPERTIES)}, "
                "metrics such as `val/loss` or `last:val/loss`, and keys of the configuration."
            )


def where(runs: Sequence[RunSummary], conditions: Sequence[str]) -> list[RunSummary]:
    """The runs that meet all conditions, such as `model.class_name=CNN`, `val/acc>0.9` or `status!=failed`.

    Text is compared as a pattern with `*` and `?`; a run without a value meets only `!=`.
    """
    for condition in conditions:
        match = _CONDITION.fullmatch(condition)
        if match is None:
            raise ColumnError(f"{condition[:100]!r} is no condition. Write it as `model.class_name=CNN` or `step>100`.")
        check_columns(runs, [match["column"]])
        runs = [run for run in runs if _meets(value_of(run, match["column"]), match["operator"], match["value"])]
    return list(runs)


def _meets(value: Any, sign: str, expected: str) -> bool:
    if sign in _ORDERS:
        try:
            return value is not None and _ORDERS[sign](float(value), float(expected))
        except ValueError:
            return _ORDERS[sign](str(value), expected)
    return _equals(value, expected) is (sign == "=")


def _equals(value: Any, expected: str) -> bool:
    if value is None or isinstance(value, bool):
        return str(value).lower() == expected.lower() or (value is None and expected.lower() == "null")
    if isinstance(value, int | float):
        try:
            return value == float(expected)
        except ValueError:
            return False
    return fnmatch.fnmatchcase(str(value), expected)


def ordered(runs: Sequence[RunSummary], column: str | None) -> list[RunSummary]:
    """The runs by a column: metrics best first, others ascending; `-age` is descending. Runs without a value are last.

    None: the newest first.
    """
    if column is None:
        return list(reversed(runs))
    is_reversed = column.startswith("-")
    column = column.removeprefix("-")
    check_columns(runs, [column])
    values = [(value_of(run, column), run) for run in runs]
    having = [(value, run) for value, run in values if not _is_missing(value)]
    if all(isinstance(value, int | float) for value, _ in having):
        having.sort(key=lambda pair: pair[0])
    else:
        having.sort(key=lambda pair: str(pair[0]))
    if is_reversed is not _is_best_last(runs, column):
        having.reverse()
    return [run for _, run in having] + [run for value, run in values if _is_missing(value)]


def _is_missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


def _is_best_last(runs: Sequence[RunSummary], column: str) -> bool:
    """Whether higher values of a metric are better."""
    kind, _, metric = column.partition(":")
    name = metric if kind in _OF_METRIC else column
    modes = [run.monitor[1] for run in runs if run.monitor is not None and run.monitor[0] == name]
    is_metric = column not in _PROPERTIES and any(name in run.metrics for run in runs)
    return is_metric and (modes[0] if modes else direction_of(name)) == "max"
