"""The parts of the script that need no network: conversion and checks."""

import gzip
import hashlib
import importlib.util
from pathlib import Path

import numpy as np
import pytest

from jax_trainer.datasets.files import read_cifar10

FILE = Path(__file__).parents[2] / "scripts" / "fetch_data.py"
spec = importlib.util.spec_from_file_location("fetch_data", FILE)
assert spec is not None and spec.loader is not None
script = importlib.util.module_from_spec(spec)
spec.loader.exec_module(script)


def test_rows_of_pixels_become_records_that_the_reader_reads(tmp_path):
    images = np.random.default_rng(1).integers(0, 256, (4, 32, 32, 3), np.uint8)
    labels = np.array([3, 1, 4, 9], np.uint8)
    (tmp_path / "batch.bin").write_bytes(script.cifar_records(images.reshape(4, 1024, 3), labels))
    read, read_labels = read_cifar10(tmp_path / "batch.bin")
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
    with pytest.raises(ValueError, match="mnist: a .*sha256"):
        script.main([str(tmp_path), "--only", "mnist"])
    assert list((tmp_path / "new").iterdir()) == []


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
    assert "mnist: done" in capsys.readouterr().out


def test_a_program_that_is_missing_or_fails_ends_the_script_with_a_sentence(tmp_path):
    with pytest.raises(SystemExit, match="`no-such-program`.*installed"):
        script.run("no-such-program", folder=tmp_path)
    with pytest.raises(SystemExit, match="`ls no-such-file` failed: .*no-such-file"):
        script.run("ls", "no-such-file", folder=tmp_path)
