"""The parts of the script that need no network: conversion and checks."""

import gzip
import hashlib
import importlib.util
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest

from jax_trainer.datasets.files import read_cifar10_binary

FILE = Path(__file__).parents[2] / "scripts" / "fetch_data.py"
spec = importlib.util.spec_from_file_location("fetch_data", FILE)
assert spec is not None and spec.loader is not None
script = importlib.util.module_from_spec(spec)
spec.loader.exec_module(script)

NOISE = np.random.default_rng(0).integers(0, 256, (11, 7, 3), np.uint8)
SMOOTH = np.add.outer(np.arange(11) * 3, np.arange(21)).reshape(11, 7, 3).astype(np.uint8)


def filtered(image: np.ndarray, filters: np.ndarray) -> bytes:
    """The lines of a PNG, pixel by pixel as its specification says."""
    height, width, _ = image.shape
    lines = []
    for y in range(height):
        line = [int(filters[y])]
        for place in range(3 * width):
            x, colour = divmod(place, 3)
            left = int(image[y, x - 1, colour]) if x else 0
            above = int(image[y - 1, x, colour]) if y else 0
            corner = int(image[y - 1, x - 1, colour]) if x and y else 0
            nearest = min((left, above, corner), key=lambda value, plane=left + above - corner: abs(plane - value))
            guess = (0, left, above, (left + above) // 2, nearest)[filters[y]]
            line.append((int(image[y, x, colour]) - guess) % 256)
        lines.append(bytes(line))
    return b"".join(lines)


def png(image: np.ndarray, filters: np.ndarray, kind: tuple[int, ...] = (8, 2, 0, 0, 0)) -> bytes:
    packed = zlib.compress(filtered(image, filters))
    header = struct.pack(">IIBBBBB", image.shape[1], image.shape[0], *kind)
    chunks = [(b"IHDR", header), (b"IDAT", packed[:50]), (b"IDAT", packed[50:]), (b"IEND", b"")]
    coded = [
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in chunks
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(coded)


@pytest.mark.parametrize("image", [NOISE, SMOOTH, NOISE[:1], NOISE[:, :1]], ids=["noise", "smooth", "row", "column"])
@pytest.mark.parametrize("kind", [0, 1, 2, 3, 4, "mixed"])
def test_a_png_gives_the_pixels_that_were_written(image, kind):
    filters = np.arange(len(image)) % 5 if kind == "mixed" else np.full(len(image), kind)
    np.testing.assert_array_equal(script.decode_png(png(image, filters)), image)


def test_a_png_of_another_kind_is_an_error():
    with pytest.raises(ValueError, match=r"got \[8, 6, 0, 0, 0\]"):
        script.decode_png(png(NOISE, np.zeros(11, int), kind=(8, 6, 0, 0, 0)))
    with pytest.raises(ValueError, match="6a 70 67"):
        script.decode_png(b"jpg")


def test_rows_of_pixels_become_records_that_the_reader_reads(tmp_path):
    images = np.random.default_rng(1).integers(0, 256, (4, 32, 32, 3), np.uint8)
    labels = np.array([3, 1, 4, 9], np.uint8)
    (tmp_path / "batch.bin").write_bytes(script.cifar_records(images.reshape(4, 1024, 3), labels))
    read, read_labels = read_cifar10_binary(tmp_path / "batch.bin")
    np.testing.assert_array_equal(read, images)
    np.testing.assert_array_equal(read_labels, labels)


def test_labels_that_do_not_fit_the_pixels_are_an_error():
    with pytest.raises(ValueError, match=r"3 labels need pixels of \[3, 1024, 3\], got \[4, 1024, 3\]"):
        script.cifar_records(np.zeros((4, 1024, 3), np.uint8), np.zeros(3, np.uint8))


def test_chapters_are_joined_with_their_headings():
    chapters = [
        {"chapter": "1", "title": "Loomings.", "text": "Call me Ishmael.\n"},
        {"chapter": "epilogue", "title": "Job.", "text": "Epilogue\n\nThe drama's done.\n"},
    ]
    assert script.joined(chapters) == "CHAPTER 1. Loomings.\n\nCall me Ishmael.\n\n\nEpilogue\n\nThe drama's done.\n"


def test_only_files_with_the_right_content_count_as_complete(tmp_path):
    sums = {name: hashlib.sha256(name.encode()).hexdigest() for name in ("a", "b")}
    assert not script.is_complete(tmp_path, sums)
    (tmp_path / "a").write_bytes(b"a")
    assert not script.is_complete(tmp_path, sums)
    (tmp_path / "b.gz").write_bytes(gzip.compress(b"b"))
    assert script.is_complete(tmp_path, sums)
    (tmp_path / "a").write_bytes(b"other")
    assert not script.is_complete(tmp_path, sums)


def test_a_set_with_a_wrong_checksum_is_not_kept(tmp_path, monkeypatch):
    def get(folder: Path) -> dict[str, Path]:
        return script.write(folder, {"a": b"other"})

    monkeypatch.setitem(script.SETS, "mnist", ("new", {"a": hashlib.sha256(b"a").hexdigest()}, get))
    with pytest.raises(ValueError, match="mnist: a has the sha256 .* expected"):
        script.main([str(tmp_path), "--only", "mnist"])
    assert list(tmp_path.iterdir()) == []


def test_an_existing_set_is_kept(tmp_path, monkeypatch, capsys):
    (tmp_path / "a").write_bytes(b"a")
    monkeypatch.setitem(script.SETS, "mnist", (".", {"a": hashlib.sha256(b"a").hexdigest()}, None))
    script.main([str(tmp_path), "--only", "mnist"])
    assert "mnist: exists" in capsys.readouterr().out


def test_a_set_is_fetched_checked_and_put_in_its_place(tmp_path, monkeypatch, capsys):
    def get(folder: Path) -> dict[str, Path]:
        return script.write(folder, {"a": b"a"})

    monkeypatch.setitem(script.SETS, "mnist", ("new", {"a": hashlib.sha256(b"a").hexdigest()}, get))
    script.main([str(tmp_path), "--only", "mnist"])
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["a"]
    assert "mnist: done, checksums match: a" in capsys.readouterr().out


def test_a_program_that_is_missing_or_fails_ends_the_script_with_a_sentence(tmp_path):
    with pytest.raises(SystemExit, match="`no-such-program`.*installed"):
        script.run("no-such-program", folder=tmp_path)
    with pytest.raises(SystemExit, match="`ls no-such-file` failed: .*no-such-file"):
        script.run("ls", "no-such-file", folder=tmp_path)
