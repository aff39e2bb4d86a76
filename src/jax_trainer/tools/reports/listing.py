"""All runs below a folder: `find_runs` reads a summary of each. What a damaged file cannot tell is left out."""

import json
import math
import os
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import yaml

from jax_trainer.checkpoint.files import open_regular, read_bounded, read_json
from jax_trainer.checkpoint.folder import CHECKPOINTS, CONFIG, METRICS, RECORD
from jax_trainer.checkpoint.lock import LOCK, is_locked
from jax_trainer.checkpoint.ranking import Direction, best_mode
from jax_trainer.config.settings import SettingsError
from jax_trainer.tools.reports.values import is_size, json_of, number_of

HPARAMS, TIMES = "hparams.json", "time.jsonl"
STATUSES = ("running", "completed", "stopped", "failed", "interrupted", "killed", "unknown")
_READ_FROM = (RECORD, METRICS, HPARAMS, CONFIG, TIMES)
_MAX_DEPTH = 8
_MAX_BYTES = 1 << 24
_MAX_KEYS = _MAX_NAMES = 2_000  # of a configuration; of metrics
_BLOCK, _MAX_LINE = 1 << 20, 1 << 22
_FACTS = {"created": str, "host": str, "commit": str, "parameters": int, "status": str, "reason": str, "started": float}
_FACTS |= {"ended": float, "seconds": float, "starts": int, "step": int, "changes": str, "wall": float}


class MetricSummary(NamedTuple):
    """A metric over a run: its last, smallest and largest value, each with its step; NaN is never the best."""

    last: float
    last_step: int
    min: float
    min_step: int
    max: float
    max_step: int


