"""The spikes of a run as a file in its folder."""

import logging
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

LOG = logging.getLogger("jax_trainer")
FILE = "gradient_spikes.npz"
COLUMNS = ("steps", "values", "averages")


Spike = tuple[int, float, float]  # the step, the value, the average at the time


class SpikeFile:
    """`gradient_spikes.npz`: per quantity the steps of its spikes, their values, and the average at the time.

    The arrays are called `grad_norm_steps`, `grad_norm_values`, `grad_norm_averages`, `loss_steps` and so on. All
    processes know the same spikes, and one of them `writes`.
    """

    def __init__(self, folder: Path, *, writes: bool = True) -> None:
        self._path, self._writes = folder / FILE, writes
        self._rows: dict[str, list[Spike]] = {"grad_norm": [], "loss": []}
        self._written = dict.fromkeys(self._rows, 0)  # how many of them the file has
        self._has_news = False

    def add(self, quantity: str, step: int, value: float, average: float) -> None:
        """One more spike; it is in the file after `write`."""
        self._rows[quantity].append((step, value, average))
        self._has_news = True

    @property
    def unwritten(self) -> dict[str, list[Spike]]:
        """The spikes that are not in the file yet: a checkpoint keeps these."""
        return {quantity: rows[self._written[quantity] :] for quantity, rows in self._rows.items()}

    def write(self) -> None:
        """Replaces the file, if there is anything new. Whoever reads it finds it whole, also after a power cut."""
        if not self._has_news:
            return
        if self._writes:
            self._replace()
        self._has_news, self._written = False, {quantity: len(rows) for quantity, rows in self._rows.items()}

    def _replace(self) -> None:
        partial = self._path.with_name(f".partial-{FILE}")
        with partial.open("wb") as file:
            np.savez(file, allow_pickle=False, **self._arrays())
            file.flush()
            os.fsync(file.fileno())  # what it has is not in the next checkpoint any more
        os.replace(partial, self._path)

    def resume(self, step: int, unwritten: Mapping[str, Any] | None = None) -> None:
        """Cuts the file to what it had at `step`, and adds what was `unwritten` then; what is later will come again."""
        known = {quantity: [tuple(row) for row in (unwritten or {}).get(quantity, ())] for quantity in self._rows}
        for quantity, rows in self._read(step).items():
            merged = {row[0]: row for row in (*rows, *known[quantity])}  # it may have been written since
            self._rows[quantity] = [merged[at] for at in sorted(merged)]
        self._has_news |= any(known.values())
        self.write()

    def _read(self, step: int) -> dict[str, list[Spike]]:
        nothing: dict[str, list[Spike]] = {quantity: [] for quantity in self._rows}
        if not self._path.exists():
            return nothing
        self._has_news = True
        try:
            with np.load(self._path, allow_pickle=False) as found:
                columns = {name: [found[f"{name}_{column}"].tolist() for column in COLUMNS] for name in self._rows}
            rows = {name: list(zip(*column, strict=True)) for name, column in columns.items()}
            return {name: [row for row in found if row[0] <= step] for name, found in rows.items()}
        except (OSError, ValueError, KeyError, zipfile.BadZipFile) as problem:
            LOG.warning(f"{self._path} cannot be read, and is begun anew. {type(problem).__name__}: {problem}")
            return nothing

    def _arrays(self) -> dict[str, np.ndarray]:
        return {
            f"{quantity}_{column}": np.array([row[index] for row in rows], np.float64 if index else np.int64)
            for quantity, rows in self._rows.items()
            for index, column in enumerate(COLUMNS)
        }
