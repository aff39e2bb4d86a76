import threading
import time
import traceback
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_trainer.adapters import function_program
from jax_trainer.core import compile_program
from jax_trainer.datasets import NOT_READY, Data, DataError, StepBatch, prefetch
from jax_trainer.datasets.prefetch import PrefetchIterator, SyncIterator
from jax_trainer.engine import Plan, StepEnd, StopTraining, Waiting, run, train_events
from jax_trainer.testing import EventRecorder


def batches(count, seconds=0.0):
    for number in range(count):
        time.sleep(seconds)
        yield StepBatch(number, 1, False, number, None)


def never_idle():
    return False


def drained(batch_iterator):
    seen = []
    while (step_batch := batch_iterator.next(5)) is not None:
        seen.append(step_batch.batch)
    return seen


def prefetch_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("jax_trainer prefetch")]


def test_a_thread_gives_the_batches_in_order_and_then_ends(subtests):
    for depth in [1, 2, 7]:
        with subtests.test(depth=depth):
            batch_iterator = PrefetchIterator(batches(20), never_idle, depth=depth, name="train")
            assert drained(batch_iterator) == list(range(20))
            batch_iterator.close()
            assert not prefetch_threads()


@pytest.mark.parametrize("depth", [1, 3])
def test_no_more_batches_are_prefetched_than_depth(depth):
    made = []

    def counted():
        for step_batch in batches(50):
            made.append(step_batch.batch)
            yield step_batch

    batch_iterator = PrefetchIterator(counted(), never_idle, depth=depth, name="train")
    for used in range(5):
        deadline = time.monotonic() + 20
        while len(made) < used + depth and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(0.01)  # in which it could make more
        assert len(made) == used + depth
        batch_iterator.next(5)
    batch_iterator.close()


def sized_batches(made, size):
    for number in range(200):
        made.append(number)
        yield StepBatch(np.zeros(size, np.uint8), 1, False, number, None)


def settled(made):
    """The number of batches made once the thread makes no more."""
    count = -1
    while count != len(made):
        count = len(made)
        time.sleep(0.05)
    return count


def small_batches_in_blocks(made, monkeypatch, block_seconds):
    monkeypatch.setattr(prefetch, "BLOCK_SECONDS", block_seconds)
    return PrefetchIterator(sized_batches(made, 100), lambda: True, depth=4, small_depth=32, name="train")


def test_small_batches_that_are_made_quickly_come_in_blocks_on_demand(monkeypatch):
    made = []
    batch_iterator = small_batches_in_blocks(made, monkeypatch, block_seconds=60)
    assert settled(made) == 32
    for _ in range(32):
        batch_iterator.next(5)
    assert settled(made) == 32  # the thread does not run while the loop has batches, or uses the last one
    batch_iterator.next(5)
    assert settled(made) == 32 + 32
    seen = [step_batch.number for step_batch in iter(lambda: batch_iterator.next(5), None)]
    assert seen == list(range(33, 200))
    assert batch_iterator.waited == 0  # less than a step takes is not waiting
    batch_iterator.close()
    assert not prefetch_threads()


def test_small_batches_that_take_longer_are_made_while_the_loop_uses_others(monkeypatch):
    made = []
    batch_iterator = small_batches_in_blocks(made, monkeypatch, block_seconds=0)
    assert settled(made) == 32
    for _ in range(15):
        batch_iterator.next(5)
    assert settled(made) == 32  # more than half of them are left
    batch_iterator.next(5)
    assert settled(made) == 16 + 32
    seen = [step_batch.number for step_batch in iter(lambda: batch_iterator.next(5), None)]
    assert seen == list(range(16, 200))
    batch_iterator.close()
    assert not prefetch_threads()


def test_large_batches_are_prefetched_to_the_usual_depth_so_that_memory_is_bounded():
    made = []
    size = prefetch.SMALL_BYTES // 32 + 1
    batch_iterator = PrefetchIterator(sized_batches(made, size), never_idle, depth=4, small_depth=32, name="train")
    assert settled(made) == 4
    batch_iterator.next(5)
    assert settled(made) == 5
    batch_iterator.close()


def test_the_depth_that_the_user_sets_is_kept_also_for_small_batches(program):
    drawn = []

    def counted():
        for number in range(100):
            drawn.append(number)
            yield ONES

    events: Any = train_events(program, state_of(program), Data(counted, prefetch=2), Plan(max_epochs=1))
    while not isinstance(next(events), StepEnd):
        pass
    assert settled(drawn) == 1 + 2
    events.close()


def test_a_loader_that_refills_one_buffer_trains_like_one_with_fresh_arrays(program):
    def fresh():
        rng = np.random.default_rng(0)
        for _ in range(100):
            yield rng.standard_normal((4, 2), np.float32)

    def refilled():
        buffer = np.empty((4, 2), np.float32)
        for batch in fresh():
            buffer[:] = batch
            yield buffer

    trained = [
        run(program, state_of(program), Data(data, prefetch=prefetch), Plan(max_epochs=2))
        for data in (fresh, refilled)
        for prefetch in (None, 0, 4)
    ]
    assert len({np.asarray(state.params).tobytes() for state in trained}) == 1


def broken():
    yield from batches(2)
    raise OSError("the disk is gone")


def test_what_the_loader_raises_is_raised_by_next_with_its_traceback():
    batch_iterator = PrefetchIterator(broken(), never_idle, depth=4, name="train")
    assert [batch_iterator.next(5).batch for _ in range(2)] == [0, 1]
    with pytest.raises(OSError, match="the disk is gone") as caught:
        batch_iterator.next(5)
    assert "in broken" in "".join(traceback.format_exception(caught.value))
    batch_iterator.close()
    assert not prefetch_threads()


