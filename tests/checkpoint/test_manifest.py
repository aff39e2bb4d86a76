"""The manifest covers every bit of a checkpoint: changed, missing and added files are found."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from jax_trainer.checkpoint.record import CheckpointError, verify_digests, verify_sizes, write_manifest
from tests.rows import noted_row


@pytest.fixture
def folder(tmp_path) -> Path:
    """A folder like a checkpoint, with its manifest."""
    folder = tmp_path / "step_00000003"
    (folder / "state" / "d").mkdir(parents=True)
    rng = np.random.default_rng(0)
    for name, size in {"checkpoint.json": 300, "state/_METADATA": 100, "state/d/ab": 5_000, "state/d/empty": 0}.items():
        (folder / name).write_bytes(rng.bytes(size))
    write_manifest(folder)
    return folder


def files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*") if file.is_file())


def flip(file: Path, rng: np.random.Generator) -> None:
    content = bytearray(file.read_bytes())
    content[rng.integers(len(content))] ^= 1 << int(rng.integers(8))
    file.write_bytes(content)


def test_an_unchanged_checkpoint_is_complete_wherever_it_is(folder, tmp_path):
    verify_digests(folder)
    verify_digests(Path(shutil.move(folder, tmp_path / "elsewhere")))


def test_a_manifest_names_every_file_with_its_size_and_digest(folder):
    content = json.loads((folder / "MANIFEST.json").read_text())
    assert content["format"] == 2
    assert content["files"].keys() == {"checkpoint.json", "state/_METADATA", "state/d/ab", "state/d/empty"}
    empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"  # of an empty file
    assert content["files"]["state/d/empty"] == {"size": 0, "sha256": empty}


def test_every_flipped_bit_is_found_in_the_manifest_too(folder):
    rng, found = np.random.default_rng(1), 0
    full = [file for file in files(folder) if file.stat().st_size]
    for number in range(200):
        file = full[number % len(full)]
        before = file.read_bytes()
        flip(file, rng)
        with pytest.raises(CheckpointError, match="step_00000003 is damaged"):
            verify_digests(folder)
        file.write_bytes(before)
        found += 1
    assert found == 200
    verify_digests(folder)


def test_every_changed_file_is_found(folder):
    for how in ["truncated", "longer", "missing", "zeroed"]:
        with noted_row(how):
            for file in files(folder):
                before = file.read_bytes()
                if how == "missing":
                    file.unlink()
                elif how == "longer":
                    file.write_bytes(before + b"x")
                elif before:
                    file.write_bytes(before[:-1] if how == "cut" else bytes(len(before)))
                else:
                    continue
                with pytest.raises(CheckpointError, match=file.name):
                    verify_digests(folder)
                file.write_bytes(before)


def test_an_added_file_and_a_link_are_found(folder):
    (folder / "state" / "more").write_text("x")
    with pytest.raises(CheckpointError, match="manifest: state/more"):
        verify_sizes(folder)
    (folder / "state" / "more").unlink()
    (folder / "state" / "link").symlink_to("/etc/passwd")
    with pytest.raises(CheckpointError, match="link is a link"):
        verify_sizes(folder)


def test_a_quick_check_finds_missing_files_without_reading_content(folder):
    file = folder / "state" / "d" / "ab"
    flip(file, np.random.default_rng(0))
    verify_sizes(folder)
    file.unlink()
    with pytest.raises(CheckpointError, match="missing: state/d/ab"):
        verify_sizes(folder)


def test_an_invalid_manifest_is_damage(folder):
    for text in ["", "{}", "[]", "[" * 100_000, '{"format": 2, "files": []}', '{"format": 2, "files": {"../up": 1}}']:
        with noted_row(text):
            (folder / "MANIFEST.json").write_text(text)
            with pytest.raises(CheckpointError, match=r"step_00000003 is damaged: MANIFEST.json"):
                verify_sizes(folder)


def test_a_reformatted_manifest_is_damage(folder):
    file = folder / "MANIFEST.json"
    file.write_text(json.dumps(json.loads(file.read_text())))
    with pytest.raises(CheckpointError, match="MANIFEST.json"):
        verify_sizes(folder)


def test_files_outside_the_folder_are_not_read(folder):
    file = folder / "MANIFEST.json"
    content = json.loads(file.read_text())
    content["files"]["../../secret"] = content["files"]["checkpoint.json"]
    file.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")
    with pytest.raises(CheckpointError, match=r"missing: \.\./\.\./secret"):
        verify_digests(folder)
