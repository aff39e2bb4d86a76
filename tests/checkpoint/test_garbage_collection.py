"""Which checkpoints of a run are kept, across restarts and rollbacks."""

import shutil
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from jax_trainer.checkpoint.store import CheckpointStore, SavedCheckpoint, SaveError
from jax_trainer.core import TrainState
from jax_trainer.datasets import Position
from jax_trainer.testing import fault

AT = Position(2, 7)


def state(step: int) -> TrainState:
    params, moments = {"w": jnp.arange(6.0) + step}, {"m": jnp.ones(3)}
    return TrainState(jnp.int32(step), params, {}, moments, jnp.zeros(2, jnp.uint32), {})


def saved_of(store: CheckpointStore, step: int) -> SavedCheckpoint:
    return next(saved for saved in store.all() if saved.step == step)


def save(store: CheckpointStore, *steps: int, loss: float = 1.0) -> None:
    for step in steps:
        store.save(state(step), AT, {"loss": loss})


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.fixture(scope="module")
def one_to_four(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("four") / "checkpoints"
    save(CheckpointStore(folder, keep_latest=4), 1, 2, 3, 4)
    return folder


@pytest.fixture
def folder(one_to_four, tmp_path) -> Path:
    """A folder with the steps 1 to 4."""
    return Path(shutil.copytree(one_to_four, tmp_path / "checkpoints"))


def test_keep_every_n_steps_keeps_complete_checkpoints(tmp_path):
    store = CheckpointStore(tmp_path, keep_latest=1, keep_every=4, monitor="loss", weights_only_best=True)
    save(store, 2, loss=0.1)
    save(store, 4, 5, 8, 9)
    assert store.steps() == [2, 4, 8, 9]
    assert {saved.step: tuple(saved.without) for saved in store.all()} == {2: ("opt_state",), 4: (), 8: (), 9: ()}


def test_the_checkpoint_that_a_run_resumed_from_is_kept_until_the_run_completes(folder):
    store = CheckpointStore(folder, keep_latest=1)
    store.mark_resumed_from(saved_of(store, 2))
    save(store, 5, 6, 7)
    assert store.steps() == [2, 7]
    store.completed()
    assert store.steps() == [7]


def test_after_a_rollback_later_steps_do_not_count_and_are_deleted_after_the_next_save(folder):
    store = CheckpointStore(folder, keep_latest=3, monitor="loss")
    store.mark_resumed_from(saved_of(store, 2))
    latest = store.latest()
    assert latest is not None and (latest.step, store.steps()) == (2, [1, 2])
    assert store.restore("latest", state(0))[1].step == 2
    assert names(folder) == [f"step_0000000{step}" for step in (1, 2, 3, 4)]
    with fault("before_rename:raise"), pytest.raises(SaveError):
        save(store, 3)
    assert len(names(folder)) == 4
    store.save(state(3), AT, {"loss": 5.0})
    assert names(folder) == [f"step_0000000{step}" for step in (1, 2, 3)]
    assert saved_of(store, 3).metrics == {"loss": 5.0}
    save(store, 4)  # as good as the first
    assert store.steps() == [2, 3, 4]


def test_a_later_step_is_not_mistaken_for_the_best(tmp_path):
    store = CheckpointStore(tmp_path, keep_latest=3, monitor="loss")
    for step, loss in [(1, 0.5), (2, 0.4), (3, 0.1)]:
        save(store, step, loss=loss)
    store.mark_resumed_from(saved_of(store, 2))
    best = store.best()
    assert best is not None and best.step == 2
    save(store, 4, loss=0.9)
    assert store.steps() == [1, 2, 4]


def test_a_run_that_saves_nothing_deletes_nothing(folder):
    before = bytes_of(folder)
    store = CheckpointStore(folder, keep_latest=1)
    store.mark_resumed_from(saved_of(store, 2))
    store.completed()
    CheckpointStore(folder, keep_latest=1).completed()
    assert bytes_of(folder) == before


def test_resuming_from_another_run_does_not_modify_it(folder, tmp_path):
    before = bytes_of(folder)
    store = CheckpointStore(tmp_path / "new", keep_latest=1)
    restored, saved = store.restore(folder / "step_00000004", state(0))
    store.mark_resumed_from(saved)
    save(store, 5, 6)
    store.completed()
    assert (store.steps(), int(restored.step)) == ([6], 4)
    assert bytes_of(folder) == before


def test_a_failed_garbage_collection_costs_no_kept_checkpoint(folder):
    store = CheckpointStore(folder, keep_latest=2)
    with fault("before_best_table:raise"), pytest.raises(SaveError, match="step 5"):
        save(store, 5)
    assert store.steps() == [1, 2, 3, 4, 5]
    with fault("mid_delete:raise"), pytest.raises(SaveError):
        save(store, 6)
    assert store.steps()[-2:] == [5, 6]
    save(store, 7)
    assert names(folder) == ["step_00000006", "step_00000007"]


def test_a_save_without_metrics_is_not_evaluated_and_others_must_have_the_metric(tmp_path):
    store = CheckpointStore(tmp_path, keep_latest=1, monitor="loss")
    save(store, 1, loss=0.5)
    store.save(state(2), AT, {})
    store.save(state(3), AT, {})
    assert store.steps() == [1, 3]
    with pytest.raises(ValueError, match="'loss'.*val/acc"):
        store.save(state(4), AT, {"val/acc": 1.0})


def test_the_default_keeps_two_to_resume_from(tmp_path):
    store: Any = CheckpointStore(tmp_path)
    save(store, 1, 2, 3)
    assert store.steps() == [2, 3]
