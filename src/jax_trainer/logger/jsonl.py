"""The metrics file of a run: one JSON line per row in `metrics.jsonl`, images as files in `media`."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from compoconf import register

from jax_trainer.logger.files import file_name_of, write_atomically
from jax_trainer.logger.pictures import png_of
from jax_trainer.logger.rows import cut
from jax_trainer.logger.values import bins_of, json_safe, plain_of
from jax_trainer.logger.writers import JsonlWriter, ToolLoggerInterface, edit_row
from jax_trainer.settings import Settings

METRICS_FILE, METRICS, MEDIA = "metrics.jsonl", "metrics", "media"


class RecordMark(NamedTuple):
    """A position in `metrics.jsonl`: its size in bytes, and the lines that a full disk has refused."""

    size: int
    unwritten: tuple[str, ...] = ()


@dataclass
class JSONLConfig(Settings):
    """The run's `metrics.jsonl`, which is always written and has no options."""


@register
class JSONLToolLogger(ToolLoggerInterface):
    """Writes everything that is logged to `metrics.jsonl` in the run folder. Every run has it.

    A line is a row: `{"step": 8, "epoch": 2, "val/loss": 0.31}`. Pictures are files in `media`, and their row is
    `{"step": 2, "media": {"val/confusion_matrix": "media/val_confusion_matrix_2.png"}}`; `histograms`, `text`,
    `hparams` and `edit`, a change of the training state by a callback, have such rows, too.
    """

    config: JSONLConfig

    def __init__(self, config: JSONLConfig, folder: Path) -> None:
        super().__init__(config, folder)
        self._writer = JsonlWriter(folder / METRICS_FILE)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._append({"step": step, **values})

    def image(self, step: int, name: str, pixels: np.ndarray) -> None:
        self.figure(step, name, png_of(pixels))

    def figure(self, step: int, name: str, png: bytes) -> None:
        path = f"{MEDIA}/{file_name_of(name)}_{step}.png"
        write_atomically(self.folder / path, png)
        self._append({"step": step, "media": {name: path}})

    def histogram(self, step: int, name: str, values: np.ndarray) -> None:
        self._append({"step": step, "histograms": {name: bins_of(values)._asdict()}})

    def text(self, step: int, name: str, text: str) -> None:
        self._append({"step": step, "text": {name: text}})

    def hparams(self, step: int, params: Mapping[str, Any], metrics: Mapping[str, float]) -> None:
        self._append({"step": step, "hparams": params, "metrics": metrics})

    def write_edit(self, step: int, edit: Mapping[str, Any]) -> None:
        self._append(edit_row(step, edit))

    def save(self, file_name: str, data: Mapping[str, Any]) -> None:
        """Writes plain data to `metrics/<file_name>.json`."""
        save_metrics(self.folder, file_name, data)

    def mark(self) -> RecordMark:
        """The current position in the file."""
        self._check_exists()
        self._writer.catch_up()
        return RecordMark(self._writer.size, self._writer.unwritten)

    def cut(self, mark: RecordMark | None) -> None:
        """Truncates the file to `mark`."""
        if cut(self._writer.path, None if mark is None else mark.size) and mark is not None:
            self._writer.replace_unwritten(mark.unwritten)

    def flush(self) -> None:
        self._writer.catch_up()

    def is_written(self) -> bool:
        """Whether all rows are written."""
        return not self._writer.unwritten

    def close(self, status: str) -> None:
        self._writer.close(status)

    def _append(self, row: Mapping[str, Any]) -> None:
        self._check_exists()
        self._writer.append(row)

    def _check_exists(self) -> None:
        if self._writer.is_deleted:
            raise FileNotFoundError(f"{self._writer.path} was deleted while the run wrote to it.")


def save_metrics(folder: Path, file_name: str, metrics: Mapping[str, Any]) -> None:
    """Writes metrics, also arrays, to `metrics/<file_name>.json` in the run folder."""
    text = json.dumps(json_safe(plain_of(metrics)), allow_nan=False, indent=1)
    write_atomically(folder / METRICS / f"{file_name_of(file_name)}.json", text.encode())
