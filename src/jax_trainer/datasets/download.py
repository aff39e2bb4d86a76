"""Files from the network: whole and checked, or not there at all."""

import gzip
import hashlib
import os
import ssl
import tarfile
import tempfile
import urllib.error
import urllib.request
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, Protocol

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from jax_trainer.core.output import safe_console

PIECE = 1 << 20  # bytes that are read at once
MAX_BYTES = 1 << 30
MAX_MEMBERS = 10_000


class DownloadError(OSError):
    """A host could not be reached, or did not send the file."""


class Readable(Protocol):
    """What bytes come from."""

    def read(self, size: int = -1, /) -> bytes:
        """Up to `size` bytes; none at the end."""
        ...


def fetch(
    url: str, target: Path, *, sha256: str, unpack_gzip: bool = False, max_bytes: int = MAX_BYTES, timeout: float = 30.0
) -> Path:
    """Fetches a file over https; it is at `target` when its content has this checksum, and else nothing is.

    Args:
        url: where it is; it, and what it is redirected to, must begin with https://.
        target: where it goes.
        sha256: of the bytes that are stored, so after unpacking: other packers make other gzip files of the same data.
        unpack_gzip: store what the file unpacks to.
        max_bytes: more than this is refused.
        timeout: seconds to wait for the host at a time.
    """
    with _answer(url, timeout) as answer, workshop(target) as folder, _progress() as progress:
        length = int(answer.headers.get("Content-Length") or 0)
        if length > max_bytes:
            raise ValueError(f"{url} has {length} bytes, more than the {max_bytes} that are allowed.")
        received = _Limited(answer, max_bytes, url, lambda size: progress.update(task, advance=size))
        task = progress.add_task(target.name, total=length or None)
        content = gzip.GzipFile(fileobj=received) if unpack_gzip else received  # type: ignore[arg-type]
        try:
            found = _store(_Limited(content, max_bytes, url), folder / target.name)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise DownloadError(f"{url} did not send a whole gzip file: {error}.") from error
        except (TimeoutError, ConnectionError, ssl.SSLError, HTTPException) as error:
            raise DownloadError(f"{url} stopped after {received.taken} bytes: {error!r}.") from error
        if received.taken < length:
            raise DownloadError(f"{url} stopped after {received.taken} of {length} bytes.")
        _check_sum(found, sha256, what=url)
        os.replace(folder / target.name, target)
    return target


def unpack_tar(
    archive: Path,
    target: Path,
    *,
    sha256: Mapping[str, str],
    max_bytes: int = MAX_BYTES,
    max_members: int = MAX_MEMBERS,
) -> Path:
    """Puts the files that `sha256` names, and nothing else, out of a `.tar.gz` into the folder `target`.

    Every entry is looked at, and one that a plain archive of data does not have (a link, a device, a path out of the
    folder) is an error. All files are whole and checked before the first one is moved to its place.
    """
    with workshop(target) as place:
        (unpacked := place / target.name).mkdir()
        try:
            found = _unpack(archive, unpacked, set(sha256), max_bytes, max_members)
        except (EOFError, gzip.BadGzipFile, zlib.error, tarfile.TarError) as error:
            raise ValueError(f"{archive} is not a whole .tar.gz file: {error}.") from error
        if missing := sorted(set(sha256) - set(found)):
            raise ValueError(f"{archive} does not contain {', '.join(missing)}.")
        for name, checksum in found.items():
            _check_sum(checksum, sha256[name], what=f"{name} in {archive}")
        if target.exists():
            for name in found:
                os.replace(unpacked / name, target / name)
        else:
            os.replace(unpacked, target)
    return target


def sha256_of(file: Path) -> str:
    """The checksum of a file, unpacked where its name ends in `.gz`."""
    digest = hashlib.sha256()
    with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as opened:
        for piece in _pieces(opened):
            digest.update(piece)
    return digest.hexdigest()


