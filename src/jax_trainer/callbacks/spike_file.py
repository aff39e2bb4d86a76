"""The file with the spikes of a run."""

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


Spike = tuple[int, float, float]  # step, value, average at that step


class SpikeFile:
    """`gradient_spikes.npz`: steps, values and averages of the spikes of each quantity.

    The arrays are called `grad_norm_steps`, `grad_norm_values`, `grad_norm_averages`, `loss_steps` and so on. All
    processes have the same spikes, and the primary one `writes`.
    """

    def __init__(self, folder: Path, *, writes: bool = True) -> None:
        self._path, self._writes = folder / FILE, writes
        self._rows: dict[str, list[Spike]] = {"grad_norm": [], "loss": []}
        self._written = dict.fromkeys(self._rows, 0)  # number of rows in the file
        self._is_dirty = False

    def add(self, quantity: str, step: int, value: float, average: float) -> None:
        """Adds a spike; `write` writes it to the file."""
        self._rows[quantity].append((step, value, average))
        self._is_dirty = True

    @property
    def unwritten(self) -> dict[str, list[Spike]]:
        """The spikes that are not in the file yet; saved with checkpoints."""
        return {quantity: rows[self._written[quantity] :] for quantity, rows in self._rows.items()}

    def write(self) -> None:
        """Replaces the file atomically, if there are new spikes."""
        if not self._is_dirty:
            return
        if self._writes:
            self._replace()
        self._is_dirty, self._written = False, {quantity: len(rows) for quantity, rows in self._rows.items()}

    def _replace(self) -> None:
        partial = self._path.with_name(f".partial-{FILE}")
        with partial.open("wb") as file:
            np.savez(file, allow_pickle=False, **self._arrays())
            file.flush()
            os.fsync(file.fileno())  # the next checkpoint no longer contains these rows
        os.replace(partial, self._path)

    def resume(self, step: int, unwritten: Mapping[str, Any] | None = None) -> None:
        """Removes spikes after `step`, which will be added again, and adds those that were `unwritten` then."""
        known = {quantity: [tuple(row) for row in (unwritten or {}).get(quantity, ())] for quantity in self._rows}
        for quantity, rows in self._read(step).items():
            merged = {row[0]: row for row in (*rows, *known[quantity])}  # they may have been written since
            self._rows[quantity] = [merged[at] for at in sorted(merged)]
        self._is_dirty |= any(known.values())
        self.write()

    def _read(self, step: int) -> dict[str, list[Spike]]:
        nothing: dict[str, list[Spike]] = {quantity: [] for quantity in self._rows}
        if not self._path.exists():
            return nothing
        self._is_dirty = True
        try:
            with np.load(self._path, allow_pickle=False) as found:
                columns = {name: [found[f"{name}_{column}"].tolist() for column in COLUMNS] for name in self._rows}
            rows = {name: list(zip(*column, strict=True)) for name, column in columns.items()}
            return {name: [row for row in found if row[0] <= step] for name, found in rows.items()}
        except (OSError, ValueError, KeyError, zipfile.BadZipFile) as problem:
            LOG.warning(f"{self._path} cannot be read, and is replaced. {type(problem).__name__}: {problem}")
            return nothing

    def _arrays(self) -> dict[str, np.ndarray]:
        return {
            f"{quantity}_{column}": np.array([row[index] for row in rows], np.float64 if index else np.int64)
            for quantity, rows in self._rows.items()
            for index, column in enumerate(COLUMNS)
        }
