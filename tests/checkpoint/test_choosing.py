"""Which checkpoint is restored when some are damaged."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jax_trainer.checkpoint.record import write_manifest
from jax_trainer.checkpoint.store import CheckpointError, CheckpointStore
from jax_trainer.core import TrainState
from jax_trainer.datasets import Position
from jax_trainer.testing import assert_same_bits

AT = Position(2, 7)
LOSSES = {1: 0.1, 2: 0.3, 3: 0.2}


def state(step: int) -> TrainState:
    return TrainState(jnp.int32(step), {"w": jnp.arange(6.0) + step}, {}, (), jnp.zeros(2, jnp.uint32), {})


@pytest.fixture(scope="module")
def three_saved(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("three") / "checkpoints"
    store = CheckpointStore(folder, keep_latest=3, monitor="loss")
    for step, loss in LOSSES.items():
        store.save(state(step), AT, {"loss": loss})
    return folder


@pytest.fixture
def store(three_saved, tmp_path) -> CheckpointStore:
    """Steps 1, 2 and 3; the best are 1, 3, 2."""
    return CheckpointStore(Path(shutil.copytree(three_saved, tmp_path / "copy")), keep_latest=3, monitor="loss")


def files_of(path: Path) -> list[Path]:
    return sorted(file for file in path.rglob("*") if file.is_file())


def flip(file: Path, seed: int = 0) -> None:
    rng, content = np.random.default_rng(seed), bytearray(file.read_bytes())
    content[rng.integers(len(content))] ^= 1 << int(rng.integers(8))
    file.write_bytes(content)


def damage(store: CheckpointStore, step: int, file: str = "state/_METADATA") -> Path:
    flip(store.folder / f"step_{step:08d}" / file)
    return store.folder / f"step_{step:08d}"


@pytest.mark.parametrize(
    ("which", "damaged", "restored_step"), [("latest", [3], 2), ("latest", [2, 3], 1), ("best", [1], 3)]
)
def test_the_next_complete_checkpoint_is_used_with_one_warning_that_names_the_damaged_ones(
    store, caplog, which, damaged, restored_step
):
    paths = [damage(store, step) for step in damaged]
    with caplog.at_level(logging.WARNING, "jax_trainer"):
        restored, saved = store.restore(which, state(0))
    assert saved.step == restored_step
    assert_same_bits(restored, state(restored_step))
    [warning] = caplog.records
    assert all(f"{path} is damaged" in warning.getMessage() for path in paths)
    assert f"Restoring {saved.path}" in warning.getMessage()


def test_an_intact_checkpoint_is_restored_without_a_warning(store, caplog):
    damage(store, 1)
    with caplog.at_level(logging.WARNING, "jax_trainer"):
        assert store.restore("latest", state(0))[1].step == 3
    assert not caplog.records


def test_for_every_flipped_truncated_or_missing_file_the_next_checkpoint_is_restored(store):
    newest = store.folder / "step_00000003"
    for number, file in enumerate(files_of(newest)):
        before = file.read_bytes()
        for how in ("flipped", "cut", "gone", "zeroed"):
            match how:
                case "flipped":
                    flip(file, number)
                case "cut":
                    file.write_bytes(before[: len(before) // 2])
                case "gone":
                    file.unlink()
                case "zeroed":
                    file.write_bytes(bytes(len(before)))
            restored, saved = store.restore("latest", state(0), only=("params",))
            assert (how, saved.step) == (how, 2)
            assert_same_bits(restored.params, state(2).params)
            file.write_bytes(before)
    assert store.restore("latest", state(0))[1].step == 3


@pytest.mark.slow
def test_each_of_a_hundred_flipped_bits_is_found(store):
    files = files_of(store.folder / "step_00000003")
    for number in range(100):
        file = files[number % len(files)]
        before = file.read_bytes()
        flip(file, number)
        assert store.restore("latest", state(0))[1].step == 2
        file.write_bytes(before)


def test_a_flipped_bit_in_the_format_is_damage_and_not_another_version(store):
    flipped = [("checkpoint.json", 4, digit) for digit in "056"] + [("MANIFEST.json", 2, digit) for digit in "036"]
    for name, number, digit in flipped:
        file = store.folder / "step_00000003" / name
        before = file.read_text()
        file.write_text(before.replace(f'"format": {number}', f'"format": {digit}'))
        assert file.read_text() != before
        assert store.restore("latest", state(0))[1].step == 2
        file.write_text(before)


@pytest.mark.parametrize("which", ["latest", "best"])
def test_if_all_are_damaged_all_reasons_are_reported(store, which):
    damage(store, 1)
    (damage(store, 2) / "checkpoint.json").unlink()
    damage(store, 3, "MANIFEST.json")
    with pytest.raises(CheckpointError, match="damaged.*step_00000003") as error:
        store.restore(which, state(0))
    assert all(f"{store.folder}/step_0000000{step}" in str(error.value) for step in (1, 2, 3))


def test_a_checkpoint_selected_by_step_or_path_is_not_replaced_by_another(store, tmp_path):
    path = damage(store, 3)
    saved = store.latest()
    for which in (3, path, saved):
        with pytest.raises(CheckpointError, match="step_00000003 is damaged: changed .*state/_METADATA"):
            store.restore(which, state(0))
    (path / "checkpoint.json").unlink()
    with pytest.raises(CheckpointError, match=r"step_00000003 is damaged: checkpoint\.json"):
        store.restore(3, state(0))


def test_the_path_of_a_checkpoint_of_another_run_is_restored(three_saved, tmp_path, monkeypatch):
    empty = CheckpointStore(tmp_path / "none")
    moved = Path(shutil.copytree(three_saved, tmp_path / "moved"))
    monkeypatch.chdir(tmp_path)
    for path in (moved / "step_00000002", Path("moved/step_00000002")):
        restored, saved = empty.restore(path, state(0))
        assert (saved.step, saved.path) == (2, moved / "step_00000002")
        assert_same_bits(restored, state(2))
    with pytest.raises(CheckpointError, match="is not a folder"):
        empty.restore(tmp_path / "step_00000009", state(0))


def test_verify_reads_every_byte_and_reports_the_damage(store):
    path = damage(store, 3)
    assert "changed since written: state/_METADATA" in store.verify(path)
    assert store.verify(store.folder / "step_00000002") == ""
    assert "is not a folder" in store.verify(store.folder / "nothing")


def test_a_list_shows_all_checkpoints_with_the_result_of_a_quick_check(store):
    damage(store, 1)
    (store.folder / "step_00000002" / "state" / "_METADATA").unlink()
    (store.folder / "step_00000009").mkdir()
    (store.folder / "abc").mkdir()
    listed = store.infos()
    assert [one.step for one in listed] == [1, 2, 3, 9]
    assert [bool(one.problem) for one in listed] == [False, True, False, True]
    assert "missing: state/_METADATA" in listed[1].problem
    whole = listed[2]
    assert (whole.metrics, whole.epoch, whole.without) == ({"loss": 0.2}, 2, ())
    assert whole.bytes == sum(file.stat().st_size for file in files_of(whole.path))
    assert CheckpointStore(store.folder / "nowhere").infos() == []


def test_a_list_shows_checkpoints_of_other_versions(store):
    file = store.folder / "step_00000003" / "checkpoint.json"
    file.write_text(file.read_text().replace('"format": 4', '"format": 1'))
    (store.folder / "step_00000003" / "MANIFEST.json").unlink()
    listed: Any = store.infos()[-1]
    assert listed.step == 3 and "was written in format 1" in listed.problem


def sizes_as_text(index: dict[str, Any]) -> Any:
    return {name: [dtype, [str(size) for size in shape], start] for name, (dtype, shape, start) in index.items()}


def a_list(index: dict[str, Any]) -> Any:
    return list(index)


@pytest.mark.parametrize("change", [sizes_as_text, a_list])
def test_an_invalid_index_of_small_arrays_with_a_valid_digest_is_damage(store, caplog, change):
    path = store.folder / "step_00000003"
    record = json.loads((path / "checkpoint.json").read_text())
    (path / "checkpoint.json").write_text(json.dumps({**record, "small": change(record["small"])}))
    write_manifest(path)
    with caplog.at_level(logging.WARNING, "jax_trainer"):
        assert store.restore("latest", state(0))[1].step == 2
    assert f"{path} is damaged: checkpoint.json" in caplog.text
    assert f"{path} is damaged: checkpoint.json" in store.verify(path)
