"""Class weights and sample weights: as in Keras, `Σ wᵢ lossᵢ / n` in training; metrics and evaluations have none."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import yaml
from flax import nnx

from jax_trainer import ArrayLoader, SupervisedBatch, fit
from jax_trainer.datasets import DataError
from jax_trainer.metrics import Accuracy

RNG = np.random.default_rng(0)
X = RNG.normal(size=(24, 4)).astype(np.float32)
Y = np.arange(24) % 3
W = RNG.uniform(0, 2, 24).astype(np.float32)
TABLE = np.array([1.0, 5.0, 0.25], np.float32)
losses = optax.softmax_cross_entropy_with_integer_labels


def linear(outputs: int = 3) -> nnx.Module:
    return nnx.Linear(4, outputs, rngs=nnx.Rngs(0))


def fitted(folder: Any, data: Any = (X, Y), test_ds: Any = None, **changes: Any) -> Any:
    options = {"loss_fn": losses, "model": linear(), "optimizer": optax.sgd(0.0), "batch_size": 10, "num_epochs": 1}
    options |= {"progress": False, "tensorboard": False, "log_dir": folder}
    return fit(train_ds=data, test_ds=test_ds, **options | changes)


def expected(weights: Any) -> float:
    """Keras' "sum_over_batch_size" of the untrained model, by hand."""
    logits = np.asarray(linear()(X), np.float64)  # type: ignore[operator]
    each = np.log(np.exp(logits).sum(-1)) - logits[np.arange(24), Y]
    return float((weights * each).sum() / 24)


ONE_HOT = np.eye(3, dtype=np.float32)[Y]
CASES = {
    "classes by index": ({"class_weight": {0: 1.0, 1: 5.0, 2: 0.25}}, TABLE[Y]),
    "classes that are left out": ({"class_weight": {1: 5.0}}, np.array([1, 5, 1])[Y]),
    "a list": ({"class_weight": [1.0, 5.0, 0.25]}, TABLE[Y]),
    "an array": ({"class_weight": TABLE}, TABLE[Y]),
    "one-hot labels": (
        {"class_weight": TABLE, "data": (X, ONE_HOT), "loss_fn": optax.softmax_cross_entropy},
        TABLE[Y],
    ),
    "a loader": ({"class_weight": TABLE, "data": ArrayLoader((X, Y), 8)}, TABLE[Y]),
    "examples": ({"sample_weight": W}, W),
    "examples of a dict": ({"sample_weight": W.tolist(), "data": {"x": X, "y": Y}}, W),
    "both": ({"sample_weight": W, "class_weight": TABLE}, W * TABLE[Y]),
    "micro-batches": ({"sample_weight": W, "accumulate": 2}, W),
    "resident arrays": ({"sample_weight": W, "resident": True, "steps_per_call": "epoch"}, W),
}


def test_the_training_loss_is_the_sum_of_weighted_losses_over_the_number_of_examples(tmp_path_factory, subtests):
    for name in CASES:
        tmp_path = tmp_path_factory.mktemp("case")
        with subtests.test(name=name):
            changes, weights = CASES[name]
            result = fitted(tmp_path, **{"test_ds": (X, Y) if "loss_fn" not in changes else None} | changes)
            np.testing.assert_allclose(result.history[1]["train/loss"], expected(weights), rtol=1e-5)
            if "loss_fn" not in changes:
                np.testing.assert_allclose(result.history[1]["val/loss"], expected(np.ones(24)), rtol=1e-5)


def test_weights_of_1_give_the_bits_of_no_weights(tmp_path_factory, subtests):
    for ones in [{"class_weight": [1.0] * 3}, {"sample_weight": np.ones(24)}]:
        tmp_path = tmp_path_factory.mktemp("case")
        with subtests.test(ones=ones):
            train = {"optimizer": optax.adam(1e-2), "num_epochs": 3}
            plain, weighted = fitted(tmp_path, **train), fitted(tmp_path, **train | ones | {"model": linear()})
            assert plain.history == weighted.history
            for a, b in zip(*(jax.tree.leaves(one.state.params) for one in (plain, weighted)), strict=True):
                np.testing.assert_array_equal(a, b)


