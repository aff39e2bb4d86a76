import math
from collections.abc import Mapping
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from jax_trainer.checkpoint.record import SavedCheckpoint
from jax_trainer.checkpoint.retention import Retention
from jax_trainer.datasets import Position
from tests.rows import noted_row

NAN, INF = math.nan, math.inf
STEPS = (9, 10, 99, 100, 1000)


def saved(step: int, value: float | None) -> SavedCheckpoint:
    return SavedCheckpoint(step, Position(), {} if value is None else {"val/acc": value}, Path())


def retention(**changed: Any) -> Retention:
    return Retention(**{"keep_latest": 2, "keep_best": 1, "monitor": "val/acc", "mode": "max", **changed})


def kept_steps(retention: Retention, values: tuple[float | None, ...]) -> list[int]:
    """Saves step by step, and deletes after each save, as a run does."""
    there: list[SavedCheckpoint] = []
    for step, value in zip(STEPS, values, strict=False):
        there.append(saved(step, value))
        kept = retention.kept(there, step)
        there = [one for one in there if one.step in kept]
    return [one.step for one in there]


def expected_steps(values: tuple[float | None, ...], latest: int, best: int, mode: str) -> list[int]:
    """The newest, and the rest after repeatedly removing the worst."""
    numbered = [(step, value) for step, value in zip(STEPS, values, strict=False)]
    good = [(step, value) for step, value in numbered if value is not None and value == value]
    while len(good) > best:
        worst = good[0]
        for one in good:
            if (one[1] < worst[1]) if mode == "max" else (one[1] > worst[1]):
                worst = one  # of equal ones, the earliest
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


def test_only_the_newest_and_the_best_are_kept():
    for latest, best in [(1, 0), (1, 1), (2, 1), (1, 2), (3, 3)]:
        for mode in ["min", "max"]:
            with noted_row(latest, best, mode):
                rule = retention(keep_latest=latest, keep_best=best, mode=mode)
                for values in SEQUENCES:
                    assert kept_steps(rule, values) == expected_steps(values, latest, best, mode), values


def test_without_a_monitored_metric_only_the_newest_are_kept():
    assert kept_steps(retention(monitor=None), (0.9, 0.1, 0.2, 0.3)) == [99, 100]


def higher(new: Mapping[str, float], old: Mapping[str, float]) -> bool:
    return new["val/acc"] > old["val/acc"]


def test_a_comparison_function_keeps_the_same_as_the_metric():
    for latest, best in [(1, 0), (1, 1), (2, 1), (1, 2), (3, 3)]:
        with noted_row(latest, best):
            rule = retention(keep_latest=latest, keep_best=best, monitor=None, better=higher)
            for values in [*set(permutations([0.1, 0.5, 0.6, 0.9, -INF])), (None, 0.5, None, 0.2, None)]:
                assert kept_steps(rule, values) == expected_steps(values, latest, best, "max"), values


def test_a_comparison_function_may_use_several_metrics():
    def cheaper_at_equal_accuracy(new: Mapping[str, float], old: Mapping[str, float]) -> bool:
        return (new["acc"], -new["cost"]) > (old["acc"], -old["cost"])

    measured = {4: (0.8, 3.0), 2: (0.9, 5.0), 1: (0.9, 7.0), 3: (0.9, 5.0)}
    there = [
        SavedCheckpoint(step, Position(), {"acc": acc, "cost": cost}, Path()) for step, (acc, cost) in measured.items()
    ]
    rule = retention(monitor=None, better=cheaper_at_equal_accuracy, mode="min")
    assert [one.step for one in rule.best_first(there)] == [2, 3, 1, 4]


def test_a_comparison_function_replaces_the_metric_also_for_nan():
    assert kept_steps(retention(keep_latest=1, better=lambda new, old: not higher(new, old)), (0.1, 0.9, NAN)) == [99]
    assert kept_steps(retention(keep_latest=1, better=higher), (NAN, 0.1, 0.9)) == [9, 99]


def test_of_equals_by_a_comparison_function_the_earlier_one_is_kept():
    assert kept_steps(retention(keep_latest=1, better=lambda new, old: False), (0.1, 0.9, 0.5)) == [9, 99]


def test_a_failing_comparison_function_is_named():
    with pytest.raises(ValueError, match=r"`better` \(higher\) failed .* step 10 .* step 9: KeyError: 'val/acc'"):
        retention(better=higher).best_first([SavedCheckpoint(step, Position(), {"a": 0.0}, Path()) for step in (9, 10)])


def test_the_last_save_is_kept_even_if_there_are_later_steps():
    there = [saved(step, 0.5) for step in (50, 60, 5)]
    assert retention(keep_latest=1, keep_best=0).kept(there, 5) == {5, 60}


def test_invalid_settings_are_errors():
    for changed, message in [
        ({"keep_latest": 0}, "`keep_latest` must be.*got 0"),
        ({"keep_latest": 1.5}, "`keep_latest` .* got 1.5"),
        ({"keep_latest": True}, "`keep_latest` .* got True"),
        ({"keep_best": -1}, "`keep_best` must be.*got -1"),
        ({"better": "val/acc"}, "`better` must be a function .*, got 'val/acc'"),
        ({"mode": "best"}, "`mode` must be 'min', 'max' or 'auto', got 'best'"),
    ]:
        with noted_row(changed, message), pytest.raises(ValueError, match=message):
            retention(**changed)
