"""`read_run`: a run as its folder describes it, as plain data; and what else reads run folders with it.

A folder may come from somebody else, or from a run that was killed while writing: links are refused, files are read up
to a size, and every value is verified here, or left out.
"""

import json
import math
import os
import re
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import yaml

from jax_trainer.checkpoint.folder import CHECKPOINTS, CONFIG, METRICS, RECORD, RunFolder, is_locked
from jax_trainer.checkpoint.ranking import Direction, best_mode
from jax_trainer.config.redaction import redact
from jax_trainer.config.settings import SettingsError
from jax_trainer.diagnostics.files import open_regular, read_bounded, read_json

HPARAMS, TIMES = "hparams.json", "time.jsonl"
STATUSES = ("running", "completed", "stopped", "failed", "interrupted", "killed", "unknown")
INLINE = 40  # items of a list that is shown on one line
MAX_KEYS = 2_000  # of a configuration
_MAX_BYTES, _MAX_LINE, _MAX_LOG = 1 << 24, 1 << 22, 1 << 22  # of a file that is read at once, of a line, of `run.log`
_MAX_DEPTH = 30  # of nested data
_MAX_NOTICES = 400
_MAX_STEPS = 256  # of the histograms of an array; of more, every second one is left out
_MAX_CLASSES, _MAX_NAME = 1_000, 100  # names, and characters of one
_MAX_ROWS = 200  # of a confusion matrix
_CHECKPOINT = re.compile(r"step_([0-9]{8,18})")
_LOG_LINE = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),\d+ (DEBUG|INFO|WARNING|ERROR|CRITICAL) (.*)")
_NOT_CURVES = frozenset(("step", "epoch", "examples", "tokens", "seconds"))  # where a row lies on an x-axis
_SPECIAL = frozenset(("media", "arrays", "text", "histograms", "edit"))  # keys of rows with more than scalars

Row = dict[str, Any]


@dataclass
class Curve:
    """The values of a metric by ascending step; NaN and infinities included."""

    steps: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def put(self, step: int, value: float) -> None:
        """Adds a value; one of the same step, before a resume, is replaced."""
        where = bisect_left(self.steps, step)
        same = self.steps[where : where + 1] == [step]
        self.steps[where : where + same] = [step]
        self.values[where : where + same] = [value]

    @property
    def last(self) -> float:
        """The last value."""
        return self.values[-1]

    @property
    def min(self) -> float:
        """The smallest value; NaN only if there is no other."""
        return min([value for value in self.values if value == value] or self.values)

    @property
    def max(self) -> float:
        """The largest value; NaN only if there is no other."""
        return max([value for value in self.values if value == value] or self.values)


class BestValue(NamedTuple):
    """The best value of the monitored metric."""

    metric: str
    mode: Direction
    value: float
    step: int


class SavedStep(NamedTuple):
    """A checkpoint: its step, metrics and size."""

    step: int
    epoch: int
    metrics: Mapping[str, float]
    bytes: int
    note: str = ""
    without: Sequence[str] = ()


class Histogram(NamedTuple):
    """The values of an array at a step: `counts[i]` of them lie between `edges[i]` and `edges[i + 1]`."""

    step: int
    edges: Sequence[float]
    counts: Sequence[float]


class LogLine(NamedTuple):
    """A message of `run.log`, or an edit of the training state."""

    time: str
    level: str
    text: str


class Start(NamedTuple):
    """One start of a run: the seconds of each phase, and in total."""

    number: int
    wall: float
    seconds: Mapping[str, float]
    status: str = ""