def _unpack(archive: Path, folder: Path, wanted: set[str], max_bytes: int, max_members: int) -> dict[str, str]:
    found: dict[str, str] = {}
    size = 0
    # the limit holds for all that is unpacked, long headers included, so that a small file cannot fill the memory
    with gzip.open(archive) as packed, tarfile.open(fileobj=_Limited(packed, max_bytes, archive), mode="r|") as entries:  # type: ignore[call-overload]
        for count, entry in enumerate(entries, 1):
            if count > max_members:
                raise ValueError(f"{archive} has more than the {max_members} entries that are allowed.")
            _check_entry(entry, archive)
            size += entry.size  # what it says it becomes: holes take no room in the archive, but do when unpacked
            if size > max_bytes:
                raise ValueError(f"{archive} unpacks to more than the {max_bytes} bytes that are allowed.")
            name = PurePosixPath(entry.name).name
            if not entry.isfile() or name not in wanted:
                continue
            if name in found:
                raise ValueError(f"{archive} contains {name} twice.")
            content = entries.extractfile(entry)
            assert content is not None  # only entries that are no files have no content
            found[name] = _store(content, folder / name)
    return found


def _check_entry(entry: tarfile.TarInfo, archive: Path) -> None:
    path, windows = PurePosixPath(entry.name), PureWindowsPath(entry.name)
    reasons = {
        "it is a link": entry.issym() or entry.islnk(),
        "it is no plain file": not (entry.isfile() or entry.isdir() or entry.issym() or entry.islnk()),
        "its path is absolute": path.is_absolute() or bool(windows.anchor),
        "its path leads out of the folder": ".." in path.parts or ".." in windows.parts,
        "its name contains a NUL": "\0" in entry.name,
    }
    if reason := next((reason for reason, holds in reasons.items() if holds), None):
        raise ValueError(f"{archive} contains {entry.name!r}, and {reason}. Nothing was unpacked.")


class _Limited:
    """Bytes from `source`, up to a limit."""

    def __init__(self, source: Readable, limit: int, what: object, progress: Any = lambda size: None) -> None:
        self._source, self._limit, self._what, self._progress = source, limit, what, progress
        self.taken = 0

    def read(self, size: int = PIECE) -> bytes:
        """Up to `size` more bytes."""
        piece = self._source.read(size)
        self.taken += len(piece)
        self._progress(len(piece))
        if self.taken > self._limit:
            raise ValueError(f"{self._what} has more than the {self._limit} bytes that are allowed.")
        return piece


class _HttpsOnly(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        _check_https(newurl)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


@contextmanager
def _answer(url: str, timeout: float) -> Iterator[Any]:
    _check_https(url)
    try:
        answer = urllib.request.build_opener(_HttpsOnly).open(url, timeout=timeout)
    except (urllib.error.URLError, TimeoutError, ConnectionError, HTTPException) as error:
        raise DownloadError(f"{url} cannot be fetched: {getattr(error, 'reason', error)}.") from error
    with answer:
        yield answer


def _check_https(url: str) -> None:
    if not url.startswith("https://"):
        raise ValueError(f"Files are fetched over https only, got the address {url!r}.")


@contextmanager
def workshop(target: Path) -> Iterator[Path]:
    """A folder on the same disk as `target`, for what is not yet whole. When something fails, all of it is gone."""
    new = [folder for folder in target.parents if not folder.exists()]
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(prefix=".partial-", dir=target.parent) as folder:
            yield Path(folder)
    except BaseException:  # also when interrupted
        for folder in new:
            if not any(folder.iterdir()):
                folder.rmdir()
        raise


def _progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    return Progress(*columns, console=safe_console())


def _store(source: Readable, file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("xb") as opened:
        for piece in _pieces(source):
            digest.update(piece)
            opened.write(piece)
    return digest.hexdigest()


def _pieces(source: Readable) -> Iterator[bytes]:
    return iter(lambda: source.read(PIECE), b"")


def _check_sum(found: str, expected: str, *, what: str) -> None:
    if found != expected:
        raise ValueError(
            f"{what} has the sha256 {found}, and {expected} is expected. It was changed or damaged on its way, and "
            "is not kept."
        )
