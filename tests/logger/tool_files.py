"""Reads what a logging tool has of a run, from its files: curves as points (x, y), and the steps of pictures."""

import csv
import json
import sqlite3
from collections.abc import Callable, Iterable
from contextlib import closing
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.logger.wandb_files import WandbFile

Curves = dict[str, list[tuple[float, float]]]


def _curves(points: Iterable[tuple[str, float, Any]]) -> Curves:
    found: Curves = {}
    for name, x, y in points:
        found.setdefault(name, []).append((x, float(y)))
    return {name: sorted(some) for name, some in found.items()}


def _of_jsonl(folder: Path) -> tuple[Curves, list[int]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    numbers = [row for row in rows if not any(isinstance(value, dict) for value in row.values())]
    points = [(name, row["step"], value) for row in numbers for name, value in row.items() if name != "step"]
    return _curves(points), [row["step"] for row in rows if "media" in row]


def _of_tensorboard(folder: Path) -> tuple[Curves, list[int]]:
    """As TensorBoard reads the event files."""
    kind = import_module("tensorboard.backend.event_processing.event_accumulator").EventAccumulator
    read = kind(str(folder), size_guidance={"scalars": 0, "images": 0}).Reload()
    points = [(tag, point.step, point.value) for tag in read.Tags()["scalars"] for point in read.Scalars(tag)]
    return _curves(points), [image.step for tag in read.Tags()["images"] for image in read.Images(tag)]


def _of_wandb(folder: Path) -> tuple[Curves, list[int]]:
    import_module("wandb").teardown()  # its service writes a little longer
    rows = WandbFile(folder).history()
    points = [
        (name, row[axis], value)
        for row in rows
        for axis in row
        if axis.startswith("axis/")
        for name, value in row.items()
        if name != axis and not isinstance(value, dict)
    ]
    pictures = [row["axis/step"] for row in rows if any(isinstance(value, dict) for value in row.values())]
    return _curves(points), pictures


def _of_csv(folder: Path) -> tuple[Curves, list[int]]:
    with (folder / "metrics.csv").open(newline="") as table:
        rows = [*csv.DictReader(table)]
    points = []
    for row in rows:
        axis = next(axis for axis in ("step", "examples", "tokens", "seconds", "epoch") if row.get(axis))
        points += [(name, float(row[axis]), value) for name, value in row.items() if name != axis and value]
    return _curves(points), _of_jsonl(folder)[1]


def _of_mlflow(folder: Path) -> tuple[Curves, list[int]]:
    with closing(sqlite3.connect(folder / "mlflow" / "mlflow.db")) as database:
        points = [*database.execute("SELECT key, step, value FROM metrics")]
        latest = dict(database.execute("SELECT key, step FROM latest_metrics"))
    curves = _curves(points)
    assert latest == {name: some[-1][0] for name, some in curves.items()}
    return curves, [int(file.stem.rpartition("_")[2]) for file in folder.rglob("artifacts/media/*.png")]


_READERS: dict[str, Callable[[Path], tuple[Curves, list[int]]]] = {
    "jsonl": _of_jsonl,
    "tensorboard": _of_tensorboard,
    "wandb": _of_wandb,
    "csv": _of_csv,
    "mlflow": _of_mlflow,
}


def shown(tool: str, folder: Path) -> tuple[Curves, list[int]]:
    """The curves and the steps of pictures that a tool has of the run in `folder`."""
    return _READERS[tool](folder)
