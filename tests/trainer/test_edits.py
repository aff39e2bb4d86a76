"""Edits in `TrainerModule`: of its own hooks, of callbacks in files and in Python."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_trainer import Edit
from jax_trainer.callbacks import ModelCheckpointConfig, ReduceLROnPlateau, ReduceLROnPlateauConfig
from jax_trainer.core.state import hyperparameters_in
from jax_trainer.testing import assert_same_bits
from jax_trainer.trainer import build, load_experiment
from tests.trainer.trainer_runs import EXAMPLE, STEPS, Plain, plain_for, rows, train_plain

PLATEAU: dict[str, Any] = {"patience": 0, "threshold": 100.0, "factor": 0.5}  # nothing improves by that much


def scale(trainer: Any) -> float:
    return float(hyperparameters_in(trainer.state)["learning_rate_scale"][0])


def test_the_learning_rate_is_reduced_after_evaluations_without_improvement(tmp_path_factory, subtests):
    for case, (flavour, given) in zip(
        ["config", "object"],
        [("linen", {"callbacks": {"p": ReduceLROnPlateauConfig(**PLATEAU)}}), ("nnx", None)],
        strict=True,
    ):
        tmp_path = tmp_path_factory.mktemp("case")
        with subtests.test(case=case):
            options: dict[str, Any] = given or {"given": [ReduceLROnPlateau(**PLATEAU)]}
            trainer = plain_for(flavour, tmp_path, optimizer=optax.sgd(3e-3), train_epochs=3, **options)
            train_plain(trainer)
            edits = [row for row in rows(trainer) if "edit" in row]
            assert [row["step"] for row in edits] == [2 * STEPS, 3 * STEPS]
            assert [row["edit"]["hyperparameters"] for row in edits] == [
                {"learning_rate_scale": 0.5},
                {"learning_rate_scale": 0.25},
            ]
            assert scale(trainer) == 0.25


@pytest.mark.slow  # files with other callbacks are in other tests
def test_a_file_can_name_it(tmp_path):
    file = tmp_path / "experiment.yaml"
    file.write_text(
        """
        trainer:
          class_name: ImgClassifierTrainer
          train_epochs: 3
          enable_progress_bar: false
          callbacks:
            ReduceLROnPlateau: {monitor: val/acc, mode: max, patience: 0, threshold: 100, factor: 0.5, min_lr: 1e-4}
            ModelCheckpoint: {monitor: val/acc}
        model: {class_name: Linear, num_classes: 10}
        optimizer: {class_name: SGD, learning_rate: 3e-4}
        dataset: {class_name: DigitsDataset, limit_train_size: 256, global_batch_size: 64}
        """
    )
    trainer = build(load_experiment(file, [f"trainer.logger.log_dir={tmp_path}"]).value)
    data = trainer.dataset
    trainer.train_model(data.train_loader, data.val_loader)
    assert [row["edit"]["hyperparameters"]["learning_rate_scale"] for row in rows(trainer) if "edit" in row] == [
        0.5,
        pytest.approx(1 / 3),  # at `min_lr`
    ]


def test_a_run_with_it_can_be_loaded_and_resumed(tmp_path):
    def made(epochs: int, folder: Path) -> Any:
        callbacks = {"plateau": ReduceLROnPlateauConfig(**PLATEAU), "saver": ModelCheckpointConfig()}
        return plain_for("linen", folder, train_epochs=epochs, callbacks=callbacks)

    train_plain(whole := made(4, tmp_path / "whole"))
    train_plain(first := made(2, tmp_path / "parts"))
    train_plain(second := made(4, tmp_path / "parts"), resume=first.folder.path)
    assert_same_bits(second.state, whole.state)
    assert rows(second) == rows(whole)
    loaded = Plain.load_from_checkpoint(second.folder.path, which="latest", exmp_input=EXAMPLE)
    assert_same_bits(loaded.state.params, whole.state.params)


def test_a_callback_object_is_not_needed_to_load_its_run(tmp_path):
    options: dict[str, Any] = {"callbacks": {"saver": ModelCheckpointConfig()}, "train_epochs": 2}
    trainer = plain_for("linen", tmp_path, given=[ReduceLROnPlateau(**PLATEAU)], **options)
    train_plain(trainer)
    loaded = Plain.load_from_checkpoint(trainer.folder.path, which="latest", exmp_input=EXAMPLE)
    assert_same_bits(loaded.state.params, trainer.state.params)


def cleared(state: Any) -> Any:
    return state.replace(params=jax.tree.map(jnp.zeros_like, state.params))


class Clearing(Plain):
    """Sets all weights to zero after the last evaluation."""

    def on_validation_epoch_end(self, eval_metrics: dict[str, Any], epoch_idx: int) -> Edit | None:
        return Edit(cleared, reason="for a test") if epoch_idx == 2 else None


def test_a_hook_of_the_trainer_may_return_an_edit(tmp_path):
    trainer = plain_for("linen", tmp_path, kind=Clearing, train_epochs=2)
    train_plain(trainer)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(trainer.state.params))
    (row,) = [row for row in rows(trainer) if "edit" in row]
    assert row["edit"] == {"by": "Clearing", "function": "cleared", "reason": "for a test"}


class Manual(Plain):
    """A training step that updates the parameters without `apply_gradients`."""

    def create_training_function(self) -> Any:
        def step(state: Any, batch: Any) -> Any:
            return state.replace(params=jax.tree.map(lambda leaf: leaf - 0.1, state.params)), {"loss": 1.0}

        return step


def test_a_custom_step_that_the_scale_cannot_reach_is_refused(tmp_path):
    trainer = plain_for("linen", tmp_path, kind=Manual, given=[ReduceLROnPlateau(**PLATEAU)], optimizer=optax.sgd(0.1))
    with pytest.raises(TypeError, match="apply_gradients"):
        train_plain(trainer)
