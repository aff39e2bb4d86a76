"""Peeking at the first batch consumes none."""

import itertools

import jax
import numpy as np
import pytest

from jax_trainer.datasets import DataError, DataSource
from jax_trainer.datasets.data_source import peeked
from jax_trainer.testing import assert_same_bits
from tests.datasets.data_sources import KINDS, NEEDS_TORCH, ids_of

TWO_EPOCHS = 12  # batches


def batches_of(data):
    """Two epochs of a fresh feed, as the loop would take them."""
    data_source = DataSource(data, "train", steps_per_epoch=6)
    return [batch for epoch in (1, 2) for batch in itertools.islice(data_source.open(epoch), 6)]


def test_the_data_still_gives_all_batches_in_the_same_order(subtests):
    for kind in KINDS:
        with subtests.test(kind=kind):
            seed = pytest.importorskip("torch", reason=NEEDS_TORCH).manual_seed if "torch" in kind else int
            seed(0)
            expected = batches_of(KINDS[kind]())
            seed(0)
            example, data = peeked(KINDS[kind]())
            if kind != "torchdata nodes":  # after a state was loaded, their `state_dict` is still the one before
                example, data = peeked(data)
            found = batches_of(data)
            assert len(found) == TWO_EPOCHS
            assert_same_bits(found, expected)
            assert np.shape(jax.tree.leaves(example)[0]) == np.shape(jax.tree.leaves(expected[0])[0])


def test_looking_at_a_torch_loader_leaves_the_random_numbers_of_others_alone():
    torch = pytest.importorskip("torch", reason=NEEDS_TORCH)
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    peeked(KINDS["torch"]())
    assert torch.equal(torch.rand(3), expected)


def test_data_that_can_be_iterated_again_is_returned_itself(subtests):
    for kind in ["array loader", "list", "function", "torch", "grain iterator"]:
        with subtests.test(kind=kind):
            data = KINDS[kind]()
            assert peeked(data)[1] is data


def test_a_stream_that_was_looked_at_twice_still_starts_with_its_first_batch_by_hand(subtests):
    for kind in ["Hugging Face", "Hugging Face, shuffle buffer", "torchdata, Hugging Face"]:
        with subtests.test(kind=kind):
            data = KINDS[kind]()
            example, _ = peeked(data)
            peeked(data)
            np.testing.assert_array_equal(np.asarray(ids_of(next(iter(data)))), ids_of(example))


def test_a_generator_whose_buffer_is_reused_keeps_its_first_batch():
    buffer = np.zeros(2)

    def filled():
        for number in range(3):
            buffer[:] = number
            yield buffer

    example, data = peeked(filled())
    assert [batch.tolist() for batch in DataSource(data, "train").open(1)] == [[0, 0], [1, 1], [2, 2]]
    assert example.tolist() == [0, 0]


def test_tensors_of_torch_come_as_arrays():
    torch = pytest.importorskip("torch", reason=NEEDS_TORCH)
    example, _ = peeked([{"x": torch.ones(2, 3)}])
    assert isinstance(example["x"], np.ndarray)


def test_empty_data_is_an_error_that_names_it(subtests):
    for empty in [[], iter([]), lambda: iter([])]:
        with subtests.test(empty=empty), pytest.raises(DataError, match=r"'val' data .*empty"):
            peeked(empty, "val")
