"""The methods of a `FitResult`, and the training of modules."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

from jax_trainer.adapters import function_program, nnx_program
from jax_trainer.callbacks import ModelCheckpointConfig
from jax_trainer.checkpoint.store import CheckpointStore
from jax_trainer.core.failpoints import FaultInjected
from jax_trainer.datasets import ArrayLoader, DataError
from jax_trainer.engine import Every
from jax_trainer.styles.fitting import fit
from jax_trainer.testing import assert_same_bits, cross_entropy, fault

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(19, 8)).astype(np.float32), RNG.integers(4, size=19)
loss_fn = cross_entropy


class Net(nnx.Module):
    """The smallest classifier with BatchNorm and Dropout."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm, self.dropout = nnx.BatchNorm(8, rngs=rngs), nnx.Dropout(0.1, rngs=rngs)
        self.out = nnx.Linear(8, 4, kernel_init=nnx.initializers.zeros, rngs=rngs)

    def __call__(self, x):
        return self.out(self.dropout(self.norm(x)))


def fitted(folder, model=None, **options):
    usual = {"num_epochs": 2, "batch_size": 8, "log_dir": folder, "progress": False, "tensorboard": False}
    if model is None:
        model, usual = Net(nnx.Rngs(0)), {**usual, "loss_fn": loss_fn, "optimizer": optax.sgd(0.1)}
    return fit(model, options.pop("train", (X, Y)), options.pop("test", (X, Y)), **{**usual, **options})


@pytest.fixture(scope="module")
def module():
    return Net(nnx.Rngs(0))


@pytest.fixture(scope="module")
def result(tmp_path_factory, module):
    options = {"loss_fn": loss_fn, "optimizer": optax.sgd(0.1)}
    return fitted(tmp_path_factory.mktemp("result"), module, **options)


