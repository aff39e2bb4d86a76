"""`run.log`: the log messages of a run."""

import contextlib
import logging
from pathlib import Path
from typing import ClassVar, Literal

LOG = logging.getLogger("jax_trainer")
Verbosity = Literal["debug", "info", "warning", "error"]


class _Fork(logging.Filter):
    """Passes every message to the open files, and to other handlers only what they would get without the files."""

    level = logging.NOTSET  # of the other handlers

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether other handlers get `record`."""
        for log in RunLog._active:
            if record.levelno >= log.level:
                log.handle(record)
        return record.levelno >= self.level


class RunLog(logging.FileHandler):
    """Appends the messages of the logger "jax_trainer", from the level `verbosity` on, to `path` until it is closed.

    The file is created by the first message. Other handlers get the same messages as without it. If the file cannot be
    written, other handlers get one warning, and the run continues.
    """

    _active: ClassVar[list["RunLog"]] = []  # several runs of a process may overlap
    _level_before: ClassVar[int] = logging.NOTSET
    _fork: ClassVar[_Fork] = _Fork()
    _has_failed = False

    def __init__(self, path: Path, verbosity: Verbosity) -> None:
        super().__init__(path, encoding="utf-8", delay=True)
        self.setLevel(verbosity.upper())
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        if not RunLog._active:
            RunLog._level_before = LOG.level
        RunLog._active = [*RunLog._active, self]  # a new list: other threads may be logging
        self._let_through()

    def emit(self, record: logging.LogRecord) -> None:
        """Writes a message."""
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
        """Closes the file and restores the level of the logger; a second call does nothing."""
        if self in RunLog._active:
            RunLog._active = [log for log in RunLog._active if log is not self]
            with contextlib.suppress(OSError):  # buffered messages may be lost
                super().close()
            self._let_through()

    @classmethod
    def _let_through(cls) -> None:
        """Sets the level of the logger to the lowest level of the files."""
        LOG.setLevel(cls._level_before)
        LOG.removeFilter(cls._fork)
        if cls._active:
            cls._fork.level = LOG.getEffectiveLevel()
            LOG.setLevel(min(cls._fork.level, *(log.level for log in cls._active)))
            LOG.addFilter(cls._fork)
