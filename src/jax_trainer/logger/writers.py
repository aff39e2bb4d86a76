"""Where numbers go: one small protocol, the writer that needs no tool, and what a tool's writer is."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from compoconf import RegistrableConfigInterface, register_interface


class MetricWriter(Protocol):
    """Takes numbers by name."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Records `values` at `step`."""
        ...

    def close(self, status: str) -> None:
        """Nothing more will come; `status` says how the run ended."""
        ...


@register_interface
class ToolLoggerInterface(RegistrableConfigInterface):
    """A `MetricWriter` that hands numbers to a tool; made of its configuration and the run's folder.

    `step` is the place on the x-axis, which may be an epoch. Whatever a tool raises costs the run one warning.
    """

    config: Any

    def __init__(self, config: Any, folder: Path) -> None:
        self.config, self.folder = config, folder

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Shows `values` at `step`."""
        raise NotImplementedError(f"{type(self).__name__} has no `write(step, values)`.")

    def close(self, status: str) -> None:
        """Nothing more will come."""


class JsonlWriter:
    """One JSON object per line: `{"step": 50, "train/loss_step": 0.31}`. NaN and infinities become strings."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("a", encoding="utf-8")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Appends a line; it is on its way to the disk when this returns."""
        row = {"step": step, **{name: _json_number(value) for name, value in values.items()}}
        self._file.write(json.dumps(row, allow_nan=False) + "\n")
        self._file.flush()

    def close(self, status: str) -> None:
        """Closes the file."""
        self._file.close()


def _json_number(value: float) -> Any:
    return value if math.isfinite(value) else str(value)
