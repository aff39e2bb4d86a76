import json
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jax_trainer.callbacks import LambdaCallback, RunContext, ThroughputMonitor, ThroughputMonitorConfig
from jax_trainer.core.metric_buffer import Field
from jax_trainer.engine import EpochEnd, EpochStart, Event, Every, Plan, StepMetrics
from tests.callbacks.callback_runs import fit, rows, scripted, scripted_program, send_event

NAMES = {"examples_per_second", "steps_per_second", "step_time"}
KEYS = {f"throughput/{name}" for name in {*NAMES, "data_wait_share"}}


class Ends:
    """Keeps what the ends of epochs say about time."""

    def __init__(self) -> None:
        self.times: list[tuple[float, float]] = []

    def handle(self, event: Event) -> None:
        if isinstance(event, EpochEnd):
            self.times.append((event.seconds, event.waited))


def measured(run: RunContext, *observers: object, examples: int, **options: Any) -> list[dict[str, Any]]:
    """What is logged of short runs on batches of 8."""
    train = scripted([1.0] * examples, batch_size=8)
    plan = Plan(**{"max_epochs": 1, "metrics_every": 2, **options})
    fit(
        ThroughputMonitor(run=run), *observers, plan=plan, train=train, program=scripted_program(), evals={"val": train}
    )
    return rows(run)


def reported(steps: int) -> Any:
    """The rows of steps on 8 examples each."""
    words = np.full((steps, 1), 8.0, np.float32).view(np.uint32)
    return SimpleNamespace(words=words, format=SimpleNamespace(default_weight=Field(0, 1, (), np.dtype(np.float32))))


@pytest.mark.parametrize("steps_per_call", [1, 3, "epoch"])
def test_an_epoch_is_logged_with_its_examples_steps_and_waiting(folder_run, steps_per_call):
    ends = Ends()
    logged = measured(folder_run, ends, examples=29, max_epochs=2, steps_per_call=steps_per_call)
    assert [(row["step"], row["epoch"]) for row in logged] == [(4, 1), (8, 2)]  # the last batch of each is not full
    for row, (seconds, waited) in zip(logged, ends.times, strict=True):
        assert row.keys() == {"step", "epoch", *KEYS}
        assert row["throughput/examples_per_second"] * seconds == pytest.approx(29)
        assert row["throughput/steps_per_second"] * seconds == pytest.approx(4)
        assert row["throughput/data_wait_share"] == pytest.approx(waited / seconds)
        assert row["throughput/step_time"] * 4 == pytest.approx(seconds)


def test_an_epoch_that_continues_counts_its_steps_before_and_after_the_interruption(folder_run):
    first, second = ThroughputMonitor(run=folder_run), ThroughputMonitor(run=folder_run)
    send_event(first, EpochStart, 0, 1, None)
    for step in (10, 20):
        send_event(first, StepMetrics, step, 1, reported(10))
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    send_event(second, EpochStart, 20, 1, None)
    send_event(second, StepMetrics, 30, 1, reported(10))
    send_event(second, EpochEnd, 30, 1, {}, 5.0, 1.0, None)
    assert second.state_dict()["epoch"] == 0
    send_event(second, EpochStart, 30, 1, None)  # the plan has become longer: the epoch that was logged is over
    send_event(second, StepMetrics, 36, 1, reported(6))
    send_event(second, EpochEnd, 36, 1, {}, 3.0, 1.0, None)
    row, later = rows(folder_run)
    assert row["throughput/steps_per_second"] == 30 / 5.0
    assert row["throughput/examples_per_second"] == 30 * 8 / 5.0
    assert row["throughput/step_time"] == pytest.approx(5 / 30)
    assert later["throughput/steps_per_second"] == 6 / 3.0


def test_evaluations_and_what_is_saved_after_them_do_not_count(folder_run):
    measured(folder_run, examples=8, eval_every=Every(steps=3))
    pause = LambdaCallback(on_validation_epoch_end=lambda metrics, epoch: time.sleep(0.5))
    row = measured(folder_run, pause, examples=8 * 6, eval_every=Every(steps=3))[-1]
    assert row["throughput/step_time"] < 0.5 / 6


def test_only_every_so_many_epochs_are_logged(folder_run):
    fit(ThroughputMonitor(ThroughputMonitorConfig(every_n_epochs=2), folder_run), plan=Plan(max_epochs=3))
    assert [row["epoch"] for row in rows(folder_run)] == [2]


def test_an_epoch_without_steps_is_not_logged(folder_run):
    send_event(ThroughputMonitor(run=folder_run), EpochEnd, 0, 1, {}, 0.0, 0.0, None)
    assert rows(folder_run) == []
