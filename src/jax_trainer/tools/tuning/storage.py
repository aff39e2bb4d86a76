"""The storage of a study: an Optuna journal file, or the URL of a database. Both hold plain data only.

A trial in it names its process: trials of killed processes are found at once on this machine, and by their heartbeat on
others. Optuna's own heartbeat needs a database and notices a killed process only minutes later.
"""

import contextlib
import logging
import os
import platform
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from jax_trainer.checkpoint import folder as lock
from jax_trainer.config import redact_text
from jax_trainer.config.redaction import environment_secrets, is_secret
from jax_trainer.diagnostics.optional_import import from_extra

LOG = logging.getLogger("jax_trainer")

JOURNAL = "study.journal"
_LINE_START = b'{"op_code":'  # of every line of a journal
PROCESS = "process"  # the user attribute of a trial that identifies its process
WORKER = "JAX_TRAINER_WORKER"  # the environment variable with the id of a worker, which its restarts share
BEAT_EVERY = 60.0  # seconds between two heartbeats
_UNTIL_NOTED = timedelta(seconds=30)  # for a started trial to get its attribute
_BEAT_PATIENCE = 5.0  # seconds to wait at the end for a heartbeat that is being written
PATIENCE = 600.0  # seconds without a heartbeat after which a process counts as dead
OUTAGE_SECONDS = 60.0  # for which a database that does not answer is asked again, as during its restart
_RETRY_SECONDS = 0.5
_LOST = ("OperationalError", "InterfaceError")  # of SQLAlchemy: the connection failed, and not the statement
_MIN_PASSWORD = 4  # characters; a shorter one would redact ordinary text


class StorageError(RuntimeError):
    """The storage of a study cannot be used."""


def optuna() -> Any:
    """The module `optuna`."""
    with from_extra("tune"):
        import optuna
    return optuna


def open_storage(storage: str | Path) -> Any:
    """Opens Optuna's storage: `storage` is the URL of a database, or a journal file, which is created if missing."""
    optuna()  # raises if it is not installed
    with _explained(storage, "cannot be opened", ""):
        return _database(str(storage)) if is_url(storage) else _journal(Path(storage))


@contextmanager
def opened_storage(storage: str | Path) -> Iterator[Any]:
    """Optuna's storage, as `open_storage` opens it; its connections to a database end with the context."""
    opened = open_storage(storage)
    try:
        failed = optuna().exceptions.StorageInternalError
        advice = " It has the finished trials: run the same again to continue."
        with _explained(storage, "does not answer", advice, failed):
            yield _Patient(optuna().storages.get_storage(opened)) if is_url(storage) else opened
    finally:
        if is_url(storage):
            opened.scoped_session.remove()
            opened.engine.dispose()


class _Patient:
    """Optuna's storage in a database; what a lost connection fails is tried again for `OUTAGE_SECONDS`.

    A trial that was created without an answer has no note of a process: it counts as stale, and is repeated.
    """

    def __init__(self, storage: Any) -> None:
        self._storage, self._patience = storage, OUTAGE_SECONDS

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._storage, name)
        return partial(self._call, found) if callable(found) else found

    def _call(self, method: Callable[..., Any], *args: Any, **options: Any) -> Any:
        errors, deadline, is_again = optuna().exceptions, time.monotonic() + self._patience, False
        while True:
            try:
                return method(*args, **options)
            except errors.UpdateFinishedTrialError:
                if not is_again or method.__name__ != "set_trial_state_values":
                    raise
                return True  # the attempt before was written, and only its answer was lost
            except errors.StorageInternalError as error:
                if type(error.__cause__).__name__ not in _LOST:
                    raise
                if time.monotonic() >= deadline:
                    self._patience = 0.0  # what still follows at the end is tried once
                    raise
                if not is_again:
                    LOG.warning(f"The database of the study does not answer. Trying again for {OUTAGE_SECONDS:g} s.")
                is_again = True
                time.sleep(_RETRY_SECONDS)


@contextmanager
def _explained(storage: str | Path, problem: str, advice: str, kind: type[Exception] = Exception) -> Iterator[None]:
    """Raises what a database, its driver or a network disk raises, which may have the password, as `StorageError`."""
    try:
        yield
    except StorageError:
        raise
    except kind as error:
        cause = error.__cause__ or error
        reason = redact_text(f"{type(cause).__name__}: {cause}", environment_secrets() | secrets_of(storage))
        text = f"The storage {shown_storage(storage)} {problem}. {reason.splitlines()[0][:500]}{advice}"
        raise StorageError(text) from None


