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


class _Onward(logging.Handler):
    """Passes on, to the loggers above, what they would hear without the files."""

    def emit(self, record: logging.LogRecord) -> None:
        """Passes `record` on; where nobody at all listens, Python shows warnings by itself."""
        above = LOG.parent
        others = [handler for handler in LOG.handlers if not isinstance(handler, _File | _Onward)]
        if above is not None and (above.hasHandlers() or not others):
            above.callHandlers(record)


class RunLog:
    """Appends the messages of the logger "jax_trainer", from the level `verbosity` on, to `path` until it is closed.

    The file appears with the first message. What is shown elsewhere stays shown there, and no more than that. Where
    nothing can be written, that is said once, elsewhere, and is nobody's failure.
    """

    _open: ClassVar[list["RunLog"]] = []  # several runs of a process may overlap
    _before: ClassVar[tuple[int, bool]] = (logging.NOTSET, True)
    _onward: ClassVar[_Onward] = _Onward()

    def __init__(self, path: Path, verbosity: Verbosity) -> None:
        self._handler = _File(path, encoding="utf-8", delay=True)
        self._handler.setLevel(verbosity.upper())
        self._handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        if not RunLog._open:
            RunLog._before = LOG.level, LOG.propagate
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

    @classmethod
    def _let_through(cls) -> None:
        """Opens the logger as far as the files want, without letting others hear more than before."""
        level, propagates = cls._before
        LOG.setLevel(level)
        LOG.propagate = propagates
        LOG.removeHandler(cls._onward)
        if cls._open:
            heard = LOG.getEffectiveLevel()
            LOG.setLevel(min(heard, *(log._handler.level for log in cls._open)))
            cls._onward.setLevel(heard)
            if propagates:
                LOG.propagate = False
                LOG.addHandler(cls._onward)
