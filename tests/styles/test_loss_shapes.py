"""No style trains on a loss that is anything but one number (or, in `fit`, one per example)."""

from typing import Any

import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

from jax_trainer import TrainerModule
from jax_trainer.logger import LoggerConfig
from jax_trainer.styles import EvalLoop, EvalTask, TrainLoop, TrainTask, fit, train_fn

X, Y = np.ones((8, 3), np.float32), np.arange(8, dtype=np.float32)
DATA = [(X, Y)]


def pairs(predictions: Any, targets: Any) -> Any:
    """Predictions [8, 1] and targets [8] make [8, 8]."""
    return (predictions - targets) ** 2


def mean_of_pairs(predictions: Any, targets: Any) -> Any:
    return pairs(predictions, targets).mean()


class Line(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.Dense(1)(x)


def nnx_line() -> nnx.Linear:
    return nnx.Linear(3, 1, rngs=nnx.Rngs(0))


class Regression(TrainerModule):
    loss: Any

    def batch_to_input(self, batch: Any) -> Any:
        return batch[0]

    def loss_function(self, model: Any, batch: Any, train: bool = True) -> Any:
        return self.loss(model(batch[0]), batch[1]), {}

    def loss_function_linen(self, params: Any, state: Any, batch: Any, rng: Any, train: bool = True) -> Any:
        outputs, mutable = self.model_linen_apply(params, state, batch[0], rng, train=train)
        return self.loss(outputs, batch[1]), (mutable, {})


def with_trainer(model: Any, loss: Any, folder: Any) -> None:
    options = {"train_epochs": 1, "enable_progress_bar": False, "logger": LoggerConfig(log_dir=str(folder))}
    trainer = Regression(model=model, optimizer=optax.sgd(0.1), exmp_input=DATA[0], **options)
    trainer.loss = loss
    trainer.train_model(DATA)


def with_fit(model: Any, loss: Any, folder: Any) -> None:
    def loss_fn(logits: Any, labels: Any) -> Any:
        return loss(logits, labels)

    options = {"num_epochs": 1, "log_dir": str(folder), "tensorboard": False, "progress": False}
    fit(model, DATA, loss_fn=loss_fn, optimizer=optax.sgd(0.1), **options)


def with_train_fn(model: Any, loss: Any, folder: Any) -> None:
    def train_step(model: Any, rng_key: Any, batch: Any) -> Any:
        return nnx.value_and_grad(lambda model: loss(model(batch[0]), batch[1]))(model)

    def val_step(model: Any, rng_key: Any, batch: Any) -> Any:
        return 0.0

    train = train_fn(fns=(train_step, val_step), n_steps=1, eval_every_n_steps=1, n_eval_batches=1, progress=False)
    train(nnx.Rngs(0)(), model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param), DATA, DATA)


def with_loop(model: Any, loss: Any, folder: Any) -> Any:
    task = TrainTask(apply=model.apply, optimizer=optax.sgd(0.1), loss=loss, data=DATA)
    return next(iter(TrainLoop(model.init, task, n_steps=1, stdout=False)))


def with_eval_loop(model: Any, loss: Any, folder: Any) -> None:
    task = TrainTask(apply=model.apply, optimizer=optax.sgd(0.1), loss=lambda o, y: o.mean(), data=DATA)
    checkpoint = next(iter(TrainLoop(model.init, task, n_steps=1, stdout=False)))
    EvalLoop(task=EvalTask(apply=model.apply, metrics={"error": loss}, data=DATA))(checkpoint)


SEE_PREDICTIONS = {
    "fit, linen": (with_fit, Line),
    "fit, nnx": (with_fit, nnx_line),
    "TrainLoop": (with_loop, Line),
}
STYLES = {
    "TrainerModule, linen": (with_trainer, Line),
    "TrainerModule, nnx": (with_trainer, nnx_line),
    "train_fn": (with_train_fn, nnx_line),
    **SEE_PREDICTIONS,
}


def test_a_loss_of_all_pairs_is_refused_with_its_shape_those_behind_it_and_the_likely_cause(tmp_path_factory, subtests):
    for style in STYLES:
        tmp_path = tmp_path_factory.mktemp("case")
        with subtests.test(style=style):
            train, model = STYLES[style]
            with pytest.raises(ValueError, match=r"\(8, 8\)(?s:.*)\(8,\)(?s:.*)[Ss]queeze the last axis") as raised:
                train(model(), pairs, tmp_path)
            if style in SEE_PREDICTIONS:
                assert "predictions (8, 1)" in str(raised.value)
                assert "targets (8,)" in str(raised.value)
            assert not list(tmp_path.iterdir())


def test_a_mean_over_all_pairs_of_predictions_and_targets_is_refused(tmp_path_factory, subtests):
    for style in [*SEE_PREDICTIONS, "EvalLoop"]:
        for case_2, loss in zip(
            ["", "the other way round"], [mean_of_pairs, lambda o, y: mean_of_pairs(y, o)], strict=True
        ):
            tmp_path = tmp_path_factory.mktemp("case")
            with subtests.test(style=style, case_2=case_2):
                train, model = {**SEE_PREDICTIONS, "EvalLoop": (with_eval_loop, Line)}[style]
                with pytest.raises(
                    ValueError, match=r"predictions \(8, 1\)(?s:.*)targets \(8,\)(?s:.*)[Ss]queeze the last axis"
                ):
                    train(model(), loss, tmp_path)


@pytest.mark.parametrize(
    "loss",
    [
        pytest.param(lambda o, y: ((o.squeeze(-1) - y) ** 2).mean(), id="squeezed"),
        pytest.param(lambda o, y: ((o[:, 0] - y) ** 2).mean(), id="column", marks=pytest.mark.slow),
        pytest.param(lambda o, y: ((o - y[:, None]) ** 2).mean(), id="widened", marks=pytest.mark.slow),
        pytest.param(lambda o, y: (o**2).mean(), id="without targets", marks=pytest.mark.slow),
        pytest.param(
            lambda o, y: ((o - o.T) ** 2).mean() + ((o - y.reshape(o.shape)) ** 2).mean(), id="pairs of predictions"
        ),
    ],
)
def test_a_loss_that_compares_each_prediction_with_its_own_target_is_trained(loss, tmp_path):
    assert with_loop(Line(), loss, tmp_path).step == 1


def test_targets_that_are_too_wide_are_to_be_squeezed_themselves(tmp_path):
    class Flat(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            return nn.Dense(1)(x)[:, 0]

    with pytest.raises(ValueError, match=r"Targets \[8, 1\].*predictions \[8\].*`targets.squeeze\(-1\)`"):
        fit(Flat(), [(X, Y[:, None])], loss_fn=mean_of_pairs, optimizer=optax.sgd(0.1), log_dir=str(tmp_path))
