"""`lora` of a trainer: over random or loaded weights, with everything that a trainer can do, resumed exactly."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

from jax_trainer.callbacks import ModelCheckpointConfig
from jax_trainer.checkpoint.store import CheckpointError
from jax_trainer.config import ConfigError, config_from
from jax_trainer.config.settings import SettingsError
from jax_trainer.core import LoRA, digest_of, model_params
from jax_trainer.models.pretrained import PretrainedError
from jax_trainer.runs.sections import LoRAConfig
from jax_trainer.testing import assert_same_bits
from jax_trainer.tools.pretrained import export_pretrained
from jax_trainer.trainer import TrainerConfig
from tests.trainer import lora_job
from tests.trainer.trainer_runs import EXAMPLE, Plain, first_examples, numbered_loader, plain_for, train_plain

LORA = LoRAConfig(match="out.kernel", rank=2, alpha=4.0)
SAVING: dict[str, Any] = {"callbacks": {"saver": ModelCheckpointConfig(monitor="val/loss")}}
KILLS = ("step:kill:2", "step:kill:7", "mid_array:kill:2", "after_rename:kill:1", "step:kill:11")


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """The folder of a run whose weights are the base of others: read-only."""
    trainer = plain_for("nnx", tmp_path_factory.mktemp("base"), **SAVING)
    train_plain(trainer)
    return trainer.folder.path


@pytest.fixture(scope="module")
def tuned(base, tmp_path_factory) -> Any:
    """A trainer after training adapters of this base: read-only."""
    trainer = plain_for("nnx", tmp_path_factory.mktemp("tuned"), init_from=str(base), lora=LORA, **SAVING)
    train_plain(trainer)
    return trainer


def test_the_weights_of_init_from_are_the_base(base, tuned):
    loaded = Plain.load_from_checkpoint(base, EXAMPLE)
    assert_same_bits(tuned.state.frozen.params, loaded.state.params)
    assert {leaf.shape[-1] for leaf in jax.tree.leaves(tuned.state.params)} == {2, 4}


def test_evaluation_prediction_and_binding_use_base_and_adapters(base, tuned, tmp_path):
    data, plain = first_examples(64), plain_for("nnx", tmp_path)
    plain.state = plain.state.replace(params=model_params(tuned._weights_of(None)))
    assert tuned.eval_model(data)["val/loss"] == pytest.approx(plain.eval_model(data)["val/loss"], rel=1e-6)
    np.testing.assert_allclose(tuned.predict(data), plain.predict(data), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(tuned.bind_model()(EXAMPLE["x"]), plain.bind_model()(EXAMPLE["x"]), rtol=1e-5, atol=1e-6)
    untrained = Plain.load_from_checkpoint(base, EXAMPLE)
    assert np.abs(tuned.predict(data) - untrained.predict(data)).max() > 0.01


def test_dora_starts_from_the_norms_of_the_loaded_base_and_averages_from_there(base, tmp_path):
    lora = LoRAConfig(match="out.kernel", rank=2, use_dora=True)
    trainer = plain_for("nnx", tmp_path, init_from=str(base), lora=lora, ema=0.9)
    kernel = np.asarray(trainer.state.frozen.params["out"]["kernel"])
    for adapters in (trainer.state.params, trainer.state.extra["ema"]):
        np.testing.assert_allclose(adapters["out.kernel"].magnitude, np.linalg.norm(kernel, axis=0), rtol=1e-6)
    untrained, data = Plain.load_from_checkpoint(base, EXAMPLE), first_examples(64)
    np.testing.assert_allclose(trainer.predict(data), untrained.predict(data), rtol=1e-6, atol=1e-6)
    train_plain(trainer)
    assert np.all(trainer.state.params["out.kernel"].magnitude != np.linalg.norm(kernel, axis=0))


def test_a_run_is_loaded_with_its_base_and_not_with_another(base, tuned):
    run = tuned.folder.path
    loaded = Plain.load_from_checkpoint(run, EXAMPLE)
    assert_same_bits(model_params(loaded.state), model_params(tuned._weights_of(None)))
    with pytest.raises(CheckpointError, match=digest_of(tuned.state.frozen)):
        Plain.load_from_checkpoint(run, EXAMPLE, overrides=("trainer.init_from=null",))
    with pytest.raises(SettingsError, match="nowhere") as error:
        Plain.load_from_checkpoint(run, EXAMPLE, overrides=("trainer.init_from=nowhere",))
    assert [key for key, _ in error.value.problems] == ["trainer.init_from"]
    with pytest.raises(PretrainedError, match="adapters"):  # without a stored dataset, its trainer cannot be built
        export_pretrained(run, run / "exported")


def test_several_adapters_share_one_base(base, tuned, tmp_path):
    other = plain_for("nnx", tmp_path, init_from=str(base), lora=LORA, **SAVING)
    train_plain(other, num_epochs=2)
    mine, data = other.predict(first_examples(32)), first_examples(32)
    buffers = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(other.state.frozen)]
    other.load_weights(tuned.folder.path)
    np.testing.assert_array_equal(other.predict(data), tuned.predict(data))
    assert buffers == [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(other.state.frozen)]
    other.load_weights(other.folder.path)
    np.testing.assert_array_equal(other.predict(data), mine)


def test_a_run_resumes_exactly_and_needs_its_base(base, tmp_path):
    copy = Path(shutil.copytree(base, tmp_path / "copy"))
    options: dict[str, Any] = {"init_from": str(copy), "lora": LORA, **SAVING}
    whole, first = (plain_for("nnx", tmp_path / name, **options) for name in "ab")
    train_plain(whole, num_epochs=2)
    train_plain(first, num_epochs=1)
    again = plain_for("nnx", tmp_path / "b", **options)
    train_plain(again, num_epochs=2, resume=first.folder.path)
    assert_same_bits(again.state, whole.state)
    shutil.rmtree(copy)
    with pytest.raises(Exception, match="copy"):
        train_plain(plain_for("nnx", tmp_path / "b", **options), num_epochs=3, resume=first.folder.path)


def test_adapters_continue_with_a_new_optimizer_state(tuned, tmp_path):
    trainer = plain_for("nnx", tmp_path, lora=LORA)
    trainer.state = tuned.state
    program = trainer.prepare(numbered_loader(128))
    trainer._start(program, resume=False, loads=False)
    assert_same_bits((trainer.state.params, trainer.state.frozen), (tuned.state.params, tuned.state.frozen))
    assert int(trainer.state.step) == 0


@pytest.mark.slow
def test_the_preflight_shows_the_memory_of_the_base_and_no_optimizer_state_for_it(tmp_path):
    def costs(**options: Any) -> tuple[dict[str, int], int]:
        trainer = plain_for("nnx", tmp_path, optimizer=optax.adam(0.1), **options)
        loader = numbered_loader(128)
        return trainer.dry_run(loader).state_bytes, trainer.preflight(loader).cost.argument_bytes

    (full, arguments), (adapted, fewer) = costs(), costs(lora=LoRAConfig(match="out.kernel", rank=1))
    assert adapted["frozen"] == full["params"]
    assert adapted["opt_state"] < full["opt_state"] / 2 and adapted["params"] < full["params"] / 2
    assert arguments - fewer >= full["opt_state"] - adapted["opt_state"] - adapted["params"]


def test_the_section_is_read_from_a_file_and_refused_with_its_key():
    section = {"train_epochs": 1, "lora": {"match": ".*(query|value).kernel", "rank": 16, "alpha": 32, "dropout": 0.05}}
    config = config_from(section, TrainerConfig)
    assert config.adapters == LoRA(match=".*(query|value).kernel", rank=16, alpha=32, dropout=0.05)
    for key, value in (("rank", 0), ("dropout", 1.5), ("match", "(")):
        with pytest.raises(ConfigError, match=f"lora.{key}|{key}"):
            config_from({**section, "lora": {**section["lora"], key: value}}, TrainerConfig)


def test_what_does_not_fit_the_model_is_an_error_of_the_section_before_anything_is_written(tmp_path):
    for options, fault in (({"match": "out.kernels"}, "'out.kernels'.*out.kernel"), ({"rank": 5}, r"5.*\[8, 4\]")):
        trainer = plain_for("nnx", tmp_path / "runs", lora=LoRAConfig(**{"match": "out.kernel", "rank": 1, **options}))
        for start in (lambda one=trainer: train_plain(one), lambda one=trainer: one.dry_run(first_examples(64))):
            with pytest.raises(SettingsError, match=fault) as error:
                start()
            assert error.value.problems[0][0] == "trainer.lora"
    assert not (tmp_path / "runs").exists()


def test_adapters_are_listed_with_the_module_that_they_belong_to(tmp_path):
    report = plain_for("nnx", tmp_path, lora=LORA).dry_run(first_examples(64))
    assert {one.path: one.parameters for one in report.modules}["out"] == report.parameter_count


def test_custom_steps_are_refused(tmp_path):
    class Custom(Plain):
        def create_training_function(self) -> Any:
            return lambda state, batch: (state, {})

    with pytest.raises(ValueError, match=r"`trainer.lora`.*custom steps"):
        train_plain(plain_for("nnx", tmp_path, kind=Custom, lora=LORA))


@pytest.mark.slow
@pytest.mark.parametrize("kill", KILLS)
def test_a_run_that_is_killed_resumes_to_the_same_bits(tmp_path, kill):
    lora_job.prepare(tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "killed")
    lora_job.main(tmp_path / "whole")
    environment = {**os.environ, "JAXTRAINER_FAILPOINT": kill}
    command = [sys.executable, lora_job.__file__, str(tmp_path / "killed")]
    assert subprocess.run(command, env=environment, check=False).returncode == -signal.SIGKILL
    assert not (tmp_path / "killed/result.json").exists()
    lora_job.main(tmp_path / "killed")
    found, whole = (json.loads((tmp_path / name / "result.json").read_text()) for name in ("killed", "whole"))
    assert found == whole
