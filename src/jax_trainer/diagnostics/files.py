"""Files and names: valid names, bounded reads of untrusted files, crash-safe writes, files of lines. Imports no jax."""

import contextlib
import errno
import json
import os
import reprlib
import stat
import tempfile
import unicodedata
from collections.abc import Iterable
from io import BufferedReader
from pathlib import Path
from typing import Any

MAX_NAME_BYTES = 200  # file systems allow 255; suffixes and temporary names need some of them
_CONTROL = {"Cc", "Zl", "Zp"}  # control characters, and those that break a line
_CANNOT_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.EBADF}  # raised for folders by some network file systems

_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = 60


# names


def safe_join(root: Path, name: str) -> Path:
    """The path of `name` directly inside `root`; a name that leads elsewhere is an error.

    >>> safe_join(Path("runs"), "first try").as_posix()
    'runs/first try'
    """
    if problem := _problem(name) or _leaves(root, name):
        raise ValueError(
            f"{shown(name)} cannot be the name of a file or folder: it {problem}. "
            "Use letters, digits, `-`, `_` and `.`, for example `run-1`."
        )
    return root / name


def shown(value: object) -> str:
    """A value for a message: short, on one line, without control characters."""
    return _repr.repr(value)


def label(name: str) -> str:
    """A name from a file for a message: unchanged unless it is long or not printable."""
    return name if name.isprintable() and len(name) < MAX_NAME_BYTES else shown(name)


def _problem(name: str) -> str:
    if not isinstance(name, str):
        return f"is of type {type(name).__name__}, not text"
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        return "is not valid Unicode"
    reasons = {
        "is empty": not name,
        f"has {size} bytes, more than {MAX_NAME_BYTES}": size > MAX_NAME_BYTES,
        "refers to another folder": name in (".", ".."),
        "contains a path separator": "/" in name or "\\" in name,
        "contains a control character": any(unicodedata.category(letter) in _CONTROL for letter in name),
        "ends in a dot or a space": name.endswith((".", " ")),
    }
    return next((reason for reason, applies in reasons.items() if applies), "")


def _leaves(root: Path, name: str) -> str:
    try:
        inside = (root / name).resolve().is_relative_to(root.resolve())
    except (OSError, RuntimeError):  # a loop of links; the type depends on the version of Python
        return f"is a link in {root} that leads nowhere"
    return "" if inside else f"is a link that leads out of {root}"


# untrusted files


def open_regular(file: Path) -> BufferedReader:
    """Opens a regular file for reading; a link, a pipe, a folder or no file is a `ValueError`."""
    try:
        # non-blocking: opening a pipe would wait for a writer
        safely = lambda name, flags: os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK)
        opened = open(file, "rb", opener=safely)  # noqa: SIM115 - the caller closes it
    except OSError as error:
        raise ValueError(f"{file} cannot be opened: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(opened.fileno()).st_mode):
        opened.close()
        raise ValueError(f"{file} is not a regular file")
    return opened


def read_bounded(file: Path, limit: int | None = None) -> str:
    """The text of a regular file, see `open_regular`; one of more than `limit` bytes is a `ValueError`."""
    with open_regular(file) as opened:
        if limit is not None and os.fstat(opened.fileno()).st_size > limit:
            raise ValueError(f"{file} is larger than the limit of {limit} bytes")
        return opened.read().decode()


def read_json(file: Path, limit: int | None = None) -> dict[str, Any]:
    """The JSON object in a file, see `read_bounded`; anything else is a `ValueError`."""
    try:
        data = json.loads(read_bounded(file, limit))
    except RecursionError:
        raise ValueError(f"{file} is nested too deeply") from None
    if not isinstance(data, dict):
        raise ValueError(f"{file} is not a JSON object")
    return data


def check_only_plain_files(folder: Path) -> None:
    """Refuses a folder with links, or anything else that is neither a regular file nor a folder."""
    for parent, folders, files in os.walk(folder):
        for path in (os.path.join(parent, name) for name in (*folders, *files)):
            mode = os.lstat(path).st_mode
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                kind = "a link" if stat.S_ISLNK(mode) else "not a regular file"
                raise ValueError(f"{path} is {kind}; {folder} may only contain files and folders")


# crash-safe writes


def write_atomically(file: Path, content: str | bytes, *, durable: bool = True) -> None:
    """Replaces `file` atomically, also a link. If `durable`, a crash leaves either the old or the new content."""
    handle, partial = tempfile.mkstemp(prefix=".partial-", dir=file.parent)
    try:
        with open(handle, "wb") as opened:
            opened.write(content.encode() if isinstance(content, str) else content)
            opened.flush()
            if durable:
                os.fsync(handle)
        os.replace(partial, file)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(partial)
        raise
    if durable:
        sync_folder(file.parent)


def sync_tree(folder: Path) -> None:
    """Calls fsync on every file and folder below `folder`."""
    for parent, _, files in os.walk(folder, topdown=False):
        for name in files:
            sync(Path(parent, name))
        sync_folder(Path(parent))


def sync_folder(folder: Path) -> None:
    """Calls fsync on `folder`, so that its entries are on disk."""
    try:
        sync(folder)
    except OSError as error:
        if error.errno not in _CANNOT_SYNC:
            raise


def sync(path: Path) -> None:
    """Calls fsync on a file or a folder."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class LineFile:
    """A file of lines, to which `append` only adds.

    Whole lines are lines; the rest, of a process that was killed or of a write that failed, is cut off by `append`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._may_be_torn = True  # whether its last line may be incomplete

    def read(self, limit: int | None = None) -> list[bytes]:
        """The lines, none without a file; a `ValueError` if it is not regular, or has more than `limit` bytes."""
        if not os.path.lexists(self.path):
            return []
        with open_regular(self.path) as opened:
            if limit is not None and os.fstat(opened.fileno()).st_size > limit:
                raise ValueError(f"{self.path} is larger than the limit of {limit} bytes. Move it elsewhere.")
            return [line for line in opened if line.endswith(b"\n")]

    def append(self, lines: Iterable[bytes], *, sync: bool = False) -> None:
        """Adds lines; after an error, none of them is a line of the file. With `sync`, waits until they are on disk."""
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        handle = os.open(self.path, flags, 0o600)
        try:
            if self._may_be_torn:
                os.ftruncate(handle, _end_of_lines(handle))
            size, text, self._may_be_torn = os.fstat(handle).st_size, b"".join(lines), True
            try:
                if os.write(handle, text) != len(text):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
                if sync:
                    os.fsync(handle)
            except OSError:
                with contextlib.suppress(OSError):
                    os.ftruncate(handle, size)
                raise
            self._may_be_torn = False
        finally:
            os.close(handle)

    def cut(self, size: int) -> None:
        """Keeps the first `size` bytes, and syncs them; a `ValueError` if no line ends there."""
        with self.path.open("rb+") as opened:
            opened.seek(max(0, size - 1))
            if size and opened.read(1) != b"\n":
                raise ValueError(f"has no line that ends after {size} bytes")
            opened.truncate(size)
            os.fsync(opened.fileno())


def _end_of_lines(handle: int) -> int:
    """The size of a file without its incomplete last line."""
    end = os.fstat(handle).st_size
    while end:
        start = max(0, end - 2**16)
        if found := os.pread(handle, end - start, start).rfind(b"\n") + 1:
            return start + found
        end = start
    return 0
