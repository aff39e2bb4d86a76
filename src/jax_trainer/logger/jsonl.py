"""The files of a run with its metrics: one JSON line per row in `metrics.jsonl`, images in `media`; a table for CSV.

A resumed run truncates the file to its size at the checkpoint: rows after it are written again.
"""

import csv
import errno
import hashlib
import io
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple
from uuid import uuid4

import numpy as np
from compoconf import register

from jax_trainer.config.settings import Settings
from jax_trainer.diagnostics.files import LineFile, write_atomically
from jax_trainer.logger.run_log import LOG
from jax_trainer.logger.values import Bins, bins_of, json_text, plain_of, values_of
from jax_trainer.logger.writers import ToolLoggerInterface

METRICS_FILE, METRICS, MEDIA = "metrics.jsonl", "metrics", "media"
MOST_UNWRITTEN = 10_000  # lines in memory while the disk is full
TAIL = 2**20  # bytes searched for the last row of metrics; rows of images and texts may follow it
_ODD = re.compile(r"[^\w.\-]")
_MOST_BYTES = 150  # of a file name; file systems allow 255, and a number and a suffix are added


class UnwrittenError(OSError):
    """Rows that were never written, because the disk was full."""

    def __init__(self, entries: int, path: Path) -> None:
        super().__init__(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} for {entries} rows", str(path))
        self.entries = entries


class JsonlWriter:
    """One JSON object per line: `{"step": 50, "train/loss_step": 0.31}`. NaN and infinities become strings.

    Appends to an existing file, after its last whole line. Lines that a full disk refuses are kept in memory, and
    written before the next one once there is space.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = LineFile(self.path)
        self._file.append([])
        self._unwritten: list[bytes] = []
        self._has_warned = False

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Appends a line, unbuffered."""
        self.append({"step": step, **values})

    def write_edit(self, step: int, edit: Mapping[str, Any]) -> None:
        """Appends an edit of the training state: `{"step": 80, "epoch": 4, "edit": {"by": …}}`."""
        rest = {name: value for name, value in edit.items() if name not in ("step", "epoch")}
        self.append({"step": step, "epoch": edit["epoch"], "edit": rest})

    def append(self, row: Mapping[str, Any]) -> None:
        """Appends a row as a line, after unwritten ones."""
        if len(self._unwritten) >= MOST_UNWRITTEN:
            raise OSError(errno.ENOSPC, f"{len(self._unwritten)} rows are waiting for disk space", str(self.path))
        self._unwritten.append(json_text(row).encode() + b"\n")
        self.flush()

    def flush(self) -> None:
        """Writes unwritten lines, if possible."""
        if not self._unwritten:
            return
        try:
            self._file.append(self._unwritten)
        except OSError as error:
            if not self._has_warned:
                text = f"{self.path} cannot be written ({error.strerror}): rows are kept in memory. Free disk space."
                LOG.warning(text)
            self._has_warned = True
        else:
            self._unwritten, self._has_warned = [], False

    @property
    def unwritten(self) -> tuple[str, ...]:
        """The lines that could not be written yet."""
        return tuple(line.decode() for line in self._unwritten)

    def close(self, status: str) -> None:
        """Closes the file; raises an `UnwrittenError` if lines could not be written."""
        self.flush()
        if self._unwritten:
            raise UnwrittenError(len(self._unwritten), self.path)


class RecordMark(NamedTuple):
    """A position in `metrics.jsonl`: its size in bytes, and the lines that a full disk has refused."""

    size: int
    unwritten: tuple[str, ...] = ()


@dataclass
class JSONLConfig(Settings):
    """The run's `metrics.jsonl`, which is always written and has no options."""


