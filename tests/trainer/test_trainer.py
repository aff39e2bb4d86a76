import logging
import re
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import AxisType

from jax_trainer.callbacks import ModelCheckpointConfig
from jax_trainer.config.settings import SettingsError
from jax_trainer.engine import evaluate
from jax_trainer.logger import LoggerConfig, TensorboardConfig
from jax_trainer.models import SimpleClassifierConfig
from jax_trainer.optimizer import AdamWConfig
from jax_trainer.testing import assert_close, assert_same_bits, digest, numbered_loader
from jax_trainer.trainer import TrainerConfig, TrainerModule
from tests.trainer.trainer_runs import (
    EPOCHS,
    EXAMPLE,
    STEPS,
    Plain,
    WatcherConfig,
    callbacks,
    digits,
    first_examples,
    plain_for,
    rows,
    settings,
    train,
    train_plain,
    trainer_for,
    values,
    waves,
)


def hand_written(state: Any, images: np.ndarray, labels: np.ndarray) -> tuple[float, float]:
    """Loss and accuracy of the linen classifier, with numpy."""
    params = jax.tree.map(np.float64, state.params)
    x = (images.reshape(len(images), -1) / 255 - 0.01915) / 0.02360
    logits = x @ params["out"]["kernel"] + params["out"]["bias"]
    of_label = logits[np.arange(len(labels)), labels]
    loss = (np.log(np.exp(logits).sum(-1)) - of_label).mean()
    return float(loss), float((logits.argmax(-1) == labels).mean())


def test_the_metrics_of_every_epoch_and_of_the_test_come_back(done):
    assert list(done.results) == [*range(1, EPOCHS + 1), "test"]
    for epoch in range(1, EPOCHS + 1):
        assert set(done.results[epoch]) == {"val/loss", "val/acc", "val/acc_std"}
    assert set(done.results["test"]) == {"test/loss", "test/acc", "test/acc_std"}
    assert done.results[EPOCHS]["val/loss"] < done.results[1]["val/loss"]


def test_the_test_uses_the_best_weights_and_not_the_last(done):
    best, last = done.watcher.evaluated[STEPS], done.watcher.evaluated[EPOCHS * STEPS]
    sets = {"test": digits().test_loader}
    of_best, of_last = (evaluate(done.trainer.program, state, sets)["test"] for state in (best, last))
    assert done.results["test"] == {f"test/{name}": value for name, value in of_best.items()}
    assert of_best["loss"] > of_last["loss"]
    assert done.watcher.tested == [done.results["test"]]
    test: Any = digits().test
    assert (of_best["loss"], of_best["acc"]) == pytest.approx(hand_written(best, test.input, test.target), rel=1e-5)


def test_afterwards_the_trainer_has_the_last_weights(done):
    assert_same_bits(done.trainer.state, done.watcher.evaluated[EPOCHS * STEPS])
    again = done.trainer.eval_model(digits().val_loader, which="last")
    assert again == done.results[EPOCHS]


def test_every_number_is_in_the_record(done):
    written = rows(done.trainer)
    validated = [row for row in written if "val/loss" in row]
    assert [(row["step"], row["epoch"]) for row in validated] == [(STEPS * n, n) for n in range(1, EPOCHS + 1)]
    for row in validated:
        assert row == {**done.results[row["epoch"]], "step": row["step"], "epoch": row["epoch"]}
    assert {**done.results["test"], "step": EPOCHS * STEPS, "epoch": EPOCHS} == written[-1]
    assert [row["step"] for row in written if "train/loss_step" in row] == list(range(2, EPOCHS * STEPS + 1, 2))
    assert len(list(values(done.trainer, "optimizer/lr"))) == EPOCHS + 1


@pytest.mark.slow  # for a linear model it is in `test_looking_at_the_state_before_training_changes_nothing`
def test_validating_and_callbacks_change_no_trained_bit(flavour, tmp_path):
    bare = trainer_for(flavour, tmp_path, hidden=True, check_val_every_n_epoch=0, train_epochs=2)
    assert train(bare).keys() == {1, 2, "test"}  # of training: without a validation, they are returned
    watched = trainer_for(flavour, tmp_path, hidden=True, callbacks=callbacks(), train_epochs=2)
    train(watched)
    assert_same_bits(bare.state, watched.state)


