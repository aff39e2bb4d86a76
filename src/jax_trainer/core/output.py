"""Standard output and standard error, for what is only shown: that it cannot be written never ends a training."""

import atexit
import io
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TextIO

from rich.console import Console

_UNWRITABLE = (OSError, ValueError)  # full, or without a reader; closed


class SafeStream(io.TextIOBase):
    """A stream for people. What cannot be written, as nobody reads it or the disk is full, is left out.

    Nothing stays behind in a buffer, which Python would try to write again, and fail, when the process ends.

    Args:
        stream: gives the stream that is meant now; None is one that was closed before the process began.
    """

    def __init__(self, stream: Callable[[], TextIO | None]) -> None:
        self._stream = stream
        self.failure: Exception | None = None  # why something was left out first

    def write(self, text: str, /) -> int:
        """Writes `text` at once, or leaves it out."""
        stream = self._stream()
        if stream is not None:
            try:
                _write(stream, text)
            except _UNWRITABLE as failure:
                self.failure = self.failure or failure
        return len(text)

    def flush(self) -> None:
        """Nothing waits here."""

    def isatty(self) -> bool:
        """Whether it is a terminal."""
        stream = self._stream()
        return stream is not None and not stream.closed and stream.isatty()

    def fileno(self) -> int:
        """The number of the file."""
        stream = self._stream()
        if stream is None:
            raise io.UnsupportedOperation("There is no such stream.")
        return stream.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override] - of the stream below
        """How letters are written."""
        return getattr(self._stream(), "encoding", None) or "utf-8"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream(), name)  # `buffer`, and what others know of standard streams


def _write(stream: TextIO, text: str) -> None:
    handle = _handle(stream)
    if handle is None:
        stream.write(text)
        stream.flush()
        return
    stream.flush()
    rest = text.encode(getattr(stream, "encoding", None) or "utf-8", "replace")
    while rest:
        rest = rest[os.write(handle, rest) :]


def _handle(stream: TextIO) -> int | None:
    """The number of the file below a stream; None: it is captured, or a notebook's, which has that of the server."""
    try:
        return stream.fileno() if isinstance(stream, io.TextIOWrapper) else None
    except io.UnsupportedOperation:
        return None


OUT, ERR = SafeStream(lambda: sys.stdout), SafeStream(lambda: sys.stderr)


def safe_console(*, stderr: bool = True, **options: Any) -> Console:
    """A console of rich, on standard error or standard output, that never fails."""
    return Console(file=ERR if stderr else OUT, **options)  # type: ignore[arg-type] - has all that is written to


def flush_output() -> None:
    """Before a process ends at once: brings out what waits, if that is possible."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            with suppress(*_UNWRITABLE):
                stream.flush()


def reserve_standard_streams() -> None:
    """Before files are opened: none of them may get the number of a standard stream that is closed.

    What libraries below Python say on standard error would end up in it.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free


@atexit.register
def _forget_what_nobody_reads() -> None:
    """Messages that could not be shown are no failure: what waits on standard error would make the exit code 120."""
    if sys.stderr is None or sys.stderr.closed:
        return
    try:
        sys.stderr.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
