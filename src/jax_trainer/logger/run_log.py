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


class RunLog:
    """Appends the messages of the logger "jax_trainer", from the level `verbosity` on, to `path` until it is closed.

    The file appears with the first message. What is shown elsewhere stays shown there. Where nothing can be written,
    that is said once, elsewhere, and is nobody's failure.
    """

    _open: ClassVar[list["RunLog"]] = []  # several runs of a process may overlap
    _level_before: ClassVar[int] = logging.NOTSET

    def __init__(self, path: Path, verbosity: Verbosity) -> None:
        self._handler = _File(path, encoding="utf-8", delay=True)
        self._handler.setLevel(verbosity.upper())
        self._handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        if not RunLog._open:
            RunLog._level_before = LOG.level
        RunLog._open.append(self)
        LOG.addHandler(self._handler)
        self._let_through()

    def close(self) -> None:
        """Leaves the logger as it was; closing again does nothing."""
        if self in RunLog._open:
            RunLog._open.remove(self)
            LOG.removeHandler(self._handler)
            self._handler.close()
            self._let_through()

    @staticmethod
    def _let_through() -> None:
        files = [log._handler for log in RunLog._open]
        LOG.setLevel(RunLog._level_before)
        LOG.setLevel(min([LOG.getEffectiveLevel(), *(file.level for file in files)]) if files else LOG.level)
        if (fallback := logging.lastResort) is not None:
            LOG.removeHandler(fallback)
            is_heard = set(LOG.handlers) - set(files) or (LOG.parent and LOG.parent.hasHandlers())
            if files and not is_heard:  # Python shows warnings by itself only while nobody at all handles them
                LOG.addHandler(fallback)
