"""The spikes of a run as a file in its folder."""

import logging
import os
import zipfile
from pathlib import Path

import numpy as np

LOG = logging.getLogger("jax_trainer")
FILE = "gradient_spikes.npz"
COLUMNS = ("steps", "values", "averages")


class SpikeFile:
    """`gradient_spikes.npz`: per quantity the steps of its spikes, their values, and the average at the time.

    The arrays are called `grad_norm_steps`, `grad_norm_values`, `grad_norm_averages`, `loss_steps` and so on.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE
        self._rows: dict[str, list[tuple[int, float, float]]] = {"grad_norm": [], "loss": []}
        self._has_news = False

    def add(self, quantity: str, step: int, value: float, average: float) -> None:
        """One more spike; it is in the file after `write`."""
        self._rows[quantity].append((step, value, average))
        self._has_news = True

    def write(self) -> None:
        """Replaces the file, if there is anything new. Whoever reads it finds it whole."""
        if not self._has_news:
            return
        partial = self._path.with_name(f".partial-{FILE}")
        with partial.open("wb") as file:
            np.savez(file, allow_pickle=False, **self._arrays())
        os.replace(partial, self._path)
        self._has_news = False

    def go_on(self, step: int) -> None:
        """Takes in what the file has up to `step`; what is later will come again."""
        if not self._path.exists():
            return
        try:
            with np.load(self._path, allow_pickle=False) as found:
                columns = {name: [found[f"{name}_{column}"].tolist() for column in COLUMNS] for name in self._rows}
            rows = {name: list(zip(*column, strict=True)) for name, column in columns.items()}
            self._rows = {name: [row for row in found if row[0] <= step] for name, found in rows.items()}
        except (OSError, ValueError, KeyError, zipfile.BadZipFile) as problem:
            LOG.warning(f"{self._path} cannot be read, and is begun anew. {type(problem).__name__}: {problem}")
        self._has_news = True

    def _arrays(self) -> dict[str, np.ndarray]:
        return {
            f"{quantity}_{column}": np.array([row[index] for row in rows], np.float64 if index else np.int64)
            for quantity, rows in self._rows.items()
            for index, column in enumerate(COLUMNS)
        }
