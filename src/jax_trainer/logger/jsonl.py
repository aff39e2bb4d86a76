"""The run's own record: every row as a line of `metrics.jsonl`, pictures as files beside it."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from compoconf import register

from jax_trainer.logger.files import file_name_of, write_whole
from jax_trainer.logger.pictures import png_of
from jax_trainer.logger.rows import cut
from jax_trainer.logger.values import bins_of, json_safe, plain_of
from jax_trainer.logger.writers import JsonlWriter, ToolLoggerInterface
from jax_trainer.settings import Settings

METRICS_FILE, METRICS, MEDIA = "metrics.jsonl", "metrics", "media"


@dataclass
class JSONLConfig(Settings):
    """The run's own record, which has nothing to choose and is always there."""


@register
class JSONLToolLogger(ToolLoggerInterface):
    """Writes all that is logged to `metrics.jsonl` in the run's folder. Every run has it, named or not.

    A line is a row: `{"step": 8, "epoch": 2, "val/loss": 0.31}`. Pictures are files in `media`, and their row is
    `{"step": 2, "media": {"val/confusion_matrix": "media/val_confusion_matrix_2.png"}}`; there are such rows of
    `histograms`, `text` and `hparams`, too.
    """

    config: JSONLConfig

    def __init__(self, config: JSONLConfig, folder: Path) -> None:
        super().__init__(config, folder)
        self._writer = JsonlWriter(folder / METRICS_FILE)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Appends the row as it is."""
        self._append({"step": step, **values})

    def image(self, step: int, name: str, pixels: np.ndarray) -> None:
        """Writes the image to a file, and its row."""
        self.figure(step, name, png_of(pixels))

    def figure(self, step: int, name: str, png: bytes) -> None:
        """Writes the figure to a file, and its row."""
        place = f"{MEDIA}/{file_name_of(name)}_{step}.png"
        write_whole(self.folder / place, png)
        self._append({"step": step, "media": {name: place}})

    def histogram(self, step: int, name: str, values: np.ndarray) -> None:
        """Appends counts and edges of bins; `left_out` are not finite."""
        self._append({"step": step, "histograms": {name: bins_of(values)._asdict()}})

    def text(self, step: int, name: str, text: str) -> None:
        """Appends the text."""
        self._append({"step": step, "text": {name: text}})

    def hparams(self, step: int, params: Mapping[str, Any], metrics: Mapping[str, float]) -> None:
        """Appends both."""
        self._append({"step": step, "hparams": params, "metrics": metrics})

    def save(self, file_name: str, data: Mapping[str, Any]) -> None:
        """Writes plain data to a file of its own, `metrics/<file_name>.json`."""
        save_metrics(self.folder, file_name, data)

    def size(self) -> int:
        """How many bytes `metrics.jsonl` has now."""
        self._check_it_is_there()
        return self._writer.size

    def cut(self, size: int | None) -> int:
        """Takes what was written after a checkpoint out of the file, which had `size` bytes then; how many it has."""
        cut(self._writer.path, size)
        return self._writer.size

    def close(self, status: str) -> None:
        """Closes the file."""
        self._writer.close(status)

    def _append(self, row: Mapping[str, Any]) -> None:
        self._check_it_is_there()
        self._writer.append(row)

    def _check_it_is_there(self) -> None:
        if self._writer.is_deleted:
            raise FileNotFoundError(f"{self._writer.path} was deleted while the run wrote to it.")


def save_metrics(folder: Path, file_name: str, metrics: Mapping[str, Any]) -> None:
    """Writes metrics, arrays among them, to `metrics/<file_name>.json` in the folder of a run."""
    text = json.dumps(json_safe(plain_of(metrics)), allow_nan=False, indent=1)
    write_whole(folder / METRICS / f"{file_name_of(file_name)}.json", text.encode())
