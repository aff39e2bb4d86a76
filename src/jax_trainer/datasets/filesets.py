"""The files of standard datasets: names, folders, addresses and checksums."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from jax_trainer.datasets.download import DownloadError, fetch, temporary_folder, unpack_tar


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
    """

    names: tuple[str, ...]
    folders: tuple[str, ...]
    sha256: Mapping[str, str] = field(default_factory=dict)
    address: str = ""
    archive_sha256: str = ""

    def find(self, folder: Path) -> dict[str, Path]:
        """The files that exist in `folder`, plain or as `.gz`, in either spelling."""
        found = {}
        for name in self.names:
            spellings = (name, f"{name}.gz", name.replace("-idx", ".idx"), f"{name.replace('-idx', '.idx')}.gz")
            paths = [folder / spelling for spelling in spellings if (folder / spelling).is_file()]
            if paths:
                found[name] = paths[0]
        return found

    def download(self, data_dir: Path) -> dict[str, Path]:
        """Downloads missing files and compares their checksums."""
        folder = data_dir / self.folders[0]
        missing = [name for name in self.names if name not in self.find(folder)]
        try:
            if self.archive_sha256:
                self._download_archive(folder, missing)
            else:
                for name in missing:
                    fetch(f"{self.address}{name}.gz", folder / name, sha256=self.sha256[name], unpack_gzip=True)
        except DownloadError as error:
            raise DownloadError(f"{error} Download {', '.join(missing)} manually, into {folder}.") from error
        return self.find(folder)

    def _download_archive(self, folder: Path, missing: Sequence[str]) -> None:
        with temporary_folder(folder) as temporary:
            archive = fetch(self.address, temporary / "archive.tar.gz", sha256=self.archive_sha256)
            unpack_tar(archive, folder, sha256={name: self.sha256[name] for name in missing})


def locate(title: str, kinds: Sequence[FileSet], data_dir: Path | str, *, download: bool) -> tuple[FileSet, list[Path]]:
    """The first of `kinds` with all files in one folder, and their paths in the order of its names.

    Files from several folders are never mixed: MNIST and Fashion-MNIST use the same names.
    """
    root = Path(data_dir)
    candidates = [(kind, root / folder) for kind in kinds for folder in kind.folders]
    for kind, folder in candidates:
        if len(found := kind.find(folder)) == len(kind.names):
            return kind, [found[name] for name in kind.names]
    if download:
        found = kinds[0].download(root)
        return kinds[0], [found[name] for name in kinds[0].names]
    kind, folder = max(candidates, key=lambda candidate: len(candidate[0].find(candidate[1])))
    missing = [name for name in kind.names if name not in kind.find(folder)]
    others = ", ".join(dict.fromkeys(str(other) for _, other in candidates if other != folder))
    raise FileNotFoundError(
        f"{len(missing)} of the {len(kind.names)} files of {title} are missing in {folder}: "
        f"{', '.join(missing)} (plain or .gz). Put them there, or set `download: true`. Also searched: {others}."
    )


_IDX = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
_BATCHES = ("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch")

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
CIFAR10_BINARY_FILES = FileSet(
    names=tuple(f"{name}.bin" for name in _BATCHES),
    folders=("cifar-10-batches-bin", "."),
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
CIFAR10_PYTHON_FILES = FileSet(names=_BATCHES, folders=("cifar-10-batches-py", "."))