def test_metrics_see_all_targets_without_weights(tmp_path_factory, subtests):
    for weights in [{"class_weight": {2: 0.0}}, {"sample_weight": (Y != 2) * 1.0}]:
        tmp_path = tmp_path_factory.mktemp("case")
        with subtests.test(weights=weights):
            result = fitted(tmp_path, test_ds=(X, Y), metrics={"acc": Accuracy()}, **weights)
            accuracy = (np.asarray(linear()(X)).argmax(-1) == Y).mean()
            assert result.history[1]["train/acc"] == result.history[1]["val/acc"] == pytest.approx(accuracy)


def test_binary_targets_of_one_output_have_two_classes(tmp_path_factory, subtests):
    for dtype in [np.float32, np.int32, bool]:
        tmp_path = tmp_path_factory.mktemp("case")
        with subtests.test(dtype=dtype):
            y, model = (Y == 1).astype(dtype), linear(1)
            each = np.asarray(optax.sigmoid_binary_cross_entropy(model(X)[:, 0], y))  # type: ignore[operator]
            loss = lambda logits, labels: optax.sigmoid_binary_cross_entropy(logits, labels.astype(jnp.float32)).mean(
                -1
            )
            result = fitted(tmp_path, (X, y[:, None]), model=model, loss_fn=loss, class_weight={1: 5.0})
            np.testing.assert_allclose(result.history[1]["train/loss"], (np.where(y, 5, 1) * each).mean(), rtol=1e-5)


def test_labels_that_the_loss_ignores_have_no_class(tmp_path):
    y = np.where(Y == 2, -1, Y)
    loss = lambda logits, labels: jnp.where(labels < 0, 1.0, losses(logits, jnp.maximum(labels, 0)))
    plain, weighted = (fitted(tmp_path, (X, y), loss_fn=loss, class_weight=[1.0, 1.0, w]) for w in (1.0, 9.0))
    assert plain.history == weighted.history


def test_a_run_with_other_class_weights_is_another_run(tmp_path):
    run = fitted(tmp_path, class_weight={1: 5.0})
    assert yaml.safe_load((run.folder / "config.yaml").read_text())["class_weight"] == {"1": 5.0}
    assert fitted(tmp_path, class_weight={1: 5.0}, resume="auto").folder == run.folder
    assert fitted(tmp_path, class_weight={1: 4.0}, resume="auto").folder != run.folder


def own_loss(model: Any, batch: Any) -> Any:
    return losses(model(batch[0]), batch[1]).mean()


REFUSED = {
    "a mean": ({"class_weight": TABLE, "loss_fn": lambda o, t: losses(o, t).mean()}, r"scalar.*`\.mean\(\)`"),
    "an own loss": ({"class_weight": TABLE, "loss_fn": own_loss}, r"class_weight.*loss_fn\(model, batch\)"),
    "an own loss of examples": ({"sample_weight": W, "loss_fn": own_loss}, r"sample_weight.*loss_fn\(model, batch\)"),
    "a class too many": ({"class_weight": {0: 1.0, 3: 2.0}}, "3: 2.0.*3 classes.*0 to 2"),
    "a name of a class": ({"class_weight": {"cat": 2.0}}, "cat.*3 classes.*0 to 2"),
    "a weight too few": ({"class_weight": [1.0, 2.0]}, r"\[1.0, 2.0\].*3 classes"),
    "a loader": ({"sample_weight": W, "data": ArrayLoader((X, Y), 8)}, "sample_weight.*ArrayLoader.*mask=weights"),
    "a batch class": ({"sample_weight": W, "data": SupervisedBatch.of(X, Y)}, "sample_weight.*SupervisedBatch"),
    "another number": ({"sample_weight": W[:5]}, r"sample_weight.*\(5,\).*\(24,\)"),
    "weights by output": ({"sample_weight": np.ones((24, 3))}, r"sample_weight.*\(24, 3\).*\(24,\)"),
}


def test_weights_that_cannot_be_applied_are_refused_before_a_folder_is_made(tmp_path_factory, subtests):
    for name in REFUSED:
        tmp_path = tmp_path_factory.mktemp("case")
        with subtests.test(name=name):
            changes, message = REFUSED[name]
            with pytest.raises((DataError, TypeError, ValueError), match=message):
                fitted(tmp_path, **changes)
            assert not list(tmp_path.iterdir())