def is_url(storage: str | Path) -> bool:
    """Whether `storage` is the URL of a database."""
    return "://" in str(storage)


def shown_storage(storage: str | Path) -> str:
    """`storage` with its credentials redacted."""
    return redact_text(str(storage), environment_secrets() | secrets_of(storage))


def secrets_of(storage: str | Path) -> frozenset[str]:
    """The password in a URL."""
    words = {word for one in _passwords(storage) for word in (one, unquote(one))}
    return frozenset(word for word in words if len(word) >= _MIN_PASSWORD)


def has_password(storage: str | Path) -> bool:
    """Whether `storage` is a URL with a password.

    >>> has_password("postgresql://me:hunter2@host/studies"), has_password("postgresql://me@host/studies")
    (True, False)
    """
    return bool(_passwords(storage))


def _passwords(storage: str | Path) -> list[str]:
    if not is_url(storage):
        return []
    try:
        parts = urlsplit(str(storage))
    except ValueError:  # malformed: any part may be a secret
        return [str(storage)]
    named = [value for key, value in parse_qsl(parts.query) if is_secret(key)]
    return [parts.password, *named] if parts.password else named


def _database(url: str, tries: int = 5) -> Any:
    try:
        return optuna().storages.RDBStorage(url, engine_kwargs={"pool_pre_ping": True})  # it may restart
    except Exception as error:  # another process may be creating the same tables
        is_race = any(word in str(error).lower() for word in ("already exists", "unique constraint", "duplicate"))
        if not is_race or tries <= 1:
            raise
    time.sleep(0.2)
    return _database(url, tries - 1)


def _journal(file: Path) -> Any:
    """A journal, without the incomplete last line that a kill or a full disk has left, which would corrupt the next."""
    journal = optuna().storages.journal
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    held = journal.JournalFileSymlinkLock(str(file))
    held.acquire()  # no other process is writing a line
    try:
        content = file.read_bytes() if file.exists() else b""
        if not content.startswith(_LINE_START[: len(content)]):
            raise StorageError(f"{file} exists and is not a journal of a study. Name another file.")
        if not content.endswith(b"\n") and content:
            os.truncate(file, content.rfind(b"\n") + 1)
    finally:
        held.release()
    return optuna().storages.JournalStorage(journal.JournalFileBackend(str(file), lock_obj=held))


@contextmanager
def quiet_optuna() -> Iterator[None]:
    """Silences Optuna's log below errors: we report the trials, with secrets redacted."""
    messages = optuna().logging
    before = messages.get_verbosity()
    messages.set_verbosity(messages.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna().exceptions.ExperimentalWarning)
            yield
    finally:
        messages.set_verbosity(before)


def own_note() -> dict[str, Any]:
    """The identity of this process, and the time of the heartbeat."""
    machine = [platform.node()]
    with contextlib.suppress(OSError):  # containers may share the name of their host, but not its process ids
        machine.append(os.readlink("/proc/self/ns/pid"))
    worker = os.environ.get(WORKER, "")
    return {"machine": " ".join(machine), "pid": os.getpid(), "worker": worker, "beat": time.time()}


def is_running(trial: Any) -> bool:
    """Whether the process of a trial in state RUNNING is alive; a trial that has just started has no note yet."""
    if PROCESS in trial.user_attrs:
        return is_alive(trial.user_attrs[PROCESS])
    began = trial.datetime_start
    return began is not None and datetime.now(began.tzinfo) - began < _UNTIL_NOTED


def is_alive(note: Any) -> bool:
    """Whether the process that wrote `note` is alive: it has a recent heartbeat and, on this machine, exists.

    A process on another machine is dead if this one has its worker id: an engine has restarted the worker here.
    """
    here = own_note()
    try:
        is_here = note["machine"] == here["machine"]
        is_replaced = not is_here and note.get("worker", "") == here["worker"] != ""
        is_gone = is_replaced or (is_here and not lock.is_alive(int(note["pid"])))
        return not is_gone and time.time() - float(note["beat"]) < PATIENCE
    except (KeyError, TypeError, ValueError, OverflowError):  # not written by us
        return False


@contextmanager
def beating(trial: Any) -> Iterator[None]:
    """Writes the identity of this process to `trial`, with heartbeats until the context ends."""
    done = threading.Event()

    def beat() -> None:
        while not done.wait(BEAT_EVERY):
            with contextlib.suppress(Exception):  # the storage may be unavailable for a while; the trial itself fails
                trial.set_user_attr(PROCESS, own_note())

    trial.set_user_attr(PROCESS, own_note())
    thread = threading.Thread(target=beat, name="jax-trainer-beat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join(_BEAT_PATIENCE)
