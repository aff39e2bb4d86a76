"""All runs below a folder: `find_runs` returns a summary of each.

What was read is kept in an index file in that folder, with the sizes and times of the files that it was read from, so
the next call reads only runs that have changed; of a `metrics.jsonl` that has grown, only the new lines. An index that
is missing, damaged or cannot be written costs time, and nothing else.
"""

import json
import math
import os
import stat
import time
import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from jax_trainer.checkpoint.files import open_regular, read_bounded, read_json, write_atomically
from jax_trainer.checkpoint.folder import CHECKPOINTS, CONFIG, METRICS, RECORD
from jax_trainer.checkpoint.lock import LOCK, is_locked
from jax_trainer.checkpoint.ranking import Direction, best_mode
from jax_trainer.reports.values import is_size, json_of, number_of
from jax_trainer.settings import SettingsError

INDEX = ".jax-trainer-index.json"
HPARAMS, TIMES = "hparams.json", "time.jsonl"
STATUSES = ("running", "completed", "stopped", "failed", "interrupted", "killed", "unknown")
_FORMAT = 2
_READ_FROM = (RECORD, METRICS, HPARAMS, CONFIG, TIMES)
_MAX_DEPTH = 8
_MAX_BYTES, _MAX_INDEX = 1 << 24, 1 << 28
_MAX_KEYS = _MAX_NAMES = 2_000  # of a configuration; of metrics
_BLOCK, _MAX_LINE, _TAIL = 1 << 20, 1 << 22, 256
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
    folder = folder.absolute()
    found = list(_run_folders(folder, 0))
    known = {} if found and found[0].path == folder else _read_index(folder)
    entries: dict[str, dict[str, Any]] = {}
    for run in found:
        name = run.path.relative_to(folder).as_posix()
        entries[name] = _entry(run, known.get(name))
    if entries and "." not in entries and entries != known:
        with suppress(OSError):  # a folder of somebody else, or a full disk
            write_atomically(folder / INDEX, json.dumps({"format": _FORMAT, "runs": entries}), sync=False)
    now = time.time()
    runs = [_summary(run, name, entries[name], now) for run, name in zip(found, entries, strict=True)]
    return sorted(runs, key=lambda run: (-run.age, run.name))


# run folders


class _Run(NamedTuple):
    path: Path
    files: dict[str, tuple[int, int]]  # time of change in ns, and size
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
                    files[name] = (found.st_mtime_ns, found.st_size)
    if RECORD in files or (CONFIG in files and (METRICS in files or LOCK in entries or CHECKPOINTS in entries)):
        yield _Run(folder, files, has_lock)
    elif depth < _MAX_DEPTH:
        for name in sorted(entries):
            if not name.startswith(".") and entries[name].is_dir(follow_symlinks=False):
                yield from _run_folders(folder / name, depth + 1)


def _summary(run: _Run, name: str, entry: Mapping[str, Any], now: float) -> RunSummary:
    facts = entry["facts"]
    changed = max((when for when, _ in run.files.values()), default=0) / 1e9
    oldest = min((when for when, _ in run.files.values()), default=0) / 1e9
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
        name=name if name != "." else run.path.name,
        status=status if status in STATUSES else "unknown",
        age=max(now - (oldest if created is None else created), 0.0),
        duration=duration,
        epoch=entry["epoch"],
        step=max(entry["step"], facts.get("step", 0)),
        metrics={metric: MetricSummary(*values) for metric, values in entry["metrics"].items()},
        config=entry["config"],
        facts=facts,
    )


# the index


def _read_index(folder: Path) -> dict[str, Any]:
    try:
        index = read_json(folder / INDEX, _MAX_INDEX)
    except ValueError:
        return {}
    runs = index.get("runs")
    return runs if index.get("format") == _FORMAT and isinstance(runs, dict) else {}


