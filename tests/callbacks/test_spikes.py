import json
import math
from typing import Any

import numpy as np
import pytest

from jax_trainer.callbacks import GradientSpikeMonitor
from jax_trainer.callbacks.spikes import NEW_LEVEL, Level


def spikes_of(values, *, decay=0.9, threshold=2.0, warmup=3) -> list[int]:
    level = Level(decay, threshold, warmup)
    return [index for index, value in enumerate(values) if level.update(value)]


def test_the_average_is_that_of_all_values_each_weighed_by_its_age():
    values = [3.0, 1.0, 2.0, 2.5]
    level = Level(0.9, 100.0, 1)
    for value in values:
        assert not level.update(value)
    assert level.average == pytest.approx(np.average(values, weights=[0.9**age for age in (3, 2, 1, 0)]), rel=1e-12)


def test_a_spike_is_far_above_what_was_usual():
    for values, found in [
        ([1, 1, 1, 2.0, 1], []),  # twice is not more than twice
        ([1, 1, 1, 2.1, 1], [3]),
        ([1, 9, 1, 1, 1], []),  # the first values say what is usual
        ([-1, -1, -1, -0.5, 0.1], [4]),  # as far above a negative average
        ([1, math.nan, 1, 1, math.inf], [1, 4]),
    ]:
        assert spikes_of(values) == found


def test_a_spike_leaves_no_trace_in_the_average():
    usual = [1.0, 1.1, 0.9, 1.0, 1.05] * 4
    level, other = Level(0.9, 2.0, 3), Level(0.9, 2.0, 3)
    for index, value in enumerate(usual):
        if index == 10:
            assert level.update(100.0) and level.update(math.nan) and level.update(100.0)
        assert not level.update(value)  # nor are those after it taken for spikes, or missed
        other.update(value)
    assert level.average == other.average
    assert level.update(2.2)


def test_what_stays_high_is_a_new_level_and_no_longer_a_spike():
    found = spikes_of([1.0] * 10 + [5.0] * (NEW_LEVEL + 50) + [11.0])
    assert found == [*range(10, 10 + NEW_LEVEL - 1), 10 + NEW_LEVEL + 50]


def test_spikes_that_are_not_in_a_row_are_no_new_level():
    found = spikes_of([1.0] * 10 + [5.0, 1.0] * (NEW_LEVEL + 5))
    assert found == [*range(10, 10 + 2 * (NEW_LEVEL + 5), 2)]


def monitor(**config: Any) -> GradientSpikeMonitor:
    return GradientSpikeMonitor(ema_decay=0.9, warmup_steps=1, **config)


def counted(grads: str, losses: str) -> dict[str, int]:
    """The counts of steps that spike where there is an `x`."""
    spikes = monitor()
    for step, (grad, loss) in enumerate(zip("." + grads, "." + losses, strict=True), 1):
        spikes.add(step, 1 + 9 * (grad == "x"), 1 + 9 * (loss == "x"))
    return {name: count for name, count in spikes.state_dict()["counts"].items() if count}


def test_which_spike_came_first_is_counted():
    for grads, losses, counts in [
        ("....", "....", {}),
        ("x.x.", "..x.", {"grad_norms": 2, "losses": 1, "synchronous": 1}),
        ("x.....", ".....x", {"grad_norms": 1, "losses": 1, "grad_before_loss": 1}),
        ("x......", "......x", {"grad_norms": 1, "losses": 1}),  # too late
        ("...x", ".x..", {"grad_norms": 1, "losses": 1, "loss_before_grad": 1}),
        ("x.x..", ".x.x.", {"grad_norms": 2, "losses": 2, "grad_before_loss": 2, "loss_before_grad": 1}),
        ("x...", "xx..", {"grad_norms": 1, "losses": 2, "synchronous": 1}),  # a common one precedes neither
    ]:
        assert counted(grads, losses) == counts


def test_the_monitor_continues_exactly_from_its_state():
    values = np.random.default_rng(0).lognormal(sigma=1.0, size=(60, 2)).tolist()
    whole, first, second = (monitor(log_to_disk=True) for _ in range(3))
    for step, pair in enumerate(values):
        whole.add(step, *pair)
    for step, pair in enumerate(values[:31]):
        first.add(step, *pair)
    second.load_state_dict(json.loads(json.dumps(first.state_dict(), allow_nan=False)))
    for step, pair in enumerate(values[31:], 31):
        second.add(step, *pair)
    assert second.state_dict() == whole.state_dict()
    assert whole.state_dict()["counts"]["grad_norms"] > 3
