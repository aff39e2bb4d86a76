"""`Mirror`: a thread that makes the copy of a run in a store agree with its folder; the lease of a run in a store.

There is no queue to lose: each pass compares the folder with what the store has. What could not be uploaded is
uploaded by a later pass, of this process or of the next one.

The lease keeps two machines off one run: the lock of its folder does not reach that far. `LEASE.json` names the process
that trains, which renews it every 20 seconds. It is created only if it is not there (a conditional write, where the
store has it), and deleted at the end of the run. One that is not renewed for a minute is of a machine that is gone:
whoever finds it waits that long, and takes it over.
"""

import json
import logging
import os
import platform
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

from jax_trainer.checkpoint.commit import partial_folder
from jax_trainer.checkpoint.errors import CheckpointError
from jax_trainer.checkpoint.folder import RECORD, RunFolder, RunInUseError, is_alive, this_process
from jax_trainer.checkpoint.record import MANIFEST, OLD, step_named, verify_digests
from jax_trainer.checkpoint.remote import LEASE, RemoteRun, Stopped, record_files
from jax_trainer.core import failpoint
from jax_trainer.datasets.storage import Store, StoreError, described
from jax_trainer.diagnostics.files import read_json

ADDRESS = "mirror.txt"  # in the run folder: where its copy is
_INTERVAL = 30.0  # seconds between passes without a new checkpoint
_RETRY = 1.0  # seconds between attempts at the end of a run
_MAX_RECORD = 1 << 24  # bytes of run.json
_MOST_NAMED = 5
SECONDS = 60.0  # without a renewal, after which a lease is taken over
_RENEWALS = 3  # in that time
_PAUSE = 1.0  # seconds between two looks at the lease of another process
_log = logging.getLogger("jax_trainer")

_Stamp = tuple[int, int, int]  # of a file: inode, size and time of change


def address_of(mirror: str, *names: str) -> str:
    """Where the copy of a run folder is: below `mirror` as the folder is below that of all runs.

    >>> address_of("s3://bucket/runs", "CNN", "20261115-142311")
    's3://bucket/runs/CNN/20261115-142311'
    """
    return "/".join([mirror.rstrip("/"), *filter(None, names)])


class AnotherRunError(RuntimeError):
    """The store has another run at this address."""


