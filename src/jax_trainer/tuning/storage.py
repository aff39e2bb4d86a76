"""Where a study is kept: a journal file, or a database by its URL. Both hold plain data, which is all that is read."""

import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from jax_trainer.config import redact_text
from jax_trainer.core import lazy_import
from jax_trainer.redaction import environment_secrets

JOURNAL = "study.journal"
_FIRST_LETTERS = b'{"op_code":'  # of every line of a journal
_LONG_ENOUGH = 4  # letters of a password, to be hidden wherever they stand


class StorageError(RuntimeError):
    """The place where a study is kept cannot be used."""


def optuna() -> Any:
    """The package that chooses what to try."""
    return lazy_import("optuna", extra="tune")


def open_storage(place: str | Path) -> Any:
    """Optuna's storage at `place`: the URL of a database, or else the name of a journal file, made if need be."""
    try:
        if is_url(place):
            return _database(str(place))
        return _journal(Path(place))
    except StorageError:
        raise
    except ModuleNotFoundError as missing:
        if missing.name == "optuna":
            raise
        raise _unusable(place, missing) from None
    except Exception as error:  # of a database, of its driver, of a network disk
        raise _unusable(place, error) from None  # what it says may have the password in it


def is_url(place: str | Path) -> bool:
    """Whether it names a database rather than a file."""
    return "://" in str(place)


def shown_place(place: str | Path) -> str:
    """`place` without the credentials in it."""
    return redact_text(str(place), environment_secrets() | secrets_of(place))


def secrets_of(place: str | Path) -> frozenset[str]:
    """What of a URL must be shown nowhere."""
    if not is_url(place):
        return frozenset()
    try:
        password = urlsplit(str(place)).password or ""
    except ValueError:  # no URL, and nobody knows which part of it is a secret
        return frozenset({str(place)})
    return frozenset(word for word in (password, unquote(password)) if len(word) >= _LONG_ENOUGH)


def _unusable(place: str | Path, error: Exception) -> StorageError:
    reason = redact_text(f"{type(error).__name__}: {error}", environment_secrets() | secrets_of(place))
    return StorageError(f"The storage {shown_place(place)} cannot be opened. {reason.splitlines()[0][:500]}")


def _database(url: str, tries: int = 5) -> Any:
    try:
        return optuna().storages.RDBStorage(url)
    except Exception as error:  # another process may have been making the same tables at the same moment
        is_race = any(word in str(error).lower() for word in ("already exists", "unique constraint", "duplicate"))
        if not is_race or tries <= 1:
            raise
    time.sleep(0.2)
    return _database(url, tries - 1)


def _journal(file: Path) -> Any:
    journal = optuna().storages.journal
    if file.exists() and file.stat().st_size and not _is_journal(file):
        raise StorageError(f"{file} is no journal of a study, and is left as it is. Name another file.")
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    lock = journal.JournalFileSymlinkLock(str(file))
    _drop_torn_line(file, lock)
    return optuna().storages.JournalStorage(journal.JournalFileBackend(str(file), lock_obj=lock))


def _is_journal(file: Path) -> bool:
    with file.open("rb") as stream:
        first = stream.read(len(_FIRST_LETTERS))
    return _FIRST_LETTERS.startswith(first)  # fewer letters where it was torn while its first line was written


def _drop_torn_line(file: Path, lock: Any) -> None:
    """A process that was killed, or a full disk, may leave half a line; with the next one it would be unreadable."""
    if not file.exists() or _ends_well(file):
        return
    lock.acquire()
    try:
        if not _ends_well(file):  # not just a line that another process is writing
            with file.open("r+b") as stream:
                stream.truncate(file.read_bytes().rfind(b"\n") + 1)
    finally:
        lock.release()


def _ends_well(file: Path) -> bool:
    with file.open("rb") as stream:
        size = stream.seek(0, 2)
        stream.seek(max(0, size - 1))
        return stream.read() in (b"", b"\n")


@contextmanager
def quiet_optuna() -> Iterator[None]:
    """Optuna says nothing but errors: what happens is told by us, without secrets."""
    logging = optuna().logging
    before = logging.get_verbosity()
    logging.set_verbosity(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna().exceptions.ExperimentalWarning)
            yield
    finally:
        logging.set_verbosity(before)
