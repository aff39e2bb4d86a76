"""The signatures of losses and evaluation steps are inspected before training."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

from jax_trainer import SupervisedBatch, fit
from jax_trainer.styles.fit_program import LossForm, checked_eval_step, evaluated_by, loss_of

KEY = jax.random.key(0)


class Identity:
    """A handle of a model whose outputs are its inputs."""

    loss_argument, mode = "model", "nnx"

    def apply(self, model, inputs, train):
        return inputs

    def loss_subject(self, model):
        return model


def called(loss: Any, outputs: Any, targets: Any, *, train: bool = True, step: Any = 0) -> Any:
    """What `fit` makes of a loss, for these outputs and targets."""
    handle: Any = Identity()
    return loss_of(loss, handle, None)(None, (outputs, targets), train, KEY, step)


def on_outputs(logits, labels): ...
def on_model(model, data): ...
def on_params(params, batch): ...
def on_batch(anything, batch): ...
def with_train(logits, labels, train): ...
def with_rng(logits, labels, *, rng=None): ...
def with_others(logits, labels, axis=-1, where=None): ...
def with_defaults(logits, labels=None): ...
def anything(*args, **kwargs): ...


def test_the_form_of_a_loss_is_inferred_from_its_parameters(subtests):
    for function, takes_batch, optional in [
        (on_outputs, False, ()),
        (jax.jit(on_outputs), False, ()),
        (on_model, True, ()),
        (on_params, True, ()),
        (jax.jit(on_batch), True, ()),
        (with_train, False, ("train",)),
        (with_rng, False, ("rng",)),
        (with_others, False, ()),
        (with_defaults, False, ()),
        (anything, False, ()),
        (functools.partial(with_train, train=True), False, ("train",)),
        (optax.softmax_cross_entropy_with_integer_labels, False, ()),
        (optax.squared_error, False, ()),
    ]:
        with subtests.test(function=function, takes_batch=takes_batch, optional=optional):
            loss = LossForm.of(function)
            assert (loss.takes_batch, loss.optional) == (takes_batch, optional)


def nothing(): ...
def one(logits): ...
def three(logits, labels, weights): ...
def by_epoch(logits, labels, epoch): ...


def test_a_loss_that_cannot_be_called_is_an_error(subtests):
    for function, message in [
        (nothing, r"`loss_fn` has no parameters.*loss_fn\(logits, labels\)"),
        (jax.jit(nothing), "has no parameters"),
        (one, "takes only `logits`"),
        (three, "`weights`.*`rng`, `step`, `train`"),
        (by_epoch, "`loss_fn`.*`epoch`"),
        (0.5, "`loss_fn` must be a function, got a float"),
    ]:
        with subtests.test(function=function, message=message), pytest.raises(TypeError, match=message):
            LossForm.of(function)


def test_an_epoch_parameter_keeps_its_default_with_a_warning(caplog):
    assert called(lambda logits, labels, epoch=None: 0.0 if epoch is None else 1.0, 0, 0)[0] == 0
    assert "parameter `epoch`" in caplog.text


def test_a_loss_receives_exactly_its_parameters():
    seen = {}

    def loss(logits, labels, *, train, rng, step):
        seen.update(train=train, rng=rng, step=step)
        return 1.0

    called(loss, 0, 0, train=False, step=7)
    assert (seen["train"], seen["step"]) == (False, 7)
    assert np.array_equal(jax.random.key_data(seen["rng"]), jax.random.key_data(KEY))


def test_a_loss_per_example_is_averaged_with_all_that_is_reported_so():
    each = jnp.array([1.0, 2.0, 6.0])
    value, reported = called(lambda a, b: (each, {"loss": each, "one": 5.0}), each, each)
    assert (value, reported) == (3.0, {"loss": 3.0, "one": 5.0})


def test_a_loss_that_returns_something_else_is_an_error(subtests):
    for returned in [(1.0, {}, None), {"loss": 1.0}, None, (1.0, 2.0), [1.0]]:
        with subtests.test(returned=returned), pytest.raises(TypeError, match="loss_fn.*dict"):
            called(lambda a, b, returned=returned: returned, 0, 0)


def test_an_evaluation_gives_a_number_or_several_by_name():
    assert evaluated_by(jnp.float32(0.5)) == {"accuracy": 0.5}
    assert evaluated_by(jnp.array([True, False])) == {"accuracy": 0.5}
    assert evaluated_by({"f1": 1.0}) == {"f1": 1.0}
    with pytest.raises(TypeError, match="a tuple of float, float"):
        evaluated_by((1.0, 2.0))


def test_an_evaluation_that_cannot_be_called_is_an_error(subtests):
    for function, message in [(nothing, "has no parameters"), (three, "`eval_step`.*`weights`"), (3, "got a int")]:
        with subtests.test(function=function, message=message), pytest.raises(TypeError, match=message):
            checked_eval_step(function)


def test_a_loss_that_is_neither_one_number_nor_one_per_example_is_refused(subtests):
    for shape in [(3, 3), (3, 1), (4,), (3, 2)]:
        with subtests.test(shape=shape), pytest.raises(ValueError, match=re.escape(str(shape))):
            called(lambda a, b, shape=shape: jnp.ones(shape), jnp.ones((3, 5)), jnp.ones(3))


MASKED = SupervisedBatch.of(np.zeros((4, 2), np.float32), np.array([0, 0, 1, 1]), mask=np.array([1, 1, 0, 0]))


def fit_masked(loss_fn: Any, folder: Any, flavour: str) -> Any:
    model = nn.Dense(2) if flavour == "linen" else nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    options = {"num_epochs": 1, "log_dir": folder, "tensorboard": False, "progress": False, "save": False}
    return fit(model, [MASKED], [MASKED], loss_fn=loss_fn, optimizer=optax.sgd(0.0), **options).history[1]


@pytest.mark.parametrize("flavour", ["linen", pytest.param("nnx", marks=pytest.mark.slow)])
def test_a_loss_per_example_counts_only_what_the_mask_of_a_batch_marks(flavour, tmp_path):
    def loss_fn(logits, labels):
        return logits.sum(-1) + labels

    found = fit_masked(loss_fn, tmp_path, flavour)
    assert (found["train/loss"], found["val/loss"]) == (0.0, 0.0)  # 0.5 with the others


def test_a_mask_that_a_loss_of_one_number_cannot_see_is_refused(tmp_path_factory, subtests):
    for flavour in ["linen", "nnx"]:
        tmp_path = tmp_path_factory.mktemp("case")
        with subtests.test(flavour=flavour):

            def loss_fn(logits, labels):
                return (logits.sum(-1) + labels).mean()

            with pytest.raises(ValueError, match=r"`mask` of shape \(4,\).*one loss per example"):
                fit_masked(loss_fn, tmp_path, flavour)


def keras_order(y_true, y_pred): ...
def labels_first(labels, logits): ...


def test_a_loss_whose_parameters_are_in_the_opposite_order_is_refused(subtests):
    for function in [keras_order, labels_first]:
        with (
            subtests.test(function=function),
            pytest.raises(TypeError, match=r"loss_fn\((y_true, y_pred|labels, logits)\).*loss_fn\((y_pred|logits), "),
        ):
            LossForm.of(function)