@dataclass(kw_only=True)
class RunRecord:
    """A run, as its folder describes it.

    Attributes:
        path: the run folder.
        name: of `find_runs`: its path below the folder that was searched.
        age: of `find_runs`: seconds since it was created.
        status: one of `STATUSES`.
        config: the configuration by dotted key.
        curves: every scalar metric by its name.
        epochs: the last step of every epoch, as (step, epoch).
        seconds: the running time at a step, as (step, seconds); all starts together.
        batch_size: examples per step; None if unknown.
        sets: the names of the evaluation sets.
        matrices: the latest confusion matrix by name, as (step, rows).
        media: images by name, as (step, file), by ascending step.
        texts: the latest logged text by name, as (step, text).
        histograms: by name, by ascending step.
        classes: names of the classes of the data, by label.
        checkpoints: by ascending step.
        starts: where the time of every start went.
        log: the messages of the run, and the edits of its state.
        provenance: the content of `run.json`.
        notes: what could not be read.
    """

    path: Path
    name: str = ""
    age: float = 0.0
    status: str = "unknown"
    config: dict[str, Any] = field(default_factory=dict)
    curves: dict[str, Curve] = field(default_factory=dict)
    epochs: list[tuple[int, int]] = field(default_factory=list)
    seconds: list[tuple[int, float]] = field(default_factory=list)
    batch_size: int | None = None
    sets: list[str] = field(default_factory=list)
    matrices: dict[str, tuple[int, list[list[float]]]] = field(default_factory=dict)
    media: dict[str, list[tuple[int, Path]]] = field(default_factory=dict)
    texts: dict[str, tuple[int, str]] = field(default_factory=dict)
    histograms: dict[str, list[Histogram]] = field(default_factory=dict)
    classes: list[str] = field(default_factory=list)
    checkpoints: list[SavedStep] = field(default_factory=list)
    starts: list[Start] = field(default_factory=list)
    log: list[LogLine] = field(default_factory=list)
    provenance: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def last_step(self) -> int:
        """The last step with a metric, or of the last start."""
        steps = [curve.steps[-1] for curve in self.curves.values()]
        return max([*steps, *(part(start, "step", int) for start in starts_of(self.provenance)[-1:])], default=0)

    @property
    def wall(self) -> float | None:
        """Running time in seconds, all starts together; None if unknown."""
        return sum(start.wall for start in self.starts) if self.starts else None

    @property
    def monitor(self) -> tuple[str, Direction | None] | None:
        """The metric that selects the best checkpoint, and its direction (None: unclear); None without metrics."""
        return monitored(self.config, self.curves)

    @property
    def best(self) -> BestValue | None:
        """The best value of the metric that selects checkpoints, or of the loss."""
        monitor, direction = self.monitor or ("", None)
        if direction is None:
            return None
        curve, value = self.curves[monitor], self.best_of(monitor)
        return BestValue(monitor, direction, value, curve.steps[curve.values.index(value)])

    def best_of(self, metric: str) -> float:
        """The best value of a metric; the last one if its name does not tell which values are better."""
        name, direction = self.monitor or ("", None)
        mode = direction if name == metric else direction_of(metric)
        return getattr(self.curves[metric], mode or "last")


def read_run(folder: str | Path) -> RunRecord:
    """Reads a run folder; a `FileNotFoundError` or `ValueError` says why it cannot."""
    path = Path(folder).absolute()
    has_metrics = (path / METRICS).is_file()
    if not has_metrics or (path / CONFIG).exists():
        RunFolder.open(path)  # raises if it is no run, and refuses links
    if not has_metrics:
        raise ValueError(f"{path} has no {METRICS}: its run has logged nothing yet. Wait for its first metrics.")
    record = RunRecord(path=path)
    _read_metrics(record)
    if not record.curves:
        raise ValueError(f"{path / METRICS} has no metrics yet: there is nothing to show. Wait for the first ones.")
    _read_facts(record, CONFIG, is_public=True)
    names = part(record.provenance, "classes", list)
    if all(isinstance(name, str) for name in names):
        record.classes = [name[:_MAX_NAME] for name in names[:_MAX_CLASSES]]
    changes = allowed_changes(record.provenance)
    record.log += [LogLine("", "CHANGE", f"step {step}: {name}: {text}") for step, name, text in changes]
    _read_checkpoints(record)
    record.sets = [name.removesuffix(".json") for name in _names_in(path / "metrics") if name.endswith(".json")]
    _read_log(record)
    sizes = [record.config.get(key) for key in ("dataset.global_batch_size", "batch_size")]
    record.batch_size = next((size for size in sizes if type(size) is int and size > 0), None)
    return record


