"""Files in object stores and on other machines, by URL: `s3://`, `gs://`, `az://`, `sftp://` and all others of fsspec.

Credentials come from the environment or the files of the service, never from the URL.
"""

import hashlib
import json
import logging
import math
import os
import posixpath
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import parse_qsl, urlsplit
from uuid import uuid4

from jax_trainer.config.redaction import environment_secrets, is_secret, redact_text
from jax_trainer.diagnostics.optional_import import MissingExtraError, from_extra

EXTRA = "cloud"
ANSWER_SECONDS = 60.0  # for which a store may take to answer a question; transfers of files may take longer
Result = TypeVar("Result")
_LONGEST = 300  # characters of an error in a message
# options of a protocol: s3fs tries five times itself if a connection breaks, and botocore five times for each of them
_OPTIONS: Mapping[str, dict[str, Any]] = {
    "file": {"auto_mkdir": True},
    "s3": {"config_kwargs": {"retries": {"total_max_attempts": 3}}},
}
_silent: dict[tuple[str, ...], float] = {}  # stores that have not answered, and when
_log = logging.getLogger("jax_trainer")


class StoreError(OSError):
    """A store cannot be reached, refuses a request, or sent less than a complete file."""


class WrongContentError(StoreError):
    """A store sent other bytes than those that were stored, by a checksum of its own."""


def is_url(path: str | os.PathLike[str]) -> bool:
    """Whether a path is the URL of a file in a store.

    >>> is_url("s3://bucket/train.npz"), is_url("data/train.npz")
    (True, False)
    """
    return "://" in os.fspath(path)


def url_problem(url: str) -> str:
    """Why a URL cannot name a folder of a store; "" if it can.

    >>> url_problem("s3://bucket/runs"), url_problem("bucket/runs")[:24]
    ('', "'bucket/runs' is no URL:")
    """
    try:
        parts = urlsplit(url)
    except ValueError as error:
        return f"the URL cannot be read: {error}."
    secrets = "@" in parts.netloc or any(is_secret(key) for key, _ in parse_qsl(parts.query))
    shown = repr(redact_text(url, environment_secrets()))
    if not (is_url(url) and parts.scheme and (parts.netloc or parts.path.strip("/"))):
        return f"{shown} is no URL: use one such as `s3://bucket/runs`, `gs://bucket/runs` or `file:///mnt/runs`."
    if secrets:
        return (
            f"{shown} contains a user or a secret, which would be written to files. Set them in the environment, such "
            "as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or FSSPEC_SFTP_USERNAME."
        )
    return ""


