"""After a resume, makes a logging tool show what `metrics.jsonl` has: every point once."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jax_trainer.logger.axes import Coordinates, XAxis
from jax_trainer.logger.jsonl import MEDIA, METRICS_FILE
from jax_trainer.logger.run_log import LOG
from jax_trainer.logger.values import Bins, values_of
from jax_trainer.logger.writers import ToolLoggerInterface

Entry = tuple[Coordinates, str, tuple[Any, ...]]


def resume(tool: ToolLoggerInterface, folder: Path, size: int, step: int, axes: XAxis) -> None:
    """Has `tool` drop what was logged after a checkpoint, and writes again what it has dropped besides.

    Rows at the step of the checkpoint may have been logged before it or after it; only `metrics.jsonl` knows.

    Args:
        tool: a tool of the run.
        folder: the run folder.
        size: bytes of `metrics.jsonl` at the checkpoint; rows that follow are of the resumed run.
        step: the step of the checkpoint.
        axes: the axes of metrics.
    """
    first = tool.resume_at(_position(tool, folder, size, step, axes))
    if first is None:
        return
    unknown = 0
    for at, kind, args in _entries(folder, size, axes):
        places = [at.on(axis) for axis in axes.used]
        if None in places:
            unknown += 1
        elif first == 0 or tool.rounded(places[0]) >= first:  # type: ignore[arg-type] - all metrics share one axis
            tool.take(at, kind, *args)
    if unknown:
        LOG.warning(
            f"{unknown} rows of {folder / METRICS_FILE} lack {' or '.join(axes.columns)}, the x-axis of this run: "
            f"{type(tool).__name__} does not show them."
        )


def _position(tool: ToolLoggerInterface, folder: Path, size: int, step: int, axes: XAxis) -> Any:
    """The place of the checkpoint on the axis of all metrics; 0 if they have several."""
    if axes.common in ("step", None):
        return step if axes.common else 0
    places = (at.on(axes.common) for at, _, _ in _entries(folder, size, axes) if at.step <= step)
    *_, last = (0, *(place for place in places if place is not None))
    return tool.rounded(last)


def _entries(folder: Path, size: int, axes: XAxis) -> Iterator[Entry]:
    """The entries of the first `size` bytes of `metrics.jsonl`, as the logger gave them to its tools."""
    with (folder / METRICS_FILE).open("rb") as file:
        while file.tell() < size and (line := file.readline()):
            try:
                row = json.loads(line)
            except ValueError:  # the process was killed while writing it
                continue
            if isinstance(row, dict) and isinstance(row.get("step"), int):
                yield from _entries_of(row, folder, axes)


def _entries_of(row: dict[str, Any], folder: Path, axes: XAxis) -> Iterator[Entry]:
    places = {axis: row[axis] for axis in axes.columns if isinstance(row.get(axis), int | float)}
    at = Coordinates(row.pop("step"), places, axes)
    match row:
        case {"media": dict(media)}:
            for name, path in media.items():
                file = folder / MEDIA / Path(path).name  # never outside of the folder
                if file.is_file():
                    yield at, "figure", (name, file.read_bytes())
        case {"histograms": dict(histograms)}:
            for name, bins in histograms.items():
                yield at, "histogram", (name, values_of(Bins(**bins)))
        case {"text": dict(texts)}:
            for name, text in texts.items():
                yield at, "text", (name, text)
        case {"hparams": dict(params), "metrics": dict(metrics)}:
            yield at, "hparams", (params, _numbers(metrics))
        case {"edit": dict(edit), "epoch": epoch}:
            yield at, "write_edit", ({**edit, "epoch": epoch},)
        case {"arrays": dict()}:  # tools do not get them
            return
        case _:
            kept = {name: value for name, value in row.items() if name not in axes.columns or name == "epoch"}
            yield at, "write", (_numbers(kept),)


def _numbers(values: dict[str, Any]) -> dict[str, float]:
    return {name: float(value) if isinstance(value, str) else value for name, value in values.items()}
