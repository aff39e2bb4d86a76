"""Which weights are used after a run, in every style: by default the best validated ones.

Each run gets worse with every epoch, so that the best weights are those of the first and not the last.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from jax_trainer import ArrayLoader, TrainerModule
from jax_trainer.callbacks import LambdaCallback, ModelCheckpointConfig
from jax_trainer.logger import LoggerConfig
from jax_trainer.runs import Weights
from jax_trainer.styles import fit
from jax_trainer.testing import assert_same_bits
from tests.styles.style_runs import STEPS, LinenLine, arrays, cross_entropy, nnx_line, optimizer, train_data, val_data

X = arrays(20)[0]
EPOCHS = 2


class Ended(NamedTuple):
    """A run that has ended: asking it, and its results."""

    outputs: Callable[..., Any]  # of all validation inputs
    validated: dict[int, float]  # the loss, by epoch
    best: Any


class Worse(TrainerModule):
    """Climbs."""

    def batch_to_input(self, batch: Any) -> Any:
        return batch[0]

    def loss_function(self, model: Any, batch: Any, train: bool = True) -> Any:
        loss = cross_entropy(model(batch[0]), batch[1])
        return (-loss if train else loss), {}

    def loss_function_linen(self, params: Any, state: Any, batch: Any, rng: Any, train: bool = True) -> Any:
        logits, mutable = self.model_linen_apply(params, state, batch[0], rng, train=train)
        loss = cross_entropy(logits, batch[1])
        return (-loss if train else loss), (mutable, {})


def worse(logits: jax.Array, labels: jax.Array, train: bool) -> jax.Array:
    loss = cross_entropy(logits, labels)
    return -loss if train else loss


def trainer_in(folder: Path, flavour: str = "nnx", *, saves: bool = True, callbacks: Any = ()) -> Worse:
    return Worse(
        model=LinenLine() if flavour == "linen" else nnx_line(),
        optimizer=optimizer(),
        exmp_input=next(iter(train_data())),
        train_epochs=EPOCHS,
        enable_progress_bar=False,
        logger=LoggerConfig(log_dir=str(folder)),
        callbacks=[*([ModelCheckpointConfig()] if saves else []), *callbacks],
    )


def by_trainer(folder: Path, flavour: str, *, saves: bool, validates: bool = True) -> Ended:
    trainer = trainer_in(folder, flavour, saves=saves)
    results = trainer.train_model(train_data(), val_data() if validates else None)
    return Ended(
        lambda **which: trainer.predict(val_data(), **which),
        {epoch: results[epoch]["val/loss"] for epoch in results if isinstance(epoch, int) and validates},
        results.best,
    )


def by_fit(folder: Path, flavour: str, *, validates: bool = True) -> Ended:
    result = fit(
        LinenLine() if flavour == "linen" else nnx_line(),
        train_data(),
        val_data() if validates else None,
        loss_fn=worse,
        optimizer=optimizer(),
        num_epochs=EPOCHS,
        log_dir=folder,
        tensorboard=False,
        progress=False,
    )
    validated = {epoch: metrics["val/loss"] for epoch, metrics in result.history.items() if "val/loss" in metrics}
    return Ended(lambda **which: result.predict(X, batch_size=16, **which), validated, result.best)


STYLES: dict[str, Callable[..., Ended]] = {
    "TrainerModule, linen": lambda folder, **more: by_trainer(folder, "linen", saves=True, **more),
    "TrainerModule, nnx": lambda folder, **more: by_trainer(folder, "nnx", saves=True, **more),
    "TrainerModule without ModelCheckpoint": lambda folder, **more: by_trainer(folder, "nnx", saves=False, **more),
    "fit, linen": lambda folder, **more: by_fit(folder, "linen", **more),
    "fit, nnx": lambda folder, **more: by_fit(folder, "nnx", **more),
}
EVERY = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name == "fit, nnx" else ()) for name in STYLES]
)
pytestmark = pytest.mark.filterwarnings("ignore:This run has no validation")


def loss_of(outputs: np.ndarray) -> float:
    return float(jax.jit(cross_entropy)(outputs, arrays(20)[1]))


@EVERY
def test_predictions_use_the_best_weights_by_default(name, tmp_path):
    ended = STYLES[name](tmp_path)
    assert ended.validated[1] < ended.validated[EPOCHS]
    assert (ended.best.epoch, ended.best.step, ended.best.mode) == (1, STEPS, "min")
    assert loss_of(ended.outputs()) == pytest.approx(ended.validated[1], rel=1e-5)
    assert loss_of(ended.outputs(which="last")) == pytest.approx(ended.validated[EPOCHS], rel=1e-5)
    assert_same_bits(ended.outputs(which="best"), ended.outputs())
    assert_same_bits(ended.outputs(which="latest"), ended.outputs(which="last"))
    with pytest.raises(ValueError, match="`which`.*'best'.*'latest'.*'newest'"):
        ended.outputs(which="newest")


@EVERY
def test_without_validation_predictions_are_those_of_the_last_weights(name, tmp_path):
    ended = STYLES[name](tmp_path, validates=False)
    assert_same_bits(ended.outputs(), ended.outputs(which="last"))


def test_of_a_trainer_everything_that_asks_weights_uses_the_same(tmp_path):
    trainer = trainer_in(tmp_path)
    results = trainer.train_model(train_data(), val_data())
    cases: list[tuple[Weights | None, int]] = [(None, 1), ("best", 1), ("last", EPOCHS)]
    for which, epoch in cases:
        assert trainer.eval_model(val_data(), which=which)["val/loss"] == results[epoch]["val/loss"]
        assert trainer.test_model(val_data(), which=which)["test/loss"] == results[epoch]["val/loss"]
        found = trainer.bind_model(which=which)(X)
        np.testing.assert_allclose(found, trainer.predict([(X, arrays(20)[1])], which=which), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(trainer.model(X), trainer.bind_model(which="last")(X))


def test_weights_that_were_set_or_loaded_are_those_that_are_used(tmp_path):
    trainer = trainer_in(tmp_path)
    results = trainer.train_model(train_data(), val_data())
    last = trainer.state
    trainer.load_model(which="latest")
    assert trainer.eval_model(val_data())["val/loss"] == results[EPOCHS]["val/loss"]
    trainer.load_model()
    assert trainer.eval_model(val_data())["val/loss"] == results[1]["val/loss"]
    trainer.state = last
    assert trainer.eval_model(val_data())["val/loss"] == results[EPOCHS]["val/loss"]
    with pytest.raises(ValueError, match="no best weights"):
        trainer.predict(val_data(), which="best")


def test_without_a_number_to_compare_by_the_last_weights_are_used(tmp_path):
    trainer = trainer_in(tmp_path, saves=False)
    assert trainer.compared_by({"val/acc": np.ones(3), "val/loss": 1.0}) == ("val/loss", "min")
    trainer.compared_by = lambda metrics: None  # type: ignore[method-assign]  # as if none were reported
    results = trainer.train_model(train_data(), val_data())
    assert results.best is None
    assert trainer.eval_model(val_data())["val/loss"] == results[EPOCHS]["val/loss"]


def test_weights_whose_validation_is_nan_are_not_the_best(tmp_path):
    trainer = trainer_in(tmp_path, "linen", saves=False)
    results = trainer.train_model(train_data(), ArrayLoader((np.full_like(X, np.nan), arrays(20)[1]), 16))
    assert results.best is None
    assert_same_bits(trainer.predict(val_data()), trainer.predict(val_data(), which="last"))


def test_during_a_run_the_present_weights_are_used(tmp_path):
    found: list[float] = []

    def ask(eval_metrics: Any, epoch: int) -> None:
        found.append(trainer.eval_model(val_data(), "again")["again/loss"])

    trainer = trainer_in(tmp_path, callbacks=[LambdaCallback(on_validation_epoch_end=ask)])
    for _ in range(2):  # the second one begins where there are best weights
        results = trainer.train_model(train_data(), val_data())
        assert found == [results[epoch]["val/loss"] for epoch in range(1, EPOCHS + 1)]
        found.clear()