@register
class JSONLToolLogger(JsonlWriter, ToolLoggerInterface):
    """Writes everything that is logged to `metrics.jsonl` in the run folder. Every run has it.

    A line is a row: `{"step": 8, "epoch": 2, "val/loss": 0.31}`. Pictures are files in `media`, and their row is
    `{"step": 2, "media": {"val/confusion_matrix": "media/val_confusion_matrix_2.png"}}`; the `arrays` of evaluations,
    `histograms`, `text`, `hparams` and `edit`, a change of the training state by a callback, have such rows, too. With
    another x-axis than the step, every row has its place on that axis as well.
    """

    config: JSONLConfig

    def __init__(self, config: JSONLConfig, folder: Path) -> None:
        ToolLoggerInterface.__init__(self, config, folder)
        self._place: Mapping[str, float] = {}
        JsonlWriter.__init__(self, folder / METRICS_FILE)

    def take(self, step: int, at: float, kind: str, *args: Any) -> None:
        """Calls the method `kind` with the step; the row also has its place on another x-axis."""
        self._place = {} if self.axis == "step" else {self.axis: at}
        getattr(self, kind)(step, *args)

    def append(self, row: Mapping[str, Any]) -> None:
        self.check_exists(self.path)
        super().append({**row, **self._place})

    def figure(self, step: int, name: str, png: bytes) -> None:
        path = f"{MEDIA}/{file_name_of(name)}_{step}.png"
        write_in_folder(self.folder / path, png)
        self.append({"step": step, "media": {name: path}})

    def histogram(self, step: int, name: str, values: np.ndarray) -> None:
        self.append({"step": step, "histograms": {name: bins_of(values)._asdict()}})

    def text(self, step: int, name: str, text: str) -> None:
        self.append({"step": step, "text": {name: text}})

    def hparams(self, step: int, params: Mapping[str, Any], metrics: Mapping[str, float]) -> None:
        self.append({"step": step, "hparams": params, "metrics": metrics})

    def evaluation(self, step: int, epoch: int, name: str, metrics: Mapping[str, Any]) -> None:
        """Appends the arrays of an evaluation, and writes all of it to `metrics/<name>.json`."""
        if arrays := {name: value for name, value in metrics.items() if isinstance(value, list)}:
            self.append({"step": step, "epoch": epoch, "arrays": arrays})
        save_metrics(self.folder, name, {"step": step, "epoch": epoch, **metrics})

    def mark(self) -> RecordMark:
        """The current position in the file."""
        self.check_exists(self.path)
        self.flush()
        return RecordMark(self.path.stat().st_size, self.unwritten)

    def cut(self, mark: RecordMark | None) -> int | None:
        """Truncates the file to `mark`; returns its size then, None if that was not possible."""
        if not cut(self.path, None if mark is None else mark.size) or mark is None:
            return None
        self._unwritten = [line.encode() for line in mark.unwritten]
        self.flush()
        return self.path.stat().st_size


def save_metrics(folder: Path, file_name: str, metrics: Mapping[str, Any]) -> None:
    """Writes metrics, also arrays, to `metrics/<file_name>.json` in the run folder."""
    write_in_folder(folder / METRICS / f"{file_name_of(file_name)}.json", json_text(plain_of(metrics)).encode())


def cut(file: Path, size: int | None) -> bool:
    """Truncates a `metrics.jsonl` to the `size` bytes that it had at a checkpoint, and syncs it.

    Returns whether that was possible. If the size is unknown (None) or does not fit the file, the file is unchanged.
    """
    if not size and not file.exists():
        return True
    try:
        if size is None:
            raise ValueError("it has no position in the checkpoint")
        LineFile(file).cut(size)
        return True
    except (OSError, ValueError) as error:
        LOG.warning(
            f"{file} is not truncated to where the checkpoint was saved: {error}. Steps that are trained again may "
            "have two rows; the later one is of this run."
        )
        return False


def last_row(file: Path) -> dict[str, Any]:
    """The last row of metrics in a `metrics.jsonl`; that of step 0 if there is none."""
    none = {"step": 0}
    if not file.is_file():  # reading a device might not end
        return none
    try:
        with file.open("rb") as record:
            record.seek(max(0, record.seek(0, os.SEEK_END) - TAIL))
            lines = record.read(TAIL).decode(errors="replace").splitlines()
    except OSError:
        return none
    rows = (row for line in reversed(lines) if (row := _row(line)))
    numbers = (row for row in rows if not any(isinstance(value, dict) for value in row.values()))
    return next(numbers, none)


def _row(line: str | bytes) -> dict[str, Any]:
    """The row of a line; empty if the process was killed while writing it."""
    try:
        row = json.loads(line)
    except ValueError:
        return {}
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else {}


def resume(tool: ToolLoggerInterface, folder: Path, size: int, step: int) -> None:
    """Has `tool` drop what was logged after a checkpoint, and writes again what it has dropped besides.

    Rows at the step of the checkpoint may have been logged before it or after it; only `metrics.jsonl` knows.

    Args:
        tool: a tool of the run.
        folder: the run folder.
        size: bytes of `metrics.jsonl` at the checkpoint; rows that follow are of the resumed run.
        step: the step of the checkpoint.
    """
    reached: float = step
    if tool.axis != "step":
        *_, reached = (0, *(at for of, at, *_ in _entries(folder, size, tool.axis) if of <= step and at is not None))
    first = tool.resume_at(tool.rounded(reached))
    if first is None:
        return
    unknown = 0
    for of, at, kind, args in _entries(folder, size, tool.axis):
        if at is None:
            unknown += 1
        elif first == 0 or tool.rounded(at) >= first:
            tool.take(of, at, kind, *args)
    if unknown:
        LOG.warning(
            f"{unknown} rows of {folder / METRICS_FILE} lack {tool.axis}, the x-axis of this run: "
            f"{type(tool).__name__} does not show them."
        )


