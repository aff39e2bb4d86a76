"""`read_run`: what a run folder says about its run.

A folder may come from somebody else, or from a run that was killed while writing: links are refused, files are read up
to a size, and lines and values that are not as expected are counted and left out.
"""

import math
import os
import re
from bisect import bisect_right
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from jax_trainer.checkpoint.files import read_bounded, read_json
from jax_trainer.checkpoint.folder import CHECKPOINTS, CONFIG, METRICS, RunFolder
from jax_trainer.checkpoint.lock import is_locked
from jax_trainer.checkpoint.ranking import best_mode, is_best
from jax_trainer.config.redaction import redact
from jax_trainer.config.settings import SettingsError
from jax_trainer.tools.reports.listing import allowed_changes
from jax_trainer.tools.reports.record import (
    BestValue,
    Curve,
    Histogram,
    LogLine,
    Recompile,
    RunRecord,
    SavedStep,
    Start,
)
from jax_trainer.tools.reports.values import flattened, is_count, is_size, json_of, matrix_of, number_of, numbers_in

_MAX_BYTES = 1 << 24  # of a JSON or YAML file
_MAX_LOG, _MAX_TIMES = 1 << 22, 1 << 26
_MAX_KEYS = 2_000  # of a configuration
_MAX_NOTICES = 400
_MAX_STEPS = 256  # of the histograms of an array; of more, every second one is left out
_MAX_CLASSES, _MAX_NAME = 1_000, 100  # names, and characters of one
_CHECKPOINT = re.compile(r"step_([0-9]{8,18})")
_LOG_LINE = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),\d+ (DEBUG|INFO|WARNING|ERROR|CRITICAL) (.*)")
_RECOMPILED = re.compile(
    r"`(\w+)` was compiled again(?: on (.*?))? \((\d+(?:\.\d+)?) s, compilation \d+\): (.*)", re.DOTALL
)
_ENDED = re.compile(r"Run ([a-z]+)\.")
_NOT_CURVES = frozenset(("step", "epoch", "examples", "tokens", "seconds"))  # where a row lies on an x-axis
_SPECIAL = frozenset(("media", "arrays", "text", "histograms", "hparams"))  # keys of rows without scalars


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
    record.classes = _classes(record.provenance)
    changes = allowed_changes(record.provenance)
    record.log += [LogLine("", "CHANGE", f"step {step}: {part}: {text}") for step, part, text in changes]
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
            row = json_of(line)
            if not isinstance(row, dict) or not is_count(step := row.get("step")):
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
        number = None if name in _NOT_CURVES else number_of(value)
        if number is not None:
            curve = record.curves.get(name) or record.curves.setdefault(name, Curve())
            curve.put(step, number)
    if is_count(epoch := row.get("epoch")) and epoch:
        while record.epochs and (record.epochs[-1][0] >= step or record.epochs[-1][1] >= epoch):
            record.epochs.pop()
        record.epochs.append((step, epoch))


def _read_special(record: RunRecord, step: int, row: Mapping[str, Any]) -> None:
    for name, path in _items(row, "media"):
        if isinstance(path, str) and (file := _inside(record.path, path)) is not None:
            shown = [one for one in record.media.get(name, []) if one[0] < step]
            record.media[name] = [*shown, (step, file)]
    for name, array in _items(row, "arrays"):
        if (matrix := matrix_of(array)) is not None:
            record.matrices[name] = step, matrix
    for name, text in _items(row, "text"):
        record.texts[name] = step, str(text)
    for name, bins in _items(row, "histograms"):
        counts, edges = (numbers_in(bins, key) for key in ("counts", "edges"))
        if counts and len(edges) == len(counts) + 1 and edges == sorted(edges) and min(counts) >= 0:
            kept = [one for one in record.histograms.get(name, []) if one.step < step]
            kept = kept[::2] if len(kept) >= _MAX_STEPS else kept
            record.histograms[name] = [*kept, Histogram(step, edges, counts)]


def _items(row: Mapping[str, Any], kind: str) -> list[tuple[str, Any]]:
    found = row.get(kind)
    return list(found.items()) if isinstance(found, dict) else []


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


def _classes(provenance: Mapping[str, Any]) -> list[str]:
    found = provenance.get("classes")
    names = found if isinstance(found, list) and all(isinstance(one, str) for one in found) else []
    return [name[:_MAX_NAME] for name in names[:_MAX_CLASSES]]


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
        metrics = {key: number for key, value in _items(saved, "metrics") if (number := number_of(value)) is not None}
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
        step = int(number_of(values.get("step")) or 0)
        scalars = {key: number for key, value in values.items() if (number := number_of(value)) is not None}
        if scalars:
            record.evaluations[name.removesuffix(".json")] = scalars
        for key, array in values.items():
            if (matrix := matrix_of(array)) is not None:
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
    shown = []
    for one in found[-_MAX_NOTICES:]:
        text = redact(one.text.replace(here, ""))
        if match := _RECOMPILED.fullmatch(text):
            function, where, seconds, reason = match.groups()
            record.recompiles.append(Recompile(one.time, function, where or "", float(seconds), reason))
        else:
            shown.append(LogLine(one.time, one.level, text))
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
    for row in map(json_of, lines):
        number, wall = (row.get("start"), number_of(row.get("wall"))) if isinstance(row, dict) else (None, None)
        if not isinstance(row, dict) or not is_count(number) or not is_size(wall) or wall < 0:
            continue
        if number not in last and is_count(resumed := row.get("from")):
            points = [point for point in points if point[0] <= resumed]
        seconds = {key: one for key, value in _items(row, "seconds") if is_size(one := number_of(value)) and one > 0}
        last[number] = Start(number, wall, seconds, str(row.get("status", "")))
        if is_count(step := row.get("step")):
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
        if is_best(value, None if best is None else best.value, direction):
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
