"""The index of a folder: what a save reads, and what it notices."""

import shutil
from pathlib import Path

import jax.numpy as jnp
import pytest

from jax_trainer.checkpoint import record
from jax_trainer.checkpoint.record import CheckpointIndex
from jax_trainer.checkpoint.store import CheckpointStore
from jax_trainer.core import TrainState
from jax_trainer.datasets import Position

AT = Position(1, 1)


def save(store: CheckpointStore, *steps: int) -> None:
    for step in steps:
        state = TrainState(jnp.int32(step), {"w": jnp.ones(3)}, {}, (), jnp.zeros(2, jnp.uint32), {})
        store.save(state, AT, {"loss": 1.0 / step}, callbacks={"one": {"step": step}})


@pytest.fixture(scope="module")
def eight(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("eight") / "checkpoints"
    save(CheckpointStore(folder, keep_latest=8), *range(1, 9))
    return folder


@pytest.fixture
def folder(eight, tmp_path) -> Path:
    return Path(shutil.copytree(eight, tmp_path / "checkpoints"))


@pytest.fixture
def read(monkeypatch) -> list[str]:
    """The names of the checkpoints that are read."""
    names: list[str] = []

    def spy(path: Path):
        names.append(path.name)
        return read_complete(path)

    read_complete = record.read_complete
    monkeypatch.setattr(record, "read_complete", spy)
    return names


def test_a_save_reads_only_the_new_checkpoint(folder, read):
    store = CheckpointStore(folder, keep_latest=8)
    save(store, 9)
    assert sorted(read) == [f"step_{step:08d}" for step in range(1, 10)]
    read.clear()
    save(store, 10, 11)
    assert read == ["step_00000010", "step_00000011"]
    assert store.steps() == list(range(4, 12))


def test_an_update_finds_what_another_store_added_replaced_and_deleted(folder, read):
    ours = CheckpointIndex(folder)
    assert list(ours.scan().found) == list(range(1, 9))
    read.clear()
    shutil.rmtree(folder / "step_00000002")
    (folder / "step_00000003" / "checkpoint.json").unlink()
    save(CheckpointStore(folder, keep_latest=20), 8, 12)
    read.clear()
    entries = ours.update()
    assert list(entries.found) == [1, 4, 5, 6, 7, 8, 12]
    assert [path.name for path in entries.damaged] == ["step_00000003"]
    assert read == ["step_00000003", "step_00000008", "step_00000012"]


def test_known_checkpoints_keep_what_ranks_them_and_questions_read_everything(folder):
    ours = CheckpointIndex(folder)
    ours.scan()
    again = ours.update().found
    assert {step: saved.metrics["loss"] for step, saved in again.items()} == {step: 1 / step for step in range(1, 9)}
    assert not again[8].callbacks and ours.scan().found[8].callbacks == {"one": {"step": 8}}


def test_a_question_notices_damage_that_changes_no_folder(folder):
    store = CheckpointStore(folder, keep_latest=8)
    save(store, 9)
    (folder / "step_00000009" / "checkpoint.json").write_text("{}")
    latest = store.latest()
    assert latest is not None and latest.step == 8
