"""`read_run`: what a run folder says about its run, as plain data.

A folder may come from somebody else, or from a run that was killed while writing: links are refused, files are read up
to a size, and lines and values that are not as expected are counted and left out.
"""

import json
import math
import os
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, TypeGuard

import yaml

from jax_trainer.checkpoint.files import read_bounded, read_json
from jax_trainer.checkpoint.folder import CHECKPOINTS, CONFIG, METRICS, RunFolder
from jax_trainer.checkpoint.lock import is_locked
from jax_trainer.checkpoint.ranking import Direction, best_mode, is_better
from jax_trainer.redaction import redact
from jax_trainer.settings import SettingsError

_MAX_BYTES = 1 << 24  # of a JSON or YAML file
_MAX_LOG, _MAX_TIMES = 1 << 22, 1 << 26
_MAX_KEYS = 2_000  # of a configuration
_MAX_DEPTH = 30  # of nested data
_MAX_INLINE = 40  # items of a list that is shown on one line
_MAX_CLASSES = 200  # of a confusion matrix
_MAX_NOTICES = 400
_CHECKPOINT = re.compile(r"step_([0-9]{8,18})")
_LOG_LINE = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),\d+ (DEBUG|INFO|WARNING|ERROR|CRITICAL) (.*)")
_ENDED = re.compile(r"Run ([a-z]+)\.")
_NOT_CURVES = frozenset(("step", "epoch", "examples", "tokens", "seconds"))  # where a row lies on an x-axis
_SPECIAL = frozenset(("media", "arrays", "text", "histograms", "hparams"))  # keys of rows without scalars


@dataclass
class Curve:
    """The values of a metric by ascending step; NaN and infinities included."""

    steps: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def put(self, step: int, value: float) -> None:
        """Adds a value; one of the same step, before a resume, is replaced."""
        if not self.steps or step > self.steps[-1]:
            self.steps.append(step)
            self.values.append(value)
            return
        where = bisect_left(self.steps, step)
        same = self.steps[where : where + 1] == [step]
        self.steps[where : where + same] = [step]
        self.values[where : where + same] = [value]


@dataclass(frozen=True)
class BestValue:
    """The best value of the monitored metric."""

    metric: str
    mode: Direction
    value: float
    step: int


@dataclass(frozen=True)
class Start:
    """One start of a run: the seconds of each phase, and in total."""

    number: int
    wall: float
    seconds: Mapping[str, float]
    status: str = ""


@dataclass(frozen=True)
class SavedStep:
    """A checkpoint: its step, metrics and size."""

    step: int
    epoch: int
    metrics: Mapping[str, float]
    bytes: int
    note: str = ""


@dataclass(frozen=True)
class LogLine:
    """A message of `run.log`, or an edit of the training state."""

    time: str
    level: str
    text: str


@dataclass(kw_only=True)
class RunRecord:
    """A run, as its folder describes it.

    Attributes:
        path: the run folder.
        status: running, completed, stopped, interrupted, failed, killed or unknown.
        config: the configuration by dotted key.
        curves: every scalar metric by its name.
        epochs: the last step of every epoch, as (step, epoch).
        seconds: the running time at a step, as (step, seconds); all starts together.
        batch_size: examples per step; None if unknown.
        best: the best value of the monitored metric.
        evaluations: the latest scalars of each evaluation set, with `step` and `epoch`.
        matrices: the latest confusion matrix by name, as (step, rows).
        media: images by name, as (step, file), by ascending step.
        texts: the latest logged text by name, as (step, text).
        histograms: the latest histogram by name, as (step, edges, counts).
        checkpoints: by ascending step.
        starts: where the time of every start went.
        log: messages of the run.
        provenance: the content of `run.json`.
        versions: of the packages that wrote the latest checkpoint.
        notes: what could not be read.
    """

    path: Path
    status: str = "unknown"
    config: dict[str, Any] = field(default_factory=dict)
    curves: dict[str, Curve] = field(default_factory=dict)
    epochs: list[tuple[int, int]] = field(default_factory=list)
    seconds: list[tuple[int, float]] = field(default_factory=list)
    batch_size: int | None = None
    best: BestValue | None = None
    evaluations: dict[str, dict[str, float]] = field(default_factory=dict)
    matrices: dict[str, tuple[int, list[list[float]]]] = field(default_factory=dict)
    media: dict[str, list[tuple[int, Path]]] = field(default_factory=dict)
    texts: dict[str, tuple[int, str]] = field(default_factory=dict)
    histograms: dict[str, tuple[int, list[float], list[float]]] = field(default_factory=dict)
    checkpoints: list[SavedStep] = field(default_factory=list)
    starts: list[Start] = field(default_factory=list)
    log: list[LogLine] = field(default_factory=list)
    provenance: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def last_step(self) -> int:
        """The last step with a metric."""
        return max((curve.steps[-1] for curve in self.curves.values()), default=0)

    @property
    def wall(self) -> float | None:
        """Running time in seconds; None if unknown."""
        if self.starts:
            return sum(start.wall for start in self.starts)
        return self.seconds[-1][1] if self.seconds else None