class Mirror:
    """Copies the run in `folder` to `url`, in the background.

    Uploads records first, then checkpoints, newest first, and then deletes what retention has deleted locally. A store
    that cannot be reached costs one warning; the run continues, and later passes upload what is missing.

    Args:
        folder: the run folder.
        url: where its copy is, see `address_of`.
        timeout: seconds that `close` waits for the last pass.
        interval: seconds between passes without a new checkpoint.
    """

    def __init__(self, folder: RunFolder, url: str, *, timeout: float = 60.0, interval: float = _INTERVAL) -> None:
        self.folder, self.url = folder, url
        self._store, self._timeout, self._interval = Store(url), timeout, interval
        self._lease = Lease(self._store)
        self._remote: RemoteRun | None = None  # None: to be listed
        self._sent: dict[str, _Stamp] = {}  # records as they are in the store
        self._seen: set[str] = set()  # checkpoints that were here, and may be deleted there
        self._damaged: set[str] = set()
        self._is_known = True  # whether this run has been uploaded to this address before
        self._has_warned = self._is_closing = self._is_abandoned = self._is_disabled = self._is_complete = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="jax-trainer mirror", daemon=True)

    def claim(self) -> None:
        """Keeps other machines off this run; a `RunInUseError` if one trains it. A store that fails costs a warning."""
        try:
            self._lease.take()
        except StoreError as error:
            self._warn(f"{error}. Make sure that no other machine trains the run")

    def start(self) -> None:
        """Starts the thread; the first pass uploads what an earlier process could not."""
        file = self.folder.path / ADDRESS
        self._is_known = file.is_file() and file.read_text().strip() == self.url
        self.folder.write_text(ADDRESS, f"{self.url}\n")
        self._seen |= self._local().keys()  # now: the next save may delete some
        self._wake.set()
        self._thread.start()

    def wake(self) -> None:
        """Starts a pass soon, after a checkpoint was written; does not wait."""
        self._wake.set()

    def close(self) -> list[str]:
        """Waits for a last pass, at most `timeout` seconds; returns what the store lacks, after a warning about it."""
        deadline = time.monotonic() + self._timeout
        self._is_closing = True
        self._wake.set()
        try:
            while self._thread.is_alive() and (left := deadline - time.monotonic()) > 0:
                self._thread.join(min(left, 0.05))  # in slices, so that Ctrl-C ends it
        finally:
            self._is_abandoned = True  # it ends before its next request
            self._wake.set()
            if not self._has_warned:  # otherwise it lapses
                with suppress(StoreError):
                    self._lease.release()
        missing = [] if self._is_complete or self._thread.ident is None else self.missing()
        if missing:
            named, path = ", ".join(missing[:_MOST_NAMED]), self.folder.path
            text = "%s lacks %d files or checkpoints, such as %s. `jax-trainer ckpt %s --upload` uploads them."
            _log.warning(text, self.url, len(missing), named, path)
        return missing

    def sync(self) -> list[str]:
        """One pass in this thread; returns what is missing after it. Raises a `StoreError`."""
        self._lease.take()
        try:
            self._pass()
        finally:
            self._lease.release()
        return self.missing()

    def missing(self) -> list[str]:
        """The checkpoints and records that the store lacks, as far as this process knows."""
        return [*self._missing_checkpoints(), *self._unsent()]

    # in the thread

    def _run(self) -> None:
        while not (self._is_disabled or self._is_complete):
            self._wake.wait(_RETRY if self._is_closing else self._interval)
            self._wake.clear()
            if self._is_abandoned:  # a pass would take the lease of a run that has ended
                return
            is_last = self._is_closing
            self._is_complete = self._try_pass() and is_last

    def _try_pass(self) -> bool:
        """Whether everything that is here is there now."""
        try:
            self._pass()
        except Stopped:
            return False
        except (AnotherRunError, RunInUseError) as error:
            self._is_disabled = True
            _log.warning("%s Nothing is uploaded.", error)
            return False
        except Exception as error:  # whatever it is, it does not end the run
            self._remote = None  # unknown what has arrived
            if not (self._has_warned or self._is_abandoned):
                self._warn(str(error).rstrip(".") if isinstance(error, StoreError) else described(error))
            return False
        if self._has_warned:
            self._has_warned = False
            _log.info("The mirror of this run is up to date again: %s", self.url)
        return True

    def _warn(self, problem: str) -> None:
        self._has_warned = True
        _log.warning(
            "The mirror of this run is behind: %s. Training continues; what is missing there is uploaded when that is "
            "possible again.",
            problem,
        )

    def _pass(self) -> None:
        if self._lease.is_lost:
            raise AnotherRunError(f"Another machine has continued the run at {self.url}.")
        if not self._lease.is_held:  # the store could not be reached
            self._lease.take()
        if self._remote is None:
            self._remote = remote = RemoteRun(self._store, lambda: self._is_abandoned)
            self._check_same_run(remote)
        remote = self._remote
        self._upload_records(remote)
        while missing := [name for name in self._missing_checkpoints() if name not in self._damaged]:
            name = missing[-1]
            self._seen.add(name)
            with _linked(self.folder.checkpoints / name) as linked:
                if linked is not None and self._is_intact(linked, name):
                    self._upload_records(remote)  # first: the checkpoint refers to them
                    remote.upload_checkpoint(linked, name)
        self._delete(remote)

    def _check_same_run(self, remote: RemoteRun) -> None:
        """Refuses the address of another run, which happens if two machines start one in the same folder."""
        file = self.folder.path / RECORD
        if self._is_known or RECORD not in remote.sizes or not file.is_file():
            return
        with suppress(ValueError, KeyError, TypeError, RecursionError):  # nothing to compare
            here, there = read_json(file, _MAX_RECORD).get("created"), json.loads(remote.store.read(RECORD))["created"]
            if here != there:
                raise AnotherRunError(
                    f"{self.url} has another run, created {there!s:.40}; this one was created {here}."
                )

    def _local(self) -> dict[str, str]:
        """The checkpoints here by ascending step, with the texts of their manifests."""
        found: dict[str, str] = {}
        for path in sorted(self.folder.checkpoints.glob("step_*"), key=lambda path: step_named(path.name)):
            if step_named(path.name) < 0 or path.name.endswith(OLD):
                continue
            try:
                found[path.name] = (path / MANIFEST).read_text()
            except (OSError, UnicodeDecodeError):
                continue  # deleted meanwhile, or damaged
        return found

    def _missing_checkpoints(self) -> list[str]:
        there = {} if self._remote is None else self._remote.checkpoints
        return [name for name, text in self._local().items() if there.get(name) != text]

    def _is_intact(self, linked: Path, name: str) -> bool:
        try:
            verify_digests(linked)
        except CheckpointError as error:
            if (self.folder.checkpoints / name).exists():  # otherwise deleted while its files were linked
                self._damaged.add(name)
                _log.warning("A checkpoint is not uploaded: %s", str(error).replace(linked.name, name))
            return False
        return True

    def _upload_records(self, remote: RemoteRun) -> None:
        for name, stamp in self._unsent().items():
            failpoint("mid_records")
            with suppress(FileNotFoundError):  # a temporary file of a tool
                remote.write(name, (self.folder.path / name).read_bytes())
                self._sent[name] = stamp

    def _unsent(self) -> dict[str, _Stamp]:
        stamps: dict[str, _Stamp] = {}
        for name, path in record_files(self.folder.path).items():
            with suppress(FileNotFoundError):
                found = path.stat()
                stamps[name] = found.st_ino, found.st_size, found.st_mtime_ns
        return {name: stamp for name, stamp in stamps.items() if self._sent.get(name) != stamp}

    def _delete(self, remote: RemoteRun) -> None:
        """Deletes what retention has deleted here. Later steps that were never here are of another machine: kept."""
        local = self._local()
        self._seen |= local.keys()
        complete = [step_named(name) for name in local if name in remote.checkpoints]
        if not complete:
            return
        for name in sorted(remote.names - local.keys()):
            if name in self._seen or step_named(name) < max(complete):
                if self._is_abandoned:
                    raise Stopped
                remote.delete_checkpoint(name)


