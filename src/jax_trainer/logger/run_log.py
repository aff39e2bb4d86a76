"""`run.log`: the log messages of a run."""

import contextlib
import logging
from pathlib import Path
from typing import ClassVar, Literal

LOG = logging.getLogger("jax_trainer")
Verbosity = Literal["debug", "info", "warning", "error"]


class _File(logging.FileHandler):
    """A log file whose failures cost one warning."""

    _has_failed = False

    def emit(self, record: logging.LogRecord) -> None:
        try:
            super().emit(record)
        except OSError:  # it cannot be opened: its folder was deleted
            self.handleError(record)

    def handleError(self, record: logging.LogRecord) -> None:
        """Warns once, instead of printing a traceback for every message."""
        if not self._has_failed:
            self._has_failed = True
            LOG.warning(f"{self.baseFilename} cannot be written: it lacks messages.")

    def close(self) -> None:
        """Closes the file; buffered messages may be lost."""
        with contextlib.suppress(OSError):
            super().close()


class _Fork(logging.Filter):
    """Passes every message to the open files, and to other handlers only what they would get without the files."""

    level = logging.NOTSET  # of the other handlers

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether other handlers get `record`."""
        for log in RunLog._open:
            log.take(record)
        return record.levelno >= self.level


class RunLog:
    """Appends the messages of the logger "jax_trainer", from the level `verbosity` on, to `path` until it is closed.

    The file is created by the first message. Other handlers get the same messages as without it. If the file cannot be
    written, other handlers get one warning, and the run continues.
    """

    _open: ClassVar[list["RunLog"]] = []  # several runs of a process may overlap
    _level_before: ClassVar[int] = logging.NOTSET
    _fork: ClassVar[_Fork] = _Fork()

    def __init__(self, path: Path, verbosity: Verbosity) -> None:
        self._file = _File(path, encoding="utf-8", delay=True)
        self._file.setLevel(verbosity.upper())
        self._file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        if not RunLog._open:
            RunLog._level_before = LOG.level
        RunLog._open = [*RunLog._open, self]  # a new list: other threads may be logging
        self._let_through()

    def take(self, record: logging.LogRecord) -> None:
        """Writes a message of at least the file's level."""
        if record.levelno >= self._file.level:
            self._file.handle(record)

    def close(self) -> None:
        """Closes the file and restores the level of the logger; a second call does nothing."""
        if self in RunLog._open:
            RunLog._open = [log for log in RunLog._open if log is not self]
            self._file.close()
            self._let_through()

    @classmethod
    def _let_through(cls) -> None:
        """Sets the level of the logger to the lowest level of the files."""
        LOG.setLevel(cls._level_before)
        LOG.removeFilter(cls._fork)
        if cls._open:
            cls._fork.level = LOG.getEffectiveLevel()
            LOG.setLevel(min(cls._fork.level, *(log._file.level for log in cls._open)))
            LOG.addFilter(cls._fork)
