"""Reading untrusted files: only regular files, and only up to a size limit."""

import os
import stat
from pathlib import Path


def read_bounded(file: Path, limit: int) -> str:
    """The text of a regular file of at most `limit` bytes; a link, a pipe or a larger file is a `ValueError`."""
    try:
        # non-blocking: opening a pipe would wait for a writer
        handle = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise ValueError(f"{file} cannot be opened: {error.strerror}") from error
    with os.fdopen(handle, "rb") as opened:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise ValueError(f"{file} is not a regular file")
        content = opened.read(limit + 1)
    if len(content) > limit:
        raise ValueError(f"{file} is larger than the limit of {limit} bytes")
    return content.decode()


def check_only_plain_files(folder: Path) -> None:
    """Refuses a folder with links, or anything else that is neither a regular file nor a folder."""
    for parent, folders, files in os.walk(folder):
        for path in (os.path.join(parent, name) for name in (*folders, *files)):
            mode = os.lstat(path).st_mode
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                kind = "a link" if stat.S_ISLNK(mode) else "not a regular file"
                raise ValueError(f"{path} is {kind}; {folder} may only contain files and folders")
