"""Untrusted checkpoint folders: tampered ones are rejected, and nothing outside of them is read."""

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore

from jax_trainer.checkpoint.record import write_manifest
from jax_trainer.checkpoint.store import CheckpointError, CheckpointStore
from jax_trainer.core import TrainState
from jax_trainer.datasets import Position
from tests.rows import noted_row

# after a failure, a thread of Orbax warns metadata its closed event loop, some time later
pytestmark = [
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.usefixtures("wait_for_orbax"),
]

STATE = TrainState(jnp.int32(3), {"w": jnp.arange(6.0)}, {}, (), jnp.zeros(2, jnp.uint32), {})


@pytest.fixture(scope="module")
def wait_for_orbax() -> Iterator[None]:
    yield
    time.sleep(0.2)


@pytest.fixture(scope="module")
def one_saved(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("one") / "checkpoints"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jax_trainer.checkpoint.arrays.LARGEST", 0)  # every array counts as large
        CheckpointStore(folder).save(STATE, Position(), {})
    return folder


@pytest.fixture
def arrays(one_saved, tmp_path) -> Path:
    """The arrays of a checkpoint, to be tampered with."""
    return Path(shutil.copytree(one_saved, tmp_path / "checkpoints")) / "step_00000003" / "state"


def restore_error(arrays: Path, *, sealed: bool = True) -> str:
    """The error of a restore; `sealed`: with a valid manifest of the tampered files."""
    if sealed:
        write_manifest(arrays.parent)
    with pytest.raises(CheckpointError) as error:
        CheckpointStore(arrays.parent.parent).restore("latest", STATE)
    return str(error.value)


def largest_file(folder: Path) -> Path:
    return max((file for file in folder.rglob("*") if file.is_file()), key=lambda file: file.stat().st_size)


def rewrite_array(arrays: Path, **changed: Any) -> None:
    """Changes the metadata of `params.w` in the array store."""
    spec = {"driver": "ocdbt", "base": f"file://{arrays}/"}
    store = tensorstore.KvStore.open(spec).result()
    metadata = json.loads(store["params.w/.zarray"])
    store["params.w/.zarray"] = json.dumps(metadata | changed).encode()


def rewrite_index(arrays: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads((arrays / "_METADATA").read_text())
    change(content)
    (arrays / "_METADATA").write_text(json.dumps(content))


def test_an_unmodified_checkpoint_is_restored(arrays):
    restored, _ = CheckpointStore(arrays.parent.parent).restore("latest", STATE)
    np.testing.assert_array_equal(restored.params["w"], np.arange(6.0))


def test_a_link_in_place_of_a_file_is_rejected(arrays):
    file = largest_file(arrays / "ocdbt.process_0")
    file.unlink()
    file.symlink_to("/etc/passwd")
    assert f"{file} is a link" in restore_error(arrays, sealed=False)


def test_a_link_in_place_of_a_folder_is_rejected(one_saved, tmp_path):
    for place in ("state/d", "state", "extra"):
        arrays = Path(shutil.copytree(one_saved, tmp_path / place.replace("/", "_"))) / "step_00000003" / "state"
        folder, elsewhere = arrays.parent / place, tmp_path / f"elsewhere {place.replace('/', '_')}"
        if folder.exists():
            shutil.move(folder, elsewhere)
        else:
            elsewhere.mkdir()
        folder.symlink_to(elsewhere)
        assert f"{folder} is a link" in restore_error(arrays, sealed=False)


def test_a_pipe_is_rejected_without_waiting(arrays):
    os.mkfifo(arrays / "d" / "pipe")
    assert "state/d/pipe" in restore_error(arrays, sealed=False)


def test_a_huge_shape_is_rejected_before_anything_is_allocated(arrays):
    rewrite_array(arrays, shape=[10**12])
    assert "params.w: expected float32[6], found float32[1000000000000]" in restore_error(arrays)


def test_huge_pieces_of_a_small_array_are_rejected(arrays):
    rewrite_array(arrays, chunks=[10**12])
    assert "read in pieces of [1000000000000]" in restore_error(arrays)


def test_another_dtype_is_rejected(arrays):
    rewrite_array(arrays, dtype="<i4")
    assert "params.w: expected float32[6], found int32[6]" in restore_error(arrays)


def test_an_index_that_points_outside_the_folder_is_rejected_and_not_followed(arrays, tmp_path):
    outside = tensorstore.open(
        {"driver": "zarr", "kvstore": f"file://{tmp_path}/outside/"}, create=True, dtype="float32", shape=[6]
    ).result()
    outside.write(np.ones(6, np.float32)).result()

    def point_outside(index: dict[str, Any]) -> None:
        entry = index["tree_metadata"].pop("('params.w',)")
        entry["key_metadata"][0]["key"] = "../../../outside"
        index["tree_metadata"]["('../../../outside',)"] = entry
        index["use_ocdbt"] = False

    rewrite_index(arrays, point_outside)
    assert "not in one store" in restore_error(arrays)
    rewrite_index(arrays, lambda index: index.update(use_ocdbt=True))
    restore_error(arrays)


def test_an_invalid_index_is_rejected(arrays):
    written, of_w = (arrays / "_METADATA").read_text(), "('params.w',)"
    changes: list[Callable[[Any], object]] = [
        lambda index: index.pop("use_ocdbt"),
        lambda index: index.pop("tree_metadata"),
        lambda index: index.update(tree_metadata=[]),
        lambda index: index["tree_metadata"][of_w]["value_metadata"].update(value_type="string"),
        lambda index: index["tree_metadata"][of_w]["value_metadata"].update(skip_deserialize=True),
        lambda index: index["tree_metadata"][of_w]["key_metadata"].append({"key": "x", "key_type": 2}),
        lambda index: index["tree_metadata"].clear(),
        lambda index: index["tree_metadata"].pop("('step',)"),
    ]
    for number, change in enumerate(changes):
        (arrays / "_METADATA").write_text(written)
        rewrite_index(arrays, change)
        with noted_row(number):
            assert "step_00000003" in restore_error(arrays)


def test_every_truncated_or_missing_file_is_found(one_saved, tmp_path):
    original = one_saved / "step_00000003"
    needed = [file.relative_to(original) for file in original.rglob("*") if file.is_file()]
    assert len(needed) > 6
    for number, name in enumerate(needed):
        for how in ("truncated", "missing"):
            folder = tmp_path / f"{number}-{how}"
            damaged = Path(shutil.copytree(one_saved, folder)) / "step_00000003" / name
            damaged.write_bytes(damaged.read_bytes()[:-5]) if how == "truncated" else damaged.unlink()
            with pytest.raises(CheckpointError, match="damaged") as error:
                CheckpointStore(folder).restore("latest", STATE)
            assert str(name) in str(error.value)


def test_a_foreign_file_is_rejected_and_never_executed(arrays, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in (arrays, arrays.parent):
        (folder / "evil.pkl").write_bytes(b"cos\nsystem\n(S'touch canary'\ntR.")
    assert "evil.pkl, state/evil.pkl" in restore_error(arrays, sealed=False)
    write_manifest(arrays.parent)
    CheckpointStore(arrays.parent.parent).restore("latest", STATE)
    assert not (tmp_path / "canary").exists()