def read_run(folder: str | Path) -> RunRecord:
    """Reads a run folder; a `FileNotFoundError` or `ValueError` says why it cannot."""
    path = Path(folder).absolute()
    if not (path / METRICS).is_file():
        RunFolder.open(path)
        raise ValueError(f"{path} has no {METRICS}: its run has logged nothing yet. Wait for its first metrics.")
    if (path / CONFIG).exists():
        RunFolder.open(path)  # refuses links
    record = RunRecord(path=path)
    _read_metrics(record)
    if not record.curves:
        raise ValueError(f"{path / METRICS} has no metrics yet: there is nothing to show. Wait for the first ones.")
    record.config = _config(record)
    record.provenance = _json(record, path / "run.json")
    _read_checkpoints(record)
    _read_evaluations(record)
    _read_log(record)
    _read_times(record)
    record.batch_size = record.batch_size or _configured_batch_size(record.config)
    record.best = _best(record)
    record.status = _status(record)
    return record


# metrics.jsonl


def _read_metrics(record: RunRecord) -> None:
    damaged = 0
    edits = []
    with _opened(record.path / METRICS) as lines:
        for line in lines:
            row = _parsed(line)
            if not isinstance(row, dict) or not _is_count(step := row.get("step")):
                damaged += 1
                continue
            if isinstance(edit := row.get("edit"), dict):
                text = ", ".join(f"{key}: {value}" for key, value in edit.items())
                edits.append(LogLine("", "EDIT", f"step {step}: {text}"))
            elif any(isinstance(row[kind], dict) for kind in _SPECIAL & row.keys()):
                _read_special(record, step, row)
            else:
                _read_scalars(record, step, row)
    record.log += edits
    if damaged:
        record.notes.append(f"{METRICS}: {damaged} lines could not be read and are left out.")


def _read_scalars(record: RunRecord, step: int, row: Mapping[str, Any]) -> None:
    for name, value in row.items():
        number = None if name in _NOT_CURVES else _number(value)
        if number is not None:
            curve = record.curves.get(name) or record.curves.setdefault(name, Curve())
            curve.put(step, number)
    if _is_count(epoch := row.get("epoch")) and epoch:
        while record.epochs and (record.epochs[-1][0] >= step or record.epochs[-1][1] >= epoch):
            record.epochs.pop()
        record.epochs.append((step, epoch))


def _read_special(record: RunRecord, step: int, row: Mapping[str, Any]) -> None:
    for name, path in _items(row, "media"):
        if isinstance(path, str) and (file := _inside(record.path, path)) is not None:
            shown = [one for one in record.media.get(name, []) if one[0] < step]
            record.media[name] = [*shown, (step, file)]
    for name, array in _items(row, "arrays"):
        if (matrix := _matrix(array)) is not None:
            record.matrices[name] = step, matrix
    for name, text in _items(row, "text"):
        record.texts[name] = step, str(text)
    for name, bins in _items(row, "histograms"):
        counts, edges = (_numbers(bins, key) for key in ("counts", "edges"))
        if counts and len(edges) == len(counts) + 1:
            record.histograms[name] = step, edges, counts


def _items(row: Mapping[str, Any], kind: str) -> list[tuple[str, Any]]:
    found = row.get(kind)
    return list(found.items()) if isinstance(found, dict) else []


def _numbers(data: Any, key: str) -> list[float]:
    found = data.get(key) if isinstance(data, dict) else None
    return [one for one in map(_number, found) if _is_size(one)] if isinstance(found, list) else []


def _matrix(array: Any) -> list[list[float]] | None:
    """A square matrix of counts; None for any other array."""
    if not isinstance(array, list) or not 2 <= len(array) <= _MAX_CLASSES:
        return None
    rows = [[_number(cell) for cell in row] if isinstance(row, list) else [] for row in array]
    if any(len(row) != len(array) or any(not _is_size(cell) or cell < 0 for cell in row) for row in rows):
        return None
    return [[cell for cell in row if cell is not None] for row in rows]


# other files


def _config(record: RunRecord) -> dict[str, Any]:
    """The configuration by dotted key, without secrets."""
    try:
        data = yaml.safe_load(read_bounded(record.path / CONFIG, _MAX_BYTES))
        found = list(islice(flattened(data), _MAX_KEYS + 1))
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        if (record.path / CONFIG).exists():
            record.notes.append(f"{CONFIG} could not be read: {type(error).__name__}.")
        return {}
    if len(found) > _MAX_KEYS:
        record.notes.append(f"{CONFIG}: only the first {_MAX_KEYS} keys are shown.")
    return redact(dict(found[:_MAX_KEYS]))


