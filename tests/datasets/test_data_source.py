import itertools
import re

import jax
import numpy as np
import pytest

from jax_trainer.core import compile_program
from jax_trainer.datasets import ArrayLoader, Data, DataError, DataSource, Position
from jax_trainer.datasets.foreign import check_batch
from jax_trainer.engine import Every, Plan, run
from jax_trainer.testing import linear_program, numbered_loader
from tests.datasets.data_sources import BATCHES, IDS, KINDS, SIZE, ids_of

ARRAYS = np.arange(20, dtype=np.int32)


@pytest.mark.parametrize("chunk", [1, 3])
@pytest.mark.parametrize("source", ["loader", "list", "function", "iterator"])
def test_every_kind_of_source_gives_the_same_batches(source, chunk):
    loader = ArrayLoader(ARRAYS, 3)
    sources = {"loader": loader, "list": list(loader), "function": lambda: iter(loader), "iterator": iter(list(loader))}
    epoch_iterator = DataSource(sources[source], "train").open(1)
    seen = []
    while (step_batch := epoch_iterator.take(chunk, chunk)) is not None:
        seen += [*step_batch.batch[: step_batch.steps].ravel()] if step_batch.stacked else [*step_batch.batch]
    np.testing.assert_array_equal(seen, ARRAYS)
    assert epoch_iterator.position == 7


def test_opening_at_a_position_skips_what_came_before(subtests):
    for source in ["loader", "list"]:
        with subtests.test(source=source):
            loader = ArrayLoader(ARRAYS, 3)
            data_source = DataSource(loader if source == "loader" else list(loader), "train")
            np.testing.assert_array_equal(np.concatenate(list(data_source.open(1, 4))), ARRAYS[12:])


def test_opening_at_a_position_of_a_loader_costs_no_replay():
    drawn = []

    class Counting:
        def epoch(self, number, start=0):
            return (drawn.append(index) or ARRAYS[index] for index in range(start, 20))

    assert next(iter(DataSource(Counting(), "train").open(1, 15))) == 15
    assert drawn == [15]


def test_a_chunk_is_padded_to_its_full_length_so_that_one_compilation_serves_all():
    epoch_iterator = DataSource(list(ArrayLoader(ARRAYS, 4)), "train").open(1)
    shapes = []
    while (step_batch := epoch_iterator.take(3, 3)) is not None:
        shapes.append(step_batch.batch.shape)
    assert shapes == [(3, 4), (3, 4)]


def test_a_stream_continues_where_the_last_epoch_stopped():
    data_source = DataSource(iter([ARRAYS[:1], ARRAYS[1:2], ARRAYS[2:3]]), "train")
    assert [next(iter(data_source.open(epoch))).item() for epoch in (1, 2)] == [0, 1]


def test_training_data_must_not_be_empty_and_evaluation_sets_may(subtests):
    for source in [[], ArrayLoader(ARRAYS[:0], 3)]:
        with subtests.test(source=source):
            with pytest.raises(DataError, match="'train' data is empty"):
                DataSource(source, "train")
            data_source = DataSource(source, "val_hard", may_be_empty=True)
            assert data_source.length == 0
            assert data_source.open(1).take(1) is None
            assert re.match("The 'val_hard' data is empty.*Check", data_source.empty_notice())


def test_an_evaluation_set_that_turns_out_empty_has_a_notice():
    data_source = DataSource(lambda: iter([]), "val", may_be_empty=True)
    assert data_source.length is None  # not known yet
    assert list(data_source.open(1)) == []
    assert "The 'val' data is empty" in data_source.empty_notice()


def test_an_iterator_that_ends_in_the_first_epoch_is_not_told_of_earlier_ones():
    program, batch = compile_program(linear_program()), next(iter(numbered_loader()))
    data = Data([batch] * 4, {"val": iter([batch, batch])})
    plan = Plan(max_epochs=1, eval_every=Every(steps=1), eval_batches=1)
    with pytest.raises(DataError, match=r"'val' data .*epoch 1.*\(list_iterator\).*has ended") as caught:
        run(program, program.init(jax.random.key(0), batch), data, plan)
    assert "earlier" not in str(caught.value)


def test_an_iterator_that_has_ended_is_told_from_an_empty_one(subtests):
    for epoch in [1, 2]:
        with subtests.test(epoch=epoch):
            once = DataSource(iter([ARRAYS]), "train")
            assert [len(list(once.open(1))), len(list(once.open(epoch)))] == [1, 0]
            assert "has ended" in str(once.exhausted_error(epoch))
            empty = DataSource(iter([]), "train")
            assert list(empty.open(1)) == []
            assert "it is empty" in str(empty.exhausted_error(1))


SOURCES = {
    **KINDS,
    "rows": lambda: ArrayLoader(IDS, SIZE, shuffle=True).row_numbers(),
    "transformed": lambda: ArrayLoader(IDS, SIZE, shuffle=True, batch_transform=lambda batch, random: -batch),
}


def take(epoch_iterator, limit, chunk):
    """The next batches, as lists, each on its own, and the last state."""
    some = epoch_iterator.take(limit, chunk)
    ids = [] if some is None else ids_of(some.batch)
    batches = [] if some is None else ids[: some.steps] if some.stacked else [ids]
    return [np.asarray(batch).tolist() for batch in batches], some and some.state


def steps(some):
    return some.steps


