"""What `fit` takes for data: arrays, batches of any form, and single examples that can be batched."""

import collections
import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jax_trainer.datasets import ArrayLoader, DataError, SupervisedBatch
from jax_trainer.datasets.foreign import is_arrays
from jax_trainer.styles.fitting.data import Inputs, as_fit_data, inputs_of, split_of

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


def cut(data, **options):
    return as_fit_data(data, "train", split_of(None), **{"batch_size": 4, "shuffle": False, "seed": 0, **options})


@pytest.mark.parametrize("data", [X, (X, Y), {"x": X, "y": Y}, ((X, X), Y), jnp.asarray(X), torch.from_numpy(X)])
def test_arrays_are_cut_into_batches(data):
    given = cut(data)
    assert given.from_arrays
    assert len(list(given.data)) == 3
    assert np.shape(next(iter(given.data)) if is_arrays(X) and data is X else X[:4]) == (4, 2)


def test_arrays_for_training_come_in_another_order_every_epoch():
    loader = cut((X, Y), shuffle=True).data
    orders = [np.concatenate([batch[1] for batch in loader.epoch(epoch)]).tolist() for epoch in (1, 2)]
    assert orders[0] != orders[1]
    assert sorted(orders[0]) == list(range(10))


@pytest.mark.parametrize("data", [[(X, Y)], ArrayLoader(X, 4), OwnLoader(X), iter([X]), lambda: iter([X])])
def test_what_gives_batches_is_left_as_it_is(data):
    assert not is_arrays(data)
    assert not cut(data).from_arrays


def test_a_batch_of_everything_as_a_dataclass_is_cut_too():
    batches = list(cut(SupervisedBatch.of(X, Y)).data)
    assert [batch.size for batch in batches] == [4, 4, 2]


@pytest.mark.parametrize(
    "batch", [(X, Y), [X, Y], {"image": X, "label": Y}, Example(X, Y), SupervisedBatch.of(X, Y), Pair(X, Y)]
)
def test_inputs_and_targets_are_found_in_batches_of_any_form(batch):
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


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ({"pixels": X, "label": Y}, r"has pixels, label: none .* inputs.*`split_batch=lambda"),
        ({"x": X, "class": Y}, "has x, class: none .* targets"),
        ({"x": X, "image": X, "y": Y}, "x and image may both be the inputs"),
        ((X, Y, Y), "a tuple of 3"),
        (X, "a single array"),
    ],
)
def test_a_batch_that_does_not_say_what_is_what_is_an_error_that_lists_what_there_is(batch, words):
    with pytest.raises(DataError, match=words):
        split_of(None)(batch)


def test_the_user_may_say_what_is_what():
    assert split_of(lambda batch: (batch["a"], batch["b"]))({"a": 1, "b": 2}) == (1, 2)
    with pytest.raises(TypeError, match="returns inputs and targets"):
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


def test_single_examples_are_batched_by_who_gives_them():
    given = cut(Examples())
    assert [len(batch[1]) for batch in given.data] == [4, 4, 2]
    assert given.example[0].shape == (4, 2)


def test_a_number_beside_the_targets_makes_no_single_example():
    assert not cut([{"x": X, "y": Y, "temperature": 0.5}]).from_arrays
    assert not cut([{"pixels": X[0], "class": Y[0]}]).from_arrays  # which only the user can tell


def test_single_examples_that_nobody_can_batch_are_an_error():
    with pytest.raises(DataError, match=r"single examples and not batches.*DataLoader"):
        cut([(X[0], Y[0])])