@contextmanager
def _linked(path: Path) -> Iterator[Path | None]:
    """A folder of links to the files of a checkpoint, which retention may delete during the upload; None: it has."""
    with partial_folder(path.parent) as folder:
        try:
            shutil.copytree(path, folder, symlinks=True, copy_function=_link, dirs_exist_ok=True)
            is_there = True
        except (FileNotFoundError, shutil.Error):
            is_there = False
            if path.exists():
                raise
        yield folder if is_there else None


def _link(file: str, new: str) -> None:
    try:
        os.link(file, new, follow_symlinks=False)
    except OSError:  # also of a file system without links
        shutil.copyfile(file, new, follow_symlinks=False)


# the lease


class Lease:
    """The lease of the run at `store`.

    Attributes:
        is_held: whether this process has it.
        is_lost: whether another process has taken it over meanwhile.
    """

    def __init__(self, store: Store) -> None:
        self._store, self._id = store, uuid4().hex
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._renew, name="jax-trainer lease", daemon=True)
        self.is_held = self.is_lost = False

    def take(self) -> None:
        """Takes the lease, after waiting for one that is not renewed; a `RunInUseError` if another process has it.

        Raises a `StoreError` if the store cannot be reached.
        """
        seen, since, was_told = self._read(), time.monotonic(), False
        while seen is not None and not self._is_stale(seen, time.monotonic() - since):
            if not was_told:
                was_told = True
                text = "The run at %s was last trained by %s. Waiting up to %.0f s to see whether it still is."
                _log.warning(text, self._store.url, _described(seen), SECONDS)
            time.sleep(_PAUSE)
            now = self._read()
            if now is not None and (now.get("id"), now.get("renewed")) != (seen.get("id"), seen.get("renewed")):
                raise RunInUseError(
                    f"The run at {self._store.url} is in use by {_described(now)}. Wait until it ends, stop it, or "
                    "start a run with another name."
                )
            seen = now
        if seen is not None:
            self._store.delete([LEASE])
        if not self._store.create(LEASE, self._text()):
            other = self._read() or {}
            raise RunInUseError(f"The run at {self._store.url} was just started by {_described(other)}.")
        self.is_held = True
        if self._thread.ident is None:
            self._thread.start()

    def release(self) -> None:
        """Deletes the lease, if this process has it."""
        self._stop.set()
        with self._lock:
            is_held, self.is_held = self.is_held, False
            if is_held and not self._is_of_another():
                self._store.delete([LEASE])

    def _renew(self) -> None:
        while not self._stop.wait(SECONDS / _RENEWALS):
            with self._lock:
                if not self.is_held:
                    return
                try:
                    if self._is_of_another():
                        self.is_held, self.is_lost = False, True
                        return
                    self._store.write(LEASE, self._text())
                except StoreError:  # the mirror reports that the store cannot be reached
                    continue

    def _is_of_another(self) -> bool:
        found = self._read()
        return found is not None and found.get("id") != self._id

    def _is_stale(self, found: dict[str, Any], waited: float) -> bool:
        """Whether the process that has the lease is gone."""
        pid = found.get("pid")
        if found.get("host") == platform.node() and isinstance(pid, int) and not is_alive(pid):
            return True
        try:
            age = (datetime.now(UTC) - datetime.fromisoformat(str(found.get("renewed")))).total_seconds()
        except (TypeError, ValueError):
            age = 0.0
        return waited >= SECONDS or age > 2 * SECONDS  # clocks may differ by a minute

    def _read(self) -> dict[str, Any] | None:
        try:
            found = json.loads(self._store.read(LEASE))
        except FileNotFoundError:
            return None
        except (ValueError, RecursionError):  # damaged, or being written
            found = {}
        return found if isinstance(found, dict) else {}

    def _text(self) -> bytes:
        renewed = datetime.now(UTC).isoformat(timespec="milliseconds")
        return (json.dumps({"id": self._id, **this_process(), "renewed": renewed}) + "\n").encode()


def _described(found: dict[str, Any]) -> str:
    return f"the process {str(found.get('pid'))[:20]} on {str(found.get('host'))[:100]!r}"