def test_batches_can_be_left_out(subtests):
    for kind in SOURCES:
        with subtests.test(kind=kind):
            full = [
                take(epoch_iterator, 1, 1)[0][0]
                for epoch_iterator in [DataSource(SOURCES[kind](), "train").open(1)]
                for _ in range(BATCHES)
            ]
            for chunk in (1, 2):
                epoch_iterator = DataSource(SOURCES[kind](), "train").open(1)
                assert epoch_iterator.skip() == 1
                first, _ = take(epoch_iterator, chunk, chunk)
                assert first == full[1 : 1 + chunk]
                assert epoch_iterator.skip() == 1
                (after,), state = take(epoch_iterator, 1, chunk)
                assert after == full[2 + chunk] and epoch_iterator.position == 3 + chunk
                data_source = DataSource(
                    SOURCES[kind](), "train"
                )  # as in another process, with what was left out behind it
                data_source.restore(state)
                assert take(data_source.open(1, epoch_iterator.position), 1, 1)[0] == [full[3 + chunk]]
                epoch_iterator.close()


def test_a_batch_that_was_pushed_back_can_be_skipped(subtests):
    for kind in ["list", "array loader", "rows", "torchdata"]:
        with subtests.test(kind=kind):
            epoch_iterator = DataSource(SOURCES[kind](), "train").open(1)
            assert steps(epoch_iterator.take(6, 6)) == 5  # the last one is ragged, so it comes alone
            assert epoch_iterator.skip(3) == 1
            assert epoch_iterator.position == BATCHES
            assert epoch_iterator.take(6, 6) is None and epoch_iterator.skip() == 0


def test_the_batch_after_one_that_was_pushed_back_and_skipped_is_next():
    epoch_iterator = DataSource([ARRAYS[:4], ARRAYS[:4], ARRAYS[:2], ARRAYS[4:8]], "train").open(1)
    assert steps(epoch_iterator.take(4, 4)) == 2  # the third has another shape
    assert epoch_iterator.skip() == 1
    assert take(epoch_iterator, 1, 1)[0] == [[4, 5, 6, 7]]


def test_length_is_known_if_the_data_has_one():
    assert DataSource(ArrayLoader(ARRAYS, 3), "train").length == 7
    assert DataSource(itertools.repeat(ARRAYS), "train").length is None


def test_leaves_that_are_not_numbers_are_named(subtests):
    for bad in [{"a": np.array([None])}, {"a": "text"}, {"a": np.array(["text"])}]:
        with subtests.test(bad=bad), pytest.raises(DataError, match="has a of type .* not numeric"):
            check_batch(bad, "batch 3")


def test_numbers_of_any_kind_pass(subtests):
    for good in [np.zeros(2, np.uint8), [1.0, 2], {"mask": np.ones(3, bool)}, np.zeros(2, np.float64)]:
        with subtests.test(good=good):
            assert check_batch(good, "batch 3") is None


def test_a_position_counts_examples_and_any_batch_size_fits_the_end_of_an_epoch():
    arrays, middle, end = np.zeros((96, 2)), Position(2, 3), Position(2, 0)
    sources = {size: DataSource(ArrayLoader(arrays, size), "train") for size in (4, 8, 9, 24)}
    assert (
        sources[8].position_at(middle, 8) == middle == sources[8].position_at(middle, None)
    )  # old records have no size
    assert sources[4].position_at(middle, 8) == Position(2, 6)
    assert sources[24].position_at(middle, 8) == Position(2, 1)
    assert sources[9].position_at(end, 8) == end
    with pytest.raises(DataError, match=r"3 batches of 8 .* 9 now.*divides 24"):
        sources[9].position_at(middle, 8)


def test_data_without_an_order_of_its_own_keeps_its_batch_size_in_the_middle_of_an_epoch():
    sizes = {"list": [np.zeros((4, 2))] * 9, "function": lambda: iter([np.zeros((4, 2))] * 9)}
    with pytest.raises(DataError, match="3 batches of 8.* 4 now"):
        DataSource(sizes["list"], "train").position_at(Position(2, 3), 8)
    assert DataSource(sizes["function"], "train").position_at(Position(2, 3), 8) == Position(2, 3)  # not known


def test_a_saved_state_is_refused_by_data_that_keeps_none(subtests):
    for data in [ArrayLoader(ARRAYS, 3), list(ArrayLoader(ARRAYS, 3)), iter([ARRAYS])]:
        with subtests.test(data=data):
            data_source = DataSource(data, "train")
            data_source.check_state(None)
            with pytest.raises(DataError, match="same loader"):
                data_source.check_state("text")


@pytest.mark.parametrize(
    ("backend", "kilobytes", "chunk", "given", "dispatches"),
    [
        ("cpu", 1, 1, None, 0),
        ("cpu", 400, 25, None, 0),
        ("gpu", 8, 1, None, 0),
        ("gpu", 8, 25, None, 0),
        ("gpu", 400, 1, None, 4),
        ("gpu", 400, 25, None, 2),
        ("gpu", 400, 25, 2, 1),
        ("gpu", 400, 1, 0, 0),
    ],
)
def test_an_accelerator_is_fed_ahead_unless_a_dispatch_is_small_and_in_memory(
    monkeypatch, backend, kilobytes, chunk, given, dispatches
):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    batches = [np.zeros(1000 * kilobytes, np.int8)] * 2
    assert DataSource(batches, "train", prefetch=given).prefetch(chunk) == dispatches
    assert DataSource(iter(batches), "train").prefetch() == 4
