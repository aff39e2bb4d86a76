"""All runs below a folder: `find_runs` reads a summary of each; the columns of a table of them, and what selects rows.

A column is a property of the run (`status`), a metric (`val/acc`: its best value; `last:val/acc`, `min:…`, `max:…`), or
a key of the configuration (`model.class_name`).
"""

import fnmatch
import json
import math
import operator
import os
import re
import stat
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any

from jax_trainer.checkpoint.folder import CHECKPOINTS, CONFIG, LOCK, METRICS, RECORD
from jax_trainer.checkpoint.ranking import Direction
from jax_trainer.config.redaction import redact
from jax_trainer.diagnostics.suggestions import suggestion
from jax_trainer.tools.reports import record as run_files
from jax_trainer.tools.reports.record import part

_READ_FROM = (RECORD, METRICS, run_files.HPARAMS, CONFIG, run_files.TIMES)
_MAX_DEPTH = 8
_MAX_NAMES = 2_000  # of metrics
_ALWAYS = ("run", "status", "age", "duration", "epoch", "step")
_OF_METRIC = ("best", "last", "min", "max")
_MAX_METRICS = 3  # columns, by default
_CONDITION = re.compile(r"(?P<column>.+?)\s*(?P<operator>!=|<=|>=|=|<|>)\s*(?P<value>.*)", re.DOTALL)
_SIGNS = {"=": operator.eq, "!=": operator.ne}
_SIGNS |= {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}


@dataclass
class MetricSummary:
    """A metric over a run: its last, smallest and largest value; NaN is never the best."""

    last: float
    min: float
    max: float


@dataclass(frozen=True)
class RunSummary:
    """A run, in short.

    Attributes:
        path: the run folder.
        name: its path below the folder that was searched.
        status: one of `STATUSES`; unknown without a `run.json`.
        age: seconds since it was created.
        duration: seconds that it has run, all starts together; None before its first save.
        epoch, step: the last ones with metrics.
        metrics: by name.
        config: the configuration by dotted key.
        facts: from `run.json`: created, host, commit, parameters, reason, starts, changes.
    """

    path: Path
    name: str
    status: str
    age: float
    duration: float | None
    epoch: int
    step: int
    metrics: Mapping[str, MetricSummary] = field(repr=False)
    config: Mapping[str, Any] = field(repr=False)
    facts: Mapping[str, Any] = field(repr=False)

    @property
    def monitor(self) -> tuple[str, Direction | None] | None:
        """The metric that selects the best checkpoint, and its direction (None: unclear); None without metrics."""
        return run_files.monitored(self.config, self.metrics)

    def best(self, metric: str) -> float | None:
        """The best value of a metric; the last one if its name does not tell which values are better."""
        found = self.metrics.get(metric)
        if found is None:
            return None
        monitor = self.monitor
        mode = monitor[1] if monitor is not None and monitor[0] == metric else run_files.direction_of(metric)
        return found.last if mode is None else getattr(found, mode)


def find_runs(folder: Path) -> list[RunSummary]:
    """All runs in `folder`, or the one whose folder it is, by ascending time of creation."""
    folder, now = folder.absolute(), time.time()
    runs = [_summary(path, files, folder, now) for path, files in _run_folders(folder, 0)]
    return sorted(runs, key=lambda run: (-run.age, run.name))


Files = dict[str, float]  # those of `_READ_FROM` in a run folder, with the time of their last change


def _run_folders(folder: Path, depth: int) -> Iterator[tuple[Path, Files]]:
    """The run folders below `folder`, without following links."""
    try:
        entries = {entry.name: entry for entry in os.scandir(folder)}
    except OSError:
        return
    files = {}
    for name in entries.keys() & _READ_FROM:
        with suppress(OSError):
            found = entries[name].stat(follow_symlinks=False)
            if stat.S_ISREG(found.st_mode):
                files[name] = found.st_mtime
    if RECORD in files or (CONFIG in files and (METRICS in files or LOCK in entries or CHECKPOINTS in entries)):
        yield folder, files
    elif depth < _MAX_DEPTH:
        for name in sorted(entries):
            if not name.startswith(".") and entries[name].is_dir(follow_symlinks=False):
                yield from _run_folders(folder / name, depth + 1)