def read_summary(path: Path, name: str) -> RunRecord:
    """The configuration, the status and the times of a run; of its curves the last, smallest and largest values.

    What cannot be read is left out. Secrets of the configuration are not hidden.
    """
    record = RunRecord(path=path, name=name)
    with suppress(ValueError):
        _read_metrics(record, in_full=False)
    for curve in record.curves.values():
        places = {*map(curve.values.index, (curve.min, curve.max)), len(curve.values) - 1}
        curve.steps = [curve.steps[place] for place in sorted(places)]
        curve.values = [curve.values[place] for place in sorted(places)]
    _read_facts(record, HPARAMS if (path / HPARAMS).exists() else CONFIG)
    return record


def _read_facts(record: RunRecord, config: str, *, is_public: bool = False) -> None:
    keys = list(islice(flat(_settings(record, config), inline=INLINE), MAX_KEYS + 1))
    if len(keys) > MAX_KEYS:
        record.notes.append(f"{config}: only the first {MAX_KEYS} keys are shown.")
    record.config = redact(dict(keys[:MAX_KEYS])) if is_public else dict(keys[:MAX_KEYS])
    record.provenance = _settings(record, RECORD, is_public=is_public)
    status = starts_of(record.provenance)[-1].get("status") if starts_of(record.provenance) else None
    status = "killed" if status == "running" else status if status in STATUSES else "unknown"
    record.status = "running" if is_locked(record.path) else status  # without an end and a lock, it was killed
    with suppress(ValueError):
        record.starts, record.seconds = read_times(record.path / TIMES)


def _settings(record: RunRecord, name: str, *, is_public: bool = False) -> dict[str, Any]:
    """The object in a file; empty if there is none, with a note if it cannot be read."""
    try:
        data = read_settings(record.path / name) if (record.path / name).exists() else {}
        return redact(data) if is_public else data
    except (ValueError, RecursionError):
        record.notes.append(f"{name} could not be read.")
        return {}


def _read_metrics(record: RunRecord, *, in_full: bool = True) -> None:
    damaged = 0
    for row in metric_rows(record.path):
        if row is None:
            damaged += 1
            continue
        step, epochs = row["step"], record.epochs
        for name, value in row.items():
            number = None if name in _NOT_CURVES else number_of(value)
            if number is not None:
                (record.curves.get(name) or record.curves.setdefault(name, Curve())).put(step, number)
        if is_count(epoch := row.get("epoch")) and epoch:
            while epochs and (epochs[-1][0] >= step or epochs[-1][1] >= epoch):
                epochs.pop()
            epochs.append((step, epoch))
        if in_full and _SPECIAL & row.keys():
            _read_special(record, row["step"], row)
    if damaged:
        record.notes.append(f"{METRICS}: {damaged} lines could not be read and are left out.")


def _read_special(record: RunRecord, step: int, row: Row) -> None:
    if edit := part(row, "edit", dict):
        text = ", ".join(f"{key}: {value}" for key, value in edit.items())
        record.log.append(LogLine("", "EDIT", f"step {step}: {text}"))
    for name, path in part(row, "media", dict).items():
        if isinstance(path, str) and (file := _inside(record.path, path)) is not None:
            shown = [image for image in record.media.get(name, []) if image[0] < step]
            record.media[name] = [*shown, (step, file)]
    for name, array in part(row, "arrays", dict).items():
        if (matrix := matrix_of(array)) is not None:
            record.matrices[name] = step, matrix
    for name, text in part(row, "text", dict).items():
        record.texts[name] = step, str(text)
    for name, bins in part(row, "histograms", dict).items():
        counts, edges = (numbers_in(part(bins, key, list)) for key in ("counts", "edges"))
        if counts and len(edges) == len(counts) + 1 and edges == sorted(edges) and min(counts) >= 0:
            kept = [histogram for histogram in record.histograms.get(name, []) if histogram.step < step]
            kept = kept[::2] if len(kept) >= _MAX_STEPS else kept
            record.histograms[name] = [*kept, Histogram(step, edges, counts)]


