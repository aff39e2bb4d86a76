"""The user's loop changes the state of a `TrainLoop` by an edit, which is part of the checkpoint."""

import jax
import numpy as np
import optax
import pytest

from jax_trainer import CheckpointFileReader, CheckpointFileWriter, Edit, TrainLoop, TrainTask
from jax_trainer.testing import assert_close, assert_same_bits

X = np.random.default_rng(0).normal(size=(16, 3)).astype(np.float32)
BATCHES = [(X[:8], X[:8, :1]), (X[8:], X[8:, :1])]


def init(rngs, x):
    return {"params": np.zeros((3, 1), np.float32)}


def loop(start=init, **options):
    optimizer = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)
    task = TrainTask(
        apply=lambda variables, x: x @ variables["params"],
        optimizer=optimizer,
        loss=lambda out, y: ((out - y) ** 2).mean(),
        data=BATCHES,
    )
    return TrainLoop(start, task, stdout=False, n_steps=6, **options)


SLOWER = Edit(hyperparameters={"learning_rate": 0.01}, reason="plateau")


def test_an_edit_changes_the_state_that_training_continues_from():
    edited, plain = loop(), loop()
    for each in (edited, plain):
        each.next_step()
        each.next_step()
    checkpoint = edited.edit(SLOWER)
    assert checkpoint is edited.checkpoint and checkpoint.step == 2
    assert float(checkpoint.optimizer_state.hyperparams["learning_rate"]) == pytest.approx(0.01)
    steps = [
        jax.tree.map(lambda a, b: a - b, each.next_step().model_params, checkpoint.model_params)
        for each in (edited, plain)
    ]
    assert_close(steps[0], 0.1 * steps[1], rtol=1e-4)


def test_the_edited_checkpoint_resumes_to_the_same_bits(tmp_path):
    whole = loop()
    checkpoints = [whole.next_step() for _ in range(2)]
    CheckpointFileWriter(output_dir=str(tmp_path))(whole.edit(SLOWER))
    *_, last = whole
    *_, resumed = loop(CheckpointFileReader(dir=str(tmp_path), target=init))
    assert_same_bits((resumed.model_params, resumed.optimizer_state), (last.model_params, last.optimizer_state))
    assert len(checkpoints) == 2 and resumed.step == last.step == 6
    assert resumed.loop_state is not None
    assert [edit["by"] for edit in resumed.loop_state.edits] == ["TrainLoop"]


def test_an_edit_of_weights_is_possible_and_needs_a_checkpoint():
    fresh = loop()
    with pytest.raises(RuntimeError, match="Take a step first"):
        fresh.edit(SLOWER)
    fresh.next_step()
    cleared = fresh.edit(Edit(lambda state: state.replace(params=jax.tree.map(jax.numpy.zeros_like, state.params))))
    assert not np.asarray(cleared.model_params).any()
    assert fresh.next_step().step == 2
