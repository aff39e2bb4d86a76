"""The small files of a run: names that stay in their folder, and contents that are whole or not there."""

import contextlib
import hashlib
import os
import re
from pathlib import Path

_ODD = re.compile(r"[^\w.\-]")
_MOST_BYTES = 150  # file systems take 255, and a number and an ending are added


def file_name_of(name: str) -> str:
    """A name that people chose, as part of the name of a file: "/" and whatever is odd become "_".

    >>> file_name_of("val/confusion matrix"), file_name_of("../../x")
    ('val_confusion_matrix', '_.._x')
    """
    safe = _ODD.sub("_", name).lstrip(".") or "_"
    if len(safe.encode()) <= _MOST_BYTES:
        return safe
    digest = hashlib.sha256(name.encode(errors="replace")).hexdigest()[:16]  # long names differ at their ends
    return f"{safe.encode()[: _MOST_BYTES - 17].decode(errors='ignore')}-{digest}"


def write_atomically(file: Path, data: bytes) -> None:
    """Puts `data` into `file`, whose folder is made where only that is missing.

    The file never is half written, and a link in its place is replaced, not followed.
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
    """Waits until `file` is on the disk as it is now, where the file system can do that."""
    with contextlib.suppress(OSError), file.open("rb") as there:
        os.fsync(there.fileno())
