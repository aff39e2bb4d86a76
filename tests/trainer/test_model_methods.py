"""Prediction, evaluation and tables of a model, and the options of a step."""

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

from jax_trainer.datasets import ArrayLoader, DataError
from jax_trainer.testing import assert_close, assert_same_bits, numbered_loader
from jax_trainer.trainer import TrainerConfig
from tests.trainer.trainer_runs import (
    EXAMPLE,
    NUMBERS,
    SGD,
    STEPS,
    Plain,
    digits,
    first_examples,
    plain_for,
    rows,
    settings,
    train_plain,
    trainer_for,
    values,
)


def odd_examples() -> ArrayLoader:
    """Batches of 32, 32 and 3."""
    return ArrayLoader({name: array[:67] for name, array in NUMBERS.items()}, 32)


@pytest.mark.parametrize("flavour", [pytest.param("linen", marks=pytest.mark.slow), "nnx"])
def test_predictions_equal_the_outputs_of_the_bound_model(flavour, tmp_path):
    trainer = plain_for(flavour, tmp_path, hidden=True)
    outputs = trainer.predict(odd_examples())
    assert outputs.shape == (67, 4) and isinstance(outputs, np.ndarray)
    bound = trainer.bind_model()
    np.testing.assert_allclose(outputs, jax.jit(lambda x: bound(x))(NUMBERS["x"][:67]), rtol=1e-5, atol=1e-6)
    assert_same_bits(trainer.predict([EXAMPLE]), outputs[:32])
    assert len(trainer.predict(odd_examples(), max_batches=2)) == 64


