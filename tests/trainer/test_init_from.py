"""`init_from`: a training starts from the weights of another run, and only then."""

import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_trainer.callbacks import ModelCheckpointConfig, UnfreezeConfig
from jax_trainer.checkpoint.store import CheckpointError
from jax_trainer.config import ConfigError, config_from
from jax_trainer.config.settings import SettingsError
from jax_trainer.optimizer import SGDConfig
from jax_trainer.runs.sections import InitFromConfig, LoRAConfig
from jax_trainer.testing import assert_same_bits
from jax_trainer.trainer import TrainerConfig
from tests.trainer.trainer_runs import EXAMPLE, LINEAR, Plain, first_examples, plain_for, settings, train_plain

FREEZING_ALL_BUT_STATISTICS = SGDConfig(learning_rate=0.1, freeze="out.kernel", train_bn=True)
SAVING: dict[str, Any] = {"callbacks": {"saver": ModelCheckpointConfig(monitor="val/loss")}}


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """The folder of a run whose weights others start from: read-only."""
    trainer = plain_for("nnx", tmp_path_factory.mktemp("base"), **SAVING)
    train_plain(trainer)
    return trainer.folder.path


@pytest.fixture
def copied(base, tmp_path) -> Path:
    return Path(shutil.copytree(base, tmp_path / "copied"))


def test_a_training_starts_from_the_weights_as_after_loading_them(base, tmp_path):
    configured, loading = plain_for("nnx", tmp_path / "a", init_from=str(base)), plain_for("nnx", tmp_path / "b")
    loading.load_weights(base)
    assert_same_bits(configured.state.params, loading.state.params)  # before training, too
    fresh = plain_for("nnx", tmp_path / "c", init_from=InitFromConfig(str(base), which="latest"))
    for trainer in (configured, loading, fresh):
        train_plain(trainer)
    assert_same_bits(configured.state, loading.state)
    assert_same_bits(fresh.state, loading.state)  # without a look at the state before
    untouched = plain_for("nnx", tmp_path / "d")
    train_plain(untouched)
    kernels = [np.asarray(one.state.params["out"]["kernel"]) for one in (configured, untouched)]
    assert (kernels[0] != kernels[1]).any()


def test_a_run_that_resumes_does_not_need_them_unless_it_has_no_checkpoint(copied, tmp_path):
    def trainer() -> Any:
        return plain_for("nnx", tmp_path / "runs", init_from=str(copied), **SAVING)

    first = trainer()
    train_plain(first)
    shutil.rmtree(first.folder.path / "checkpoints")  # as if it was killed before the first one
    (first.folder.path / "checkpoints").mkdir()
    again = trainer()
    train_plain(again, resume=first.folder.path)
    assert_same_bits(again.state, first.state)
    shutil.rmtree(copied)
    longer = trainer()
    train_plain(longer, resume=first.folder.path, num_epochs=2)
    assert int(longer.state.step) == 2 * int(first.state.step)
    loaded = Plain.load_from_checkpoint(first.folder.path, longer.exmp_input)
    assert_same_bits(loaded.state.params["out"], longer.state.params["out"])


def test_weights_that_cannot_be_loaded_are_an_error_before_anything_is_written(base, tmp_path):
    for source, words in (
        (str(tmp_path / "nowhere"), "nowhere"),
        (InitFromConfig(str(base), which=7), "step_00000007"),
    ):
        trainer = plain_for("nnx", tmp_path / "runs", init_from=source)
        for start in (lambda one=trainer: train_plain(one), lambda one=trainer: one.dry_run(first_examples(64))):
            with pytest.raises(SettingsError, match=words) as error:
                start()
            assert error.value.problems[0][0] == "trainer.init_from"
    other = plain_for("nnx", tmp_path / "runs", hidden=True, init_from=str(base))
    with pytest.raises(SettingsError, match=r"params\.hidden\.linear\.kernel"):
        train_plain(other)
    assert not (tmp_path / "runs").exists()