def _entry(run: _Run, known: Any) -> dict[str, Any]:
    """What the index has about a run: `known`, as far as it is up to date."""
    files = {name: list(state) for name, state in run.files.items()}
    before = known if _is_entry(known) else {"files": {}}
    old = before["files"]
    if old == files:
        return before
    entry = {"files": files}
    keeps = {name: name in old and old[name] == files.get(name) for name in _READ_FROM}
    is_same = all(old.get(name) == files.get(name) for name in (CONFIG, HPARAMS)) and "config" in before
    entry["config"] = before["config"] if is_same else _config(run)
    entry["facts"] = before["facts"] if keeps[RECORD] and old.get(TIMES) == files.get(TIMES) else _facts(run)
    metrics = {name: before[name] for name in ("metrics", "epoch", "step", "read", "tail") if name in before}
    return {**entry, **(metrics if keeps[METRICS] else _metrics(run, metrics))}


def _is_entry(known: Any) -> bool:
    """Whether an entry of the index is as it was written: anybody may have written to the file."""
    kinds = {"files": dict, "config": dict, "facts": dict, "metrics": dict, "epoch": int, "step": int, "read": int}
    if not isinstance(known, dict) or not all(isinstance(known.get(name), kind) for name, kind in kinds.items()):
        return False
    numbers = (float, int) * 3
    return (
        isinstance(known.get("tail"), int)
        and all(isinstance(value, _FACTS.get(name, ())) for name, value in known["facts"].items())
        and all(
            isinstance(values, list) and len(values) == 6 and all(map(isinstance, values, numbers))
            for values in known["metrics"].values()
        )
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


def _metrics(run: _Run, before: Mapping[str, Any]) -> dict[str, Any]:
    """The summary of `metrics.jsonl`, continued from an earlier one unless a resumed run has cut the file."""
    new: dict[str, Any] = {"metrics": {}, "epoch": 0, "step": 0, "read": 0, "tail": 0}
    if METRICS not in run.files:
        return new
    try:
        file = open_regular(run.path / METRICS)
    except ValueError:
        return new
    with file:
        if before and before["read"] and _tail(file, before["read"]) == before["tail"]:
            new = {**before, "metrics": {name: list(values) for name, values in before["metrics"].items()}}
        file.seek(new["read"])
        for lines, end in _blocks(file, new["read"]):
            new["read"] = end
            for row in _parsed(lines):
                _add(row, new)
        return {**new, "tail": _tail(file, new["read"])}


def _tail(file: Any, end: int) -> int:
    """A checksum of the bytes before `end`."""
    file.seek(max(end - _TAIL, 0))
    return zlib.crc32(file.read(min(_TAIL, end)))


def _blocks(file: Any, end: int) -> Iterator[tuple[list[bytes], int]]:
    """The complete lines of a file, block by block, with the position of their end; one that is too long is cut."""
    rest, cut = b"", 0
    while block := file.read(_BLOCK):
        *lines, rest = (rest + block).split(b"\n")
        if lines:
            end, cut = end + cut + sum(map(len, lines)) + len(lines), 0
            yield lines, end
        if len(rest) > _MAX_LINE:
            rest, cut = rest[:1], cut + len(rest) - 1


def _parsed(lines: list[bytes]) -> Iterator[dict[str, Any]]:
    """The rows of these lines; lines that are none, such as one that was cut by a crash, are left out."""
    try:
        rows = json.loads(b"[" + b",".join(lines) + b"]")  # at once: most of the time of reading is spent per call
    except (ValueError, RecursionError):
        rows = map(parsed_row, lines)
    return (row for row in rows if row is not None and _is_row(row))


def _add(row: Mapping[str, Any], summary: dict[str, Any]) -> None:
    step, metrics = row["step"], summary["metrics"]
    for name, value in row.items():
        if name == "step":
            continue
        if type(value) is not float:
            value = _number(value)
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
    summary["step"] = max(summary["step"], step)
    if type(epoch := row.get("epoch")) is int:
        summary["epoch"] = max(summary["epoch"], epoch)


def parsed_row(line: bytes) -> dict[str, Any] | None:
    """A row of `metrics.jsonl`; None if the line is not one."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if _is_row(row) else None


def _is_row(row: Any) -> bool:
    return isinstance(row, dict) and type(row.get("step")) is int


def _number(value: Any) -> float | None:
    """A scalar metric; NaN and infinities are strings in a row."""
    is_scalar = type(value) is int and abs(value) < 1 << 1000
    return float(value) if is_scalar or value in ("nan", "inf", "-inf") else None
