from hypothesis import given
from hypothesis import strategies as st

from jax_trainer.callbacks.pace import WINDOW, Pace, TimeLeft
from jax_trainer.engine import Every


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


def test_evaluations_count_for_the_time_left_and_not_for_the_rate():
    left = TimeLeft(epochs=10, steps=1000, eval_every=Every(epochs=2))
    assert left.seconds(500, 5, rate=10.0) == 50
    left.evaluation = 7.0
    assert left.seconds(500, 5, rate=10.0) == 50 + 3 * 7  # after the epochs 6, 8 and 10
    assert left.seconds(1000, 10, rate=10.0) == 0


def test_evaluations_by_steps_and_by_minutes_count():
    left = TimeLeft(epochs=None, steps=1000, eval_every=Every(steps=100, minutes=0.5))
    left.evaluation = 3.0
    assert left.seconds(450, 0, rate=550 / 60) == 60 + (6 + 2) * 3


def test_without_a_rate_or_an_end_no_time_is_known():
    assert TimeLeft(None, 100).seconds(0, 0, rate=0.0) is None
    assert TimeLeft(None, None).seconds(0, 0, rate=1.0) is None
