import json

import numpy as np
import pytest
from callback_runs import FIRST_RATE, STEPS, TOTAL, fit

from jax_trainer.callbacks import LearningRateMonitor, LearningRateMonitorConfig
from jax_trainer.engine import Plan


def rates(folder_run, every: int) -> list[tuple[int, int, float]]:
    fit(LearningRateMonitor(LearningRateMonitorConfig(every_n_epochs=every), folder_run), plan=Plan(max_epochs=4))
    rows = map(json.loads, (folder_run.folder / "metrics.jsonl").read_text().splitlines())
    return [(row["step"], row["epoch"], row["optimizer/lr"]) for row in rows]


@pytest.mark.parametrize(("every", "epochs"), [(1, [1, 2, 3, 4]), (-1, [1, 2, 3, 4]), (2, [2, 4])])
def test_the_learning_rate_is_logged_before_the_first_epoch_and_at_the_beginning_of_epochs(folder_run, every, epochs):
    steps = [(epoch - 1) * STEPS for epoch in epochs]
    # the optimizer keeps the rate of its last step
    expected = [FIRST_RATE * (1 - max(step - 1, 0) / TOTAL) for step in [0, *steps]]
    logged = rates(folder_run, every)
    assert [row[:2] for row in logged] == [(0, 0), *zip(steps, epochs, strict=True)]
    np.testing.assert_allclose([row[2] for row in logged], expected, rtol=1e-6)


def test_never_is_never(folder_run):
    assert rates(folder_run, 0) == []
