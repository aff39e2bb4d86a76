"""The files of standard datasets: names, addresses, checksums and downloads, and readers of IDX and binary CIFAR-10.

A file appears only when it is complete and its checksum matches.
"""

import gzip
import hashlib
import io
import math
import os
import tarfile
import tempfile
import urllib.request
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import wrap_file

from jax_trainer.diagnostics.output import safe_console

CIFAR_SHAPE = (3, 32, 32)
CIFAR_RECORD = 1 + math.prod(CIFAR_SHAPE)  # bytes


class DownloadError(OSError):
    """A host could not be reached, or did not send the complete file."""


def fetch(url: str, *, sha256: str, unpack_gzip: bool = False, timeout: float = 30.0) -> bytes:
    """The content of the file at an https address.

    Args:
        url: address of the file; it, and any redirect, must start with https://.
        sha256: checksum of the content, after decompression: gzip files of the same data differ by compressor.
        unpack_gzip: decompress the file.
        timeout: seconds to wait for the host per read.
    """
    _check_https(url)
    try:
        with urllib.request.build_opener(_HttpsOnly).open(url, timeout=timeout) as response:
            length = int(response.headers.get("Content-Length") or 0)
            with wrap_file(response, length, description=url.rpartition("/")[2], console=safe_console()) as received:
                content = received.read()
        content = gzip.decompress(content) if unpack_gzip else content
    except (OSError, EOFError, zlib.error, HTTPException) as error:
        raise DownloadError(f"{url} cannot be downloaded: {getattr(error, 'reason', error)!s}.") from error
    return _verified(content, sha256, url)


def unpack_tar(archive: bytes, names: Iterable[str]) -> dict[str, bytes]:
    """The contents of the files of a `.tar.gz` that have these names, in any folder."""
    found, missing = {}, set(names)
    with tarfile.open(fileobj=io.BytesIO(archive)) as packed:
        for entry in packed:
            if entry.isfile() and (name := Path(entry.name).name) in missing - found.keys():
                found[name] = packed.extractfile(entry).read()  # type: ignore[union-attr]
    if missing - found.keys():
        raise ValueError(f"The archive does not contain {', '.join(sorted(missing - found.keys()))}.")
    return found


def sha256_of(file: Path) -> str:
    """The checksum of the content of a file, decompressed if its name ends in `.gz`."""
    return hashlib.sha256(read_bytes(file)).hexdigest()


def _verified(content: bytes, sha256: str, what: str) -> bytes:
    if (found := hashlib.sha256(content).hexdigest()) != sha256:
        raise DownloadError(f"{what} has the sha256 {found}, expected {sha256}. The file is incomplete, or was changed")
    return content


class _HttpsOnly(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        _check_https(newurl)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _check_https(url: str) -> None:
    if not url.startswith("https://"):
        raise ValueError(f"Downloads need an https:// address, got {url!r}.")


@dataclass(frozen=True, kw_only=True)
class FileSet:
    """The files of a dataset, and the folders in which they are searched.

    Args:
        names: names of the files.
        folders: folders below `data_dir`, in search order; downloads go into the first.
        sha256: checksum of the content of each file, after decompression of a `.gz`, whose bytes depend on the
            compressor.
        address: URL of the folder with the files as `.gz`, or of an archive (`.tar.gz`) of all; empty for none.
        archive_sha256: checksum of that archive.
        unsafe: files and folders below `data_dir` of a version that runs code when it is read, for messages.
    """

    names: tuple[str, ...]
    folders: tuple[str, ...]
    sha256: Mapping[str, str] = field(default_factory=dict)
    address: str = ""
    archive_sha256: str = ""
    unsafe: tuple[str, ...] = ()

    def find(self, folder: Path) -> dict[str, Path]:
        """The files that exist in `folder`, plain or as `.gz`, in either spelling."""
        found = {}
        for name in self.names:
            spellings = (name, f"{name}.gz", name.replace("-idx", ".idx"), f"{name.replace('-idx', '.idx')}.gz")
            if paths := [folder / spelling for spelling in spellings if (folder / spelling).is_file()]:
                found[name] = paths[0]
        return found

    def download(self, data_dir: Path) -> dict[str, Path]:
        """Downloads missing files and compares their checksums."""
        folder = data_dir / self.folders[0]
        missing = [name for name in self.names if name not in self.find(folder)]
        try:
            if self.archive_sha256:
                found = unpack_tar(fetch(self.address, sha256=self.archive_sha256), missing)
                contents = {name: _verified(content, self.sha256[name], name) for name, content in found.items()}
            else:
                urls = {name: f"{self.address}{name}.gz" for name in missing}
                contents = {name: fetch(url, sha256=self.sha256[name], unpack_gzip=True) for name, url in urls.items()}
        except DownloadError as error:
            raise DownloadError(f"{error} Download {', '.join(missing)} manually, into {folder}.") from error
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".partial-", dir=folder) as partial:  # files appear when complete
            for name, content in contents.items():
                Path(partial, name).write_bytes(content)
                os.replace(Path(partial, name), folder / name)
        return self.find(folder)

    def locate(self, title: str, data_dir: Path | str, *, download: bool) -> list[Path]:
        """The paths of all files, in one folder, in the order of the names; downloads them only if asked to.

        Files from several folders are never mixed: MNIST and Fashion-MNIST use the same names.
        """
        folders = [Path(data_dir, folder) for folder in self.folders]
        found = max(map(self.find, folders), key=len)  # the first of the fullest
        if len(found) < len(self.names) and download:
            found = self.download(Path(data_dir))
        if len(found) == len(self.names):
            return [found[name] for name in self.names]
        folder = next(folder for folder in folders if self.find(folder) == found)
        message = (
            f"{len(self.names) - len(found)} of the {len(self.names)} files of {title} are missing in {folder}: "
            f"{', '.join(name for name in self.names if name not in found)} (plain or .gz). Put them there, or set "
            f"`download: true`. Also searched: {', '.join(str(other) for other in folders if other != folder)}."
        )
        for unsafe in (path for path in (Path(data_dir, name) for name in self.unsafe) if path.exists()):
            message += f" {unsafe} is a version that would run code when it is read: use the files of {self.address}."
        raise FileNotFoundError(message)


