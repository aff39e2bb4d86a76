"""All runs below a folder: `find_runs` reads a summary of each; the columns of a table of them, and what selects rows.

A column is a property of the run (`status`), a metric (`val/acc`: its best value; `last:val/acc`, `min:…`, `max:…`), or
a key of the configuration (`model.class_name`).
"""

import fnmatch
import json
import operator
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from jax_trainer.checkpoint.folder import CHECKPOINTS, CONFIG, LOCK, METRICS, RECORD
from jax_trainer.config.redaction import redact
from jax_trainer.diagnostics.suggestions import suggestion
from jax_trainer.tools.reports.record import (
    HPARAMS,
    TIMES,
    RunRecord,
    allowed_changes,
    direction_of,
    part,
    read_summary,
    starts_of,
)

_FILES = (RECORD, METRICS, HPARAMS, CONFIG, TIMES)
_MAX_DEPTH = 8
_ALWAYS = ("run", "status", "age", "duration", "epoch", "step")
_OF_METRIC = ("best", "last", "min", "max")
_MAX_METRICS = 3  # columns, by default
_CONDITION = re.compile(r"(?P<column>.+?)\s*(?P<operator>!=|<=|>=|=|<|>)\s*(?P<value>.*)", re.DOTALL)
_SIGNS = {"=": operator.eq, "!=": operator.ne}
_SIGNS |= {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}


def find_runs(folder: Path) -> list[RunRecord]:
    """All runs in `folder`, or the one whose folder it is, by ascending time of creation; of curves only extremes."""
    folder, now, runs = folder.absolute(), time.time(), []
    for path in _run_folders(folder, 0):
        run = read_summary(path, path.name if path == folder else path.relative_to(folder).as_posix())
        files = [os.lstat(path / name).st_mtime for name in _FILES if os.path.lexists(path / name)]
        created = min(files, default=now)
        with suppress(ValueError, OverflowError):
            created = datetime.fromisoformat(part(run.provenance, "created", str)).timestamp()
        run.age = max(now - created, 0.0)
        runs.append(run)
    return sorted(runs, key=lambda run: (-run.age, run.name))


def _run_folders(folder: Path, depth: int) -> Iterator[Path]:
    """The run folders below `folder`, without following links."""
    try:
        entries = {entry.name: entry for entry in os.scandir(folder)}
    except OSError:
        return
    files = {name for name in entries.keys() & _FILES if entries[name].is_file(follow_symlinks=False)}
    if RECORD in files or (CONFIG in files and (METRICS in files or LOCK in entries or CHECKPOINTS in entries)):
        yield folder
    elif depth < _MAX_DEPTH:
        for name in sorted(entries):
            if not name.startswith(".") and entries[name].is_dir(follow_symlinks=False):
                yield from _run_folders(folder / name, depth + 1)


# columns


_PROPERTIES: dict[str, Callable[[RunRecord], Any]] = {
    "run": lambda run: run.name,
    "status": lambda run: run.status,
    "age": lambda run: run.age,
    "duration": lambda run: run.wall,
    "epoch": lambda run: run.epochs[-1][1] if run.epochs else 0,
    "step": lambda run: run.last_step,
    "created": lambda run: part(run.provenance, "created", str) or None,
    "starts": lambda run: len(starts_of(run.provenance)) or None,
    "host": lambda run: part(run.provenance, "host", str) or None,
    "commit": lambda run: part(part(run.provenance, "git", dict), "commit", str) or None,
    "parameters": lambda run: part(part(run.provenance, "parameters", dict), "count", int) or None,
    "reason": lambda run: part(next(reversed(starts_of(run.provenance)), {}), "reason", str) or None,
    "changes": lambda run: ", ".join(f"{name} at step {step}" for step, name, _ in allowed_changes(run.provenance)),
}