def test_a_progress_bar_and_a_tool_change_no_trained_bit(done, tmp_path, capsys):
    tool = TensorboardConfig(save_dir=str(tmp_path), name="shown")
    logger = LoggerConfig(tool_config=tool, log_steps_every=1)
    shown = trainer_for(done.flavour, tmp_path, enable_progress_bar=True, logger=logger)
    train(shown)
    assert re.search("epoch 4/4  step 16  train loss .*  val loss", capsys.readouterr().err)
    assert list((tmp_path / "shown").rglob("events.out.tfevents*"))
    assert_same_bits(shown.state, done.trainer.state)


def test_looking_at_the_state_before_training_changes_nothing_and_it_stays(done, tmp_path):
    trainer = trainer_for(done.flavour, tmp_path, check_val_every_n_epoch=0)
    first = trainer.state
    before = digest(first)
    train(trainer)
    assert_same_bits(trainer.state, done.trainer.state)
    assert digest(first) == before


def test_another_seed_gives_other_bits(tmp_path):
    other, same, first = (
        Plain(model=nn.Dense(4), optimizer=optax.sgd(0.1), exmp_input=EXAMPLE, seed=seed, **settings(tmp_path))
        for seed in (43, 42, 42)
    )
    assert_same_bits(same.state.params, first.program.init(jax.random.key(42), EXAMPLE).params)
    assert digest(other.state.params) != digest(first.state.params)


@pytest.mark.parametrize("flavour", [pytest.param("linen", marks=pytest.mark.slow), "nnx"])
def test_a_trainer_in_plain_python_needs_a_loss_and_what_the_model_gets(flavour, tmp_path):
    trainer = plain_for(flavour, tmp_path, train_epochs=5)
    results = train_plain(trainer)
    assert list(results) == [1, 2, 3, 4, 5]
    assert results[5]["val/loss"] < results[1]["val/loss"]


def test_what_a_subclass_did_not_write_is_an_error_with_its_name(tmp_path_factory, subtests):
    for model, missing, message in [
        ("nnx", "batch_to_input", "Unfinished must implement `batch_to_input`"),
        ("nnx", "loss_function", "Unfinished must implement `loss_function`"),
        ("linen", "loss_function_linen", "Unfinished must implement `loss_function_linen`"),
    ]:
        tmp_path = tmp_path_factory.mktemp("case")
        with subtests.test(model=model, missing=missing, message=message):

            class Unfinished(Plain):
                """Lacks something."""

            setattr(Unfinished, missing, getattr(TrainerModule, missing))
            with pytest.raises(NotImplementedError, match=message):
                plain_for(model, tmp_path, kind=Unfinished).dry_run(numbered_loader(32 * STEPS))


def test_linen_draws_random_numbers_from_the_passed_key(tmp_path):
    class Keys(Plain):
        """Reports what the model draws with three keys, of which two are the same."""

        def loss_function_linen(self, params: Any, state: Any, batch: Any, rng: jax.Array, train: bool = True) -> Any:
            drawing = state._replace(apply_fn=lambda variables, x, *, rngs: jax.random.uniform(rngs["dropout"]))
            keys = {"first": rng, "same": rng, "other": jax.random.fold_in(rng, 1)}
            drawn = {
                name: self.model_linen_apply(params, drawing, None, key, train=False)[0] for name, key in keys.items()
            }
            loss, (mutable, _) = super().loss_function_linen(params, state, batch, rng, train)
            return loss, (mutable, drawn)

    trainer = plain_for("linen", tmp_path, kind=Keys, max_steps=1, check_val_every_n_epoch=0)
    train_plain(trainer)
    first, same, other = (next(values(trainer, f"train/{name}_epoch")) for name in ("first", "same", "other"))
    assert first == same != other


