"""`Mirror`: a thread that makes the copy of a run in a store agree with its folder.

There is no queue to lose: each pass compares the folder with what the store has. What could not be uploaded is
uploaded by a later pass, of this process or of the next one.
"""

import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from jax_trainer.checkpoint.commit import partial_folder
from jax_trainer.checkpoint.errors import CheckpointError
from jax_trainer.checkpoint.files import read_json
from jax_trainer.checkpoint.folder import RECORD, RunFolder
from jax_trainer.checkpoint.index import OLD, step_named
from jax_trainer.checkpoint.lease import Lease
from jax_trainer.checkpoint.lock import RunInUseError
from jax_trainer.checkpoint.manifest import MANIFEST, verify_digests
from jax_trainer.checkpoint.remote import RemoteRun, Stopped, record_files
from jax_trainer.core import failpoint
from jax_trainer.datasets.storage import Store, StoreError, described

ADDRESS = "mirror.txt"  # in the run folder: where its copy is
_INTERVAL = 30.0  # seconds between passes without a new checkpoint
_RETRY = 1.0  # seconds between attempts at the end of a run
_MAX_RECORD = 1 << 24  # bytes of run.json
_MOST_NAMED = 5
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
            self._has_warned = True
            _log.warning(
                "The mirror of this run is behind: %s. Make sure that no other machine trains the run; what is missing "
                "there is uploaded when that is possible again.",
                error,
            )

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
            if not self._has_warned:  # otherwise it lapses
                with suppress(StoreError):
                    self._lease.release()
        missing = [] if self._is_complete or self._thread.ident is None else self.missing()
        if missing:
            more = f" and {len(missing) - _MOST_NAMED} more" if len(missing) > _MOST_NAMED else ""
            _log.warning(
                "%s lacks %s%s. They are in %s: `jax-trainer ckpt %s --upload` uploads them, and so does the next run "
                "that resumes it.",
                *(self.url, ", ".join(missing[:_MOST_NAMED]), more, self.folder.path, self.folder.path),
            )
        return missing

    def sync(self) -> list[str]:
        """One pass in this thread; returns what is missing after it. Raises a `StoreError`."""
        self._seen |= self._local().keys()
        self._lease.take()
        try:
            self._pass()
        finally:
            self._lease.release()
        return self.missing()

    def missing(self) -> list[str]:
        """The checkpoints and records that the store lacks, as far as this process knows."""
        remote = {} if self._remote is None else self._remote.checkpoints
        checkpoints = [name for name, text in self._local().items() if remote.get(name) != text]
        return [*checkpoints, *self._unsent()]

    # in the thread

    def _run(self) -> None:
        while not self._is_disabled:
            self._wake.wait(_RETRY if self._is_closing else self._interval)
            self._wake.clear()
            is_last = self._is_closing
            self._is_complete = self._try_pass() and is_last
            if self._is_complete or self._is_abandoned:
                return

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
                self._has_warned = True
                _log.warning(
                    "The mirror of this run is behind: %s. Training continues; what is missing there is uploaded when "
                    "that is possible again.",
                    str(error).rstrip(".") if isinstance(error, StoreError) else described(error),
                )
            return False
        if self._has_warned:
            self._has_warned = False
            _log.info("The mirror of this run is up to date again: %s", self.url)
        return True

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
        while (name := self._newest_missing(remote)) is not None:
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
        try:
            here, there = read_json(file, _MAX_RECORD).get("created"), json.loads(remote.store.read(RECORD))["created"]
        except (ValueError, KeyError, TypeError, RecursionError):  # nothing to compare
            return
        if here != there:
            raise AnotherRunError(
                f"{self.url} has another run, created {str(there)[:40]}; this one was created {here}."
            )

    def _local(self) -> dict[str, str]:
        """The checkpoints here by ascending step, with the texts of their manifests."""
        found: dict[str, str] = {}
        for path in sorted(self.folder.checkpoints.glob("step_*"), key=step_named):
            if step_named(path) < 0 or path.name.endswith(OLD):
                continue
            try:
                found[path.name] = (path / MANIFEST).read_text()
            except (OSError, UnicodeDecodeError):  # deleted meanwhile, or damaged
                continue
        return found

    def _newest_missing(self, remote: RemoteRun) -> str | None:
        local = self._local()
        self._seen |= local.keys()
        missing = [
            name for name, text in local.items() if remote.checkpoints.get(name) != text and name not in self._damaged
        ]
        return missing[-1] if missing else None

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
            try:
                found = path.stat()
            except FileNotFoundError:
                continue
            if self._sent.get(name) != (stamp := (found.st_ino, found.st_size, found.st_mtime_ns)):
                stamps[name] = stamp
        return stamps

    def _delete(self, remote: RemoteRun) -> None:
        """Deletes what retention has deleted here. Later steps that were never here are of another machine: kept."""
        local = self._local()
        complete = [step_named(Path(name)) for name in local if name in remote.checkpoints]
        if not complete:
            return
        for name in sorted(remote.names - local.keys()):
            if name in self._seen or step_named(Path(name)) < max(complete):
                if self._is_abandoned:
                    raise Stopped
                remote.delete_checkpoint(name)


@contextmanager
def _linked(path: Path) -> Iterator[Path | None]:
    """A folder of links to the files of a checkpoint, which retention may delete during the upload; None: it has."""
    with partial_folder(path.parent) as folder:
        try:
            for parent, _, names in os.walk(path, onerror=_raise):
                inside = folder / Path(parent).relative_to(path)
                inside.mkdir(exist_ok=True)
                for name in names:
                    _link(Path(parent, name), inside / name)
        except FileNotFoundError:
            yield None
        else:
            yield folder


def _link(file: Path, new: Path) -> None:
    try:
        os.link(file, new, follow_symlinks=False)
    except FileNotFoundError:
        raise
    except OSError:  # a file system without links
        shutil.copyfile(file, new, follow_symlinks=False)


def _raise(error: OSError) -> None:
    raise error
