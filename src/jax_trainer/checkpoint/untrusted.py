"""Reading what somebody else may have written: nothing but plain files, and no more of them than can be wanted."""

import os
import stat
from pathlib import Path


def read_bounded(file: Path, limit: int) -> str:
    """The text of a plain file of at most `limit` bytes; a link, a pipe or a larger file is a `ValueError`."""
    try:
        # without blocking: opening a pipe would wait for somebody to write into it
        handle = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise ValueError(f"{file} cannot be opened: {error.strerror}") from error
    with os.fdopen(handle, "rb") as opened:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise ValueError(f"{file} is not a plain file")
        content = opened.read(limit + 1)
    if len(content) > limit:
        raise ValueError(f"{file} has more than the {limit} bytes that are allowed")
    return content.decode()


def check_only_plain_files(folder: Path) -> None:
    """Refuses a folder in which something is a link, or anything else that is neither a file nor a folder."""
    for place, folders, files in os.walk(folder):
        for path in (os.path.join(place, name) for name in (*folders, *files)):
            mode = os.lstat(path).st_mode
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                kind = "a link" if stat.S_ISLNK(mode) else "no plain file"
                raise ValueError(f"{path} is {kind}, and {folder} may not have any")