def test_an_optimizer_that_remembers_its_start_starts_from_them(base, tmp_path):
    unchanged: Any = lambda grads, start, params=None: (grads, start)
    anchored = optax.GradientTransformation(lambda params: jax.tree.map(jnp.copy, params), unchanged)
    config = TrainerConfig(**settings(tmp_path, train_epochs=1, init_from=str(base)))
    trainer = Plain(config, LINEAR["nnx"](num_classes=4), exmp_input=EXAMPLE, optimizer=anchored)
    other = plain_for("nnx", tmp_path)
    other.load_weights(base)
    train_plain(trainer)
    assert_same_bits(trainer.state.opt_state, other.state.params)


def test_a_part_may_be_left_out(base, tmp_path):
    source = InitFromConfig(str(base), leave_out=("params.out.kernel",))
    partly, none = plain_for("nnx", tmp_path, init_from=source), plain_for("nnx", tmp_path)
    assert_same_bits(partly.state.params["out"]["kernel"], none.state.params["out"]["kernel"])
    assert (np.asarray(partly.state.params["out"]["bias"]) != 0).any()


def test_parameters_that_would_stay_random_and_frozen_are_an_error(base, tmp_path_factory, subtests):
    for kept, changes, match in [
        ("params.out.kernel", {"optimizer": SGDConfig(learning_rate=0.1, freeze="out.kernel")}, "out.kernel.*freeze"),
        ("params.out.kernel", {"optimizer": FREEZING_ALL_BUT_STATISTICS}, "out.kernel.*freeze"),
        ("params.out.kernel", {"callbacks": {"one": UnfreezeConfig(schedule={0: "out.bias"})}}, "out.kernel.*Unfreeze"),
        ("params.out.bias", {"lora": LoRAConfig(match="out.kernel", rank=2)}, "out.bias.*lora"),
        ("params.out.kernel", {"lora": LoRAConfig(match="out.kernel", rank=2)}, "out.kernel.*lora"),
    ]:
        tmp_path = tmp_path_factory.mktemp("case")
        with subtests.test(kept=kept, changes=changes, match=match):
            part = InitFromConfig(str(base), leave_out=(kept,))
            with pytest.raises(SettingsError, match=match):
                train_plain(plain_for("nnx", tmp_path, init_from=part, **changes))
            with pytest.raises(CheckpointError, match=match):
                plain_for("nnx", tmp_path, **changes).load_weights(base, rename={kept: None})
            trained = LoRAConfig(match="out.kernel", rank=2, train="out.bias")
            if kept == "params.out.bias":
                plain_for("nnx", tmp_path, lora=trained).load_weights(base, rename={kept: None})


def test_a_partial_load_is_logged_once(base, tmp_path, caplog):
    other = plain_for("nnx", tmp_path, hidden=True)
    other.load_weights(base, partial=True)
    assert caplog.text.count("Partial restore") == 1


def test_averaged_weights_start_from_the_loaded_ones(base, tmp_path):
    trainer = plain_for("nnx", tmp_path, ema=0.9)
    trainer.load_weights(base)
    assert_same_bits(trainer.state.extra["ema"], trainer.state.params)
    assert trainer.state.extra["ema"]["out"]["kernel"] is not trainer.state.params["out"]["kernel"]


def test_a_file_names_a_folder_or_a_section_with_options():
    short = config_from({"init_from": "base"}, TrainerConfig)
    full = config_from({"init_from": {"path": "base", "leave_out": ["params.head.*"], "cast": True}}, TrainerConfig)
    assert short.initial_weights == InitFromConfig("base")
    assert full.initial_weights == InitFromConfig("base", leave_out=("params.head.*",), cast=True)
    assert TrainerConfig().initial_weights is None
    with pytest.raises(ConfigError, match="init_from"):
        config_from({"init_from": 3}, TrainerConfig)