class Two(nnx.Module):
    """A model of two inputs."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.out = nnx.Linear(8, 4, kernel_init=waves, rngs=rngs)

    def __call__(self, a: jax.Array, b: jax.Array) -> jax.Array:
        return self.out(a - b)


class TwoLinen(nn.Module):
    """A model of two inputs."""

    @nn.compact
    def __call__(self, a: jax.Array, b: jax.Array, train: bool = False) -> jax.Array:
        return nn.Dense(4, kernel_init=waves, name="out")(a - b)


class TwoInputs(Plain):
    """Calls its model in several ways, which must agree."""

    def batch_to_input(self, batch: Any) -> Any:
        return batch["x"], batch["x"] / 2

    def loss_function(self, model: Any, batch: Any, train: bool = True) -> Any:
        a, b = self.batch_to_input(batch)
        first, other = self.model_apply(model, a, b, train=train), self.model_apply(model, (a, b), train=train)
        loss, metrics = self._evaluate(first, batch)
        return loss, {**metrics, "difference": abs(first - other).max()}

    def loss_function_linen(self, params: Any, state: Any, batch: Any, rng: jax.Array, train: bool = True) -> Any:
        a, b = self.batch_to_input(batch)
        outputs, mutable = self.model_linen_apply(params, state, a, b, rng, train=train)
        by_name, _ = self.model_linen_apply(params, state, (a, b), rng=rng, train=train)
        loss, metrics = self._evaluate(outputs, batch)
        return loss, (mutable, {**metrics, "difference": abs(outputs - by_name).max()})


def test_several_inputs_of_a_model_are_positional_or_a_tuple(tmp_path_factory, subtests):
    for case, model in zip(["nnx", "linen"], [Two, TwoLinen()], strict=True):
        tmp_path = tmp_path_factory.mktemp("case")
        with subtests.test(case=case):
            trainer = TwoInputs(
                model=model, optimizer=optax.sgd(0.1), exmp_input=EXAMPLE, **settings(tmp_path, max_steps=1)
            )
            assert train_plain(trainer)[1]["val/difference"] == 0


def forgetting(call: Any) -> type[Plain]:
    class Forgets(Plain):
        def loss_function_linen(self, params: Any, state: Any, batch: Any, rng: jax.Array, train: bool = True) -> Any:
            return call(self, params, state, batch["x"], rng=rng)

    return Forgets


def test_the_mode_and_the_key_of_a_model_call_must_be_passed(tmp_path_factory, subtests):
    for case, (call, match) in zip(
        ["no mode", "a positional mode", "no key", "a positional mode of nnx"],
        [
            (lambda self, *loss, rng: self.model_linen_apply(*loss, rng), "'train'"),
            (lambda self, *loss, rng: self.model_linen_apply(*loss, rng, True), "'train'"),
            (lambda self, *loss, rng: self.model_linen_apply(*loss, train=True), "random key"),
            (lambda self, params, state, x, rng: self.model_apply(None, x, True), "`train=True`"),
        ],
        strict=True,
    ):
        tmp_path = tmp_path_factory.mktemp("case")
        with subtests.test(case=case), pytest.raises(TypeError, match=match):
            plain_for("linen", tmp_path, kind=forgetting(call)).dry_run(numbered_loader(32 * STEPS))


def test_nnx_is_in_the_right_mode_and_can_be_put_into_the_other(tmp_path):
    evaluating: list[tuple[bool, list[bool]]] = []

    class Normed(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.norm, self.out = nnx.BatchNorm(8, rngs=rngs), nnx.Linear(8, 4, kernel_init=waves, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.out(self.norm(x))

    class Modes(Plain):
        """Calls the model in every mode."""

        def loss_function(self, model: Any, batch: Any, train: bool = True) -> Any:
            found = []
            for mode in (None, False, True, None):
                self.model_apply(model, batch["x"], train=mode)
                found.append(model.norm.use_running_average)
            evaluating.append((train, found))
            return super().loss_function(model, batch, train)

    options = settings(tmp_path, train_epochs=1)
    train_plain(Modes(model=Normed, optimizer=optax.sgd(0.1), exmp_input=EXAMPLE, **options))
    assert (True, [False, True, False, False]) in evaluating
    assert (False, [True, True, False, False]) in evaluating


def test_several_named_sets_are_evaluated_and_can_be_monitored(tmp_path):
    saver = ModelCheckpointConfig(monitor="val_far/loss")
    trainer = plain_for("nnx", tmp_path, train_epochs=2, callbacks={"saver": saver})
    sets = {"near": first_examples(32), "far": first_examples(64)}
    tests = {"a": first_examples(32), "b": first_examples(64)}
    results = trainer.train_model(numbered_loader(32 * STEPS), sets, tests)
    assert set(results[2]) == {f"val_{name}/{metric}" for name in sets for metric in ("loss", "acc")}
    assert set(results["test"]) == {f"test_{name}/{metric}" for name in "ab" for metric in ("loss", "acc")}
    assert trainer.test_model(tests) == results["test"]


def test_without_validation_data_every_epoch_is_saved_and_the_last_weights_are_tested(tmp_path, caplog):
    trainer = plain_for("nnx", tmp_path, train_epochs=2, callbacks={"saver": ModelCheckpointConfig()})
    with caplog.at_level(logging.WARNING, "jax_trainer"):
        results = trainer.train_model(numbered_loader(32 * STEPS), None, first_examples(64))
    assert "no validation" in caplog.text
    assert list(results) == [1, 2, "test"]
    assert results["test"] == trainer.test_model(first_examples(64))
    loaded = Plain.load_from_checkpoint(trainer.folder.path, EXAMPLE)
    assert loaded.test_model(first_examples(64)) == results["test"]


def test_without_test_data_there_is_no_test(tmp_path):
    assert list(train_plain(plain_for("nnx", tmp_path))) == [1]
    with pytest.raises(ValueError, match="No data"):
        plain_for("nnx", tmp_path).test_model(None)


def test_num_epochs_overrides_the_configuration(tmp_path):
    trainer = plain_for("nnx", tmp_path, train_epochs=7)
    assert list(train_plain(trainer, num_epochs=2)) == [1, 2]
    assert int(trainer.state.step) == 2 * STEPS


def test_a_run_that_a_callback_stops_is_tested_and_recorded(done, tmp_path):
    trainer = trainer_for(done.flavour, tmp_path, callbacks=callbacks(stop_after=2))
    results = train(trainer)
    assert list(results) == [1, 2, "test"]
    assert results["test"] == done.results["test"]  # the best was in the first epoch
    assert rows(trainer)[-1] == {**results["test"], "step": 2 * STEPS, "epoch": 2}
    assert "Run stopped" in (trainer.folder.path / "run.log").read_text()
    assert_same_bits(trainer.state, done.watcher.evaluated[2 * STEPS])


def test_what_was_measured_is_recorded_before_a_callback_acts_on_it(tmp_path):
    watching = {"watcher": WatcherConfig(stop_after=2)}
    trainer = plain_for("nnx", tmp_path, train_epochs=5, callbacks=watching, check_val_every_n_epoch=0)
    train_plain(trainer)
    assert [row["epoch"] for row in rows(trainer) if "train/loss_epoch" in row] == [1, 2]


def test_quiet_shows_nothing(tmp_path, capsys):
    train_plain(plain_for("nnx", tmp_path, enable_progress_bar=True), quiet=True)
    assert capsys.readouterr() == ("", "")


def test_training_again_keeps_the_weights_and_resets_everything_else(tmp_path):
    trainer = plain_for("nnx", tmp_path)
    before = train_plain(trainer)
    first, folder = trainer.state, trainer.folder
    results = train_plain(trainer, num_epochs=2)
    assert trainer.folder != folder
    assert int(trainer.state.step) == 2 * STEPS
    assert results[2]["val/loss"] < before[1]["val/loss"]
    assert int(first.step) == STEPS  # still there


def test_devices_of_a_mesh_share_every_batch(tmp_path):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    alone, shared = (plain_for("nnx", tmp_path, mesh=which) for which in (None, mesh))
    results = train_plain(alone), train_plain(shared)
    assert all(len(leaf.sharding.device_set) == 4 for leaf in jax.tree.leaves(shared.state))
    assert_close(shared.state.params, alone.state.params, rtol=1e-4, atol=1e-5)
    assert results[0][1] == pytest.approx(results[1][1], rel=1e-4)


def test_a_model_of_the_other_flavour_is_an_error_at_once(tmp_path):
    config = TrainerConfig(**settings(tmp_path, model_mode="linen"))
    with pytest.raises(SettingsError, match="`model_mode` is linen.*SimpleClassifier") as error:
        Plain(config, SimpleClassifierConfig(), AdamWConfig(), EXAMPLE)
    assert error.value.problems[0][0] == "trainer.model_mode"


def test_what_could_not_be_loaded_again_is_not_stored(tmp_path):
    config = TrainerConfig(**settings(tmp_path))
    with pytest.raises(ValueError, match="`other_configs`.*note.*dataset, eval_sets, num_gpus, seed"):
        Plain(config, SimpleClassifierConfig(), AdamWConfig(), EXAMPLE, other_configs={"note": "x"})
