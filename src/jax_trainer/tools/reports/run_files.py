"""What the files of a run folder say: every value is verified here, or left out.

A folder may come from somebody else, or from a run that was killed while writing: links are refused, files are read up
to a size, and what is not as expected is left out.
"""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import yaml

from jax_trainer.checkpoint.folder import METRICS, is_locked
from jax_trainer.checkpoint.ranking import Direction, best_mode
from jax_trainer.config.settings import SettingsError
from jax_trainer.diagnostics.files import open_regular, read_bounded, read_json

HPARAMS, TIMES = "hparams.json", "time.jsonl"
STATUSES = ("running", "completed", "stopped", "failed", "interrupted", "killed", "unknown")
MAX_KEYS = 2_000  # of a configuration
_MAX_BYTES = 1 << 24  # of a file that is read at once
_BLOCK, _MAX_LINE = 1 << 20, 1 << 22
_MAX_DEPTH = 30  # of nested data
_MAX_CLASSES = 200  # of a confusion matrix

Row = dict[str, Any]


# files


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


def rows_of(file: Path) -> Iterator[Row | None]:
    """The rows of a file of JSON lines, None for each damaged one; without a last line that a crash has cut."""
    with open_regular(file) as opened:
        rest = b""
        while block := opened.read(_BLOCK):
            *lines, rest = (rest + block).split(b"\n")
            try:
                found = json.loads(b"[" + b",".join(lines) + b"]")  # at once: most of the time is spent per call
            except (ValueError, RecursionError):
                found = map(_json_of, lines)
            yield from (row if isinstance(row, dict) else None for row in found)
            rest = rest if len(rest) <= _MAX_LINE else rest[:1]  # a line without an end is not kept in memory


def metric_rows(folder: Path) -> Iterator[Row | None]:
    """The rows of metrics of a run, None for each damaged one."""
    return (row if row and is_count(row.get("step")) else None for row in rows_of(folder / METRICS))


class Start(NamedTuple):
    """One start of a run: the seconds of each phase, and in total."""

    number: int
    wall: float
    seconds: Mapping[str, float]
    status: str = ""


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


def status_of(folder: Path, record: Mapping[str, Any]) -> str:
    """One of `STATUSES`: a run without an end whose folder is not locked was killed."""
    if is_locked(folder):
        return "running"
    status = starts_of(record)[-1].get("status") if starts_of(record) else None
    return "killed" if status == "running" else status if status in STATUSES else "unknown"


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
    if not isinstance(array, list) or not 2 <= len(array) <= _MAX_CLASSES:
        return None
    rows = [numbers_in(row) for row in array]
    fits = all(len(row) == len(array) == len(source) for row, source in zip(rows, array, strict=True) if row)
    return rows if fits and all(row and min(row) >= 0 for row in rows) else None


def is_count(value: Any) -> TypeGuard[int]:
    """Whether it is a step or an epoch; larger integers are no exact numbers in a page."""
    return type(value) is int and 0 <= value < 2**53


def is_size(value: float | None) -> TypeGuard[float]:
    """Whether it is a number that can be drawn."""
    return value is not None and abs(value) < 1e15


def _json_of(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None
