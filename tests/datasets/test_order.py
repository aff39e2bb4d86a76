import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_trainer.datasets.arrays import Order, generator


@given(
    examples=st.integers(1, 200),
    per_process=st.integers(1, 9),
    processes=st.integers(1, 5),
    epoch=st.integers(1, 5),
    shuffle=st.booleans(),
)
def test_any_number_of_processes_sees_the_global_order(examples, per_process, processes, epoch, shuffle):
    size = per_process * processes
    alone = Order(examples=examples, batch_size=size, shuffle=shuffle, process=(0, 1))
    parts = [
        Order(examples=examples, batch_size=size, shuffle=shuffle, process=(i, processes)) for i in range(processes)
    ]
    for index in range(alone.full_batches):
        joined = np.concatenate([part.cut(part.of(epoch), index) for part in parts])
        np.testing.assert_array_equal(joined, alone.cut(alone.of(epoch), index))
        assert alone.size_of(index) == size
    for part in parts if examples % size else ():  # what is left over goes to every process completely
        np.testing.assert_array_equal(
            part.cut(part.of(epoch), len(alone) - 1), alone.cut(alone.of(epoch), len(alone) - 1)
        )
        assert part.size_of(len(alone) - 1) == examples % size


@given(examples=st.integers(1, 300), size=st.integers(1, 40), epoch=st.integers(1, 9))
def test_an_epoch_visits_every_example_once(examples, size, epoch):
    order = Order(examples=examples, batch_size=size, shuffle=True, process=(0, 1))
    seen = np.concatenate([order.cut(order.of(epoch), index) for index in range(len(order))])
    np.testing.assert_array_equal(np.sort(seen), np.arange(examples))


def test_all_processes_get_the_complete_last_batch_if_it_is_not_full(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    shared, own = (Order(examples=20, batch_size=8, process=process) for process in [(1, 2), (0, 1)])
    assert [shared.is_replicated(index) for index in range(3)] == [False, False, True]
    assert all(own.is_replicated(index) for index in range(3))  # each has all of all batches
    with pytest.raises(ValueError, match="`process` .*4 processes, .*2"):
        Order(examples=20, batch_size=8, process=(1, 4)).is_replicated(0)


def test_every_epoch_and_every_seed_has_an_order_of_its_own():
    orders = {
        tuple(Order(examples=50, batch_size=5, shuffle=True, seed=s).of(e)) for s in range(5) for e in range(1, 6)
    }
    assert len(orders) == 25


def test_several_batches_at_once_are_the_same_rows_for_every_process():
    for process in [(0, 1), (1, 2), (2, 3)]:
        order = Order(examples=40, batch_size=6, shuffle=True, process=process)
        at_once = order.cut(order.of(3), 1, 4)
        np.testing.assert_array_equal(at_once, np.concatenate([order.cut(order.of(3), index) for index in range(1, 5)]))


def test_the_order_of_an_epoch_is_this_one_for_ever():
    # a checkpoint stores two numbers, so a later version must give the same order
    assert Order(examples=10, batch_size=2, shuffle=True, seed=42).of(1).tolist() == [7, 1, 4, 9, 8, 3, 5, 0, 2, 6]


def test_what_makes_no_batches_is_an_error_with_a_fix(subtests):
    for options, message in [
        ({"batch_size": 0}, "`batch_size` must be .*at least 1, got 0"),
        ({"batch_size": 2.5}, "`batch_size` must be .* got 2.5"),
        ({"batch_size": True}, "`batch_size` must be .* got True"),
        ({"seed": -1}, "`seed` must be .*at least 0, got -1"),
        ({"examples": 0, "shuffle": True}, "The set is empty"),
        ({"examples": 0, "drop_last": True}, "The set is empty"),
        ({"batch_size": 11, "drop_last": True}, "10 examples.* batch of 11.*at most 10"),
        ({"batch_size": 4, "process": (0, 3)}, "A batch of 4 .* 3 processes. Use 3 or 6"),
        ({"process": (2, 2)}, r"`process` must be .* got \(2, 2\)"),
    ]:
        with subtests.test(options=options), pytest.raises(ValueError, match=message):
            Order(**{"examples": 10, "batch_size": 2, **options})


def test_random_numbers_belong_to_their_position():
    draws = {generator(seed, epoch, index).random() for seed in range(3) for epoch in range(3) for index in range(3)}
    assert len(draws) == 27
    assert generator(1, 2, 3).random() == generator(1, 2, 3).random()