def _entries(folder: Path, size: int, axis: str) -> Iterator[tuple[int, float | None, str, tuple[Any, ...]]]:
    """The entries of the first `size` bytes of `metrics.jsonl`, as the logger gave them to its tools.

    Each with its step and its place on the axis, None if that is unknown.
    """
    with (folder / METRICS_FILE).open("rb") as file:
        while file.tell() < size and (line := file.readline()):
            if not (row := _row(line)):
                continue
            place = row.get(axis)
            at = row.pop("step"), place if isinstance(place, int | float) else None
            match row:
                case {"media": dict(media)}:
                    for name, path in media.items():
                        picture = folder / MEDIA / Path(path).name  # never outside of the folder
                        if picture.is_file():
                            yield *at, "figure", (name, picture.read_bytes())
                case {"histograms": dict(histograms)}:
                    for name, bins in histograms.items():
                        yield *at, "histogram", (name, values_of(Bins(**bins)))
                case {"text": dict(texts)}:
                    for name, text in texts.items():
                        yield *at, "text", (name, text)
                case {"hparams": dict(params), "metrics": dict(metrics)}:
                    yield *at, "hparams", (params, _numbers(metrics))
                case {"edit": dict(edit), "epoch": epoch}:
                    yield *at, "write_edit", ({**edit, "epoch": epoch},)
                case {"arrays": dict()}:  # tools do not get them
                    pass
                case _:
                    kept = {name: value for name, value in row.items() if name != axis or name == "epoch"}
                    yield *at, "write", (_numbers(kept),)


def _numbers(values: dict[str, Any]) -> dict[str, float]:
    return {name: float(value) if isinstance(value, str) else value for name, value in values.items()}


def file_name_of(name: str) -> str:
    """A user's name as part of a file name: "/" and special characters become "_".

    >>> file_name_of("val/confusion matrix"), file_name_of("../../x")
    ('val_confusion_matrix', '_.._x')
    """
    safe = _ODD.sub("_", name).lstrip(".") or "_"
    if len(safe.encode()) <= _MOST_BYTES:
        return safe
    digest = hashlib.sha256(name.encode(errors="replace")).hexdigest()[:16]  # long names differ at their ends
    return f"{safe.encode()[: _MOST_BYTES - 17].decode(errors='ignore')}-{digest}"


def write_in_folder(file: Path, content: bytes) -> None:
    """Writes a file atomically; creates its folder, but not the parents of that."""
    file.parent.mkdir(exist_ok=True)
    write_atomically(file, content, durable=False)


def run_id(folder: Path, tool: str, new: Callable[[], str] = lambda: uuid4().hex[:12]) -> str:
    """The id of the run in `tool`, in `<tool>-id.txt` of the run folder: a resumed run continues under it."""
    file = folder / f"{tool}-id.txt"
    known = file.read_text(encoding="utf-8", errors="replace").strip() if file.is_file() else ""
    if not re.fullmatch(r"[A-Za-z0-9_\-]{1,64}", known):
        known = new()
        write_atomically(file, f"{known}\n")
    return known


# a table


TABLE, PARAMETERS = "metrics.csv", "hparams.csv"


@dataclass
class CSVConfig(Settings):
    """The table `metrics.csv`, which has no options."""


@register
class CSVToolLogger(ToolLoggerInterface):
    """Writes `metrics.csv`, a column per metric, and the hyperparameters to `hparams.csv`.

    A row has only the metrics that were logged together; its other cells are empty. A metric that appears later adds a
    column at the end. Pictures are in `media`, as in every run. A resumed run writes the table again.
    """

    config: CSVConfig
    whole_steps: ClassVar[bool] = False

    def __init__(self, config: CSVConfig, folder: Path) -> None:
        super().__init__(config, folder)
        self._path = folder / TABLE
        self._names: list[str] = []
        if self._path.exists():
            with self._path.open(newline="", encoding="utf-8") as table:
                self._names = next(csv.reader(table), [])

    def resume_at(self, step: int) -> int:
        self._names = []
        self._path.unlink(missing_ok=True)
        return 0

    def write(self, step: int, values: Mapping[str, float]) -> None:
        row = {self.axis: step, **values}
        if new := [name for name in row if name not in self._names]:
            rows: list[dict[str, str]] = []
            if self._names:
                with self._path.open(newline="", encoding="utf-8") as table:
                    rows = [*csv.DictReader(table)]
            self._names = [*self._names, *new]
            text = io.StringIO()
            writer = csv.DictWriter(text, self._names)
            writer.writeheader()
            writer.writerows(rows)
            write_atomically(self._path, text.getvalue(), durable=False)
        with self._path.open("r+", newline="", encoding="utf-8") as table:  # an error if the file was deleted
            table.seek(0, io.SEEK_END)
            csv.DictWriter(table, self._names).writerow(row)

    def hparams(self, step: int, params: Mapping[str, Any], metrics: Mapping[str, float]) -> None:
        """Writes the names and values of both to `hparams.csv`."""
        table = io.StringIO()
        csv.writer(table).writerows([("name", "value"), *params.items(), *metrics.items()])
        write_atomically(self.folder / PARAMETERS, table.getvalue(), durable=False)
