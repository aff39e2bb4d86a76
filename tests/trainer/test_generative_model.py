"""Generative models through the trainer: every objective trains, draws, saves, and resumes exactly."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

from jax_trainer.adapters import build_model
from jax_trainer.callbacks import ModelCheckpointConfig, SampleImagesConfig
from jax_trainer.checkpoint.folder import RunFolder
from jax_trainer.config.settings import SettingsError
from jax_trainer.core.failpoints import FaultInjected
from jax_trainer.models import ConditionalMLPConfig, DiTConfig
from jax_trainer.models.generative import (
    ConsistencyDistillationConfig,
    ConsistencyTrainingConfig,
    EDMConfig,
    FlowMatchingConfig,
)
from jax_trainer.models.generative.networks import are_alike
from jax_trainer.optimizer import SGDConfig
from jax_trainer.testing import assert_same_bits, fault
from jax_trainer.trainer import GenerativeTrainer, GenerativeTrainerConfig
from tests.trainer.trainer_runs import digits, settings

OBJECTIVES = {
    "flow": FlowMatchingConfig(steps=1, guidance=1.5),
    "edm": EDMConfig(steps=2, sigma_data=1.0),
    "consistency": ConsistencyTrainingConfig(levels_first=2, levels_last=8, sigma_data=1.0),
}
LABELS = np.arange(10)


def trainer_of(folder: Path, objective: Any, *, model: Any = None, run_folder: Any = None, **changes: Any) -> Any:
    """On digits, two epochs of four steps, with averaged weights."""
    options = {"train_epochs": 2, "ema": 0.9, "callbacks": {"saver": ModelCheckpointConfig()}, **changes}
    config = GenerativeTrainerConfig(**settings(folder, **options), objective=objective)
    model = model or ConditionalMLPConfig(hidden=(4,), num_classes=10)
    optimizer = SGDConfig(learning_rate=0.1)
    parts = {"model": model} if isinstance(model, nn.Module) else {"model_config": model}
    return GenerativeTrainer(
        config, optimizer_config=optimizer, dataset=digits(), folder=run_folder, exmp_input=digits().train[:64], **parts
    )


def after_training(trainer: Any, **options: Any) -> Any:
    trainer.train_model(digits().train_loader, digits().val_loader, **options)
    return trainer


def samples_of(trainer: Any, **options: Any) -> np.ndarray:
    return np.asarray(trainer.sample(0, LABELS, **options))


@pytest.mark.example
@pytest.mark.parametrize("name", ["flow", "edm", "consistency"])
def test_a_crashed_run_resumes_to_the_same_bits_pictures_and_samples(tmp_path, name):
    callbacks = {
        "saver": ModelCheckpointConfig(every_n_steps=3),
        "images": SampleImagesConfig(every_n_steps=5, per_class=1),
    }
    complete = after_training(trainer_of(tmp_path / "complete", OBJECTIVES[name], callbacks=callbacks))
    broken = trainer_of(tmp_path / "part", OBJECTIVES[name], callbacks=callbacks)
    with fault("step:raise:7"), pytest.raises(FaultInjected):
        after_training(broken)
    again = trainer_of(
        tmp_path / "part", OBJECTIVES[name], callbacks=callbacks, run_folder=RunFolder.open(broken.folder.path)
    )
    after_training(again, resume=True)
    assert_same_bits(again.state, complete.state)
    np.testing.assert_array_equal(samples_of(again), samples_of(complete))
    pictures = [
        {file.name: file.read_bytes() for file in run.folder.path.glob("media/*.png")} for run in (again, complete)
    ]
    assert pictures[0] == pictures[1]
    assert set(pictures[0]) == {f"samples_images_{step}.png" for step in (4, 5, 8)}


@pytest.fixture(scope="module")
def flow(tmp_path_factory) -> Any:
    """A trained model, which nothing validates: that would have to be compiled."""
    trainer = trainer_of(tmp_path_factory.mktemp("flow"), OBJECTIVES["flow"], train_epochs=1)
    trainer.train_model(digits().train_loader)
    return trainer


def test_samples_use_the_averaged_weights_of_the_passed_state(tmp_path):
    trainer = trainer_of(tmp_path, OBJECTIVES["flow"])
    ones = jax.tree.map(lambda leaf: np.ones(leaf.shape, leaf.dtype), trainer.state.params)  # no new model has these
    state = trainer.state = trainer.state.replace(extra={**trainer.state.extra, "ema": ones})
    averaged = samples_of(trainer)
    assert averaged.shape == (10, 8, 8, 1) and np.isfinite(averaged).all()
    np.testing.assert_array_equal(samples_of(trainer, state=state), averaged)
    plain = state.replace(extra={})
    assert np.abs(samples_of(trainer, state=plain) - averaged).max() > 0
    np.testing.assert_array_equal(samples_of(trainer, state=plain.replace(params=ones)), averaged)


@pytest.mark.example
def test_a_run_is_loaded_with_what_it_draws(flow):
    loaded = GenerativeTrainer.load_from_checkpoint(flow.folder.path, which="latest")
    np.testing.assert_array_equal(samples_of(loaded), samples_of(flow))
    key = jax.random.key(0)
    np.testing.assert_array_equal(loaded.sample(key, count=3), flow.sample(0, count=3))
    with pytest.raises(ValueError, match="`count`.*`labels`"):
        loaded.sample(0)


@pytest.mark.example
def test_evaluations_do_not_depend_on_the_progress_of_training(tmp_path):
    trainer = trainer_of(tmp_path, OBJECTIVES["consistency"])
    loss = trainer.eval_model(digits().val_loader)["val/loss"]
    trainer.state = trainer.state.replace(step=trainer.state.step + 8)
    assert trainer.eval_model(digits().val_loader)["val/loss"] == loss


def test_how_far_training_is_decides_how_many_levels_there_are(tmp_path):
    trainer = trainer_of(tmp_path, OBJECTIVES["consistency"])
    trainer.prepare(digits().train_loader)
    assert [float(trainer._progress(step, True)) for step in (0, 4, 8)] == [0, 0.5, 1]
    assert trainer._progress(4, False) is None


class LinenNetwork(nn.Module):
    """A network of linen with dropout."""

    @nn.compact
    def __call__(self, x, t, condition=None, train=False):
        inputs = [x.reshape(len(x), -1), t[:, None], nn.one_hot(condition, 10)]
        hidden = nn.tanh(nn.Dense(16)(jax.numpy.concatenate(inputs, axis=-1)))
        return nn.Dense(64)(nn.Dropout(0.1, deterministic=not train)(hidden)).reshape(x.shape)


@pytest.mark.example
def test_a_network_of_linen_trains_and_draws(tmp_path):
    trainer = trainer_of(tmp_path, OBJECTIVES["edm"], model=LinenNetwork())
    results = trainer.train_model(digits().train_loader, digits().val_loader)
    assert results[2]["val/loss"] < results[1]["val/loss"]
    samples = samples_of(trainer)
    assert samples.shape == (10, 8, 8, 1) and np.isfinite(samples).all()


@pytest.mark.example
def test_a_student_learns_from_the_weights_of_another_run_and_leaves_them_alone(tmp_path):
    teacher = after_training(trainer_of(tmp_path / "teacher", OBJECTIVES["edm"]))
    objective = ConsistencyDistillationConfig(levels=4, sigma_data=1.0)
    options = {"teacher": str(teacher.folder.path), "callbacks": {"saver": ModelCheckpointConfig(every_n_steps=3)}}
    broken = trainer_of(tmp_path / "student", objective, **options)
    begun = broken.state
    averaged = teacher._weights_of("best").extra["ema"]
    assert_same_bits(begun.params["student"], averaged)  # it is like its teacher, and begins as that
    assert_same_bits(begun.model_state["frozen"], averaged)
    with fault("step:raise:5"), pytest.raises(FaultInjected):
        after_training(broken)
    again = trainer_of(tmp_path / "student", objective, run_folder=RunFolder.open(broken.folder.path), **options)
    after_training(again, resume=True)
    complete = after_training(trainer_of(tmp_path / "complete", objective, **options))
    assert_same_bits(again.state, complete.state)
    assert_same_bits(again.state.model_state["frozen"], averaged)
    assert np.isfinite(samples_of(again)).all()


class WithStatistics(nn.Module):
    """A network of linen that is not only parameters."""

    @nn.compact
    def __call__(self, x, t, condition=None, train=False):
        return nn.BatchNorm(use_running_average=not train)(x)


def test_a_network_of_linen_with_batch_statistics_is_refused_before_training(tmp_path):
    with pytest.raises(TypeError, match="batch_stats.*Use LayerNorm or GroupNorm"):
        after_training(trainer_of(tmp_path, OBJECTIVES["flow"], model=WithStatistics()))
    assert not list(tmp_path.iterdir())


@pytest.mark.example
def test_a_student_of_another_size_begins_by_itself(tmp_path, flow):
    objective = ConsistencyDistillationConfig(levels=4, sigma_data=1.0, teacher="flow_matching")
    small = ConditionalMLPConfig(hidden=(3,), num_classes=10)
    trainer = trainer_of(tmp_path, objective, model=small, teacher=str(flow.folder.path))
    assert_same_bits(trainer.state.model_state["frozen"], flow.state.extra["ema"])
    assert trainer.dry_run(digits().train_loader) is not None


def test_networks_are_alike_by_their_parameters_whatever_modes_they_are_in():
    def network(width: int, train: bool) -> Any:
        config = DiTConfig(layers=1, heads=2, width=width, dropout=0.1)
        model: Any = nnx.eval_shape(lambda: build_model(config, np.zeros((1, 4, 4, 1), np.float32), nnx.Rngs(0)))
        model.train() if train else model.eval()
        return model

    assert are_alike(network(8, True), network(8, False))
    assert not are_alike(network(8, True), network(12, True))


def test_a_teacher_is_there_exactly_where_one_is_needed(subtests):
    for objective, teacher, words in [
        (ConsistencyDistillationConfig(), None, "set `teacher`"),
        (FlowMatchingConfig(), "runs/x", "FlowMatching .*`teacher`"),
    ]:
        with (
            subtests.test(objective=objective, teacher=teacher, words=words),
            pytest.raises(SettingsError, match=words),
        ):
            GenerativeTrainerConfig(objective=objective, teacher=teacher)


def test_a_missing_teacher_is_an_error(tmp_path):
    with pytest.raises(SettingsError, match="nowhere") as error:
        trainer_of(tmp_path, ConsistencyDistillationConfig(), teacher=str(tmp_path / "nowhere"))
    assert error.value.problems[0][0] == "trainer.teacher"