class Store:
    """A folder of a store; paths are relative to it, with `/` between parts. Creating it does not connect.

    All methods raise a `StoreError` if the store cannot be reached, and `FileNotFoundError` for a missing file.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/") if urlsplit(url).path.strip("/") else url
        with from_extra(EXTRA):
            import fsspec.config
            from fsspec.asyn import AsyncFileSystem
            from fsspec.core import url_to_fs
        scheme = urlsplit(url).scheme
        options = {**_OPTIONS.get(scheme, {}), **fsspec.config.conf.get(scheme, {})}
        try:
            # its own: what another one has listed may be out of date
            fs, self._root = url_to_fs(url, skip_instance_cache=True, use_listings_cache=False, **options)
        except ImportError as error:
            hint = f"{url}: {error}. `pip install 'jax-trainer[{EXTRA}]'` installs that of `s3://`."
            raise MissingExtraError(hint, name=getattr(error, "name", None)) from None
        self._fs: Any = fs
        # others have folders, and show a file while it is being written
        self._is_object_store = isinstance(fs, AsyncFileSystem)

    def missing_bucket(self) -> str:
        """The bucket of the URL if the store says that it does not exist; "" if it exists, or there is no answer."""
        bucket = self._root.strip("/").partition("/")[0]
        if not self._is_object_store or not bucket or is_url(self._root):
            return ""
        try:
            self._answer(lambda: self._fs.info(bucket))
        except FileNotFoundError:
            return bucket
        except StoreError as error:  # an outage, or no permission to ask: a run does without an answer
            _log.debug("Whether the bucket exists is unknown: %s", error)
        return ""

    def sizes(self) -> dict[str, int]:
        """All files below the folder, with their sizes in bytes; empty if it does not exist."""
        try:
            found = self._answer(lambda: self._fs.find(self._root, detail=True))
        except FileNotFoundError:
            return {}
        start = len(self._root.rstrip("/")) + 1
        return {name[start:]: info["size"] for name, info in found.items() if info.get("type", "file") == "file"}

    def folders(self) -> list[str]:
        """The names of the folders in the folder."""
        try:
            found = self._answer(lambda: self._fs.ls(self._root, detail=True))
        except FileNotFoundError:
            return []
        return sorted(posixpath.basename(one["name"].rstrip("/")) for one in found if one["type"] == "directory")

    def read(self, path: str) -> bytes:
        """The content of a file."""
        return self._answer(lambda: self._fs.cat_file(self._at(path)))

    def read_all(self, paths: Sequence[str]) -> dict[str, bytes]:
        """The contents of several small files at once, without those that do not exist."""
        at = {self._at(path): path for path in paths}
        found = self._answer(lambda: self._fs.cat(list(at), on_error="return")) if at else {}
        found = found if isinstance(found, dict) else {next(iter(at)): found}
        with self._reaching():
            for content in found.values():
                if isinstance(content, Exception) and not isinstance(content, FileNotFoundError):
                    raise content
        stripped = {self._fs._strip_protocol(name): content for name, content in found.items()}
        return {path: stripped[name] for name, path in at.items() if isinstance(stripped.get(name), bytes)}

    def write(self, path: str, content: bytes | Path) -> None:
        """Writes a file, of these bytes or like this local file: it has the old or the new content, nothing between."""
        at = self._at(path)
        with self._reaching():
            if self._is_object_store:
                self._put(at, content)
                return
            self._fs.makedirs(posixpath.dirname(at), exist_ok=True)
            partial = posixpath.join(posixpath.dirname(at), f".partial-{uuid4().hex}")
            self._put(partial, content)
            self._fs.mv(partial, at)

    def create(self, path: str, content: bytes) -> bool:
        """Writes a file unless there is one, in one request where the store can; returns whether it was written."""
        at = self._at(path)
        with self._reaching():
            try:
                if self._is_object_store:
                    self._fs.pipe_file(at, content, mode="create")
                    return True
                self._fs.makedirs(posixpath.dirname(at), exist_ok=True)
                with self._fs.open(at, "xb") as file:
                    file.write(content)
            except FileExistsError:
                return False
            except (TypeError, ValueError, NotImplementedError):  # a store without conditional writes
                if self._fs.exists(at):
                    return False
                self._fs.pipe_file(at, content)
        return True

    def _put(self, at: str, content: bytes | Path) -> None:
        if isinstance(content, bytes):
            self._fs.pipe_file(at, content)
        else:
            self._fs.put_file(str(content), at)

    def copy(self, old: str, new: str) -> None:
        """Copies a file within the store."""
        with self._reaching():
            if not self._is_object_store:
                self._fs.makedirs(posixpath.dirname(self._at(new)), exist_ok=True)
            self._fs.cp_file(self._at(old), self._at(new))

    def delete(self, paths: Sequence[str]) -> None:
        """Deletes files, in this order, and the folders that they leave empty; missing ones are ignored."""
        with self._reaching():
            for path in paths:
                try:
                    self._fs.rm_file(self._at(path))
                except FileNotFoundError:
                    continue
            if self._is_object_store:
                return
            for folder in sorted({self._at(posixpath.dirname(path)) for path in paths}, key=len, reverse=True):
                while folder != self._root and self._fs.exists(folder) and not self._fs.ls(folder):
                    self._fs.rmdir(folder)
                    folder = posixpath.dirname(folder)

    def download(self, path: str, target: Path) -> None:
        """Writes the content of a file to `target`, not atomically."""
        with self._reaching():
            self._fs.get_file(self._at(path), str(target))

    def properties(self, path: str) -> tuple[int | None, str]:
        """The size of a file in bytes, None if unknown, and a text that changes with its content."""
        info = self._answer(lambda: self._fs.info(self._at(path)))
        version = info.get("ETag") or info.get("etag") or info.get("mtime")
        return info.get("size"), str(version or self._answer(lambda: self._fs.ukey(self._at(path))))

    def _at(self, path: str) -> str:
        return posixpath.join(self._root, path) if path else self._root

    def _answer(self, ask: Callable[[], Result]) -> Result:
        """What the store answers; a `StoreError` if it does not within `ANSWER_SECONDS`, or has just not done so."""
        store, problem = urlsplit(self.url)[:2], f"{self.url}: no answer within {ANSWER_SECONDS:g} seconds"
        if time.monotonic() - _silent.get(store, -math.inf) < ANSWER_SECONDS:
            raise StoreError(problem)
        answer: Future[Result] = Future()

        def wait() -> None:
            try:
                answer.set_result(ask())
            except BaseException as error:
                answer.set_exception(error)

        # in a thread, which stays behind: no library has a limit for all that may hang
        threading.Thread(target=wait, name="jax-trainer store", daemon=True).start()
        with self._reaching():
            try:
                return answer.result(ANSWER_SECONDS)
            except TimeoutError:
                if answer.done():
                    raise
                _silent[store] = time.monotonic()
                raise StoreError(problem) from None

    @contextmanager
    def _reaching(self) -> Iterator[None]:
        try:
            yield
        except (FileNotFoundError, StoreError, NotImplementedError):
            raise
        except Exception as error:  # of any library, also errors that are no `OSError`
            kind = WrongContentError if type(error).__name__.endswith("ChecksumError") else StoreError
            raise kind(f"{self.url}: {described(error)}") from None


def described(error: BaseException) -> str:
    """The type and the text of an error in one line, without secrets."""
    text = redact_text(" ".join(str(error).split()), environment_secrets()).rstrip(".")
    return f"{type(error).__name__}: {text[:_LONGEST]}" if text else type(error).__name__


def data_cache() -> Path:
    """The folder of the local copies of data files, in the user's cache folder. It may be deleted at any time."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "jax_trainer" / "data"


def local_copy(path: str | os.PathLike[str]) -> Path:
    """A local path as it is; of a URL, the path of a copy in the cache, which is downloaded if it is not there.

    The copy belongs to this URL, and to the version of the file that is there now. It appears once it is complete.

    >>> local_copy("data/train.npz")
    PosixPath('data/train.npz')
    """
    if not is_url(path):
        return Path(path)
    url = os.fspath(path)
    if problem := url_problem(url):
        raise ValueError(problem)
    folder, name = posixpath.split(url)
    store = Store(folder)
    try:
        size, version = store.properties(name)
    except FileNotFoundError:
        raise FileNotFoundError(f"{url} does not exist. Check the address.") from None
    key = hashlib.sha256(json.dumps([url, size, version]).encode()).hexdigest()
    copy = data_cache() / key[:32] / name
    if copy.is_file():
        return copy
    copy.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    _log.info("Downloading %s to %s.", url, copy)
    with tempfile.TemporaryDirectory(prefix=".partial-", dir=copy.parent.parent) as partial:
        store.download(name, file := Path(partial) / "file")
        if size is not None and (found := file.stat().st_size) != size:
            raise StoreError(f"{url} has {size} bytes, of which {found} arrived. Try again.")
        os.replace(file, copy)
    return copy
