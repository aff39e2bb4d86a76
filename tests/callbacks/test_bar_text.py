from hypothesis import given
from hypothesis import strategies as st

from jax_trainer.callbacks.screen import WINDOW, Pace


def paced(rate: float, seconds: float, *, first: int = 0) -> Pace:
    pace = Pace()
    for tick in range(int(seconds) + 1):
        pace.count(first + int(rate * tick), float(tick))
    return pace


@given(rate=st.integers(1, 1000), seconds=st.integers(2, 300), first=st.integers(0, 10**9))
def test_a_steady_rate_is_the_rate(rate: int, seconds: int, first: int):
    assert paced(rate, seconds, first=first).rate == rate


def test_the_rate_follows_a_change_within_the_window():
    pace = paced(10, 100)
    for tick in range(101, 101 + int(WINDOW)):
        pace.count(1000 + 2 * (tick - 100), float(tick))
    assert pace.rate == 2


def test_steps_that_take_longer_than_the_window_have_a_rate():
    pace = Pace()
    for step in range(4):
        pace.count(step, step * 10 * WINDOW)
    assert pace.rate == 1 / (10 * WINDOW)


def test_nothing_is_known_before_the_second_dispatch():
    pace = Pace()
    assert pace.rate == 0
    pace.count(8, 5.0)
    pace.count(8, 9.0)  # drawn again, without another step
    assert pace.rate == 0
