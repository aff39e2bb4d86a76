"""Going back to the latest checkpoint when a batch makes the loss not finite, and leaving that batch out."""

import json

import numpy as np
import optax
import pytest

from jax_trainer.callbacks import ModelCheckpoint, ModelCheckpointConfig
from jax_trainer.config.settings import SettingsError
from jax_trainer.core import NonFiniteError
from jax_trainer.datasets import ArrayLoader
from jax_trainer.logger import LoggerConfig
from jax_trainer.testing import TinyNNX, assert_same_bits, numbered_data
from tests.trainer.trainer_runs import EXAMPLE, Plain, plain_for

BAD = (2, 5)  # batches of every epoch


def arrays(bad=BAD):
    broken = {name: np.array(array) for name, array in numbered_data(256).items()}
    for number in bad:
        broken["x"][32 * number + 5, 1] = np.nan
    return broken


def without_bad_ones():
    return [batch for number, batch in enumerate(ArrayLoader(arrays(()), 32).epoch(1)) if number not in BAD]


def trainer_for(folder, **changes):
    saver = {"saver": ModelCheckpointConfig(every_n_steps=2)}
    options = {"on_nonfinite": "rollback", "max_rollbacks": 4, "check_val_every_n_epoch": 0, "train_epochs": 2}
    return plain_for("linen", folder, **{**options, "callbacks": saver, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {},
        pytest.param({"steps_per_call": 3}, marks=pytest.mark.slow),
        pytest.param({"resident": True, "steps_per_call": "epoch"}, marks=pytest.mark.slow),
    ],
    ids=["one", "chunks", "resident"],
)
def test_the_result_is_that_of_a_run_that_never_saw_the_bad_batches(tmp_path, caplog, changes):
    clean = trainer_for(tmp_path, **{**changes, "resident": False})
    clean.train_model(without_bad_ones())
    trainer = trainer_for(tmp_path, **changes)
    trainer.train_model(ArrayLoader(arrays(), 32))
    assert_same_bits(trainer.state, clean.state)
    notices = [record.message for record in caplog.records if "Rolled back" in record.message]
    assert len(notices) == 4  # two of each epoch
    assert all(part in notices[0] for part in ("Step 3 ", "step 2;", "batch 2 of epoch 1"))


def test_after_going_back_the_record_has_every_row_once(tmp_path):
    quiet = LoggerConfig(log_steps_every=1, log_dir=str(tmp_path))
    trainer = trainer_for(tmp_path, logger=quiet, max_rollbacks=1)
    trainer.train_model(ArrayLoader(arrays((3,)), 32, shuffle=False), num_epochs=1)
    kept = [json.loads(line) for line in (trainer.folder.path / "metrics.jsonl").read_text().splitlines()]
    steps = [row["step"] for row in kept if "train/loss_step" in row]
    assert steps == [1, 2, 3, 4, 5, 6, 7]


def test_it_goes_back_only_so_often(tmp_path):
    trainer = trainer_for(tmp_path, max_rollbacks=1)
    with pytest.raises(NonFiniteError, match="nonfinite"):
        trainer.train_model(ArrayLoader(arrays(), 32))
    assert all(np.isfinite(leaf).all() for leaf in trainer.state.params["out"].values())


def test_without_a_checkpoint_yet_it_is_an_error(tmp_path):
    with pytest.raises(NonFiniteError, match="nonfinite"):
        trainer_for(tmp_path).train_model(ArrayLoader(arrays((1,)), 32))


def test_data_that_cannot_go_back_is_an_error_and_not_trained_on_at_another_place(tmp_path):
    trainer = trainer_for(tmp_path, train_epochs=1)
    with pytest.raises(NonFiniteError, match="nonfinite"):
        trainer.train_model(iter(list(ArrayLoader(arrays(), 32).epoch(1))))


def test_it_needs_something_that_saves(tmp_path):
    with pytest.raises(SettingsError, match="`rollback`.*ModelCheckpoint"):
        trainer_for(tmp_path, callbacks={})


def test_a_checkpoint_callback_passed_in_python_counts_for_rollback(subtests):
    for case, callbacks in zip(
        ["dict", "config", "object"],
        [{"ModelCheckpoint": {}}, [ModelCheckpointConfig()], [ModelCheckpoint()]],
        strict=True,
    ):
        with subtests.test(case=case):
            options = {"model": lambda rngs: TinyNNX(rngs=rngs), "optimizer": optax.sgd(0.1), "exmp_input": EXAMPLE}
            trainer = Plain(on_nonfinite="rollback", train_epochs=1, callbacks=callbacks, **options)
            assert trainer.config.saver == ModelCheckpointConfig()