_IDX = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")

MNIST_FILES = FileSet(
    names=_IDX,
    folders=("MNIST/raw", "mnist", "."),
    address="https://ossci-datasets.s3.amazonaws.com/mnist/",
    sha256={
        "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
        "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    },
)
FASHION_MNIST_FILES = FileSet(
    names=_IDX,
    folders=("FashionMNIST/raw", "fashion-mnist", "."),
    address="https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
    sha256={
        "train-images-idx3-ubyte": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
        "train-labels-idx1-ubyte": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
        "t10k-images-idx3-ubyte": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
        "t10k-labels-idx1-ubyte": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
    },
)
CIFAR10_FILES = FileSet(
    names=(*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"),
    folders=("cifar-10-batches-bin", "."),
    unsafe=("cifar-10-batches-py", "data_batch_1", "cifar-10-python.tar.gz"),
    address="https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
    # of the archive with the published MD5 c32a1d4ab5d03f1284b67883e8d87530; each file has its own checksum, too
    archive_sha256="c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
    sha256={
        "data_batch_1.bin": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
        "data_batch_2.bin": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
        "data_batch_3.bin": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
        "data_batch_4.bin": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
        "data_batch_5.bin": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
        "test_batch.bin": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
    },
)


def read_bytes(path: Path | str) -> bytes:
    """The content of a file, decompressed if its name ends in `.gz`."""
    data = Path(path).read_bytes()
    if Path(path).suffix != ".gz":
        return data
    try:
        return gzip.decompress(data)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path} is not a complete gzip file ({error}). Download it again.") from error


def read_idx(path: Path | str, *, dimensions: int) -> np.ndarray:
    """The uint8 array of an IDX file, plain or `.gz`: images have 3 dimensions, labels 1."""
    data = read_bytes(path)
    magic, header = bytes([0, 0, 8, dimensions]), 4 + 4 * dimensions
    if data[:4] != magic:
        raise ValueError(
            f"{path} starts with {data[:4].hex(' ') or 'nothing'}, but an IDX file of uint8 with {dimensions} "
            f"dimension{'s' * (dimensions > 1)} starts with {magic.hex(' ')}. It is another file, or it is damaged."
        )
    shape = tuple(int.from_bytes(data[at : at + 4], "big") for at in range(4, header, 4))
    expected = header + math.prod(shape)
    if len(data) != expected:
        raise ValueError(
            f"{path} has the shape {shape} and must have {expected} bytes, but has {len(data)}. Download it again."
        )
    return np.frombuffer(data, np.uint8, offset=header).reshape(shape)


def read_cifar10(path: Path | str) -> tuple[np.ndarray, np.ndarray]:
    """Images [n, 32, 32, 3] uint8 and labels [n] of a file of the binary version, such as `data_batch_1.bin`."""
    data = read_bytes(path)
    if not data or len(data) % CIFAR_RECORD:
        raise ValueError(
            f"{path} has {len(data)} bytes, which is not a multiple of the record size {CIFAR_RECORD} (30,730,000 in "
            "the original). Download it again."
        )
    records = np.frombuffer(data, np.uint8).reshape(-1, CIFAR_RECORD)
    images = records[:, 1:].reshape(-1, *CIFAR_SHAPE).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(images), records[:, 0]


def check_labels(labels: np.ndarray, classes: int, path: Path | str) -> np.ndarray:
    """The labels as int32; raises if one is not below `classes`."""
    wrong = np.flatnonzero((labels < 0) | (labels >= classes))
    if len(wrong):
        raise ValueError(
            f"{path} has the label {labels[wrong[0]]} at index {wrong[0]}, but labels must be from 0 to {classes - 1}. "
            "It is another file, or it is damaged."
        )
    return labels.astype(np.int32)
