"""Where numbers go: one small protocol, the writer that needs no tool, and what a tool's writer is."""

import contextlib
import errno
import json
import os
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from compoconf import RegistrableConfigInterface, register_interface

from jax_trainer.logger.run_log import LOG
from jax_trainer.logger.values import json_safe

MOST_UNWRITTEN = 10_000  # lines that wait for room on the disk


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

    `step` is the place on the x-axis, which all curves share. A tool has to have `write`; what else it cannot show, it
    ignores. All of it is called in one thread, which is not that of the training. Whatever a tool raises costs the run
    one warning, and the tool what it was given.
    """

    config: Any

    def __init__(self, config: Any, folder: Path) -> None:
        self.config, self.folder = config, folder

    @classmethod
    def require(cls) -> None:
        """Raises `ImportError` if a package is missing; called before training, in its thread."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Shows `values`, a row of the run, at `step`; its epoch is among them as "epoch"."""
        raise NotImplementedError(f"{type(self).__name__} has no `write(step, values)`.")

    def image(self, step: int, name: str, pixels: np.ndarray) -> None:
        """Shows an image: bytes, [height, width, 1, 3 or 4 channels]."""

    def figure(self, step: int, name: str, png: bytes) -> None:
        """Shows a figure, drawn as a PNG file."""

    def histogram(self, step: int, name: str, values: np.ndarray) -> None:
        """Shows how `values`, of any shape, are distributed."""

    def text(self, step: int, name: str, text: str) -> None:
        """Shows a text."""

    def hparams(self, step: int, params: Mapping[str, Any], metrics: Mapping[str, float]) -> None:
        """Shows what the run was made of, by names with dots, and what came out of it."""

    def flush(self) -> None:
        """Brings what it was given to where it belongs."""

    def close(self, status: str) -> None:
        """Nothing more will come."""


class UnwrittenError(OSError):
    """Rows that waited for room on the disk to the end."""

    def __init__(self, entries: int, path: Path) -> None:
        super().__init__(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} for {entries} rows", str(path))
        self.entries = entries


class JsonlWriter:
    """One JSON object per line: `{"step": 50, "train/loss_step": 0.31}`. NaN and infinities become strings.

    It appends to a file that is there. A last line that was cut off stays a line of its own. Lines that cannot be
    written, as the disk is full, wait: they are written before the next one, as soon as that is possible.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("ab+", buffering=0)
        self._unwritten: deque[bytes] = deque()
        self._has_warned = False
        with contextlib.suppress(OSError):
            if self.size and os.pread(self._file.fileno(), 1, self.size - 1) != b"\n":
                self._file.write(b"\n")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Appends a line; it is on its way to the disk when this returns."""
        self.append({"step": step, **values})

    def append(self, row: Mapping[str, Any]) -> None:
        """Appends a line with this row, after those that wait."""
        if len(self._unwritten) >= MOST_UNWRITTEN:
            raise OSError(errno.ENOSPC, f"{len(self._unwritten)} rows wait for room already", str(self.path))
        self._unwritten.append(json.dumps(json_safe(row), allow_nan=False).encode() + b"\n")
        self.catch_up()

    def catch_up(self) -> None:
        """Writes the lines that wait, as far as that is possible."""
        try:
            while self._unwritten:
                self._put(self._unwritten[0])
                self._unwritten.popleft()
        except OSError as error:
            if not self._has_warned:
                LOG.warning(f"{self.path} cannot be written ({error.strerror}): rows wait until it can. Make room.")
            self._has_warned = True
        else:
            self._has_warned = False

    @property
    def unwritten(self) -> tuple[str, ...]:
        """The lines that wait."""
        return tuple(line.decode() for line in self._unwritten)

    def replace_unwritten(self, lines: Iterable[str]) -> None:
        """These lines wait, instead of those that do; they are written if that is possible."""
        self._unwritten = deque(line.encode() for line in lines)
        self.catch_up()

    def _put(self, line: bytes) -> None:
        before = self.size
        try:
            if self._file.write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
        except OSError:
            with contextlib.suppress(OSError):
                self._file.truncate(before)  # half a line would be in the way of the next one
            raise

    @property
    def size(self) -> int:
        """How many bytes the file has."""
        return os.fstat(self._file.fileno()).st_size

    @property
    def is_deleted(self) -> bool:
        """Whether the file was deleted: what is written goes nowhere, and nothing else would tell."""
        return os.fstat(self._file.fileno()).st_nlink == 0

    def close(self, status: str) -> None:
        """Closes the file; an `UnwrittenError` where lines still wait."""
        self.catch_up()
        self._file.close()
        if self._unwritten:
            raise UnwrittenError(len(self._unwritten), self.path)