def _inside(folder: Path, path: str) -> Path | None:
    """The regular file at a relative path in `folder`; None if it is none, or leads out of it."""
    try:
        file = (folder / path).resolve()
        return file if file.is_relative_to(folder.resolve()) and file.is_file() else None
    except (OSError, ValueError):
        return None


def _names_in(folder: Path) -> list[str]:
    return sorted(os.listdir(folder)) if folder.is_dir() and not folder.is_symlink() else []


def _read_checkpoints(record: RunRecord) -> None:
    for name in _names_in(record.path / CHECKPOINTS):
        if (match := _CHECKPOINT.fullmatch(name)) is None:
            continue
        saved = _settings(record, f"{CHECKPOINTS}/{name}/checkpoint.json")
        tree = os.walk(record.path / CHECKPOINTS / name)
        size = sum(os.lstat(os.path.join(parent, file)).st_size for parent, _, files in tree for file in files)
        named = {key: number_of(value) for key, value in part(saved, "metrics", dict).items()}
        metrics = {key: number for key, number in named.items() if number is not None}
        note = "" if saved else "damaged"
        record.checkpoints.append(SavedStep(int(match[1]), part(saved, "epoch", int), metrics, size, note))


def _read_log(record: RunRecord) -> None:
    """The messages of `run.log`; lines without a time continue the message above."""
    file = record.path / "run.log"
    try:
        lines = read_bounded(file, _MAX_LOG).splitlines() if file.exists() else []
    except ValueError as error:
        record.notes.append(f"run.log could not be read: {error}.")
        return
    found: list[LogLine] = []
    for line in lines:
        if match := _LOG_LINE.fullmatch(line):
            found.append(LogLine(match[1], match[2], match[3]))
        elif found:
            found[-1] = found[-1]._replace(text=f"{found[-1].text}\n{line}"[:4_000])
    if len(found) > _MAX_NOTICES:
        record.notes.append(f"run.log: only the last {_MAX_NOTICES} of {len(found)} messages are shown.")
    hidden = lambda text: redact(text.replace(f"{record.path}/", ""))
    record.log[:0] = (one._replace(text=hidden(one.text)) for one in found[-_MAX_NOTICES:])


# files


def read_settings(file: Path) -> dict[str, Any]:
    """The object in a JSON or YAML file; a `ValueError` if it cannot be read."""
    if file.suffix == ".json":
        return read_json(file, _MAX_BYTES)
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast where PyYAML was built with libyaml
    try:
        data = loader(read_bounded(file, _MAX_BYTES)).get_single_data()
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(" ".join(str(error).split())) from error
    if not isinstance(data, dict):
        raise ValueError("it is not a section")
    return data


def rows_of(file: Path) -> Iterator[Row | None]:
    """The rows of a file of JSON lines, None for each damaged one; without a last line that a crash has cut."""
    with open_regular(file) as opened:
        while line := opened.readline(_MAX_LINE):
            if line.endswith(b"\n") or len(line) == _MAX_LINE:
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError):
                    row = None
                yield row if isinstance(row, dict) else None


def metric_rows(folder: Path) -> Iterator[Row | None]:
    """The rows of metrics of a run, None for each damaged one."""
    return (row if row and is_count(row.get("step")) else None for row in rows_of(folder / METRICS))


def read_times(file: Path) -> tuple[list[Start], list[tuple[int, float]]]:
    """The starts of a run in its `time.jsonl`, and the running time at a step, as (step, seconds)."""
    last: dict[int, Start] = {}
    points: list[tuple[int, float]] = []
    for row in rows_of(file):
        number, wall = (None, None) if row is None else (row.get("start"), number_of(row.get("wall")))
        if row is None or not is_count(number) or not is_size(wall) or wall < 0:
            continue
        if number not in last and is_count(resumed := row.get("from")):
            points = [point for point in points if point[0] <= resumed]
        seconds = {key: number_of(value) for key, value in part(row, "seconds", dict).items()}
        spent = {key: value for key, value in seconds.items() if is_size(value) and value > 0}
        last[number] = Start(number, wall, spent, str(row.get("status", "")))
        if is_count(step := row.get("step")):
            while points and points[-1][0] >= step:
                points.pop()
            points.append((step, sum(start.wall for start in last.values())))
    return list(last.values()), points


