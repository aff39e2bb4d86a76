"""The messages of a run in a file beside its numbers."""

import contextlib
import logging
from pathlib import Path
from typing import ClassVar, Literal

LOG = logging.getLogger("jax_trainer")
Verbosity = Literal["debug", "info", "warning", "error"]


class _File(logging.FileHandler):
    """A file of messages that may fail."""

    _has_failed = False

    def emit(self, record: logging.LogRecord) -> None:
        """Writes a message, if that is possible."""
        try:
            super().emit(record)
        except OSError:  # it cannot be opened, for its folder is gone
            self.handleError(record)

    def handleError(self, record: logging.LogRecord) -> None:
        """Says so once, instead of showing where in the library it happened every time."""
        if not self._has_failed:
            self._has_failed = True
            LOG.warning(f"{self.baseFilename} cannot be written, and messages are missing in it.")

    def close(self) -> None:
        """Closes the file; what is then still to be written may be lost."""
        with contextlib.suppress(OSError):
            super().close()


class _Fork(logging.Filter):
    """Gives every message to the files that want it, and lets others hear what they would hear without the files."""

    heard = logging.NOTSET  # from which level on

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether others hear of `record`."""
        for log in RunLog._open:
            log.take(record)
        return record.levelno >= self.heard


class RunLog:
    """Appends the messages of the logger "jax_trainer", from the level `verbosity` on, to `path` until it is closed.

    The file appears with the first message. What is shown elsewhere stays shown there, and no more than that. Where
    nothing can be written, that is said once, elsewhere, and is nobody's failure.
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
        RunLog._open = [*RunLog._open, self]  # another list: messages may come from other threads meanwhile
        self._let_through()

    def take(self, record: logging.LogRecord) -> None:
        """Writes a message, if it is important enough."""
        if record.levelno >= self._file.level:
            self._file.handle(record)

    def close(self) -> None:
        """Leaves the logger as it was; closing again does nothing."""
        if self in RunLog._open:
            RunLog._open = [log for log in RunLog._open if log is not self]
            self._file.close()
            self._let_through()

    @classmethod
    def _let_through(cls) -> None:
        """Opens the logger as far as the files want."""
        LOG.setLevel(cls._level_before)
        LOG.removeFilter(cls._fork)
        if cls._open:
            cls._fork.heard = LOG.getEffectiveLevel()
            LOG.setLevel(min(cls._fork.heard, *(log._file.level for log in cls._open)))
            LOG.addFilter(cls._fork)
