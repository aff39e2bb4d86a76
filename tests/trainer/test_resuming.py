"""Where a training resumes: automatically, in the same folder or in a new one."""

import hashlib
import json
from typing import Any

import jax
import numpy as np
import pytest

from jax_trainer.callbacks import ModelCheckpointConfig
from jax_trainer.checkpoint.folder import RunInUseError
from jax_trainer.checkpoint.record import CheckpointError
from jax_trainer.core.failpoints import FaultInjected
from jax_trainer.testing import assert_same_bits, fault
from tests.trainer.trainer_runs import plain_for, train_plain


def saving(**options):
    return {"ModelCheckpoint": ModelCheckpointConfig(**options)}


def tree(folder):
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def runs_in(folder):
    return sorted(path for path in folder.iterdir())


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    trainer = plain_for("linen", tmp_path_factory.mktemp("straight"), train_epochs=2, callbacks=saving(every_n_steps=3))
    return trainer, train_plain(trainer)


def test_auto_starts_a_run_resumes_it_and_leaves_a_completed_one(straight, tmp_path):
    reference, results = straight

    def again():
        trainer = plain_for("linen", tmp_path, train_epochs=2, callbacks=saving(every_n_steps=3))
        return trainer, lambda: train_plain(trainer, resume="auto")

    for _ in range(3):
        _, train = again()
        with fault("step:raise:2"), pytest.raises(FaultInjected):
            train()
    trainer, train = again()
    assert train() == results
    assert_same_bits(trainer.state, reference.state)
    before = int(trainer.state.step)
    trainer, train = again()
    assert (train(), int(trainer.state.step)) == (results, before)
    assert len(runs_in(tmp_path)) == 1


def test_auto_continues_to_another_length_and_takes_another_program_for_another_run(tmp_path):
    changed: list[Any] = [{"train_epochs": 1}, {"train_epochs": 2}, {"train_epochs": 1}, {"precision": "bf16"}]
    for changes in changed:
        train_plain(plain_for("linen", tmp_path, callbacks=saving(), **changes), resume="auto")
    assert len(runs_in(tmp_path)) == 2


def test_a_run_that_had_saved_nothing_begins_again_in_its_folder(straight, tmp_path, caplog):
    reference, _ = straight
    quiet = saving(every_n_steps=3, save_on_exception=False)
    with fault("step:raise:2"), pytest.raises(FaultInjected):
        train_plain(plain_for("linen", tmp_path, train_epochs=2, callbacks=quiet), resume="auto")
    trainer = plain_for("linen", tmp_path, train_epochs=2, callbacks=quiet)
    train_plain(trainer, resume="auto")
    assert_same_bits(trainer.state, reference.state)
    assert len(runs_in(tmp_path)) == 1
    assert "has no checkpoint" in caplog.text
    steps = [json.loads(line)["step"] for line in trainer.folder.metrics_file.read_text().splitlines()]
    assert steps == sorted(steps)


def test_a_fork_resumes_into_a_new_folder_and_does_not_modify_the_original(straight, tmp_path):
    reference, results = straight
    old = reference.folder.path
    step = sorted((old / "checkpoints").glob("step_*"))[0]
    before = tree(old)
    fork = plain_for("linen", tmp_path, train_epochs=2, callbacks=saving(every_n_steps=1, save_top_k=1))
    assert train_plain(fork, resume=step, fork=True) == results
    assert_same_bits(fork.state, reference.state)
    assert fork.folder.path.parent == tmp_path
    assert tree(old) == before
    record = json.loads((fork.folder.path / "run.json").read_text())
    number = int(step.name.removeprefix("step_"))
    assert record["parent"] == {"run": str(old), "step": number} and len(record["starts"]) == 1
    assert record["starts"][0]["from_step"] == number and "trainer.seed" in record["fingerprint"]["words"]


def test_a_fork_needs_a_run_to_resume(tmp_path):
    with pytest.raises(ValueError, match="`fork`.*`resume`"):
        train_plain(plain_for("linen", tmp_path), fork=True)


def test_a_run_can_go_back_to_an_earlier_step_and_what_was_later_goes(straight, tmp_path):
    reference, _ = straight
    trainer = plain_for("linen", tmp_path, train_epochs=2, callbacks=saving(every_n_steps=1, keep_latest=5))
    train_plain(trainer)
    early = sorted(trainer.folder.checkpoints.glob("step_*"))[0]
    again = plain_for("linen", tmp_path, train_epochs=2, callbacks=saving(every_n_steps=1, keep_latest=5))
    with fault("step:raise:2"), pytest.raises(FaultInjected):
        train_plain(again, resume=early)
    kept = sorted(path.name for path in trainer.folder.checkpoints.glob("step_*"))
    first = int(early.name.removeprefix("step_"))
    assert kept[-1] == f"step_{first + 2:08d}"
    train_plain(again, resume=True)
    assert_same_bits(again.state, reference.state)


def test_a_folder_that_is_trained_in_is_refused(tmp_path):
    trainer = plain_for("linen", tmp_path, callbacks=saving())
    train_plain(trainer)
    other = plain_for("linen", tmp_path, callbacks=saving())
    with trainer.folder.locked(), pytest.raises(RunInUseError, match=str(trainer.folder.path)):
        train_plain(other, resume=trainer.folder.path)


def test_all_checkpoints_damaged_is_refused_and_nothing_is_begun_anew(tmp_path):
    trainer = plain_for("linen", tmp_path, callbacks=saving())
    train_plain(trainer)
    record = trainer.folder.metrics_file.read_bytes()
    for file in trainer.folder.checkpoints.rglob("MANIFEST.json"):
        file.write_text("{}")
    again = plain_for("linen", tmp_path, callbacks=saving())
    with pytest.raises(CheckpointError, match="damaged"):
        train_plain(again, resume=trainer.folder.path)
    assert trainer.folder.metrics_file.read_bytes() == record


def test_a_moved_run_resumes(straight, tmp_path):
    reference, _ = straight
    first = plain_for("linen", tmp_path / "here", train_epochs=2, callbacks=saving())
    with fault("step:raise:3"), pytest.raises(FaultInjected):
        train_plain(first)
    moved = tmp_path / "there"
    first.folder.path.rename(moved)
    again = plain_for("linen", tmp_path / "here", train_epochs=2, callbacks=saving())
    train_plain(again, resume=moved)
    assert_same_bits(again.state, reference.state)
    assert again.folder.path == moved


def test_fine_tuning_begins_with_the_weights_of_another_run_and_an_optimizer_that_has_seen_nothing(straight, tmp_path):
    reference, _ = straight
    trainer = plain_for("linen", tmp_path)
    trainer.load_weights(reference.folder.path, which="latest")
    assert_same_bits(trainer.state.params, reference.state.params)
    assert int(trainer.state.step) == 0
    train_plain(trainer)
    assert int(trainer.state.step) < int(reference.state.step)
    assert any(
        (np.asarray(a) != np.asarray(b)).any()
        for a, b in zip(jax.tree.leaves(trainer.state.params), jax.tree.leaves(reference.state.params), strict=True)
    )