def _summary(path: Path, files: Files, folder: Path, now: float) -> RunSummary:
    record = _settings(path / RECORD)
    facts, (metrics, epoch, step) = _facts(record), _metrics(path, files)
    created, duration = min(files.values()), None
    with suppress(KeyError, ValueError, OverflowError):
        created = datetime.fromisoformat(facts["created"]).timestamp()
    if run_files.TIMES in files:
        with suppress(ValueError):
            duration = sum(start.wall for start in run_files.read_times(path / run_files.TIMES)[0])
    is_flat = run_files.HPARAMS in files
    config = _settings(path / run_files.HPARAMS).items() if is_flat else run_files.flat(_settings(path / CONFIG))
    return RunSummary(
        path=path,
        name=path.name if path == folder else path.relative_to(folder).as_posix(),
        status=run_files.status_of(path, record),
        age=max(now - created, 0.0),
        duration=duration,
        epoch=epoch,
        step=max(step, facts.get("step", 0)),
        metrics=metrics,
        config=dict(islice(config, run_files.MAX_KEYS)),
        facts=facts,
    )


def _settings(file: Path) -> dict[str, Any]:
    """The object in a file; empty if it cannot be read."""
    try:
        return run_files.read_settings(file)
    except ValueError:
        return {}


def _facts(record: Mapping[str, Any]) -> dict[str, Any]:
    """What `run.json` tells, as far as it has the expected types."""
    starts = run_files.starts_of(record)
    last = starts[-1] if starts else {}
    found = {
        **{name: part(record, name, str) for name in ("created", "host")},
        "commit": part(part(record, "git", dict), "commit", str),
        "parameters": part(part(record, "parameters", dict), "count", int),
        "reason": part(last, "reason", str),
        "step": part(last, "step", int),
        "starts": len(starts),
        "changes": ", ".join(f"{name} at step {step}" for step, name, _ in run_files.allowed_changes(record)),
    }
    return {name: value for name, value in found.items() if value}


def _metrics(path: Path, files: Files) -> tuple[dict[str, MetricSummary], int, int]:
    """The metrics of `metrics.jsonl`, and the last epoch and step."""
    metrics: dict[str, MetricSummary] = {}
    epoch = step = 0
    if METRICS in files:
        with suppress(ValueError):
            for row in filter(None, run_files.metric_rows(path)):
                step = max(step, row.pop("step"))
                if type(found := row.pop("epoch", None)) is int:
                    epoch = max(epoch, found)
                _add(row, metrics)
    return metrics, epoch, step


def _add(row: run_files.Row, metrics: dict[str, MetricSummary]) -> None:
    for name, value in row.items():
        value = value if type(value) is float else run_files.number_of(value)
        if value is None:
            continue
        if (known := metrics.get(name)) is not None:
            known.last = value
            known.min = value if value < known.min or math.isnan(known.min) else known.min
            known.max = value if value > known.max or math.isnan(known.max) else known.max
        elif len(metrics) < _MAX_NAMES:
            metrics[name] = MetricSummary(value, value, value)


# columns


_PROPERTIES = ("run", "status", "age", "duration", "epoch", "step", "created", "starts", "host", "commit", "parameters")
_PROPERTIES += ("reason", "changes")


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
        return getattr(run, "name" if column == "run" else column, run.facts.get(column))
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
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    with suppress(ValueError):
        if is_number:
            return _SIGNS[sign](value, float(expected))
    if sign in ("=", "!="):
        text = json.dumps(value) if value is None or isinstance(value, bool) else str(value)
        return fnmatch.fnmatchcase(text, expected) is (sign == "=")
    return value is not None and _SIGNS[sign](str(value), expected)


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
    is_there = lambda value: value is not None and value == value  # NaN is not
    having = [(value, run) for value, run in values if is_there(value)]
    of_numbers = all(isinstance(value, int | float) for value, _ in having)
    having.sort(key=lambda pair: pair[0] if of_numbers else str(pair[0]))
    if is_reversed is not _is_best_last(runs, column):
        having.reverse()
    return [run for _, run in having] + [run for value, run in values if not is_there(value)]


def _is_best_last(runs: Sequence[RunSummary], column: str) -> bool:
    """Whether higher values of a metric are better."""
    kind, _, metric = column.partition(":")
    name = metric if kind in _OF_METRIC else column
    modes = [run.monitor[1] for run in runs if run.monitor is not None and run.monitor[0] == name]
    is_metric = column not in _PROPERTIES and any(name in run.metrics for run in runs)
    return is_metric and (modes[0] if modes else run_files.direction_of(name)) == "max"
