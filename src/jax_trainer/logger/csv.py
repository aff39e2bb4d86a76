"""Writes the metrics of a run as a table, `metrics.csv` in the run folder."""

import csv
import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from compoconf import register

from jax_trainer.config.settings import Settings
from jax_trainer.diagnostics.files import write_atomically
from jax_trainer.logger.writers import ToolLoggerInterface

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
