import shutil
from typing import Any

import pytest
from flax import linen as nn

from jax_trainer.callbacks import ModelCheckpointConfig
from jax_trainer.checkpoint.record import CheckpointError
from jax_trainer.config import ConfigError
from jax_trainer.config.settings import SettingsError
from jax_trainer.core import copy_state
from jax_trainer.datasets import DatasetConfig, DatasetModule
from jax_trainer.logger import LoggerConfig
from jax_trainer.runs.sections import InitFromConfig
from jax_trainer.testing import assert_same_bits, numbered_data
from jax_trainer.trainer import (
    ImgClassifierTrainer,
    LanguageModelTrainer,
    TrainerModule,
    build,
    stored_run,
)
from tests.trainer.trainer_runs import (
    EPOCHS,
    EXAMPLE,
    LINEAR,
    SGD,
    STEPS,
    Plain,
    digits,
    first_examples,
    plain_for,
    rows,
    settings,
    train_plain,
    waves,
)


def test_a_run_is_loaded_from_wherever_its_folder_is(done, tmp_path):
    moved = tmp_path / "elsewhere"
    shutil.copytree(done.trainer.folder.path, moved)
    loaded: Any = TrainerModule.load_from_checkpoint(moved)
    assert type(loaded).__name__ == "ImgClassifierTrainer"
    assert loaded.folder.path == moved
    assert loaded.test_model(loaded.dataset.test_loader) == done.results["test"]
    assert_same_bits(loaded.state.params, done.watcher.evaluated[STEPS].params)
    loaded.load_model(which="latest")
    assert_same_bits(loaded.state.params, done.trainer.state.params)
    assert loaded.eval_model(digits().val_loader) == done.results[EPOCHS]
    with pytest.raises(CheckpointError, match="step 3"):
        loaded.load_model(which=3)


def test_the_stored_configuration_rebuilds_the_run(done, tmp_path):
    run: Any = stored_run(done.trainer.folder, [f"trainer.logger.log_dir={tmp_path}"]).value
    again = build(run)
    assert (run.trainer.seed, run.dataset.limit_train_size, run.optimizer.learning_rate.warmup_steps) == (42, 256, 2)
    data = again.dataset
    results = again.train_model(data.train_loader, data.val_loader, data.test_loader)
    assert results == done.results
    assert_same_bits(again.state, done.trainer.state)
    assert rows(again) == rows(done.trainer)
    assert again.configs.keys() == {"trainer", "model", "optimizer", "dataset", "seed", "num_gpus"}


def test_a_run_of_another_class_is_an_error(done):
    with pytest.raises(TypeError, match="ImgClassifierTrainer.*LanguageModelTrainer"):
        LanguageModelTrainer.load_from_checkpoint(done.trainer.folder.path)


class Narrow(ImgClassifierTrainer):
    """An unregistered subclass."""


def test_a_subclass_that_is_not_registered_loads_what_its_parent_stored(done):
    assert type(Narrow.load_from_checkpoint(done.trainer.folder.path)) is Narrow


