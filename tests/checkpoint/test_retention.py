import math
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from jax_trainer.checkpoint.record import Saved
from jax_trainer.checkpoint.retention import Retention
from jax_trainer.datasets import Position

NAN, INF = math.nan, math.inf
STEPS = (9, 10, 99, 100, 1000)


def saved(step: int, value: float | None) -> Saved:
    return Saved(step, Position(), {} if value is None else {"val/acc": value}, Path())


def retention(**changed: Any) -> Retention:
    return Retention(**{"keep_latest": 2, "keep_best": 1, "monitor": "val/acc", "mode": "max", **changed})


def what_stays(retention: Retention, values: tuple[float | None, ...]) -> list[int]:
    """Saves one after another, and deletes after each, as a run does."""
    there: list[Saved] = []
    for step, value in zip(STEPS, values, strict=False):
        there.append(saved(step, value))
        kept = retention.kept(there, step)
        there = [one for one in there if one.step in kept]
    return [one.step for one in there]


def by_hand(values: tuple[float | None, ...], latest: int, best: int, mode: str) -> list[int]:
    """The newest, and what is left of all when the worst is taken away again and again."""
    numbered = [(step, value) for step, value in zip(STEPS, values, strict=False)]
    good = [(step, value) for step, value in numbered if value is not None and value == value]
    while len(good) > best:
        worst = good[0]
        for one in good:
            if (one[1] <= worst[1]) if mode == "max" else (one[1] >= worst[1]):
                worst = one
        good.remove(worst)
    return sorted({step for step, _ in numbered[-latest:]} | {step for step, _ in good})


SEQUENCES = [
    *set(permutations([0.1, 0.5, 0.5, NAN, 0.9])),
    *set(permutations([INF, -INF, 0.0, NAN, NAN])),
    (0.1, 0.2, 0.3, 0.4, 0.5),
    (0.5, 0.4, 0.3, 0.2, 0.1),
    (0.5,) * 5,
    (NAN,) * 5,
    (None, 0.5, None, 0.2, None),
]


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize(("latest", "best"), [(1, 0), (1, 1), (2, 1), (1, 2), (3, 3)])
def test_the_newest_and_the_best_of_all_stay_and_no_others(latest, best, mode):
    rule = retention(keep_latest=latest, keep_best=best, mode=mode)
    for values in SEQUENCES:
        assert what_stays(rule, values) == by_hand(values, latest, best, mode), values


def test_without_a_metric_to_monitor_only_the_newest_stay():
    assert what_stays(retention(monitor=None), (0.9, 0.1, 0.2, 0.3)) == [99, 100]


def test_what_was_just_saved_stays_though_later_steps_are_there():
    there = [saved(step, 0.5) for step in (50, 60, 5)]
    assert retention(keep_latest=1, keep_best=0).kept(there, 5) == {5, 60}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"keep_latest": 0}, "`keep_latest` must be a whole number of at least 1, got 0. A run goes on"),
        ({"keep_latest": 1.5}, "`keep_latest` .* got 1.5"),
        ({"keep_latest": True}, "`keep_latest` .* got True"),
        ({"keep_best": -1}, "`keep_best` must be a whole number of at least 0, got -1"),
        ({"mode": "auto"}, "`mode` must be 'min' or 'max', got 'auto'"),
    ],
)
def test_settings_that_make_no_sense_are_errors(changed, message):
    with pytest.raises(ValueError, match=message):
        retention(**changed)
