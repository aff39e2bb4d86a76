"""Folders that somebody else may have made: they are refused, and nothing outside of them is read."""

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

from jax_trainer.checkpoint.manifest import write_manifest
from jax_trainer.checkpoint.store import CheckpointError, CheckpointStore
from jax_trainer.core import TrainState
from jax_trainer.datasets import Position

# when orbax fails, it leaves work behind that complains about its closed loop, from a thread and some time later
pytestmark = [
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.usefixtures("complaints_end_here"),
]

STATE = TrainState(jnp.int32(3), {"w": jnp.arange(6.0)}, {}, (), jnp.zeros(2, jnp.uint32), {})


@pytest.fixture(scope="module")
def complaints_end_here() -> Iterator[None]:
    yield
    time.sleep(0.2)


@pytest.fixture(scope="module")
def one_saved(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("one") / "checkpoints"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jax_trainer.checkpoint.packing.LARGEST", 0)  # each array by itself, as if it were large
        CheckpointStore(folder).save(STATE, Position(), {})
    return folder


@pytest.fixture
def arrays(one_saved, tmp_path) -> Path:
    """The arrays of a checkpoint, to be tampered with."""
    return Path(shutil.copytree(one_saved, tmp_path / "checkpoints")) / "step_00000003" / "state"


def refusal(arrays: Path, *, sealed: bool = True) -> str:
    """Why it is not restored, though its manifest says that all is as it was written."""
    if sealed:
        write_manifest(arrays.parent)
    with pytest.raises(CheckpointError) as error:
        CheckpointStore(arrays.parent.parent).restore("latest", STATE)
    return str(error.value)


def largest_file(folder: Path) -> Path:
    return max((file for file in folder.rglob("*") if file.is_file()), key=lambda file: file.stat().st_size)


def rewrite_array(arrays: Path, **changed: Any) -> None:
    """Changes what the store says about `params.w`."""
    spec = {"driver": "ocdbt", "base": f"file://{arrays}/"}
    store = tensorstore.KvStore.open(spec).result()
    about = json.loads(store["params.w/.zarray"])
    store["params.w/.zarray"] = json.dumps(about | changed).encode()


def rewrite_index(arrays: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads((arrays / "_METADATA").read_text())
    change(content)
    (arrays / "_METADATA").write_text(json.dumps(content))


def test_what_was_not_tampered_with_is_restored(arrays):
    restored, _ = CheckpointStore(arrays.parent.parent).restore("latest", STATE)
    np.testing.assert_array_equal(restored.params["w"], np.arange(6.0))


def test_a_link_in_place_of_a_file_is_refused(arrays):
    file = largest_file(arrays / "ocdbt.process_0")
    file.unlink()
    file.symlink_to("/etc/passwd")
    assert f"{file} is a link" in refusal(arrays, sealed=False)


@pytest.mark.parametrize("place", ["state/d", "state", "extra"])
def test_a_link_in_place_of_a_folder_is_refused(arrays, place, tmp_path):
    folder = arrays.parent / place
    if folder.exists():
        shutil.move(folder, tmp_path / "elsewhere")
    else:
        (tmp_path / "elsewhere").mkdir()
    folder.symlink_to(tmp_path / "elsewhere")
    assert f"{folder} is a link" in refusal(arrays, sealed=False)


def test_a_pipe_is_refused_and_not_waited_for(arrays):
    os.mkfifo(arrays / "d" / "pipe")
    assert "pipe is not a regular file" in refusal(arrays, sealed=False)


def test_a_huge_shape_is_refused_before_anything_is_allocated(arrays):
    rewrite_array(arrays, shape=[10**12])
    assert "params.w: expected float32[6], found float32[1000000000000]" in refusal(arrays)


def test_huge_pieces_of_a_small_array_are_refused(arrays):
    rewrite_array(arrays, chunks=[10**12])
    assert "read in pieces of [1000000000000]" in refusal(arrays)


def test_another_dtype_is_refused(arrays):
    rewrite_array(arrays, dtype="<i4")
    assert "params.w: expected float32[6], found int32[6]" in refusal(arrays)


def test_an_index_that_leads_out_of_the_folder_is_refused_and_not_followed(arrays, tmp_path):
    outside = tensorstore.open(
        {"driver": "zarr", "kvstore": f"file://{tmp_path}/outside/"}, create=True, dtype="float32", shape=[6]
    ).result()
    outside.write(np.ones(6, np.float32)).result()

    def lead_away(index: dict[str, Any]) -> None:
        entry = index["tree_metadata"].pop("('params.w',)")
        entry["key_metadata"][0]["key"] = "../../../outside"
        index["tree_metadata"]["('../../../outside',)"] = entry
        index["use_ocdbt"] = False

    rewrite_index(arrays, lead_away)
    assert "not in one store" in refusal(arrays)
    rewrite_index(arrays, lambda index: index.update(use_ocdbt=True))
    refusal(arrays)


@pytest.mark.parametrize(
    "change",
    [
        lambda index: index.pop("use_ocdbt"),
        lambda index: index.pop("tree_metadata"),
        lambda index: index.update(tree_metadata=[]),
        lambda index: index["tree_metadata"]["('params.w',)"]["value_metadata"].update(value_type="string"),
        lambda index: index["tree_metadata"]["('params.w',)"]["value_metadata"].update(skip_deserialize=True),
        lambda index: index["tree_metadata"]["('params.w',)"]["key_metadata"].append({"key": "x", "key_type": 2}),
        lambda index: index["tree_metadata"].clear(),
        lambda index: index["tree_metadata"].pop("('step',)"),
    ],
)
def test_an_index_that_makes_no_sense_is_refused(arrays, change):
    rewrite_index(arrays, change)
    assert "step_00000003" in refusal(arrays)


def test_files_that_are_cut_or_gone_are_refused_whichever_it_is(one_saved, tmp_path):
    original = one_saved / "step_00000003"
    needed = [file.relative_to(original) for file in original.rglob("*") if file.is_file()]
    assert len(needed) > 6
    for number, name in enumerate(needed):
        for how in ("cut", "gone"):
            folder = tmp_path / f"{number}-{how}"
            damaged = Path(shutil.copytree(one_saved, folder)) / "step_00000003" / name
            damaged.write_bytes(damaged.read_bytes()[:-5]) if how == "cut" else damaged.unlink()
            with pytest.raises(CheckpointError, match="damaged") as error:
                CheckpointStore(folder).restore("latest", STATE)
            assert str(name) in str(error.value)


def test_a_file_that_does_not_belong_there_is_refused_and_never_does_anything(arrays, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in (arrays, arrays.parent):
        (folder / "evil.pkl").write_bytes(b"cos\nsystem\n(S'touch canary'\ntR.")
    assert "evil.pkl, state/evil.pkl are not in the manifest" in refusal(arrays, sealed=False)
    write_manifest(arrays.parent)
    CheckpointStore(arrays.parent.parent).restore("latest", STATE)
    assert not (tmp_path / "canary").exists()