def test_a_folder_that_is_no_run_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match=f"{tmp_path}.*run folder"):
        TrainerModule.load_from_checkpoint(tmp_path)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A run whose data is not part of its configuration."""
    trainer = plain_for("nnx", tmp_path_factory.mktemp("plain"), callbacks={"saver": ModelCheckpointConfig()})
    return trainer, train_plain(trainer)


def test_the_latest_weights_are_also_called_the_last(plain):
    trainer, _ = plain
    assert_same_bits(trainer.predict([EXAMPLE], which="latest"), trainer.predict([EXAMPLE], which="last"))
    assert trainer.load_model(which="last") == trainer.load_model(which="latest")
    for which in ("latest", "last"):
        loaded = Plain.load_from_checkpoint(trainer.folder.path, EXAMPLE, which=which)
        loaded.load_weights(trainer.folder.path, which=which)
        assert_same_bits(loaded.state.params, trainer.state.params)
        assert InitFromConfig("run", which).options["which"] == which
    with pytest.raises(ValueError, match="which.*newest"):
        trainer.predict([EXAMPLE], which="newest")


def test_a_run_without_a_dataset_needs_an_example(plain):
    trainer, results = plain
    with pytest.raises(SettingsError, match="`exmp_input`") as error:
        Plain.load_from_checkpoint(trainer.folder.path)
    assert error.value.problems[0][0] == "dataset"
    loaded = Plain.load_from_checkpoint(trainer.folder.path, EXAMPLE)
    assert type(loaded) is Plain
    assert loaded.eval_model(first_examples(64)) == results[1]


def test_the_stored_configuration_can_be_overridden(plain):
    path = plain[0].folder.path
    with pytest.raises(SettingsError, match="`num_gpus` is 2"):
        Plain.load_from_checkpoint(path, EXAMPLE, overrides=["num_gpus=2"])
    with pytest.raises(ConfigError, match="command line: trainer.train_epoch: "):
        Plain.load_from_checkpoint(path, EXAMPLE, overrides=["trainer.train_epoch=2"])


def test_an_unregistered_dataset_is_passed_again(tmp_path):
    data = DatasetModule(DatasetConfig(global_batch_size=32), numbered_data(32 * STEPS), numbered_data(64))
    trainer = plain_for("nnx", tmp_path, callbacks={"saver": ModelCheckpointConfig()})
    trainer.dataset = data
    results = trainer.train_model(data.train_loader, data.val_loader)
    assert "dataset" not in trainer.configs
    loaded: Any = Plain.load_from_checkpoint(trainer.folder.path, dataset=data)
    assert loaded.dataset is data
    assert loaded.eval_model(data.val_loader) == results[1]


def test_without_a_folder_there_is_nothing_to_load(tmp_path):
    with pytest.raises(ValueError, match="no run folder"):
        plain_for("nnx", tmp_path).load_model()


def test_what_was_loaded_is_trained_on(plain, tmp_path):
    trainer, results = plain
    loaded: Any = Plain.load_from_checkpoint(
        trainer.folder.path, EXAMPLE, overrides=[f"trainer.logger.log_dir={tmp_path}"]
    )
    assert train_plain(loaded)[1]["val/loss"] < results[1]["val/loss"]
    assert loaded.folder.path.is_relative_to(tmp_path)


def test_weights_that_were_trained_on_transformed_batches_say_so_where_a_trainer_has_no_transforms(tmp_path, caplog):
    data = digits()
    parts = {"model": LINEAR["nnx"](num_classes=10), "optimizer": SGD}
    example, options = data.example(), {"train_epochs": 1, "logger": LoggerConfig(log_dir=str(tmp_path))}
    callbacks = {"saver": ModelCheckpointConfig()}
    trainer = ImgClassifierTrainer(**parts, exmp_input=example, callbacks=callbacks, **options)  # type: ignore[arg-type]
    trainer.train_model(data.train_loader, data.val_loader)
    assert "device transforms" not in caplog.text
    assert trainer.folder is not None
    ImgClassifierTrainer.load_from_checkpoint(trainer.folder.path, exmp_input=example)
    assert "device transforms train=(normalize(" in caplog.text
    assert "see raw inputs. Pass `dataset=…`" in caplog.text
    caplog.clear()
    ImgClassifierTrainer.load_from_checkpoint(trainer.folder.path, dataset=data)
    assert "device transforms" not in caplog.text


class TwoLayers(nn.Module):
    classes: int

    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = nn.Dense(4, kernel_init=waves, name="hidden")(x)
        return nn.Dense(self.classes, kernel_init=waves, name="out")(x)


def test_a_head_that_is_left_out_keeps_its_own_weights(tmp_path):
    saver = {"saver": ModelCheckpointConfig()}
    trainer, other = (
        Plain(model=TwoLayers(classes), optimizer_config=SGD, exmp_input=EXAMPLE, **settings(tmp_path, callbacks=saver))
        for classes in (4, 3)
    )
    trainer.train_model([EXAMPLE], num_epochs=1)
    assert trainer.folder is not None
    head = copy_state(other.state.params["out"])
    other.load_weights(trainer.folder.path, which="latest", rename={"params.out.*": None})
    assert_same_bits(other.state.params["out"], head)
    assert head["kernel"].shape[-1] == 3
    assert_same_bits(other.state.params["hidden"], trainer.state.params["hidden"])
