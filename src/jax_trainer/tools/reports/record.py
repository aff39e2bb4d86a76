"""`read_run`: a run as its folder describes it, as plain data."""

import os
import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from jax_trainer.checkpoint.folder import CHECKPOINTS, CONFIG, METRICS, RECORD, RunFolder
from jax_trainer.checkpoint.ranking import Direction, is_best
from jax_trainer.config.redaction import redact
from jax_trainer.diagnostics.files import read_bounded
from jax_trainer.tools.reports import run_files
from jax_trainer.tools.reports.run_files import part

INLINE = 40  # items of a list that is shown on one line
_MAX_LOG = 1 << 22
_MAX_NOTICES = 400
_MAX_STEPS = 256  # of the histograms of an array; of more, every second one is left out
_MAX_CLASSES, _MAX_NAME = 1_000, 100  # names, and characters of one
_CHECKPOINT = re.compile(r"step_([0-9]{8,18})")
_LOG_LINE = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),\d+ (DEBUG|INFO|WARNING|ERROR|CRITICAL) (.*)")
_NOT_CURVES = frozenset(("step", "epoch", "examples", "tokens", "seconds"))  # where a row lies on an x-axis
_SPECIAL = frozenset(("media", "arrays", "text", "histograms", "hparams"))  # keys of rows without scalars


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


@dataclass(kw_only=True)
class RunRecord:
    """A run, as its folder describes it.

    Attributes:
        path: the run folder.
        status: one of `STATUSES`.
        config: the configuration by dotted key.
        curves: every scalar metric by its name.
        epochs: the last step of every epoch, as (step, epoch).
        seconds: the running time at a step, as (step, seconds); all starts together.
        batch_size: examples per step; None if unknown.
        best: the best value of the monitored metric.
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
    sets: list[str] = field(default_factory=list)
    matrices: dict[str, tuple[int, list[list[float]]]] = field(default_factory=dict)
    media: dict[str, list[tuple[int, Path]]] = field(default_factory=dict)
    texts: dict[str, tuple[int, str]] = field(default_factory=dict)
    histograms: dict[str, list[Histogram]] = field(default_factory=dict)
    classes: list[str] = field(default_factory=list)
    checkpoints: list[SavedStep] = field(default_factory=list)
    starts: list[run_files.Start] = field(default_factory=list)
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
    has_metrics = (path / METRICS).is_file()
    if not has_metrics or (path / CONFIG).exists():
        RunFolder.open(path)  # raises if it is no run, and refuses links
    if not has_metrics:
        raise ValueError(f"{path} has no {METRICS}: its run has logged nothing yet. Wait for its first metrics.")
    record = RunRecord(path=path)
    _read_metrics(record)
    if not record.curves:
        raise ValueError(f"{path / METRICS} has no metrics yet: there is nothing to show. Wait for the first ones.")
    keys = list(islice(run_files.flat(_settings(record, CONFIG), inline=INLINE), run_files.MAX_KEYS + 1))
    if len(keys) > run_files.MAX_KEYS:
        record.notes.append(f"{CONFIG}: only the first {run_files.MAX_KEYS} keys are shown.")
    record.config = redact(dict(keys[: run_files.MAX_KEYS]))
    record.provenance = _settings(record, RECORD)
    names = part(record.provenance, "classes", list)
    if all(isinstance(name, str) for name in names):
        record.classes = [name[:_MAX_NAME] for name in names[:_MAX_CLASSES]]
    changes = run_files.allowed_changes(record.provenance)
    record.log += [LogLine("", "CHANGE", f"step {step}: {name}: {text}") for step, name, text in changes]
    _read_checkpoints(record)
    record.sets = [name.removesuffix(".json") for name in _names_in(path / "metrics") if name.endswith(".json")]
    _read_log(record)
    if (path / run_files.TIMES).is_file():
        record.starts, record.seconds = run_files.read_times(path / run_files.TIMES)
    sizes = (record.batch_size, *(record.config.get(key) for key in ("dataset.global_batch_size", "batch_size")))
    record.batch_size = next((size for size in sizes if type(size) is int and size > 0), None)
    record.best = _best(record)
    record.status = run_files.status_of(path, record.provenance)
    return record


def _settings(record: RunRecord, name: str) -> dict[str, Any]:
    """The object in a file, in JSON without secrets; empty if there is none, with a note if it cannot be read."""
    try:
        data = run_files.read_settings(record.path / name) if (record.path / name).exists() else {}
        return redact(data) if name.endswith(".json") else data  # references in YAML could make it large
    except (ValueError, RecursionError):
        record.notes.append(f"{name} could not be read.")
        return {}


def _read_metrics(record: RunRecord) -> None:
    damaged = 0
    for row in run_files.metric_rows(record.path):
        if row is None:
            damaged += 1
        elif edit := part(row, "edit", dict):
            text = ", ".join(f"{key}: {value}" for key, value in edit.items())
            record.log.append(LogLine("", "EDIT", f"step {row['step']}: {text}"))
        elif any(isinstance(row[kind], dict) for kind in _SPECIAL & row.keys()):
            _read_special(record, row["step"], row)
        else:
            _read_scalars(record, row["step"], row)
    if damaged:
        record.notes.append(f"{METRICS}: {damaged} lines could not be read and are left out.")


def _read_scalars(record: RunRecord, step: int, row: run_files.Row) -> None:
    for name, value in row.items():
        number = None if name in _NOT_CURVES else run_files.number_of(value)
        if number is not None:
            (record.curves.get(name) or record.curves.setdefault(name, Curve())).put(step, number)
    if run_files.is_count(epoch := row.get("epoch")) and epoch:
        while record.epochs and (record.epochs[-1][0] >= step or record.epochs[-1][1] >= epoch):
            record.epochs.pop()
        record.epochs.append((step, epoch))


def _read_special(record: RunRecord, step: int, row: run_files.Row) -> None:
    for name, path in part(row, "media", dict).items():
        if isinstance(path, str) and (file := _inside(record.path, path)) is not None:
            shown = [image for image in record.media.get(name, []) if image[0] < step]
            record.media[name] = [*shown, (step, file)]
    for name, array in part(row, "arrays", dict).items():
        if (matrix := run_files.matrix_of(array)) is not None:
            record.matrices[name] = step, matrix
    for name, text in part(row, "text", dict).items():
        record.texts[name] = step, str(text)
    for name, bins in part(row, "histograms", dict).items():
        counts, edges = (run_files.numbers_in(part(bins, key, list)) for key in ("counts", "edges"))
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
        named = {key: run_files.number_of(value) for key, value in part(saved, "metrics", dict).items()}
        metrics = {key: number for key, number in named.items() if number is not None}
        note = "" if saved else "damaged"
        record.checkpoints.append(SavedStep(int(match[1]), part(saved, "epoch", int), metrics, size, note))
        versions = part(saved, "versions", dict)
        record.versions = {str(key): str(value) for key, value in versions.items()} or record.versions
        record.batch_size = part(part(part(saved, "run", dict), "loop", dict), "batch_size", int) or record.batch_size


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


def _best(record: RunRecord) -> BestValue | None:
    """The best value of the metric that selects checkpoints, or of the loss."""
    monitor, direction = run_files.monitored(record.config, record.curves) or ("", None)
    if direction is None:
        return None
    best: BestValue | None = None
    for step, value in zip(record.curves[monitor].steps, record.curves[monitor].values, strict=True):
        if is_best(value, None if best is None else best.value, direction):
            best = BestValue(monitor, direction, value, step)
    return best
