"""The section `optimizers`: read from a file, stored with the run, loaded again, and logged by name."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jax_trainer import TrainerModule
from jax_trainer.callbacks import LearningRateMonitorConfig, ModelCheckpointConfig, ReduceLROnPlateauConfig
from jax_trainer.config import ConfigError
from jax_trainer.config.settings import SettingsError
from jax_trainer.core.optimizers import AlternatingOptimizer, Optimizers
from jax_trainer.logger import LoggerConfig
from jax_trainer.optimizer import (
    AdamWConfig,
    AlternatingOptimizerConfig,
    GroupConfig,
    LinearScheduleConfig,
    SGDConfig,
    build_optimizers,
)
from jax_trainer.testing import assert_same_bits
from jax_trainer.trainer import build, load_experiment

DATA = [np.random.default_rng(seed).normal(size=(8, 2)).astype(np.float32) for seed in range(4)]
GAN = Path(__file__).parents[2] / "src/jax_trainer/configs" / "digits_gan.yaml"
SMALL = [
    *("model.width=4", "model.latent=3", "dataset.global_batch_size=32", "dataset.limit_train_size=128"),
    *("trainer.train_epochs=2", "trainer.callbacks={}", "trainer.enable_progress_bar=false", "trainer.logger={}"),
]


class Pair(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.generator, self.discriminator = nnx.Linear(3, 2, rngs=rngs), nnx.Linear(2, 1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.discriminator(x)


class Toy(TrainerModule):
    def batch_to_input(self, batch: Any) -> Any:
        return batch

    def loss_function(self, model: Any, batch: Any, train: bool, rng: jax.Array) -> Any:  # type: ignore[override]
        fake = model.discriminator(model.generator(jax.random.normal(rng, (len(batch), 3))))
        real = model.discriminator(batch)
        losses = {"fool": jax.nn.softplus(-fake), "catch": jax.nn.softplus(fake) + jax.nn.softplus(-real)}
        return {name: loss.mean() for name, loss in losses.items()}, {}


OPTIMIZERS: dict[str, Any] = {
    "discriminator": AlternatingOptimizerConfig(
        AdamWConfig(learning_rate=0.01), loss="catch", steps=2, parameters="discriminator"
    ),
    "generator": AlternatingOptimizer(
        SGDConfig(
            learning_rate=LinearScheduleConfig(init_value=0.1, end_value=0.0),
            groups={"bias": GroupConfig(".*bias", learning_rate_factor=0.5)},
        ),
        every=2,
        losses={"fool": LinearScheduleConfig(init_value=1.0, end_value=2.0)},
    ),
}


def toy(folder: Any, optimizers: Any = None, kind: type[Toy] = Toy, **settings: Any) -> Toy:
    logger = LoggerConfig(log_dir=str(folder), log_steps_every=1)
    options: dict[str, Any] = {"enable_progress_bar": False, "logger": logger, "exmp_input": DATA[0], **settings}
    return kind(model=Pair, optimizer=optimizers or OPTIMIZERS, **{"train_epochs": 2, **options})


def both(generator: Any, discriminator: Any) -> dict[str, AlternatingOptimizer]:
    """Optimizers for the losses of `Toy`."""
    return {
        "generator": AlternatingOptimizer(generator, loss="fool"),
        "discriminator": AlternatingOptimizer(discriminator, loss="catch"),
    }


def rows(trainer: Toy) -> list[dict[str, Any]]:
    assert trainer.folder is not None
    return [json.loads(line) for line in (trainer.folder.path / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    saver = {"ModelCheckpoint": ModelCheckpointConfig(monitor="val/loss"), "rates": LearningRateMonitorConfig()}
    trainer = toy(tmp_path_factory.mktemp("several"), callbacks=saver)
    return trainer, trainer.train_model(DATA, DATA)


def test_rates_and_losses_are_logged_by_optimizer(done):
    trainer, results = done
    logged = {name for row in rows(trainer) for name in row}
    expected = {f"optimizer/{name}/lr" for name in OPTIMIZERS} | {"optimizer/generator/lr_bias"}
    expected |= {f"optimizer/{name}/grad_global_norm_step" for name in OPTIMIZERS}
    expected |= {"val/loss", "val/loss/fool", "val/loss/catch", "train/loss/fool_step", "val/loss/generator"}
    assert expected <= logged
    found = results[2]
    # the weight of `fool` is 2 at the end of the run, and the total of an optimizer with weights is reported
    assert found["val/loss/generator"] == pytest.approx(2 * found["val/loss/fool"], rel=1e-6)
    assert found["val/loss"] == pytest.approx(found["val/loss/generator"] + found["val/loss/catch"], rel=1e-6)


def test_a_schedule_counts_the_updates_of_its_own_optimizer(done):
    rates = [row["optimizer/generator/lr_step"] for row in rows(done[0]) if "optimizer/generator/lr_step" in row]
    assert rates == pytest.approx([0.1, 0.1, 0.1, 0.075, 0.075, 0.05, 0.05, 0.025])  # 4 updates in 8 steps
    counts = {name: int(one.updates) for name, one in done[0].state.opt_state.by_name.items()}
    assert counts == {"discriminator": 16, "generator": 4}


def test_a_stored_run_is_loaded_with_its_optimizers_and_evaluates_the_same(done):
    trainer, results = done
    load: Any = partial(Toy.load_from_checkpoint, trainer.folder.path, DATA[0], model=Pair, which="latest")
    loaded = load(overrides=["trainer.max_steps=8"])
    found = loaded.eval_model(DATA)
    assert found == pytest.approx({name: results[2][name] for name in found})
    assert_same_bits(loaded.state.params, trainer.state.params)
    assert list(loaded.optimizer_config) == ["discriminator", "generator"]  # in their order
    without_length = load()
    np.testing.assert_array_equal(without_length.bind_model()(DATA[0]), loaded.bind_model()(DATA[0]))
    with pytest.raises(SettingsError, match="`steps`") as caught:  # of a weight that depends on the length of the run
        without_length.eval_model(DATA)
    assert caught.value.problems[0][0] == "losses.fool.steps"


def test_a_plateau_scales_the_rates_of_all_optimizers(tmp_path):
    plateau = ReduceLROnPlateauConfig(monitor="val/loss", patience=0, factor=0.5, threshold=1e9, min_lr=1e-4)
    optimizers = both(SGDConfig(learning_rate=0.1), SGDConfig(learning_rate=0.2))
    callbacks = {"plateau": plateau, "rates": LearningRateMonitorConfig()}
    trainer = toy(tmp_path, optimizers, callbacks=callbacks, train_epochs=3)
    trainer.train_model(DATA, DATA)
    last = [row for row in rows(trainer) if "optimizer/generator/lr_step" in row][-1]
    assert last["optimizer/generator/lr_step"] == pytest.approx(0.05)
    assert last["optimizer/discriminator/lr_step"] == pytest.approx(0.1)


@pytest.mark.slow
def test_debug_runs_the_same_steps_without_compiling(tmp_path):
    seen: list[float] = []

    class Watched(Toy):
        def loss_function(self, model: Any, batch: Any, train: bool, rng: jax.Array) -> Any:  # type: ignore[override]
            seen.append(float(batch[0, 0]))  # an error if it were traced
            return super().loss_function(model, batch, train, rng)

    optimizers = both(optax.sgd(0.1), optax.sgd(0.1))
    toy(tmp_path, optimizers, Watched, train_epochs=1, debug=True).train_model(DATA[:1])
    assert set(seen) == {float(DATA[0][0, 0])}


def test_an_optimizer_that_would_never_update_is_an_error():
    with pytest.raises(SettingsError, match="`every`.*10.*3 steps") as caught:
        build_optimizers({"a": AlternatingOptimizer(optax.sgd(1.0), every=10)}, 3)
    assert caught.value.problems[0][0] == "optimizers.a.every"
    schedule = LinearScheduleConfig(init_value=1.0, end_value=0.0, steps=7)
    with pytest.raises(SettingsError, match="7 updates.*6") as caught:
        build_optimizers({"a": AlternatingOptimizer(SGDConfig(learning_rate=schedule), every=2, steps=2)}, 6)
    assert caught.value.problems[0][0] == "optimizers.a.optimizer.learning_rate.steps"


def test_a_custom_step_needs_one_optimizer(tmp_path):
    class Custom(Toy):
        def create_training_function(self) -> Any:
            return lambda state, batch: (state.apply_gradients(grads=jax.tree.map(jnp.zeros_like, state.params)), {})

    trainer = toy(tmp_path, kind=Custom)
    with pytest.raises(TypeError, match="different losses"):
        trainer.train_model(DATA)


# the file


def test_the_gan_of_the_file_is_built_with_its_optimizers(tmp_path):
    trainer = build(load_experiment(GAN, [*SMALL, f"trainer.logger.log_dir={tmp_path}"]).value)
    tx = trainer.init_optimizer(2, 4)
    assert isinstance(tx, Optimizers) and list(tx.by_name) == ["discriminator", "generator"]


@pytest.mark.slow
def test_the_gan_of_the_file_is_trained_and_draws_samples(tmp_path):
    trainer = build(load_experiment(GAN, [*SMALL, f"trainer.logger.log_dir={tmp_path}"]).value)
    trainer.train_model(trainer.dataset.train_loader)
    assert trainer.sample(0, count=5).shape == (5, 8, 8, 1)
    assert np.isfinite(trainer.sample(0, count=5)).all()


def test_mistakes_in_the_section_are_reported_with_their_key(subtests):
    for overrides, match in [
        (["optimizer={class_name: SGD}"], "optimizers.*both"),
        (["optimizers={}"], "optimizer.*missing"),
        (["optimizers.generator.every=0"], "every.*at least 1, found 0"),
        (["optimizers.generator.parameters=("], "parameters.*regular expression"),
        (["optimizers.generator.loss=a", "optimizers.generator.losses={b: 1.0}"], "loss.*'a'"),
        (["optimizers.generator.optimiser={class_name: SGD}"], "optimiser.*optimizer"),
    ]:
        with subtests.test(overrides=overrides, match=match), pytest.raises(ConfigError, match=match):
            load_experiment(GAN, overrides)