def test_closing_early_ends_the_loader_in_its_own_thread():
    ended = []

    def tidy():
        try:
            yield from batches(100)
        finally:
            ended.append(threading.current_thread().name)

    batch_iterator = PrefetchIterator(tidy(), never_idle, depth=2, name="train")
    batch_iterator.next(5)
    batch_iterator.close()
    assert ended == ["jax_trainer prefetch 'train'"]
    assert not prefetch_threads()


def test_a_late_batch_gives_the_caller_a_turn():
    batch_iterator = PrefetchIterator(batches(1, seconds=0.3), never_idle, depth=1, name="train")
    assert batch_iterator.next(0.05) is NOT_READY
    assert batch_iterator.next(5).batch == 0
    batch_iterator.close()


def test_a_loader_that_hangs_is_an_error_after_the_timeout():
    release = threading.Event()

    def hanging():
        release.wait()
        yield from batches(1)

    batch_iterator = PrefetchIterator(hanging(), never_idle, depth=1, name="train", timeout=0.2)
    with pytest.raises(DataError, match="'train'.*`timeout`.* 0.2 s"):
        [batch_iterator.next(0.05) for _ in range(100)]
    release.set()
    batch_iterator.close()


def test_only_the_time_in_which_the_device_has_nothing_to_do_counts_as_waiting():
    busy_until = time.perf_counter() + 0.2
    batch_iterator = PrefetchIterator(
        batches(1, seconds=0.5), lambda: time.perf_counter() > busy_until, depth=1, name="train"
    )
    began = time.perf_counter()
    batch_iterator.next(5)
    assert 0.05 < batch_iterator.waited < time.perf_counter() - began - 0.15
    batch_iterator.close()
    busy = PrefetchIterator(batches(1, seconds=0.2), never_idle, depth=1, name="train")
    busy.next(5)
    assert busy.waited == 0
    busy.close()


def test_without_a_thread_the_caller_makes_the_batches():
    batch_iterator = SyncIterator(batches(3), never_idle)
    assert drained(batch_iterator) == [0, 1, 2]
    batch_iterator.close()


@pytest.fixture(scope="module")
def program():
    def loss(params, batch, *, rng, train):
        return params * batch.mean(), {}

    return compile_program(function_program(lambda key, batch: jnp.zeros(()), loss, optax.sgd(0.1)))


ONES = np.ones((4, 2), np.float32)


def state_of(program):
    return program.init(jax.random.key(0), ONES)


def slowly(count, seconds):
    for _ in range(count):
        time.sleep(seconds)
        yield ONES


class Stopper:
    def __init__(self, kind):
        self._kind = kind

    def handle(self, event):
        if isinstance(event, StepEnd) and event.step == 3:
            raise self._kind("enough")


def test_a_run_that_is_stopped_leaves_no_thread(program, subtests):
    for kind in [StopTraining, RuntimeError]:
        with subtests.test(kind=kind):
            data = Data(lambda: slowly(100, 0.001), {"val": lambda: slowly(5, 0.0)}, prefetch=4)
            if kind is RuntimeError:
                with pytest.raises(RuntimeError, match="enough"):
                    run(program, state_of(program), data, Plan(max_epochs=2), [Stopper(kind)])
            else:
                run(program, state_of(program), data, Plan(max_epochs=2), [Stopper(kind)])
            assert not prefetch_threads()


def test_an_abandoned_generator_of_events_leaves_no_thread(program):
    events: Any = train_events(
        program, state_of(program), Data(lambda: slowly(100, 0.0), prefetch=4), Plan(max_epochs=1)
    )
    for _ in range(5):
        next(events)
    assert prefetch_threads()
    events.close()
    assert not prefetch_threads()


def test_an_error_of_the_loader_names_the_batch(program):
    def failing():
        yield ONES
        yield ONES
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone") as caught:
        run(program, state_of(program), Data(failing, prefetch=2), Plan(max_epochs=1))
    line, where = caught.value.__notes__
    assert "in failing" in line
    assert where == "This happened while batch 2 of epoch 1 of the 'train' data was loaded."


def test_a_slow_loader_is_named_as_the_bottleneck_in_one_line_per_epoch(program, caplog):
    seen = EventRecorder()
    run(program, state_of(program), Data(lambda: slowly(60, 0.01)), Plan(max_epochs=2), [seen])
    lines = [record.message for record in caplog.records if "bottleneck" in record.message]
    assert [f"epoch {epoch}" in line for epoch, line in enumerate(lines, start=1)] == [True, True]


def test_waiting_for_data_gives_observers_a_turn_and_ends_a_run_that_is_to_stop(program):
    class Impatient:
        def handle(self, event):
            if isinstance(event, Waiting):
                raise StopTraining

    began = time.monotonic()
    run(program, state_of(program), Data(lambda: slowly(2, 2.5)), Plan(max_epochs=1), [Impatient()])
    assert time.monotonic() - began < 2 * 2.5


def test_a_prefetch_thread_of_an_abandoned_loop_is_closed_at_exit(program):
    events = train_events(program, state_of(program), Data(lambda: slowly(60, 0.0), prefetch=2), Plan(max_epochs=1))
    next(event for event in events if isinstance(event, StepEnd))
    assert [thread for thread in threading.enumerate() if "prefetch" in thread.name]
    prefetch._close_all()
    assert not [thread for thread in threading.enumerate() if "prefetch" in thread.name]
