import itertools

import numpy as np
import pytest

from jax_trainer.datasets import ArrayLoader, DataError, Feed
from jax_trainer.datasets.foreign import check_batch

ARRAYS = np.arange(20, dtype=np.int32)


@pytest.mark.parametrize("chunk", [1, 3])
@pytest.mark.parametrize("source", ["loader", "list", "function", "iterator"])
def test_every_kind_of_source_gives_the_same_batches(source, chunk):
    loader = ArrayLoader(ARRAYS, 3)
    sources = {"loader": loader, "list": list(loader), "function": lambda: iter(loader), "iterator": iter(list(loader))}
    cursor = Feed(sources[source], "train").open(1)
    seen = []
    while (taken := cursor.take(chunk, chunk)) is not None:
        seen += [*taken.batch[: taken.steps].ravel()] if taken.stacked else [*taken.batch]
    np.testing.assert_array_equal(seen, ARRAYS)
    assert cursor.position == 7


@pytest.mark.parametrize("source", ["loader", "list"])
def test_opening_at_a_position_skips_what_came_before(source):
    loader = ArrayLoader(ARRAYS, 3)
    feed = Feed(loader if source == "loader" else list(loader), "train")
    np.testing.assert_array_equal(np.concatenate(list(feed.open(1, 4))), ARRAYS[12:])


def test_opening_at_a_position_of_a_loader_costs_no_replay():
    drawn = []

    class Counting:
        def epoch(self, number, start=0):
            return (drawn.append(index) or ARRAYS[index] for index in range(start, 20))

    assert next(iter(Feed(Counting(), "train").open(1, 15))) == 15
    assert drawn == [15]


def test_a_chunk_is_padded_to_its_full_length_so_that_one_compilation_serves_all():
    cursor = Feed(list(ArrayLoader(ARRAYS, 4)), "train").open(1)
    shapes = []
    while (taken := cursor.take(3, 3)) is not None:
        shapes.append(taken.batch.shape)
    assert shapes == [(3, 4), (3, 4)]


def test_a_stream_goes_on_where_the_last_epoch_stopped():
    feed = Feed(iter([ARRAYS[:1], ARRAYS[1:2], ARRAYS[2:3]]), "train")
    assert [next(iter(feed.open(epoch))).item() for epoch in (1, 2)] == [0, 1]


def test_length_is_known_where_the_source_tells():
    assert Feed(ArrayLoader(ARRAYS, 3), "train").length == 7
    assert Feed(itertools.repeat(ARRAYS), "train").length is None


@pytest.mark.parametrize("bad", [{"a": np.array([None])}, {"a": "text"}, {"a": np.array(["text"])}])
def test_leaves_that_are_not_numbers_are_named(bad):
    with pytest.raises(DataError, match="has a of type .* not numeric"):
        check_batch(bad, "batch 3")


@pytest.mark.parametrize("good", [np.zeros(2, np.uint8), [1.0, 2], {"mask": np.ones(3, bool)}, np.zeros(2, np.float64)])
def test_numbers_of_any_kind_pass(good):
    assert check_batch(good, "batch 3") is None