@dataclass(frozen=True)
class RunSummary:
    """A run, in short.

    Attributes:
        path: the run folder.
        name: its path below the folder that was searched.
        status: one of `STATUSES`. A run without an end whose folder is not locked was killed; one without a `run.json`
            is unknown.
        age: seconds since it was created.
        duration: seconds that it has run, all starts together; None if unknown.
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
        config = self.config
        savers = [key.removesuffix("class_name") for key, value in config.items() if value == "ModelCheckpoint"]
        named = [(config.get(f"{saver}monitor"), config.get(f"{saver}mode")) for saver in savers]
        named += [(config.get("metric"), config.get("mode"))]
        named += [(name, None) for name in ("val/loss", "train/loss_epoch", *self.metrics)]
        for name, mode in named:
            if isinstance(name, str) and name in self.metrics:
                return name, mode if mode in ("min", "max") else direction_of(name)
        return None

    def best(self, metric: str) -> float | None:
        """The best value of a metric; the last one if its name does not tell which values are better."""
        found = self.metrics.get(metric)
        if found is None:
            return None
        monitor = self.monitor
        mode = monitor[1] if monitor is not None and monitor[0] == metric else direction_of(metric)
        return found.last if mode is None else getattr(found, mode)


def direction_of(metric: str) -> Direction | None:
    """Whether lower or higher values of a metric are better, by its name; None if that is unclear."""
    try:
        return best_mode("auto", metric.removesuffix("_epoch").removesuffix("_step"))
    except SettingsError:
        return None


def find_runs(folder: Path) -> list[RunSummary]:
    """All runs in `folder`, or the one whose folder it is, by ascending time of creation."""
    folder, now = folder.absolute(), time.time()
    runs = [_summary(run, folder, now) for run in _run_folders(folder, 0)]
    return sorted(runs, key=lambda run: (-run.age, run.name))


# run folders


class _Run(NamedTuple):
    path: Path
    files: dict[str, float]  # the time of the last change
    has_lock: bool


def _run_folders(folder: Path, depth: int) -> Iterator[_Run]:
    """The run folders below `folder`, without following links."""
    try:
        entries = {entry.name: entry for entry in os.scandir(folder)}
    except OSError:
        return
    files, has_lock = {}, False
    for name in (*_READ_FROM, LOCK):
        if name in entries:
            with suppress(OSError):
                found = entries[name].stat(follow_symlinks=False)
                if stat.S_ISREG(found.st_mode) and name == LOCK:
                    has_lock = found.st_size > 0  # it is emptied when it is released
                elif stat.S_ISREG(found.st_mode):
                    files[name] = found.st_mtime
    if RECORD in files or (CONFIG in files and (METRICS in files or LOCK in entries or CHECKPOINTS in entries)):
        yield _Run(folder, files, has_lock)
    elif depth < _MAX_DEPTH:
        for name in sorted(entries):
            if not name.startswith(".") and entries[name].is_dir(follow_symlinks=False):
                yield from _run_folders(folder / name, depth + 1)


def _summary(run: _Run, folder: Path, now: float) -> RunSummary:
    facts = _facts(run)
    metrics, epoch, step = _metrics(run)
    changed, oldest = (choose(run.files.values(), default=0.0) for choose in (max, min))
    status = facts.get("status", "unknown")
    if run.has_lock and is_locked(run.path):
        status = "running"
    elif status == "running":
        status = "killed"
    started, ended = facts.get("started"), facts.get("ended")
    duration = facts.get("wall", facts.get("seconds"))
    if started is not None and ended is None and "wall" not in facts:
        duration = (duration or 0.0) + max((now if status == "running" else changed) - started, 0.0)
    created = _timestamp(facts.get("created"))
    return RunSummary(
        path=run.path,
        name=run.path.name if run.path == folder else run.path.relative_to(folder).as_posix(),
        status=status if status in STATUSES else "unknown",
        age=max(now - (oldest if created is None else created), 0.0),
        duration=duration,
        epoch=epoch,
        step=max(step, facts.get("step", 0)),
        metrics=metrics,
        config=_config(run),
        facts=facts,
    )


# what is read


def _config(run: _Run) -> dict[str, Any]:
    """The configuration by dotted key; empty if it cannot be read."""
    try:
        data = read_settings(run.path / (HPARAMS if HPARAMS in run.files else CONFIG))
    except ValueError:
        return {}
    return dict(islice(data.items() if HPARAMS in run.files else flat(data, ""), _MAX_KEYS))


def read_settings(file: Path) -> dict[str, Any]:
    """The object in a JSON or YAML file; a `ValueError` if it cannot be read."""
    if file.suffix == ".json":
        return read_json(file, _MAX_BYTES)
    # `safe_load`, but ten times as fast where PyYAML was built with libyaml
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)(read_bounded(file, _MAX_BYTES))
    try:
        data = loader.get_single_data()
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(" ".join(str(error).split())) from error
    finally:
        loader.dispose()
    if not isinstance(data, dict):
        raise ValueError("it is not a section")
    return data


def flat(data: Any, above: str) -> Iterator[tuple[str, Any]]:
    """Nested data as dotted keys and values.

    >>> dict(flat({"model": {"hidden": [16, 32], "act": "gelu"}}, ""))
    {'model.hidden.0': 16, 'model.hidden.1': 32, 'model.act': 'gelu'}
    """
    if isinstance(data, dict | list):
        for name, value in data.items() if isinstance(data, dict) else enumerate(data):
            yield from flat(value, f"{above}.{name}" if above else str(name))
    elif above:
        yield above, data if isinstance(data, str | int | float | None) else str(data)


def _facts(run: _Run) -> dict[str, Any]:
    """What `run.json` tells, as far as it has the expected types."""
    try:
        record = read_json(run.path / RECORD, _MAX_BYTES)
    except ValueError:
        return {}
    starts = [one for one in _part(record, "starts", list) if isinstance(one, dict)]
    times = [(_timestamp(one.get("start")), _timestamp(one.get("end"))) for one in starts]
    last = starts[-1] if starts else {}
    found = {
        "created": record.get("created"),
        "host": record.get("host"),
        "commit": _part(record, "git", dict).get("commit"),
        "parameters": _part(record, "parameters", dict).get("count"),
        "status": last.get("status"),
        "reason": last.get("reason"),
        "step": last.get("step"),
        "started": times[-1][0] if times else None,
        "ended": times[-1][1] if times else None,
        "seconds": sum((max(end - start, 0.0) for start, end in times if start and end), 0.0),
        "starts": len(starts),
        "changes": ", ".join(f"{part} at step {step}" for step, part, _ in allowed_changes(record)) or None,
        "wall": _wall(run),
    }
    return {name: value for name, value in found.items() if type(value) is _FACTS[name]}


def _wall(run: _Run) -> float | None:
    """Seconds of all starts, as `jax-trainer time` counts them; None for a run of before there was a `time.jsonl`."""
    if TIMES not in run.files:
        return None
    try:
        lines = read_bounded(run.path / TIMES, _MAX_BYTES).splitlines()
    except ValueError:
        return None
    # the last row of each start; one that was cut by a crash is none
    rows = map(json_of, {line.partition(",")[0]: line for line in lines if line.endswith("}")}.values())
    walls = [number_of(row.get("wall")) for row in rows if isinstance(row, dict)]
    return sum((wall for wall in walls if is_size(wall)), 0.0)


def allowed_changes(record: Mapping[str, Any]) -> list[tuple[int, str, str]]:
    """What a run computes differently since it was resumed: the step from which on, the part, and how it differs."""
    starts = [one for one in _part(record, "starts", list) if isinstance(one, dict)]
    changes = [(one.get("from_step"), change) for one in starts for change in _part(one, "allowed", list)]
    return [
        (step, change[0], change[1])
        for step, change in changes
        if type(step) is int and isinstance(change, list) and [*map(type, change)] == [str, str]
    ]


def _part(record: Mapping[str, Any], name: str, kind: Any) -> Any:
    return record[name] if isinstance(record.get(name), kind) else kind()


def _timestamp(text: Any) -> float | None:
    try:
        return datetime.fromisoformat(text).timestamp()
    except (TypeError, ValueError, OverflowError):
        return None


def _metrics(run: _Run) -> tuple[dict[str, MetricSummary], int, int]:
    """The metrics of `metrics.jsonl`, and the last epoch and step."""
    metrics: dict[str, list[Any]] = {}
    epoch = step = 0
    if METRICS in run.files:
        with suppress(ValueError), open_regular(run.path / METRICS) as file:
            for row in _rows(file):
                _add(row, metrics)
                step = max(step, row["step"])
                if type(found := row.get("epoch")) is int:
                    epoch = max(epoch, found)
    return {name: MetricSummary(*values) for name, values in metrics.items()}, epoch, step


def _rows(file: BinaryIO) -> Iterator[dict[str, Any]]:
    """The rows of the complete lines; lines that are none, such as one that was cut by a crash, are left out."""
    rest = b""
    while block := file.read(_BLOCK):
        *lines, rest = (rest + block).split(b"\n")
        try:
            rows = json.loads(b"[" + b",".join(lines) + b"]")  # at once: most of the time of reading is spent per call
        except (ValueError, RecursionError):
            rows = map(json_of, lines)
        yield from filter(is_row, rows)
        rest = rest if len(rest) <= _MAX_LINE else rest[:1]  # a line without an end is not kept in memory


def _add(row: Mapping[str, Any], metrics: dict[str, list[Any]]) -> None:
    step = row["step"]
    for name, value in row.items():
        if name == "step":
            continue
        if type(value) is not float:
            value = number_of(value)
            if value is None or name == "epoch":
                continue
        old = metrics.get(name)
        if old is None:
            if len(metrics) < _MAX_NAMES:
                metrics[name] = [value, step] * 3
            continue
        old[0], old[1] = value, step
        if value < old[2] or math.isnan(old[2]):
            old[2], old[3] = value, step
        if value > old[4] or math.isnan(old[4]):
            old[4], old[5] = value, step


def is_row(row: Any) -> bool:
    """Whether the data of a line of `metrics.jsonl` is a row."""
    return isinstance(row, dict) and type(row.get("step")) is int
