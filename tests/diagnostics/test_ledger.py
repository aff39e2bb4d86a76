"""Every second of a run is in exactly one phase."""

import threading
import time

import jax
import jax.numpy as jnp
import pytest

from jax_trainer.diagnostics import ledger as ledgers
from jax_trainer.diagnostics.ledger import (
    COMPILE,
    DATA,
    OTHER,
    SCRIPT,
    STEPS,
    TRACE,
    WAITING,
    TimeLedger,
    begin,
    phase,
    timed,
)

NAP = 0.3


class Clock:
    """A clock that a test moves."""

    now = 100.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(ledgers, "time", made)
    return made


@pytest.fixture
def ledger(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    if "clock" in request.fixturenames:
        request.getfixturevalue("clock")
    monkeypatch.setattr(ledgers._current, "ledger", None)
    made = begin()
    yield made
    made.end()


def test_the_phases_sum_to_the_wall_clock_time(clock: Clock, ledger: TimeLedger):
    with phase("a"):
        clock.sleep(1)
        with phase("b"):
            clock.sleep(2)
        clock.sleep(4)
    clock.sleep(8)
    ledger.end()
    clock.sleep(16)
    assert nonzero(ledger) == {"a": 5, "b": 2, OTHER: 8}  # the inner phase pauses the outer one


def nonzero(ledger: TimeLedger) -> dict[str, float]:
    return {name: seconds for name, seconds in ledger.read().items() if seconds}


def test_a_phase_ends_with_an_exception(clock: Clock, ledger: TimeLedger):
    with pytest.raises(ZeroDivisionError), phase("a"):
        clock.sleep(1 / 0)
    clock.sleep(2)
    assert nonzero(ledger) == {OTHER: 2}


def test_a_generator_that_is_closed_late_costs_no_second(clock: Clock, ledger: TimeLedger):
    def abandoned():
        with phase("a"):
            yield

    generator = abandoned()
    next(generator)
    with phase("b"):
        clock.sleep(1)
        generator.close()
        clock.sleep(2)
    clock.sleep(4)
    assert ledger.read()["a"] == 0 and sum(ledger.read().values()) == 7


def test_the_time_of_a_timed_function_has_its_name(clock: Clock, ledger: TimeLedger):
    timed("callback Slow", clock.sleep)(3)
    assert nonzero(ledger) == {"callback Slow": 3}


def test_waiting_for_data_is_a_part_of_the_steps(clock: Clock, ledger: TimeLedger):
    with phase(STEPS):
        clock.sleep(5)
        ledger.track_waiting(lambda: 2.0)
        assert ledger.read()[WAITING] == 2
        ledger.track_waiting()
    assert nonzero(ledger) == {STEPS: 3, WAITING: 2}
    ledger.track_waiting(lambda: 100.0)  # never more than there is
    assert nonzero(ledger) == {WAITING: 5}


def test_tracing_and_compiling_are_taken_out_of_the_phase_they_happen_in(ledger: TimeLedger):
    @jax.jit
    def inner(x: jax.Array) -> jax.Array:
        time.sleep(NAP)  # while it is traced
        return x * 2

    x = jnp.ones(3)
    before = ledger.read()
    with phase(STEPS):
        jax.jit(lambda x: inner(x) + 1)(x).block_until_ready()
    after = ledger.read()
    traced = after[TRACE] - before.get(TRACE, 0.0)
    assert NAP <= traced < 1.9 * NAP  # the inner function is not counted twice
    assert after[COMPILE] > before.get(COMPILE, 0.0)
    assert after[STEPS] < NAP


def test_other_threads_do_not_count(clock: Clock, ledger: TimeLedger):
    def work():
        with phase("elsewhere"):
            clock.sleep(3)

    thread = threading.Thread(target=work)
    with phase("joining"):
        thread.start()
        thread.join()
    assert nonzero(ledger) == {"joining": 3}


def test_a_run_inside_a_run_has_its_own_time(clock: Clock, ledger: TimeLedger):
    with phase("callback Nested"):
        inner = begin()
        with phase("a"):
            clock.sleep(3)
        inner.end()
    assert inner.since == "call" and nonzero(inner) == {"a": 3}
    assert nonzero(ledger) == {"callback Nested": 3}


def test_an_ended_ledger_does_not_change(clock: Clock, ledger: TimeLedger):
    ledger.end()
    with phase("a"):
        clock.sleep(1)
    ledger.move("b", 1.0)
    assert nonzero(ledger) == {}


def test_the_first_ledger_of_a_process_begins_with_it():
    made = ledgers._of_process()
    took = time.perf_counter() - made.started
    assert made.since in ("process", "import") and took < 24 * 3600
    assert sum(made.read().values()) == pytest.approx(took, abs=0.5)


def test_what_the_script_did_before_a_run_keeps_its_name(clock: Clock):
    made = TimeLedger(clock.now, "process", SCRIPT)
    for name in (DATA, STEPS):  # the steps of a loop of its own
        depth = made.enter(name)
        clock.sleep(1)
        made.leave(depth)
    made._take(None)
    clock.sleep(2)
    assert nonzero(made) == {DATA: 1, SCRIPT: 1, OTHER: 2}
