"""Arrays are all examples in every method that takes data; a training needs the size of its batches."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jax_trainer.datasets import ArrayLoader, DataError, SupervisedBatch
from jax_trainer.testing import assert_same_bits, numbered_loader
from jax_trainer.trainer import EvalSet
from tests.trainer.trainer_runs import EXAMPLE, LINEAR, NUMBERS, STEPS, Plain, settings

X, Y = NUMBERS["x"][:67], NUMBERS["y"][:67]  # two batches, and a smaller one


class OfDicts(Plain):
    """Batches are dicts."""

    form = staticmethod(lambda x, y: {"x": x, "y": y})


class OfPairs(Plain):
    """Batches are tuples."""

    form = staticmethod(lambda x, y: (x, y))

    def batch_to_input(self, batch: Any) -> Any:
        return batch[0]

    def loss_function(self, model: Any, batch: Any, train: bool = True) -> Any:
        return super().loss_function(model, {"x": batch[0], "y": batch[1]}, train)


class OfLists(OfPairs):
    """Batches are lists, as those of torch."""

    form = staticmethod(lambda x, y: [x, y])


class OfRecords(OfPairs):
    """Batches are dataclasses."""

    form = staticmethod(lambda x, y: SupervisedBatch(size=len(x), input=x, target=y))

    def batch_to_input(self, batch: Any) -> Any:
        return batch.input

    def loss_function(self, model: Any, batch: Any, train: bool = True) -> Any:
        return super().loss_function(model, (batch.input, batch.target), train)


def trainer_of(kind: Any, folder: Any, flavour: str = "nnx") -> Any:
    model = (lambda rngs: nnx.Linear(8, 4, rngs=rngs)) if flavour == "nnx" else LINEAR[flavour](num_classes=4)
    options = settings(folder, train_epochs=1)
    return kind(model=model, optimizer=optax.sgd(0.1), exmp_input=kind.form(EXAMPLE["x"], EXAMPLE["y"]), **options)


@pytest.mark.parametrize("kind", [OfDicts, OfPairs, OfRecords, OfLists])
def test_arrays_are_all_examples_in_predictions_and_evaluations(kind, tmp_path):
    trainer = trainer_of(kind, tmp_path)
    batches = [kind.form(X[start : start + 32], Y[start : start + 32]) for start in (0, 32, 64)]
    outputs, expected = trainer.predict(batches), trainer.eval_model(batches)
    assert outputs.shape == (67, 4)
    for inputs in (X, jnp.asarray(X)):
        assert_same_bits(trainer.predict(inputs), outputs)
    assert trainer.predict(X[:5]).shape == (5, 4)
    if kind is OfLists:  # a list is a list of batches
        return
    arrays = kind.form(X, Y)
    assert_same_bits(trainer.predict(arrays), outputs)
    assert trainer.eval_model(arrays) == expected
    assert trainer.test_model(arrays) == {name.replace("val/", "test/"): one for name, one in expected.items()}
    sets = {"near": arrays, "far": EvalSet(batches)}
    results = trainer.train_model(batches[:2], sets, arrays)
    assert results[1].keys() == {"val_near/loss", "val_near/acc", "val_far/loss", "val_far/acc"}
    assert results[1]["val_near/loss"] == results[1]["val_far/loss"] == results["test"]["test/loss"]
    assert trainer.train_model(batches[:2], arrays)[1].keys() == {"val/loss", "val/acc"}


def test_only_the_inputs_of_a_dict_are_needed_to_predict(tmp_path):
    trainer = trainer_of(OfDicts, tmp_path)
    assert_same_bits(trainer.predict({"x": X}), trainer.predict(X))


def test_what_would_predict_rows_of_an_example_is_refused(flavour, tmp_path_factory, subtests):
    for case, data in zip(
        ["a single example", "a list of inputs", "a loader of inputs"], [X[0], [X[:5]], ArrayLoader(X, 32)], strict=True
    ):
        tmp_path = tmp_path_factory.mktemp("case")
        with subtests.test(case=case):
            trainer = trainer_of(OfPairs, tmp_path, flavour)
            with pytest.raises(ValueError, match=r"\(8,\).*\[n, 8\].*x\[None\]"):
                trainer.predict(data)


def test_batches_may_be_in_a_tuple(tmp_path):
    batches = tuple(numbered_loader(32 * STEPS))
    assert list(trainer_of(OfDicts, tmp_path).train_model(batches, batches)) == [1]


def test_a_training_on_arrays_needs_a_batch_size(tmp_path_factory, subtests):
    for kind in [OfDicts, OfPairs, OfRecords]:
        for case_2, method in zip(
            ["train_model", "train_epoch", "lr_find", "preflight", "dry_run"],
            [
                lambda trainer, data: trainer.train_model(data),
                lambda trainer, data: trainer.train_epoch(data, 1),
                lambda trainer, data: trainer.lr_find(data),
                lambda trainer, data: trainer.preflight(data),
                lambda trainer, data: trainer.dry_run(data),
            ],
            strict=True,
        ):
            tmp_path = tmp_path_factory.mktemp("case")
            with subtests.test(kind=kind, case_2=case_2):
                with pytest.raises(DataError, match=r"\(67, 8\), \(67,\).*ArrayLoader"):
                    method(trainer_of(kind, tmp_path), kind.form(X, Y))
                assert not list(tmp_path.iterdir())


def test_predictions_of_arrays_are_those_of_a_loader_of_them(tmp_path):
    trainer = trainer_of(OfDicts, tmp_path)
    loader = ArrayLoader({"x": X, "y": Y}, 32)
    file = trainer.predict(X, output=tmp_path / "outputs.npz")
    assert_same_bits(np.load(file.path)["prediction"], trainer.predict(loader))