def flattened(data: Any, above: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Nested data as dotted keys and values; short lists of scalars stay values.

    >>> dict(flattened({"model": {"hidden": [16, 32], "act": "gelu"}}))
    {'model.hidden': '[16, 32]', 'model.act': 'gelu'}
    """
    if depth > _MAX_DEPTH:
        yield above, "…"
        return
    if isinstance(data, dict) and data:
        pairs = list(data.items())
    elif isinstance(data, list) and (len(data) > _MAX_INLINE or any(isinstance(one, dict | list) for one in data)):
        pairs = list(enumerate(data))
    else:
        if above:
            yield above, data if isinstance(data, str | int | float | None) else str(data)
        return
    for name, value in pairs:
        yield from flattened(value, f"{above}.{name}" if above else str(name), depth + 1)


def _read_checkpoints(record: RunRecord) -> None:
    folder = record.path / CHECKPOINTS
    names = sorted(os.listdir(folder)) if folder.is_dir() and not folder.is_symlink() else []
    for name in names:
        if (match := _CHECKPOINT.fullmatch(name)) is None:
            continue
        saved = _json(record, folder / name / "checkpoint.json")
        size = sum(
            os.lstat(os.path.join(parent, file)).st_size
            for parent, _, files in os.walk(folder / name)
            for file in files
        )
        metrics = {key: number for key, value in _items(saved, "metrics") if (number := _number(value)) is not None}
        epoch = saved.get("epoch")
        note = "" if saved else "damaged"
        record.checkpoints.append(SavedStep(int(match[1]), epoch if type(epoch) is int else 0, metrics, size, note))
        record.versions = {str(key): str(value) for key, value in _items(saved, "versions")} or record.versions
        loop = dict(_items(saved, "run")).get("loop")
        if isinstance(loop, dict) and type(batch_size := loop.get("batch_size")) is int and batch_size > 0:
            record.batch_size = batch_size


def _read_evaluations(record: RunRecord) -> None:
    folder = record.path / "metrics"
    names = sorted(os.listdir(folder)) if folder.is_dir() and not folder.is_symlink() else []
    for name in names:
        if not name.endswith(".json"):
            continue
        values = _json(record, folder / name)
        step = int(_number(values.get("step")) or 0)
        scalars = {key: number for key, value in values.items() if (number := _number(value)) is not None}
        if scalars:
            record.evaluations[name.removesuffix(".json")] = scalars
        for key, array in values.items():
            if (matrix := _matrix(array)) is not None:
                record.matrices[key] = step, matrix


def _read_log(record: RunRecord) -> None:
    """The messages of `run.log`; lines without a time continue the message above."""
    try:
        text = read_bounded(record.path / "run.log", _MAX_LOG)
    except ValueError as error:
        if (record.path / "run.log").exists():
            record.notes.append(f"run.log could not be read: {error}.")
        return
    found: list[LogLine] = []
    for line in text.splitlines():
        if match := _LOG_LINE.fullmatch(line):
            found.append(LogLine(match[1], match[2], match[3]))
        elif found:
            found[-1] = LogLine(found[-1].time, found[-1].level, f"{found[-1].text}\n{line}"[:4_000])
    if len(found) > _MAX_NOTICES:
        record.notes.append(f"run.log: only the last {_MAX_NOTICES} of {len(found)} messages are shown.")
    here = f"{record.path}/"
    shown = [LogLine(one.time, one.level, redact(one.text.replace(here, ""))) for one in found[-_MAX_NOTICES:]]
    record.log = shown + record.log


def _read_times(record: RunRecord) -> None:
    """`time.jsonl`; without it, the running time is that of epochs and evaluations."""
    file = record.path / "time.jsonl"
    if not file.is_file():
        record.seconds = _seconds_of_epochs(record.curves)
        return
    last: dict[int, Start] = {}
    points: list[tuple[int, float]] = []
    try:
        lines = read_bounded(file, _MAX_TIMES).splitlines()
    except ValueError as error:
        record.notes.append(f"{error}.")
        return
    for row in map(_parsed, lines):
        number, wall = (row.get("start"), _number(row.get("wall"))) if isinstance(row, dict) else (None, None)
        if not isinstance(row, dict) or not _is_count(number) or not _is_size(wall) or wall < 0:
            continue
        if number not in last and _is_count(resumed := row.get("from")):
            points = [point for point in points if point[0] <= resumed]
        seconds = {key: one for key, value in _items(row, "seconds") if _is_size(one := _number(value)) and one > 0}
        last[number] = Start(number, wall, seconds, str(row.get("status", "")))
        if _is_count(step := row.get("step")):
            while points and points[-1][0] >= step:
                points.pop()
            points.append((step, sum(one.wall for one in last.values())))
    record.starts, record.seconds = list(last.values()), points


def _seconds_of_epochs(curves: Mapping[str, Curve]) -> list[tuple[int, float]]:
    """The running time at the end of every epoch, with the validations until then."""
    epochs, evaluations = curves.get("train/time_epoch", Curve()), curves.get("val/time", Curve())
    points, total, evaluated = [(0, 0.0)], 0.0, 0
    for step, seconds in zip(epochs.steps, epochs.values, strict=True):
        until = bisect_right(evaluations.steps, step)
        total += sum(one for one in (seconds, *evaluations.values[evaluated:until]) if math.isfinite(one))
        evaluated = until
        points.append((step, total))
    return points if total else []


# what follows from them


def _configured_batch_size(config: Mapping[str, Any]) -> int | None:
    sizes = (config.get(key) for key in ("dataset.global_batch_size", "batch_size"))
    return next((size for size in sizes if type(size) is int and size > 0), None)


def _best(record: RunRecord) -> BestValue | None:
    """The best value of the metric that selects checkpoints, or of the validation loss."""
    config = record.config
    savers = [key.removesuffix("class_name") for key, value in config.items() if value == "ModelCheckpoint"]
    named = [(config.get(f"{saver}monitor"), config.get(f"{saver}mode", "auto")) for saver in savers]
    named += [(config.get("metric"), config.get("mode", "auto")), ("val/loss", "min")]
    monitor, mode = next(((one, how) for one, how in named if one in record.curves), (None, None))
    if not isinstance(monitor, str) or mode not in ("min", "max", "auto"):
        return None
    try:
        direction = best_mode(mode, monitor)
    except SettingsError:  # `auto`, and the name does not say
        return None
    curve = record.curves[monitor]
    best: BestValue | None = None
    for step, value in zip(curve.steps, curve.values, strict=True):
        if is_better(value, None if best is None else best.value, direction):
            best = BestValue(monitor, direction, value, step)
    return best


def _status(record: RunRecord) -> str:
    if is_locked(record.path):
        return "running"
    starts = record.provenance.get("starts")
    started = starts[-1] if isinstance(starts, list) and starts else record.provenance
    found = started.get("status") if isinstance(started, dict) else None
    if not isinstance(found, str) and record.starts:
        found = record.starts[-1].status
    if not isinstance(found, str) or not found:
        endings = [match[1] for line in record.log if (match := _ENDED.match(line.text))]
        return endings[-1] if endings else "unknown"
    return "killed" if found == "running" else found  # nobody holds its lock


# values


def _number(value: Any) -> float | None:
    """A number, also one that JSON cannot represent; None for anything else."""
    if type(value) is float:
        return value
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    if isinstance(value, str) and value not in ("nan", "inf", "-inf", "NaN", "Infinity", "-Infinity"):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _is_count(value: Any) -> TypeGuard[int]:
    """Whether it is a step or an epoch; larger integers are no exact numbers in a page."""
    return type(value) is int and 0 <= value < 2**53


def _is_size(value: float | None) -> TypeGuard[float]:
    """Whether it is a number that can be drawn."""
    return value is not None and abs(value) < 1e15


def _parsed(line: str | bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):  # killed while writing
        return None


def _json(record: RunRecord, file: Path) -> dict[str, Any]:
    """A JSON object without secrets; empty if there is none, with a note if it cannot be read."""
    if not file.exists():
        return {}
    try:
        return redact(read_json(file, _MAX_BYTES))
    except (ValueError, RecursionError):
        record.notes.append(f"{file.relative_to(record.path)} could not be read.")
        return {}


def _opened(file: Path) -> Any:
    return os.fdopen(os.open(file, os.O_RDONLY | os.O_NOFOLLOW), "rb")


def _inside(folder: Path, path: str) -> Path | None:
    """The regular file at a relative path in `folder`; None if it is none, or leads out of it."""
    try:
        file = (folder / path).resolve()
        return file if file.is_relative_to(folder.resolve()) and file.is_file() else None
    except (OSError, ValueError):
        return None


def names_of(paths: Sequence[Path]) -> list[str]:
    """Names of runs: as many of the last parts of their paths as tell them apart; two for a single run.

    >>> names_of([Path("/a/CNN/1"), Path("/a/CNN/2")]), names_of([Path("/a/x/1"), Path("/b/x/1")])
    (['1', '2'], ['a/x/1', 'b/x/1'])
    """
    longest = max(len(path.parts) for path in paths)
    for count in range(1 if len(paths) > 1 else 2, longest + 1):
        names = ["/".join(path.parts[1:][-count:]) for path in paths]
        if len({*names}) == len(paths):
            return names
    return [str(path) for path in paths]