# facts


def part(data: Any, name: str, kind: Any) -> Any:
    """An entry of data that is expected to be of this kind; an empty one if it is not."""
    return data[name] if isinstance(data, dict) and isinstance(data.get(name), kind) else kind()


def starts_of(record: Mapping[str, Any]) -> list[Row]:
    """The starts in a `run.json`."""
    return [start for start in part(record, "starts", list) if isinstance(start, dict)]


def allowed_changes(record: Mapping[str, Any]) -> list[tuple[int, str, str]]:
    """What a run computes differently since it was resumed: the step from which on, the part, and how it differs."""
    changes = [(row.get("from_step"), change) for row in starts_of(record) for change in part(row, "allowed", list)]
    return [
        (step, change[0], change[1])
        for step, change in changes
        if type(step) is int and isinstance(change, list) and [*map(type, change)] == [str, str]
    ]


def monitored(config: Mapping[str, Any], metrics: Mapping[str, Any]) -> tuple[str, Direction | None] | None:
    """The metric that selects the best checkpoint, and its direction (None: unclear); None without metrics."""
    savers = [key.removesuffix("class_name") for key, value in config.items() if value == "ModelCheckpoint"]
    named = [(config.get(f"{saver}monitor"), config.get(f"{saver}mode")) for saver in savers]
    named += [(config.get("metric"), config.get("mode"))]
    named += [(name, None) for name in ("val/loss", "train/loss_epoch", *metrics)]
    for name, mode in named:
        if isinstance(name, str) and name in metrics:
            return name, mode if mode in ("min", "max") else direction_of(name)
    return None


def direction_of(metric: str) -> Direction | None:
    """Whether lower or higher values of a metric are better, by its name; None if that is unclear."""
    try:
        return best_mode("auto", metric.removesuffix("_epoch").removesuffix("_step"))
    except SettingsError:
        return None


def flat(data: Any, above: str = "", *, inline: int = 0, depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Nested data as dotted keys and values; lists of at most `inline` scalars stay values.

    >>> dict(flat({"model": {"hidden": [16, 32], "act": "gelu"}}))
    {'model.hidden.0': 16, 'model.hidden.1': 32, 'model.act': 'gelu'}
    >>> dict(flat({"model": {"hidden": [16, 32], "act": "gelu"}}, inline=2))
    {'model.hidden': '[16, 32]', 'model.act': 'gelu'}
    """
    if depth > _MAX_DEPTH:
        yield above, "…"
    elif isinstance(data, dict) and data:
        for name, value in data.items():
            yield from flat(value, f"{above}.{name}" if above else str(name), inline=inline, depth=depth + 1)
    elif isinstance(data, list) and (len(data) > inline or any(isinstance(item, dict | list) for item in data)):
        yield from flat(dict(enumerate(data)), above, inline=inline, depth=depth)
    elif above:
        yield above, data if isinstance(data, str | int | float | None) else str(data)


# values


def number_of(value: Any) -> float | None:
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


def numbers_in(values: Any) -> list[float]:
    """The numbers of a list, without those that cannot be drawn."""
    return [one for one in map(number_of, values) if is_size(one)] if isinstance(values, list) else []


def matrix_of(array: Any) -> list[list[float]] | None:
    """A square matrix of counts; None for any other array."""
    rows = [numbers_in(row) for row in array] if isinstance(array, list) and len(array) <= _MAX_ROWS else []
    fits = all(isinstance(row, list) and len(row) == len(rows) for row in array) if rows else False
    return rows if len(rows) > 1 and fits and all(len(row) == len(rows) and min(row) >= 0 for row in rows) else None


def is_count(value: Any) -> TypeGuard[int]:
    """Whether it is a step or an epoch; larger integers are no exact numbers in a page."""
    return type(value) is int and 0 <= value < 2**53


def is_size(value: float | None) -> TypeGuard[float]:
    """Whether it is a number that can be drawn."""
    return value is not None and abs(value) < 1e15
