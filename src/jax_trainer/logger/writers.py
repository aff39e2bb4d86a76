"""The protocol of metric writers, the JSON-lines writer, and the interface of logging tools."""

import contextlib
import errno
import json
import os
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from compoconf import RegistrableConfigInterface, register_interface

from jax_trainer.logger.run_log import LOG
from jax_trainer.logger.values import json_safe

MOST_UNWRITTEN = 10_000  # lines in memory while the disk is full


class MetricWriter(Protocol):
    """Writes metrics by name."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Writes `values` at `step`."""
        ...

    def close(self, status: str) -> None:
        """Closes the writer; `status` is how the run ended."""
        ...


@runtime_checkable
class EditWriter(Protocol):
    """A writer that also records edits of the training state."""

    def write_edit(self, step: int, edit: Mapping[str, Any]) -> None:
        """Writes who changed what at `step`, and why: plain data with the `epoch`."""
        ...


@register_interface
class ToolLoggerInterface(RegistrableConfigInterface):
    """A `MetricWriter` for a logging tool, created from its configuration and the run folder.

    `step` is the position on the x-axis, which all curves share. A tool must have `write`; the other methods do nothing
    by default. All methods are called in one background thread. An error of a tool costs one warning and the entry.
    """

    config: Any

    def __init__(self, config: Any, folder: Path) -> None:
        self.config, self.folder = config, folder

    @classmethod
    def require(cls) -> None:
        """Raises `ImportError` if a package is missing; called before training, in the main thread."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Logs a row of metrics at `step`; it may contain the epoch as "epoch"."""
        raise NotImplementedError(f"{type(self).__name__} must implement `write(step, values)`.")

    def image(self, step: int, name: str, pixels: np.ndarray) -> None:
        """Logs an image: uint8 [height, width, 1, 3 or 4 channels]."""

    def figure(self, step: int, name: str, png: bytes) -> None:
        """Logs a figure, rendered as a PNG file."""

    def histogram(self, step: int, name: str, values: np.ndarray) -> None:
        """Logs a histogram of `values`, which may have any shape."""

    def text(self, step: int, name: str, text: str) -> None:
        """Logs a text."""

    def hparams(self, step: int, params: Mapping[str, Any], metrics: Mapping[str, float]) -> None:
        """Logs hyperparameters by dotted name, and final metrics."""

    def write_edit(self, step: int, edit: Mapping[str, Any]) -> None:
        """Logs an edit of the training state: who changed what and why, with the epoch."""

    def flush(self) -> None:
        """Writes buffered entries."""

    def close(self, status: str) -> None:
        """Closes the tool; `status` is how the run ended."""


class UnwrittenError(OSError):
    """Rows that were never written, because the disk was full."""

    def __init__(self, entries: int, path: Path) -> None:
        super().__init__(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} for {entries} rows", str(path))
        self.entries = entries


class JsonlWriter:
    """One JSON object per line: `{"step": 50, "train/loss_step": 0.31}`. NaN and infinities become strings.

    Appends to an existing file; an incomplete last line stays a separate line. Lines that a full disk refuses are kept
    in memory, and written before the next one once there is space.
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
        """Appends a line, unbuffered."""
        self.append({"step": step, **values})

    def write_edit(self, step: int, edit: Mapping[str, Any]) -> None:
        """Appends an edit of the training state: `{"step": 80, "epoch": 4, "edit": {"by": …}}`."""
        self.append(edit_row(step, edit))

    def append(self, row: Mapping[str, Any]) -> None:
        """Appends a row as a line, after unwritten ones."""
        if len(self._unwritten) >= MOST_UNWRITTEN:
            raise OSError(errno.ENOSPC, f"{len(self._unwritten)} rows are waiting for disk space", str(self.path))
        self._unwritten.append(json.dumps(json_safe(row), allow_nan=False).encode() + b"\n")
        self.catch_up()

    def catch_up(self) -> None:
        """Writes unwritten lines, if possible."""
        try:
            while self._unwritten:
                self._put(self._unwritten[0])
                self._unwritten.popleft()
        except OSError as error:
            if not self._has_warned:
                LOG.warning(
                    f"{self.path} cannot be written ({error.strerror}): rows are kept in memory. Free disk space."
                )
            self._has_warned = True
        else:
            self._has_warned = False

    @property
    def unwritten(self) -> tuple[str, ...]:
        """The lines that could not be written yet."""
        return tuple(line.decode() for line in self._unwritten)

    def replace_unwritten(self, lines: Iterable[str]) -> None:
        """Replaces the unwritten lines, and writes them if possible."""
        self._unwritten = deque(line.encode() for line in lines)
        self.catch_up()

    def _put(self, line: bytes) -> None:
        before = self.size
        try:
            if self._file.write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
        except OSError:
            with contextlib.suppress(OSError):
                self._file.truncate(before)  # removes the incomplete line
            raise

    @property
    def size(self) -> int:
        """Size of the file in bytes."""
        return os.fstat(self._file.fileno()).st_size

    @property
    def is_deleted(self) -> bool:
        """Whether the file was deleted, in which case writes are lost without an error."""
        return os.fstat(self._file.fileno()).st_nlink == 0

    def close(self, status: str) -> None:
        """Closes the file; raises an `UnwrittenError` if lines could not be written."""
        self.catch_up()
        self._file.close()
        if self._unwritten:
            raise UnwrittenError(len(self._unwritten), self.path)


def edit_row(step: int, edit: Mapping[str, Any]) -> dict[str, Any]:
    """The row of an edit of the training state."""
    rest = {name: value for name, value in edit.items() if name not in ("step", "epoch")}
    return {"step": step, "epoch": edit["epoch"], "edit": rest}
