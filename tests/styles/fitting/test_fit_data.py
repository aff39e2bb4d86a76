"""The data that `fit` accepts: arrays, batches of any form, and single examples that can be batched."""

import collections
import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jax_trainer.datasets import ArrayLoader, DataError, SupervisedBatch
from jax_trainer.datasets.foreign import is_arrays
from jax_trainer.styles.fit_data import Inputs, as_fit_data, inputs_of, split_of

X, Y = np.arange(20.0).reshape(10, 2), np.arange(10)
Pair = collections.namedtuple("Pair", ["features", "label"])


@dataclasses.dataclass
class Example:
    image: object
    labels: object
    size: int = 10


@dataclasses.dataclass
class OwnLoader:
    """A loader that happens to be a dataclass of arrays."""

    x: np.ndarray

    def __iter__(self):
        yield self.x


def fit_data(data, **options):
    return as_fit_data(data, "train", split_of(None), **{"batch_size": 4, "shuffle": False, "seed": 0, **options})


ARRAYS = {"one": X, "pair": (X, Y), "dict": {"x": X, "y": Y}, "nested": ((X, X), Y), "jax": jnp.asarray(X), "torch": X}


def test_arrays_are_split_into_batches(subtests):
    for kind in ARRAYS:
        with subtests.test(kind=kind):
            data: Any = pytest.importorskip("torch").from_numpy(X) if kind == "torch" else ARRAYS[kind]
            found = fit_data(data)
            assert found.from_arrays
            assert len(list(found.data)) == 3
            assert np.shape(next(iter(found.data)) if is_arrays(X) and data is X else X[:4]) == (4, 2)


def test_arrays_for_training_come_in_another_order_every_epoch():
    loader = fit_data((X, Y), shuffle=True).data
    orders = [np.concatenate([batch[1] for batch in loader.epoch(epoch)]).tolist() for epoch in (1, 2)]
    assert orders[0] != orders[1]
    assert sorted(orders[0]) == list(range(10))


def test_data_that_yields_batches_is_used_unchanged(subtests):
    for data in [[(X, Y)], ArrayLoader(X, 4), OwnLoader(X), iter([X]), lambda: iter([X])]:
        with subtests.test(data=data):
            assert not is_arrays(data)
            assert not fit_data(data).from_arrays


def test_a_dataset_as_a_batch_dataclass_is_split_too():
    batches = list(fit_data(SupervisedBatch.of(X, Y)).data)
    assert [batch.size for batch in batches] == [4, 4, 2]


def test_inputs_and_targets_are_found_in_batches_of_any_form(subtests):
    for batch in [(X, Y), [X, Y], {"image": X, "label": Y}, Example(X, Y), SupervisedBatch.of(X, Y), Pair(X, Y)]:
        with subtests.test(batch=batch):
            inputs, targets = split_of(None)(batch)
            assert inputs is X
            assert targets is Y
            assert inputs_of(None)(batch) is X


def test_inputs_need_no_targets():
    find = inputs_of(None)
    assert find(X) is X
    assert find({"x": X}) is X
    assert find(Inputs((X, Y))) == (X, Y)
    assert inputs_of(lambda batch: (batch["a"], batch["b"]))({"a": X, "b": Y}) is X


def test_a_batch_with_unknown_entries_is_an_error_that_lists_them(subtests):
    for batch, message in [
        ({"pixels": X, "label": Y}, r"pixels, label: .*inputs.*`split_batch=lambda"),
        ({"x": X, "class": Y}, "x, class: .*targets"),
        ({"x": X, "image": X, "y": Y}, "x and image .*inputs"),
        ((X, Y, Y), "a tuple of 3"),
        (X, "a single array"),
    ]:
        with subtests.test(batch=batch, message=message), pytest.raises(DataError, match=message):
            split_of(None)(batch)


def test_split_batch_selects_inputs_and_targets():
    assert split_of(lambda batch: (batch["a"], batch["b"]))({"a": 1, "b": 2}) == (1, 2)
    with pytest.raises(TypeError, match="`split_batch`.*got a int"):
        split_of(lambda batch: batch["a"])({"a": 1})


class Examples:
    """What tf.data and Grain look like: single examples, and a method that batches them."""

    def __init__(self, size=0):
        self.size = size

    def batch(self, size):
        return Examples(size)

    def __iter__(self):
        if not self.size:
            return iter(zip(X, Y, strict=True))
        return iter((X[at : at + self.size], Y[at : at + self.size]) for at in range(0, 10, self.size))


def test_single_examples_are_batched_by_their_dataset():
    found = fit_data(Examples())
    assert [len(batch[1]) for batch in found.data] == [4, 4, 2]
    assert found.example[0].shape == (4, 2)


def test_a_number_beside_the_targets_makes_no_single_example():
    assert not fit_data([{"x": X, "y": Y, "temperature": 0.5}]).from_arrays
    assert not fit_data([{"pixels": X[0], "class": Y[0]}]).from_arrays  # only the user knows


def test_single_examples_without_a_batch_method_are_an_error():
    with pytest.raises(DataError, match=r"'train' data is a list.*single examples.*DataLoader"):
        fit_data([(X[0], Y[0])])
