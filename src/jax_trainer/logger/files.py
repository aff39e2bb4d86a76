"""Small files of a run: safe names and atomic writes."""

import contextlib
import hashlib
import os
import re
from pathlib import Path

_ODD = re.compile(r"[^\w.\-]")
_MOST_BYTES = 150  # file systems allow 255; a number and a suffix are added


def file_name_of(name: str) -> str:
    """A user's name as part of a file name: "/" and special characters become "_".

    >>> file_name_of("val/confusion matrix"), file_name_of("../../x")
    ('val_confusion_matrix', '_.._x')
    """
    safe = _ODD.sub("_", name).lstrip(".") or "_"
    if len(safe.encode()) <= _MOST_BYTES:
        return safe
    digest = hashlib.sha256(name.encode(errors="replace")).hexdigest()[:16]  # long names differ at their ends
    return f"{safe.encode()[: _MOST_BYTES - 17].decode(errors='ignore')}-{digest}"


def write_atomically(file: Path, data: bytes) -> None:
    """Writes `data` to `file` atomically; creates its folder, but not the parents of that.

    A link at this path is replaced, not followed.
    """
    file.parent.mkdir(exist_ok=True)
    partial = file.with_name(f".{file.name}.partial")
    partial.unlink(missing_ok=True)
    try:
        with partial.open("xb") as out:
            out.write(data)
        os.replace(partial, file)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def sync(file: Path) -> None:
    """Waits until the content of `file` is on disk, if the file system supports that."""
    with contextlib.suppress(OSError), file.open("rb") as opened:
        os.fsync(opened.fileno())
