"""Standard output and standard error; a failed write never ends a training."""

import atexit
import io
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console

_UNWRITABLE = (OSError, ValueError)  # disk full or broken pipe; closed stream


class SafeStream(io.TextIOBase):
    """A text stream that drops what cannot be written (broken pipe, full disk).

    Nothing is left in a buffer, which Python would try to write, and fail, when the process ends.

    Args:
        stream: returns the current stream; None: it was closed before the process started.
    """

    def __init__(self, stream: Callable[[], TextIO | None]) -> None:
        self._stream = stream
        self.failure: Exception | None = None  # the first failed write

    def write(self, text: str, /) -> int:
        """Writes `text` without buffering; drops it if that fails."""
        stream = self._stream()
        if stream is not None:
            try:
                _write(stream, text)
            except _UNWRITABLE as failure:
                self.failure = self.failure or failure
        return len(text)

    def flush(self) -> None:
        """Does nothing: `write` does not buffer."""

    def isatty(self) -> bool:
        stream = self._stream()
        return stream is not None and not stream.closed and stream.isatty()

    def fileno(self) -> int:
        stream = self._stream()
        if stream is None:
            raise io.UnsupportedOperation("The stream was closed before the process started.")
        return stream.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override] - of the stream below
        return getattr(self._stream(), "encoding", None) or "utf-8"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream(), name)  # `buffer` and other attributes of standard streams


def _write(stream: TextIO, text: str) -> None:
    stream.flush()
    try:
        handle = stream.fileno() if isinstance(stream, io.TextIOWrapper) else None
    except io.UnsupportedOperation:
        handle = None
    if handle is None:  # it is captured, or a notebook's, whose descriptor is the server's
        stream.write(text)
        stream.flush()
        return
    rest = text.encode(getattr(stream, "encoding", None) or "utf-8", "replace")
    while rest:
        rest = rest[os.write(handle, rest) :]


OUT, ERR = SafeStream(lambda: sys.stdout), SafeStream(lambda: sys.stderr)


def safe_console(*, stderr: bool = True, **options: Any) -> Console:
    """A rich `Console` on standard error or standard output whose writes never raise."""
    return Console(file=ERR if stderr else OUT, **options)  # type: ignore[arg-type] - implements the methods that rich uses


def tame(text: str) -> str:
    """`text` with control characters escaped: names of files may contain terminal escape sequences."""
    return "".join(char if char.isprintable() or char == "\n" else ascii(char)[1:-1] for char in text)


def short_path(path: str | Path) -> str:
    """A path for a person: relative if it is inside of the working directory.

    >>> short_path(Path.cwd() / "runs" / "CNN")
    'runs/CNN'
    """
    try:
        text = str(Path(path).relative_to(Path.cwd()))
        return f"./{text}" if text.startswith("-") else text  # a command would read it as an option
    except (OSError, ValueError):  # it is elsewhere, or the working directory was deleted
        return str(path)


def flush_output() -> None:
    """Flushes both streams if possible; call it before `os._exit`."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            with suppress(*_UNWRITABLE):
                stream.flush()


def reserve_standard_streams() -> None:
    """Opens the null device for closed standard streams, so that no file gets their descriptors.

    Native libraries would write their messages to standard error into such a file.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free descriptor


@atexit.register
def _discard_unwritable_stderr() -> None:
    """Discards buffered messages on a broken standard error, which would make the exit code 120."""
    if sys.stderr is None or sys.stderr.closed:
        return
    try:
        sys.stderr.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
