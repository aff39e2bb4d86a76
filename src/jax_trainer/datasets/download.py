"""Downloads files and unpacks archives; a file appears only when it is complete and its checksum matches."""

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

from jax_trainer.diagnostics.output import safe_console

CHUNK_BYTES = 1 << 20  # per read
MAX_BYTES = 1 << 30
MAX_MEMBERS = 10_000


class DownloadError(OSError):
    """A host could not be reached, or did not send the complete file."""


class Readable(Protocol):
    """A binary stream."""

    def read(self, size: int = -1, /) -> bytes:
        """Up to `size` bytes; empty at the end."""
        ...


def fetch(
    url: str, target: Path, *, sha256: str, unpack_gzip: bool = False, max_bytes: int = MAX_BYTES, timeout: float = 30.0
) -> Path:
    """Downloads a file over https to `target`; nothing is left there if its checksum does not match.

    Args:
        url: address of the file; it, and any redirect, must start with https://.
        target: path of the file.
        sha256: checksum of the stored bytes, after decompression: gzip files of the same data differ by compressor.
        unpack_gzip: store the decompressed content.
        max_bytes: maximum size in bytes.
        timeout: seconds to wait for the host per read.
    """
    with _open_url(url, timeout) as response, temporary_folder(target) as folder, _progress() as progress:
        length = int(response.headers.get("Content-Length") or 0)
        if length > max_bytes:
            raise ValueError(f"{url} has {length} bytes, more than the allowed {max_bytes}.")
        received = _Limited(response, max_bytes, url, lambda size: progress.update(task, advance=size))
        task = progress.add_task(target.name, total=length or None)
        content = gzip.GzipFile(fileobj=received) if unpack_gzip else received  # type: ignore[arg-type]
        try:
            found = _store(_Limited(content, max_bytes, url), folder / target.name)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise DownloadError(f"{url} did not send a complete gzip file: {error}.") from error
        except (TimeoutError, ConnectionError, ssl.SSLError, HTTPException) as error:
            raise DownloadError(f"{url} stopped after {received.count} bytes: {error!r}.") from error
        if received.count < length:
            raise DownloadError(f"{url} stopped after {received.count} of {length} bytes.")
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
    """Extracts only the files that `sha256` names from a `.tar.gz` into the folder `target`.

    Every entry is checked; links, devices and paths outside of the folder are errors. All files are extracted and their
    checksums compared before the first one is moved to `target`.
    """
    with temporary_folder(target) as folder:
        (unpacked := folder / target.name).mkdir()
        try:
            found = _unpack(archive, unpacked, set(sha256), max_bytes, max_members)
        except (EOFError, gzip.BadGzipFile, zlib.error, tarfile.TarError) as error:
            raise ValueError(f"{archive} is not a complete .tar.gz file: {error}.") from error
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
    """The checksum of the content of a file, decompressed if its name ends in `.gz`."""
    digest = hashlib.sha256()
    with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as opened:
        for chunk in _chunks(opened):
            digest.update(chunk)
    return digest.hexdigest()


def _unpack(archive: Path, folder: Path, wanted: set[str], max_bytes: int, max_members: int) -> dict[str, str]:
    found: dict[str, str] = {}
    size = 0
    # the limit includes headers, so that a small archive cannot fill the memory
    with gzip.open(archive) as packed, tarfile.open(fileobj=_Limited(packed, max_bytes, archive), mode="r|") as entries:  # type: ignore[call-overload]
        for count, entry in enumerate(entries, 1):
            if count > max_members:
                raise ValueError(f"{archive} has more than the allowed {max_members} entries.")
            _check_entry(entry, archive)
            size += entry.size  # its declared size: sparse files are larger than their data in the archive
            if size > max_bytes:
                raise ValueError(f"{archive} unpacks to more than the allowed {max_bytes} bytes.")
            name = PurePosixPath(entry.name).name
            if not entry.isfile() or name not in wanted:
                continue
            if name in found:
                raise ValueError(f"{archive} contains {name} twice.")
            content = entries.extractfile(entry)
            assert content is not None  # it is a file
            found[name] = _store(content, folder / name)
    return found


def _check_entry(entry: tarfile.TarInfo, archive: Path) -> None:
    path, windows = PurePosixPath(entry.name), PureWindowsPath(entry.name)
    reasons = {
        "it is a link": entry.issym() or entry.islnk(),
        "it is not a regular file": not (entry.isfile() or entry.isdir() or entry.issym() or entry.islnk()),
        "its path is absolute": path.is_absolute() or bool(windows.anchor),
        "its path leads out of the folder": ".." in path.parts or ".." in windows.parts,
        "its name contains a NUL": "\0" in entry.name,
    }
    if reason := next((reason for reason, holds in reasons.items() if holds), None):
        raise ValueError(f"{archive} contains {entry.name!r}: {reason}. Nothing was unpacked.")


class _Limited:
    """Reads from `source`, up to a limit."""

    def __init__(self, source: Readable, limit: int, what: object, progress: Any = lambda size: None) -> None:
        self._source, self._limit, self._what, self._progress = source, limit, what, progress
        self.count = 0

    def read(self, size: int = CHUNK_BYTES) -> bytes:
        chunk = self._source.read(size)
        self.count += len(chunk)
        self._progress(len(chunk))
        if self.count > self._limit:
            raise ValueError(f"{self._what} has more than the allowed {self._limit} bytes.")
        return chunk


class _HttpsOnly(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        _check_https(newurl)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


@contextmanager
def _open_url(url: str, timeout: float) -> Iterator[Any]:
    _check_https(url)
    try:
        response = urllib.request.build_opener(_HttpsOnly).open(url, timeout=timeout)
    except (urllib.error.URLError, TimeoutError, ConnectionError, HTTPException) as error:
        raise DownloadError(f"{url} cannot be downloaded: {getattr(error, 'reason', error)}.") from error
    with response:
        yield response


def _check_https(url: str) -> None:
    if not url.startswith("https://"):
        raise ValueError(f"Downloads need an https:// address, got {url!r}.")


@contextmanager
def temporary_folder(target: Path) -> Iterator[Path]:
    """A temporary folder on the file system of `target`, for incomplete files. It is removed if something fails."""
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
        for chunk in _chunks(source):
            digest.update(chunk)
            opened.write(chunk)
    return digest.hexdigest()


def _chunks(source: Readable) -> Iterator[bytes]:
    return iter(lambda: source.read(CHUNK_BYTES), b"")


def _check_sum(found: str, expected: str, *, what: str) -> None:
    if found != expected:
        raise ValueError(
            f"{what} has the sha256 {found}, expected {expected}. The file was changed or damaged, and was deleted."
        )