class Explicit(nnx.Module):
    """A model that gets its random streams in every call, and has another method for what it predicts."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.dropout, self.out = nnx.Dropout(0.5), nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, x, rngs):
        return self.out(self.dropout(x, rngs=rngs))

    def classes(self, x):
        return self.out(x).argmax(-1)


def test_a_function_can_compute_the_predictions(tmp_path):
    def loss(model, batch, rng):
        return loss_fn(model(batch[0], nnx.Rngs(rng)), batch[1]).mean()

    options = {"loss_fn": loss, "optimizer": optax.sgd(0.1), "predict_fn": lambda model, x: model.classes(x)}
    result = fitted(tmp_path, Explicit(nnx.Rngs(0)), **options)
    assert result.predict(X).shape == (19,)
    assert_same_bits(result.predict(X), np.asarray(jax.jit(result.model.classes)(X)))
    without = fitted(tmp_path, Explicit(nnx.Rngs(0)), **{**options, "predict_fn": None}).predict(X)
    assert_same_bits(without.argmax(-1), np.asarray(result.predict(X), without.argmax(-1).dtype))
    of_state = lambda state, x: state.apply_fn({"params": state.params}, x).argmax(-1)
    linen = {"loss_fn": loss_fn, "optimizer": optax.sgd(0.1), "predict_fn": of_state}
    assert fitted(tmp_path, nn.Dense(4), **linen).predict(X).shape == (19,)
    with pytest.raises(TypeError, match="predict_fn.*Program"):
        fitted(tmp_path, nnx_program(Net(nnx.Rngs(0)), lambda m, b, train: 0.0, optax.sgd(0.1)), predict_fn=of_state)


def test_an_nnx_module_has_the_trained_weights_and_is_in_evaluation_mode(result, module):
    assert result.model is module
    _, params, _, rest = nnx.split(module, nnx.Param, nnx.RngState, ...)
    assert_same_bits(nnx.to_pure_dict(params), result.state.params)
    assert_same_bits(nnx.to_pure_dict(rest), result.state.model_state)
    np.testing.assert_allclose(
        nnx.jit(lambda module: module(X))(module), result.predict(X, which="last"), rtol=1e-5, atol=1e-6
    )


def test_an_nnx_module_has_the_newest_weights_however_training_ends(tmp_path):
    module = Net(nnx.Rngs(0))
    with fault("step:raise:4"), pytest.raises(FaultInjected):
        fitted(tmp_path, module, loss_fn=loss_fn, optimizer=optax.sgd(0.1))
    [folder] = (tmp_path / "fit").iterdir()
    store = CheckpointStore(folder / "checkpoints")
    assert [saved.step for saved in store.all()][-1] == 4
    arrays = nnx.to_pure_dict(nnx.state(module, nnx.Param))
    saved, _ = store.restore("latest", like=jax.eval_shape(_state_like), only=("params",), partial=True)
    assert_same_bits(arrays, saved.params)


def _state_like():
    return nnx_program(Net, lambda model, batch, train: 0.0, optax.sgd(0.1)).init(jax.random.key(0), (X, Y))


def test_predictions_are_in_the_order_of_the_data_whatever_form_it_has(result):
    expected = result.predict(X)
    assert expected.shape == (19, 4)
    for data in (ArrayLoader((X, Y), 8), [(X[:8], Y[:8]), (X[8:16], Y[8:16]), (X[16:], Y[16:])]):
        assert_same_bits(result.predict(data), expected)
    for data in (ArrayLoader({"image": X}, 8), [X]):
        np.testing.assert_allclose(result.predict(data), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(result.predict(X, batch_size=5), expected, rtol=1e-5, atol=1e-6)


def test_predictions_for_a_torch_loader_are_those_for_its_arrays(result):
    torch = pytest.importorskip("torch")
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.from_numpy(X), torch.from_numpy(Y)), 8)
    assert_same_bits(result.predict(loader), result.predict(X))


def test_predictions_take_the_inputs_of_data_that_has_targets(result, tmp_path):
    expected = result.predict(X)
    by_name = fitted(tmp_path, train={"x": X, "y": Y}, test=None)
    for x in ((X, Y), {"x": X}, {"image": X, "label": Y}):
        np.testing.assert_array_equal(result.predict(x), expected)
    for x in (X, {"x": X, "y": Y}, {"x": X}, (X, Y)):
        np.testing.assert_array_equal(by_name.predict(x), by_name.predict([{"x": X}]))


def test_a_tuple_is_several_inputs_where_the_model_has_several(tmp_path):
    class Sum(nnx.Module):
        def __init__(self):
            self.out = nnx.Linear(8, 4, rngs=nnx.Rngs(0))

        def __call__(self, a, b):
            return self.out(a - b)

    options = {"split_batch": lambda batch: ((batch["a"], batch["b"]), batch["y"]), "loss_fn": loss_fn}
    data = {"a": X, "b": 2 * X, "y": Y}
    result = fitted(tmp_path, Sum(), train=data, test=None, optimizer=optax.sgd(0.1), **options)
    np.testing.assert_array_equal(result.predict((X, 2 * X)), result.predict(data))


def test_the_best_state_is_read_from_the_disk(result):
    state = result.best_state()
    assert result.best.metrics["val/loss"] == min(metrics["val/loss"] for metrics in result.history.values())
    assert jax.tree.structure(state) == jax.tree.structure(result.state)


@pytest.mark.parametrize("mode", ["min", pytest.param("max", marks=pytest.mark.slow)])
def test_without_checkpoints_the_best_weights_are_those_that_would_have_been_saved(tmp_path, mode):
    options = {"num_epochs": 3, "metric": "loss", "mode": mode, "optimizer": optax.sgd(1.0), "loss_fn": loss_fn}
    line = lambda: nnx.Linear(8, 4, kernel_init=nnx.initializers.zeros, rngs=nnx.Rngs(0))
    saved = fitted(tmp_path / "saved", line(), **options)
    kept = fitted(tmp_path / "kept", line(), save=False, **options)
    assert not list(kept.folder.rglob("step_*")) and list(saved.folder.rglob("step_*"))
    assert kept.best == saved.best and kept.history == saved.history
    assert_same_bits(kept.best_state().params, saved.best_state().params)
    assert_same_bits(kept.state, saved.state)
    assert_same_bits(kept.best_state().params, kept.best_state().params)  # reading them does not give them away


def test_checkpoints_are_written_at_the_configured_interval(tmp_path):
    steps = {}
    for name, save in {"epochs": Every(epochs=2), "steps": Every(steps=4)}.items():
        found = fitted(tmp_path / name, save=save, num_epochs=5, test=None)
        steps[name] = CheckpointStore(found.folder / "checkpoints").steps()[-2:]
    assert steps == {"epochs": [12, 15], "steps": [12, 15]}


WRONG_SAVES = {
    "a number": ({"save": 3}, r"`save`.*3"),
    "never": ({"save": Every()}, r"`save`.*Every"),
    "resumed": ({"save": False, "resume": "auto"}, r"save=False.*`resume` is 'auto'"),
    "two say when": ({"save": False, "callbacks": [ModelCheckpointConfig()]}, r"save=False.*ModelCheckpoint"),
}


def test_a_save_that_cannot_be_done_is_refused_before_anything_is_written(tmp_path_factory, subtests):
    for options, message in WRONG_SAVES.values():
        tmp_path = tmp_path_factory.mktemp("case")
        with subtests.test(options=options, message=message):
            with pytest.raises(ValueError, match=message):
                fitted(tmp_path / "runs", **options)
            assert not (tmp_path / "runs").exists()


def test_a_figure_shows_each_metric_with_training_and_evaluation_together(result):
    figure = result.plot()
    [axes] = figure.axes
    assert axes.get_title() == "loss"
    assert {line.get_label(): list(line.get_ydata()) for line in axes.get_lines()} == {
        where: [metrics[f"{where}/loss"] for metrics in result.history.values()] for where in ("train", "val")
    }


def test_a_notebook_shows_the_figure_as_a_picture(result):
    assert result.plot()._repr_png_().startswith(b"\x89PNG")


def test_a_notebook_shows_the_result_as_curves_and_last_values(result):
    html = result._repr_html_()
    assert result.status in html and "<svg" in html and "val/loss" in html and "<script" not in html


def test_its_repr_names_status_and_folder(result):
    best = result.best
    value = f"{best.metrics['val/loss']:.6g}"
    said = (
        f"best: epoch {best.epoch}, step {best.step}: val/loss {value}, lower is better; predict uses the best weights"
    )
    assert repr(result).startswith(f"FitResult(completed after 2 epochs, {said}; folder=")
    assert result.folder.is_dir()


def test_a_program_is_fitted_too(tmp_path):
    program = function_program(
        lambda key, batch: jnp.zeros(8),
        lambda params, batch, *, rng, train: (((batch - params) ** 2).mean(), {"acc": -abs(params).sum()}),
        optax.sgd(0.1),
    )._replace(predict_step=lambda state, batch: batch - state.params)
    result = fitted(tmp_path, program, train=X, test=X, metric="acc")
    assert result.best is not None
    assert result.best.metrics["val/acc"] == max(metrics["val/acc"] for metrics in result.history.values())
    np.testing.assert_allclose(result.predict(X, which="last"), X - result.state.params, rtol=1e-6)
    np.testing.assert_allclose(result.predict(X), X - result.best_state().params, rtol=1e-6)
    assert result.model is None


def test_where_nothing_was_saved_there_is_no_best_state(result):
    lone = copy.copy(result)
    lone._kept = None
    with pytest.raises(ValueError, match="No best checkpoint"):
        lone.best_state()


def test_a_result_evaluates_other_data(result):
    last = result.evaluate((X, Y), which="last")
    assert last["test/loss"] == pytest.approx(result.history[2]["val/loss"])
    batches = [(X[:8], Y[:8]), (X[8:], Y[8:])]
    assert result.evaluate(batches)["test/loss"] == pytest.approx(result.evaluate((X, Y))["test/loss"], rel=1e-5)
    with pytest.raises(DataError, match="'test' data is empty"):
        result.evaluate([])
