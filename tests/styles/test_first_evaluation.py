"""Mistakes in validation and test data show before the first step, in every style, and no batch is lost by looking."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx

from jax_trainer import TrainerModule
from jax_trainer.datasets import ArrayLoader, DataError
from jax_trainer.logger import LoggerConfig
from jax_trainer.styles import fit, train_fn

Batch = dict[str, Any]


def batch(width: int = 4, value: float = 1.0) -> Batch:
    return {"x": np.full((8, width), value, np.float32), "y": np.zeros(8, np.int32)}


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.out = nnx.Linear(4, 3, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.out(x)


STEPS: list[int] = []


def loss_of(model: Any, batch: Any) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"]).mean()


class Watched:
    """Training data that remembers being trained on: its first batch is an example, its second is not."""

    def __iter__(self) -> Any:
        yield batch()
        STEPS.append(1)
        yield batch()


class Trainer(TrainerModule):
    """Reports how large its inputs are."""

    def batch_to_input(self, batch: Any) -> Any:
        return batch["x"]

    def loss_function(self, model: Any, batch: Any, train: bool = True) -> Any:
        return loss_of(model, batch), {"size": batch["x"].mean()}


def trainer_of(folder: Path, **changes: Any) -> Trainer:
    options = {"train_epochs": 1, "enable_progress_bar": False, "logger": LoggerConfig(log_dir=str(folder))}
    return Trainer(model=Net, optimizer=optax.sgd(0.1), exmp_input=batch(), **options | changes)


def of_trainer(val: Any, folder: Path) -> Any:
    return trainer_of(folder).train_model(Watched(), val)[1]["val/loss"]


def of_trainers_test(test: Any, folder: Path) -> Any:
    return trainer_of(folder).train_model(Watched(), None, {"val": test})["test"]["test_val/loss"]


def of_fit(val: Any, folder: Path) -> Any:
    options: Any = {"log_dir": str(folder), "tensorboard": False, "progress": False, "num_epochs": 1}

    def loss_fn(model: Any, batch: Any) -> jax.Array:
        return loss_of(model, batch)

    result = fit(Net(nnx.Rngs(0)), Watched(), val, loss_fn=loss_fn, optimizer=optax.sgd(0.1), **options)
    return result.history[1]["val/loss"]


def of_train_fn(val: Any, folder: Path) -> Any:
    model, found = Net(nnx.Rngs(0)), []

    def train_step(model: Any, rng_key: jax.Array, batch: Any) -> Any:
        return nnx.value_and_grad(loss_of)(model, batch)

    def val_step(model: Any, rng_key: jax.Array, batch: Any) -> jax.Array:
        return loss_of(model, batch)

    def hook(step: int, *, metrics: Any, **kwargs: Any) -> None:
        found.append(metrics.get("val/loss"))

    go = train_fn(
        fns=(train_step, val_step), n_steps=2, eval_every_n_steps=2, n_eval_batches=4, hooks=[hook], progress=False
    )
    go(jax.random.key(0), model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param), Watched(), val)
    return found[-1]


STYLES = {"TrainerModule": of_trainer, "its tests": of_trainers_test, "fit": of_fit, "train_fn": of_train_fn}
MISTAKES: dict[str, tuple[Callable[[], Any], str]] = {
    "another width": (lambda: [batch(5)], r"val.*float32\[8, 5\].*training data has .*float32\[8, 4\]"),
    "a list and not a dict": (lambda: [[*batch().values()]], r"val.*batch\[0\] float32\[8, 4\].*batch\['x'\]"),
    "labels that are no classes": (
        lambda: [batch() | {"y": np.full(8, 7, np.int32)}],
        r"batch\['y'\] holds 7.*must be 0 to 2.*val' data",
    ),
    "an empty list": (list, "val.*empty"),
    "a function that gives nothing": (lambda: lambda: iter([]), "val.*(empty|no batch)"),
    "an iterator that gives nothing": (lambda: iter([]), "val.*(empty|no batch)"),
}


def test_mistakes_in_evaluation_data_show_before_the_first_step(tmp_path_factory, subtests):
    for style in STYLES:
        for mistake in MISTAKES:
            tmp_path = tmp_path_factory.mktemp("case")
            with subtests.test(style=style, mistake=mistake):
                STEPS.clear()
                make, says = MISTAKES[mistake]
                with pytest.raises((DataError, TypeError, ValueError), match=f"(?s){says}"):
                    STYLES[style](make(), tmp_path)
                assert not STEPS
                assert not list(tmp_path.rglob("metrics.jsonl"))


@pytest.mark.parametrize(
    "style", [pytest.param(style, marks=pytest.mark.slow if style == "TrainerModule" else ()) for style in STYLES]
)
def test_an_iterator_loses_no_batch_by_being_looked_at(style, tmp_path):
    batches = [batch(value=value) for value in (1.0, 2.0, 3.0)]
    assert STYLES[style](iter(batches), tmp_path / "a") == STYLES[style](batches, tmp_path / "b")


def test_an_iterator_that_several_evaluations_would_use_up_is_refused(tmp_path):
    STEPS.clear()
    with pytest.raises(DataError, match="'val'.*iterator.*once"):
        trainer_of(tmp_path, train_epochs=2).train_model(Watched(), iter([batch()]))
    assert not STEPS


def test_of_several_validation_sets_the_first_decides_which_weights_are_tested(tmp_path):
    sets = {"b": [batch(value=1.0)], "a": [batch(value=2.0)]}
    trainer = trainer_of(tmp_path, train_epochs=2)
    results = trainer.train_model([batch()], sets, [batch()])
    assert {"val_a/loss", "val_b/loss"} <= set(results[1])
    assert trainer.compared_by(results[1]) == ("val_b/loss", "min")
    assert "test/loss" in results["test"]


def test_labels_of_all_examples_in_memory_are_checked_before_the_first_step(tmp_path):
    labels = np.zeros(24, np.int32)
    labels[-1] = 9  # not in the first batch
    data = ArrayLoader({"x": np.ones((24, 4), np.float32), "y": labels}, 8)
    for style in STYLES.values():
        STEPS.clear()
        with pytest.raises(ValueError, match=r"(?s)batch\['y'\] holds 9.*val' data"):
            style(data, tmp_path)
        assert not STEPS


def test_labels_that_are_no_classes_are_refused_by_an_evaluation_by_itself(tmp_path):
    with pytest.raises(ValueError, match=r"batch\['y'\] holds 7.*must be 0 to 2"):
        trainer_of(tmp_path).eval_model([batch() | {"y": np.full(8, 7, np.int32)}])
