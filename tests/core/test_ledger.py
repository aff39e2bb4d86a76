"""Every second of a run is in exactly one phase."""

import threading
import time

import jax
import jax.numpy as jnp
import pytest

from jax_trainer.core import ledger as ledgers
from jax_trainer.core.ledger import COMPILE, OTHER, STEPS, TRACE, WAITING, TimeLedger, begin, phase, timed

NAP = 0.02


@pytest.fixture
def ledger():
    made = begin()
    yield made
    made.end()


def wall(of: TimeLedger) -> float:
    return time.perf_counter() - of.started


def test_the_phases_sum_to_the_wall_clock_time(ledger: TimeLedger):
    with phase("a"):
        time.sleep(NAP)
        with phase("b"):
            time.sleep(NAP)
    ledger.end()
    seconds = ledger.read()
    assert sum(seconds.values()) == pytest.approx(wall(ledger), abs=0.01)
    assert NAP <= seconds["a"] < 2 * NAP and NAP <= seconds["b"] < 2 * NAP  # the inner phase pauses the outer one


def test_time_in_no_phase_is_other(ledger: TimeLedger):
    time.sleep(NAP)
    assert ledger.read()[OTHER] >= NAP


def test_a_phase_ends_with_an_exception(ledger: TimeLedger):
    with pytest.raises(KeyError), phase("a"):
        raise KeyError
    before = ledger.read()["a"]
    time.sleep(NAP)
    assert ledger.read()["a"] == before


def test_a_generator_that_is_closed_late_does_not_disturb_the_others(ledger: TimeLedger):
    def abandoned():
        with phase("a"):
            yield

    generator = abandoned()
    next(generator)
    with phase("b"):
        generator.close()
        time.sleep(NAP)
    time.sleep(NAP)
    seconds = ledger.read()
    assert seconds["a"] < NAP
    assert sum(seconds.values()) == pytest.approx(wall(ledger), abs=0.005)


def test_the_time_of_a_timed_function_has_its_name(ledger: TimeLedger):
    timed("callback Slow", time.sleep)(NAP)
    assert ledger.read()["callback Slow"] >= NAP


def test_waiting_for_data_is_a_part_of_the_steps(ledger: TimeLedger):
    with phase(STEPS):
        time.sleep(2 * NAP)
        ledger.track_waiting(lambda: NAP)
        assert ledger.read()[WAITING] == NAP
        ledger.track_waiting()
    seconds = ledger.read()
    assert seconds[WAITING] == NAP and seconds[STEPS] >= NAP
    ledger.track_waiting(lambda: 100.0)  # never more than there is
    assert sum(ledger.read().values()) == pytest.approx(wall(ledger), abs=0.005)


def test_tracing_and_compiling_are_taken_out_of_the_phase_they_happen_in(ledger: TimeLedger):
    @jax.jit
    def inner(x: jax.Array) -> jax.Array:
        time.sleep(8 * NAP)  # while it is traced
        return x * 2

    x = jnp.ones(3)
    before = ledger.read()
    with phase(STEPS):
        jax.jit(lambda x: inner(x) + 1)(x).block_until_ready()
    after = ledger.read()
    traced = after[TRACE] - before.get(TRACE, 0.0)
    assert 8 * NAP <= traced < 15 * NAP  # the inner function is not counted twice
    assert after[COMPILE] > before.get(COMPILE, 0.0)
    assert after[STEPS] < 8 * NAP


def test_other_threads_do_not_count(ledger: TimeLedger):
    def work():
        with phase("elsewhere"):
            time.sleep(NAP)

    thread = threading.Thread(target=work)
    thread.start()
    with phase("joining"):
        thread.join()
    assert "elsewhere" not in ledger.read()
    assert ledger.read()["joining"] >= NAP / 2


def test_a_run_inside_a_run_has_its_own_time(ledger: TimeLedger):
    with phase("callback Nested"):
        inner = begin()
        with phase("a"):
            time.sleep(NAP)
        inner.end()
    assert inner.since == "call" and inner.read()["a"] >= NAP
    assert "a" not in ledger.read() and ledger.read()["callback Nested"] >= NAP


def test_an_ended_ledger_does_not_change(ledger: TimeLedger):
    ledger.end()
    before = ledger.read()
    with phase("a"):
        time.sleep(NAP)
    ledger.move("b", 1.0)
    assert ledger.read() == before


def test_the_first_ledger_of_a_process_begins_with_it():
    made = ledgers._of_process()
    assert made.since in ("process", "import")
    assert wall(made) < 24 * 3600
    assert sum(made.read().values()) == pytest.approx(wall(made), abs=0.005)