def default_columns(runs: Sequence[RunRecord]) -> list[str]:
    """The properties of runs, the best and last values of what they monitor, and what was changed in the middle."""
    monitors = Counter(monitor[0] for run in runs if (monitor := run.monitor) is not None)
    names = [name for name, _ in monitors.most_common(_MAX_METRICS)]
    changes = ["changes"] if any(allowed_changes(run.provenance) for run in runs) else []
    return [*_ALWAYS, *names, *(f"last:{name}" for name in names[:1] if len(names) == 1), *changes]


def value_of(run: RunRecord, column: str) -> Any:
    """The value of a column; None if the run has none. Secrets of the configuration are hidden."""
    if column in _PROPERTIES:
        return _PROPERTIES[column](run)
    kind, _, metric = column.partition(":")
    if kind in _OF_METRIC and metric in run.curves:
        return run.best_of(metric) if kind == "best" else getattr(run.curves[metric], kind)
    if column in run.curves:
        return run.best_of(column)
    return redact(run.config[column], column) if column in run.config else None


def check_columns(runs: Sequence[RunRecord], columns: Sequence[str]) -> None:
    """Raises a `ValueError` for a column that is no property, metric or key of any run."""
    for column in columns:
        kind, _, metric = column.partition(":")
        name = metric if kind in _OF_METRIC else column
        if runs and name not in _PROPERTIES and not any(name in run.curves or name in run.config for run in runs):
            known = {*_PROPERTIES, *(key for run in runs for key in (*run.curves, *run.config))}
            raise ValueError(
                f"No run has the column {name[:100]!r}.{suggestion(name, known)} Columns are {', '.join(_PROPERTIES)}, "
                "metrics such as `val/loss` or `last:val/loss`, and keys of the configuration."
            )


def where(runs: Sequence[RunRecord], conditions: Sequence[str]) -> list[RunRecord]:
    """The runs that meet all conditions, such as `model.class_name=CNN`, `val/acc>0.9` or `status!=failed`.

    Text is compared as a pattern with `*` and `?`; a run without a value meets only `!=`.
    """
    for condition in conditions:
        match = _CONDITION.fullmatch(condition)
        if match is None:
            raise ValueError(f"{condition[:100]!r} is no condition. Write it as `model.class_name=CNN` or `step>100`.")
        check_columns(runs, [match["column"]])
        runs = [run for run in runs if _meets(value_of(run, match["column"]), match["operator"], match["value"])]
    return list(runs)


def _meets(value: Any, sign: str, expected: str) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    with suppress(ValueError):
        if is_number:
            return _SIGNS[sign](value, float(expected))
    if sign in ("=", "!="):
        text = json.dumps(value) if value is None or isinstance(value, bool) else str(value)
        return fnmatch.fnmatchcase(text, expected) is (sign == "=")
    return value is not None and _SIGNS[sign](str(value), expected)


def ordered(runs: Sequence[RunRecord], column: str | None) -> list[RunRecord]:
    """The runs by a column: metrics best first, others ascending; `-age` is descending. Runs without a value are last.

    None: the newest first.
    """
    if column is None:
        return list(reversed(runs))
    is_reversed = column.startswith("-")
    column = column.removeprefix("-")
    check_columns(runs, [column])
    values = [(value_of(run, column), run) for run in runs]
    is_there = lambda value: value is not None and value == value  # NaN is not
    having = [(value, run) for value, run in values if is_there(value)]
    of_numbers = all(isinstance(value, int | float) for value, _ in having)
    having.sort(key=lambda pair: pair[0] if of_numbers else str(pair[0]))
    kind, _, metric = column.partition(":")
    name = metric if kind in _OF_METRIC else column
    modes = [run.monitor[1] for run in runs if run.monitor is not None and run.monitor[0] == name]
    is_metric = column not in _PROPERTIES and any(name in run.curves for run in runs)
    if is_reversed is not (is_metric and (modes[0] if modes else direction_of(name)) == "max"):  # higher is better
        having.reverse()
    return [run for _, run in having] + [run for value, run in values if not is_there(value)]
