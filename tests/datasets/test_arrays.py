from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_trainer.datasets import ArrayLoader, SupervisedBatch

IDS = np.arange(100)


def ids(loader, epoch, start=0):
    return np.concatenate(list(loader.epoch(epoch, start)))


@given(
    examples=st.integers(1, 60),
    batch_size=st.integers(1, 20),
    epoch=st.integers(1, 5),
    shuffle=st.booleans(),
)
def test_every_example_comes_exactly_once_per_epoch(examples, batch_size, epoch, shuffle):
    loader = ArrayLoader(np.arange(examples), batch_size, shuffle=shuffle)
    batches = list(loader.epoch(epoch))
    assert len(batches) == len(loader)
    assert sorted(np.concatenate(batches)) == list(range(examples))


def test_the_order_is_a_function_of_seed_and_epoch():
    loader = ArrayLoader(IDS, 10, shuffle=True, seed=1)
    np.testing.assert_array_equal(ids(loader, 2), ids(ArrayLoader(IDS, 10, shuffle=True, seed=1), 2))
    assert not np.array_equal(ids(loader, 1), ids(loader, 2))
    assert not np.array_equal(ids(loader, 1), ids(ArrayLoader(IDS, 10, shuffle=True, seed=2), 1))


def test_without_shuffling_the_order_is_kept():
    np.testing.assert_array_equal(ids(ArrayLoader(IDS, 7), 3), IDS)


@given(start=st.integers(0, 10))
def test_an_epoch_can_be_entered_at_any_batch(start):
    loader = ArrayLoader(IDS, 10, shuffle=True)
    if start < 10:
        np.testing.assert_array_equal(ids(loader, 4, start), ids(loader, 4)[start * 10 :])
    else:
        assert not list(loader.epoch(4, start))


def test_the_last_batch_is_ragged_or_dropped():
    assert [len(b) for b in ArrayLoader(IDS, 30)] == [30, 30, 30, 10]
    assert [len(b) for b in ArrayLoader(IDS, 30, drop_last=True)] == [30, 30, 30]


@given(limit=st.integers(1, 6), batch_size=st.integers(1, 30))
def test_cutting_out_chunks_gives_the_batches_of_iterating(limit, batch_size):
    loader = ArrayLoader({"id": IDS, "x": IDS[:, None] * 2.0}, batch_size, shuffle=True)
    epoch: Any = loader.epoch(1)
    batches = []
    while (chunk := epoch.take(limit, 6))[1]:
        stacked, steps = chunk
        assert stacked["id"].shape == (6, batch_size)
        batches += [{name: array[i] for name, array in stacked.items()} for i in range(steps)]
    full = [batch for batch in loader.epoch(1) if len(batch["id"]) == batch_size]
    assert len(batches) == len(full)
    for a, b in zip(batches, full, strict=True):
        np.testing.assert_array_equal(a["id"], b["id"])
        np.testing.assert_array_equal(a["x"], b["x"])
    assert len(list(epoch)) == len(loader) - len(full)  # the ragged one is still to come


def test_arrays_that_make_no_batches_are_an_error_with_a_fix(subtests):
    for arrays, options, message in [
        ((np.zeros(3), np.zeros(4)), {}, "share their first axis"),
        (np.zeros(()), {}, "share their first axis"),
        (np.zeros(0), {"shuffle": True}, "0 examples"),
        (np.zeros(5), {"batch_size": 0}, "`batch_size` must be .*at least 1, got 0"),
        (np.zeros(5), {"drop_last": True}, "5 examples.* batch of 8.*at most 5"),
    ]:
        with subtests.test(arrays=arrays, options=options), pytest.raises(ValueError, match=message):
            ArrayLoader(arrays, **{"batch_size": 8, **options})


def test_an_evaluation_set_may_be_empty():
    loader = ArrayLoader((np.zeros((0, 3)), np.zeros(0)), 8)
    assert (len(loader), list(loader), list(loader.epoch(2, 0))) == (0, [], [])


def test_transforms_of_records_get_random_numbers_of_their_position():
    def jitter(record, rng):
        return {"id": record["id"], "noise": rng.random()}

    loaders = [
        ArrayLoader({"id": np.arange(20)}, size, shuffle=True, record_transform=jitter, process=process)
        for size, process in [(5, (0, 1)), (10, (0, 2)), (10, (1, 2))]
    ]
    whole, *parts = [jax.tree.map(lambda *x: np.concatenate(x), *loader.epoch(2)) for loader in loaders]
    by_id = dict(zip(whole["id"].tolist(), whole["noise"].tolist(), strict=True))
    assert len(set(by_id.values())) == 20
    for part in parts:  # another batch size and several processes: the same numbers for the same place
        assert [by_id[i] for i in part["id"].tolist()] == part["noise"].tolist()
    late = next(loaders[0].epoch(2, start=3))
    np.testing.assert_array_equal(late["noise"], whole["noise"][15:])


def test_transforms_of_batches_come_after_those_of_records():
    def scaled(batch, rng):
        return batch * rng.integers(1, 100)

    loader = ArrayLoader(np.ones((6, 2)), 4, record_transform=lambda row, rng: row[:1] + 1, batch_transform=scaled)
    first, last = loader.epoch(1)
    assert first.shape == (4, 1) and last.shape == (2, 1)
    assert len(np.unique(first)) == len(np.unique(last)) == 1
    assert first[0] % 2 == 0
    np.testing.assert_array_equal(next(loader.epoch(1, start=1)), last)


def test_a_transformed_batch_class_keeps_its_size():
    batch = SupervisedBatch.of(np.zeros((5, 2)), np.arange(5))
    loader = ArrayLoader(batch, 3, record_transform=lambda record, rng: record)
    assert [(b.size, b.input.shape) for b in loader] == [(3, (3, 2)), (2, (2, 2))]


def test_entering_an_epoch_late_costs_nothing():
    loader = ArrayLoader(np.arange(2_000_003, dtype=np.int32), 2, shuffle=True)
    reads = []

    class Counted(np.ndarray):
        def take(self, rows, *args):  # type: ignore[override]
            reads.append(len(rows))
            return super().take(rows, *args)

    setattr(loader, "_leaves", [loader._leaves[0].view(Counted)])  # noqa: B010 - of a type that counts
    batch = next(loader.epoch(7, start=1_000_000))
    assert reads == [2]
    np.testing.assert_array_equal(batch, loader.order(7)[2_000_000:2_000_002])


def test_an_epoch_whose_order_is_known_is_the_same():
    known, fresh = (ArrayLoader(IDS, 30, shuffle=True) for _ in range(2))
    known.order(4)
    for epoch in (4, 5, 4):
        np.testing.assert_array_equal(ids(known, epoch), ids(fresh, epoch))


def test_arrays_of_a_mapped_file_are_read_from_the_disk(tmp_path):
    np.save(tmp_path / "ids.npy", IDS)
    loader = ArrayLoader(np.load(tmp_path / "ids.npy", mmap_mode="r"), 30, shuffle=True)
    assert not loader.in_memory and ArrayLoader(IDS, 30).in_memory
    np.testing.assert_array_equal(ids(loader, 2), ids(ArrayLoader(IDS, 30, shuffle=True), 2))