class TakesStreams(nnx.Module):
    """Its call requires random streams, as that of Flax's MNIST example."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.dropout, self.out = nnx.Dropout(0.5), nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, x: jax.Array, rngs: nnx.Rngs) -> jax.Array:
        return self.out(self.dropout(x, rngs=rngs))


class PassesStreams(Plain):
    """Passes the random streams to its model."""

    def loss_function(  # pyright: ignore[reportIncompatibleMethodOverride]  # called by parameter name
        self, model: Any, batch: Any, train: bool, rng: jax.Array
    ) -> Any:
        return self._evaluate(self.model_apply(model, batch["x"], nnx.Rngs(rng), train=train), batch)


def test_a_model_whose_call_requires_random_streams_predicts(tmp_path):
    options = {**settings(tmp_path, train_epochs=1), "optimizer_config": SGD, "exmp_input": EXAMPLE}
    trainer: Any = PassesStreams(model=TakesStreams, **options)
    accuracy = train_plain(trainer)[1]["val/acc"]
    outputs = trainer.predict(first_examples(64))
    assert (outputs.argmax(-1) == NUMBERS["y"][:64]).mean() == pytest.approx(accuracy)
    np.testing.assert_allclose(outputs, trainer.bind_model()(NUMBERS["x"][:64], nnx.Rngs(0)), rtol=1e-5, atol=1e-6)
    assert "TakesStreams" in trainer.tabulate()


def test_predictions_see_what_the_dataset_does_to_images(tmp_path):
    trainer = trainer_for("linen", tmp_path)
    loader = digits().test_loader
    guessed = trainer.predict(loader).argmax(-1)
    labels = np.concatenate([batch.target for batch in loader])
    assert (guessed == labels).mean() == pytest.approx(trainer.test_model(loader)["test/acc"])


@pytest.mark.parametrize("flavour", ["linen", pytest.param("nnx", marks=pytest.mark.slow)])
def test_a_bound_model_takes_images_as_the_dataset_gives_them(flavour, tmp_path):
    trainer, test = trainer_for(flavour, tmp_path), digits().test
    bound, expected = trainer.bind_model(), trainer.test_model(digits().test_loader)["test/acc"]
    assert test.input.dtype == np.uint8
    found = jax.jit(bound)(test.input)
    assert (np.asarray(found).argmax(-1) == test.target).mean() == pytest.approx(expected)
    np.testing.assert_allclose(bound(test.input), found, rtol=1e-5, atol=1e-5)
    seen = digits().transforms.apply(jax.random.key(0), test, train=False).input
    np.testing.assert_allclose(trainer.bind_model(transforms=False)(seen), found, rtol=1e-5, atol=1e-5)
    with pytest.raises(AttributeError, match=r"'out'.*transforms=False"):
        bound.out  # noqa: B018


def test_a_model_whose_inputs_are_computed_cannot_take_them_as_the_dataset_gives_them(tmp_path):
    class Scaled(type(trainer_for("linen", tmp_path))):
        """Computes its input."""

        def batch_to_input(self, batch):
            return batch.input * 2

    trainer = trainer_for("linen", tmp_path)
    trainer.__class__ = Scaled
    with pytest.raises(ValueError, match=r"`batch_to_input` computes.*transforms=False"):
        trainer.bind_model()(digits().test.input)


@pytest.mark.parametrize("flavour", [pytest.param("linen", marks=pytest.mark.slow), "nnx"])
def test_evaluated_bound_and_predicting_weights_are_the_same(flavour, tmp_path):
    trainer = plain_for(flavour, tmp_path, ema=0.9)
    train_plain(trainer)
    bound = trainer.bind_model()(EXAMPLE["x"])
    np.testing.assert_allclose(trainer.predict([EXAMPLE]), bound, rtol=1e-5, atol=1e-6)
    trainer.state = trainer.state.replace(params=jax.tree.map(jnp.zeros_like, trainer.state.params))
    np.testing.assert_allclose(trainer.predict([EXAMPLE]), bound, rtol=1e-5, atol=1e-6)


def test_a_bound_model_is_apart_from_training(tmp_path):
    trainer = plain_for("nnx", tmp_path)
    bound = trainer.bind_model()
    before = np.array(bound.out.kernel[...])
    train_plain(trainer)
    np.testing.assert_array_equal(bound.out.kernel[...], before)


@pytest.mark.parametrize("flavour", ["linen", pytest.param("nnx", marks=pytest.mark.slow)])
def test_tables_show_modules_and_parameters(flavour, tmp_path, capsys):
    trainer = plain_for(flavour, tmp_path)
    trainer.print_tabulate()
    shown = capsys.readouterr().out
    assert "out" in shown and "float32[" in shown
    params = trainer.tabulate_params()
    count = sum(leaf.size for leaf in jax.tree.leaves(trainer.state.params))
    assert "out.kernel" in params and f"{count:,}" in params


def test_tables_of_a_model_whose_images_are_normalised(tmp_path):
    assert "out" in trainer_for("linen", tmp_path).tabulate()


@pytest.mark.parametrize("flavour", [pytest.param("linen", marks=pytest.mark.slow), "nnx"])
def test_statistics_of_parameters_and_gradients_are_reported(flavour, tmp_path):
    changes: dict[str, Any] = {"log_param_stats": True, "log_grad_stats": True, "grad_log_modes": ("max",)}
    trainer = plain_for(flavour, tmp_path, check_val_every_n_epoch=0, max_steps=2, **changes)
    train_plain(trainer)
    last = [row for row in rows(trainer) if "param/out.kernel_mean_step" in row][-1]
    kernel = np.asarray(trainer.state.params["out"]["kernel"])
    plain = plain_for(flavour, tmp_path, check_val_every_n_epoch=0, max_steps=2)
    train_plain(plain)
    assert_same_bits(trainer.state, plain.state)
    assert {name for name in last if name.startswith("param/out.kernel")} == {
        f"param/out.kernel_{mode}_step" for mode in ("min", "max", "mean", "std")
    }
    assert {name for name in last if name.startswith("grad/out.kernel")} == {"grad/out.kernel_max_step"}
    single = plain_for(flavour, tmp_path, check_val_every_n_epoch=0, max_steps=1, **changes)
    train_plain(single)
    (row,) = [row for row in rows(single) if "param/out.kernel_mean_epoch" in row]
    kernel = np.asarray(single.state.params["out"]["kernel"], np.float64)
    assert row["param/out.kernel_mean_epoch"] == pytest.approx(kernel.mean(), rel=1e-4)
    assert row["param/out.kernel_std_epoch"] == pytest.approx(kernel.std(), rel=1e-4)


class SowingLinen(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Dense(4)(x)
        self.sow("intermediates", "hidden", x)
        return x


class SowingNnx(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.out = nnx.Linear(EXAMPLE["x"].shape[-1], 4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.out(x)
        self.sow(nnx.Intermediate, "hidden", x)
        return x


@pytest.mark.parametrize(
    "model", [pytest.param(SowingLinen(), id="linen", marks=pytest.mark.slow), pytest.param(SowingNnx, id="nnx")]
)
def test_what_a_model_sows_is_reported(model, tmp_path):
    def trained(**changes: Any) -> Any:
        config = TrainerConfig(**settings(tmp_path, train_epochs=1, check_val_every_n_epoch=0, **changes))
        trainer = Plain(config, None, SGD, EXAMPLE, model=model)
        train_plain(trainer)
        return trainer

    shown = trained(log_intermediates=True, interm_log_modes=("mean", "std"))
    names = {name for row in rows(shown) for name in row if name.startswith("intermediate/")}
    assert names == {f"intermediate/hidden_{mode}_{when}" for mode in ("mean", "std") for when in ("step", "epoch")}
    assert_same_bits(shown.state, trained().state)


def test_intermediates_of_a_model_that_sows_none_are_a_warning(tmp_path, caplog):
    train_plain(plain_for("nnx", tmp_path, log_intermediates=True))
    assert "`log_intermediates` is on" in caplog.text


def test_evaluations_draw_from_their_own_seed(tmp_path):
    class Drawing(Plain):
        """Reports what evaluation draws."""

        def loss_function_linen(self, params: Any, state: Any, batch: Any, rng: jax.Array, train: bool = True) -> Any:
            loss, (mutable, metrics) = super().loss_function_linen(params, state, batch, rng, train)
            return loss, (mutable, {**metrics, "drawn": jax.random.uniform(rng)})

    def drawn(**changes: Any) -> float:
        return plain_for("linen", tmp_path, kind=Drawing, **changes).eval_model(first_examples(64))["val/drawn"]

    assert drawn(seed=1) == drawn(seed=2) != drawn(seed=1, seed_eval=44)


def test_limits_end_evaluations_early(tmp_path):
    class Counting(Plain):
        """Counts batches."""

        def loss_function(self, model: Any, batch: Any, train: bool = True) -> Any:
            loss, metrics = super().loss_function(model, batch, train)
            return loss, {**metrics, "batches": {"value": 1, "mode": "sum"}}

    trainer = plain_for("nnx", tmp_path, kind=Counting, limit_val_batches=2, limit_test_batches=1)
    results = trainer.train_model(numbered_loader(32 * STEPS), first_examples(128), first_examples(128))
    assert (results[1]["val/batches"], results["test"]["test/batches"]) == (2, 1)
    assert trainer.eval_model(first_examples(128))["val/batches"] == 2
    assert trainer.test_eval_function(first_examples(128))["val/batches"] == 1


@pytest.mark.slow
def test_a_breakpoint_in_the_loss_shows_values_in_debug_mode(tmp_path, monkeypatch):
    seen: list[Any] = []

    def stop_here() -> None:
        frame = sys._getframe(1)
        seen.append(frame.f_locals["loss"].item())  # what is traced for a compiler has no value

    class Debugged(Plain):
        """Stops in the loss."""

        def _evaluate(self, logits: jax.Array, batch: Any) -> Any:
            loss, metrics = super()._evaluate(logits, batch)
            breakpoint()
            return loss, metrics

    monkeypatch.setattr(sys, "breakpointhook", stop_here)
    debugged = plain_for("nnx", tmp_path, kind=Debugged, debug=True, max_steps=2)
    compiled = plain_for("nnx", tmp_path, max_steps=2)
    results = train_plain(debugged), train_plain(compiled)
    assert len(seen) >= 2 + 2  # steps, and batches of the validation
    assert_close(debugged.state.params, compiled.state.params, rtol=1e-4, atol=1e-6)
    assert results[0][1] == pytest.approx(results[1][1], rel=1e-5)


def test_another_dataset_brings_its_transforms(tmp_path):
    trainer, batches = trainer_for("linen", tmp_path), list(digits().val_loader)  # which carry none themselves
    before = trainer.eval_model(batches)
    trainer.set_dataset(None)
    assert trainer.eval_model(batches) != before
    trainer.set_dataset(digits())
    assert trainer.eval_model(batches) == before


def test_values_of_a_run_are_in_its_hparams(tmp_path):
    trainer = plain_for("nnx", tmp_path)
    train_plain(trainer)
    assert '"optimizer.learning_rate": 0.1' in (trainer.folder.path / "hparams.json").read_text()
    assert list(values(trainer, "val/loss"))


def test_evaluating_on_empty_data_is_an_error(tmp_path):
    trainer = plain_for("nnx", tmp_path)
    for evaluate, name in ((trainer.eval_model, "val"), (trainer.test_model, "test")):
        for empty in ([], lambda: iter(())):
            with pytest.raises(DataError, match=f"'{name}' data"):
                evaluate(empty)
