from itertools import product
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jax_trainer.callbacks import (
    GradientSpikeMonitor,
    GradientSpikeMonitorConfig,
    LearningRateMonitor,
    LearningRateMonitorConfig,
    RunContext,
)
from jax_trainer.config.settings import SettingsError
from jax_trainer.engine import EpochEnd, FitEnd, FitStart, Plan, StepMetrics
from tests.callbacks.callback_runs import (
    FIRST_RATE,
    STEPS,
    TOTAL,
    evaluated,
    fit,
    rows,
    run_in,
    scripted,
    scripted_program,
    send_event,
)
from tests.rows import noted_row


def rates(folder_run, every: int) -> list[tuple[int, int, float]]:
    fit(LearningRateMonitor(LearningRateMonitorConfig(every_n_epochs=every), folder_run), plan=Plan(max_epochs=4))
    return [(row["step"], row["epoch"], row["optimizer/lr"]) for row in rows(folder_run)]


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


USUAL = np.random.default_rng(0).uniform(0.9, 1.1, size=(24, 2)).astype(np.float32)  # loss, norm
SPIKES = {9: (1, 100), 11: (100, 1), 17: (100, 100)}  # step: by what they are multiplied
FACTORS = np.array([SPIKES.get(step, (1, 1)) for step in range(1, 25)])
COUNTS = ("grad_norms", "losses", "synchronous", "grad_before_loss", "loss_before_grad")


def watched(folder_run, *, log_norms: bool = True, every: int = 1, **options) -> GradientSpikeMonitor:
    """A callback that has seen 24 steps, in three epochs."""
    config = GradientSpikeMonitorConfig(warmup_steps=4, every_n_epochs=every, log_to_disk=True)
    callback, program = GradientSpikeMonitor(config, folder_run), scripted_program(log_norms=log_norms)
    batches = list(scripted(*(USUAL * FACTORS).T.tolist()))
    state = program.init(jax.random.key(0), batches[0])
    plan = Plan(max_steps=24, steps_per_epoch=8, metrics_every=5, **options)
    fit(callback, plan=plan, train=iter(batches), state=state, program=program, evals={})
    return callback


@pytest.mark.parametrize("steps_per_call", [1, 3, 8])
def test_spikes_are_counted_per_epoch_whatever_the_chunks(folder_run, steps_per_call):
    watched(folder_run, steps_per_call=steps_per_call)
    logged = rows(folder_run)
    assert [(row["step"], row["epoch"]) for row in logged] == [(8, 1), (16, 2), (24, 3)]
    assert [[row[f"optimizer/spikes_{name}"] for name in COUNTS] for row in logged] == [
        [0, 0, 0, 0, 0],
        [1, 1, 0, 1, 0],
        [1, 1, 1, 0, 0],
    ]


def test_counts_cover_all_epochs_since_the_last_that_was_logged(folder_run):
    watched(folder_run, every=3)
    (row,) = rows(folder_run)
    assert [row[f"optimizer/spikes_{name}"] for name in COUNTS] == [2, 2, 1, 1, 0]


def test_a_spike_of_a_hundred_times_leaves_the_average_as_it_was(folder_run):
    state = watched(folder_run).state_dict()["levels"]
    for index, name in enumerate(("loss", "grad_norm")):
        kept = USUAL[FACTORS[:, index] == 1, index].astype(np.float64)
        expected = np.average(kept, weights=0.995 ** np.arange(len(kept))[::-1])
        assert state[name]["total"] / state[name]["weight"] == pytest.approx(expected, rel=1e-9)


def test_the_spikes_themselves_are_in_a_file(folder_run):
    watched(folder_run)
    with np.load(folder_run.folder / "gradient_spikes.npz", allow_pickle=False) as found:
        assert found["grad_norm_steps"].tolist() == [9, 17]
        np.testing.assert_allclose(found["grad_norm_values"], USUAL[[8, 16], 1] * 100, rtol=1e-6)
        np.testing.assert_allclose(found["grad_norm_averages"][0], USUAL[:8, 1].mean(), rtol=0.01)
        assert found["loss_steps"].tolist() == [11, 17]


def test_without_the_norm_it_says_which_key_to_set(folder_run):
    with pytest.raises(
        ValueError, match="needs the step metric 'optimizer/grad_global_norm'.* Set `log_grad_norm: true`"
    ):
        watched(folder_run, log_norms=False)


def test_steps_that_were_skipped_are_not_looked_at(folder_run):
    batches = scripted([1, 1, float("nan"), 1], [1, 1, 1, 1])
    callback = GradientSpikeMonitor(run=folder_run)
    fit(callback, program=scripted_program(guarded=True), train=batches, evals={}, plan=Plan(max_epochs=1))
    assert callback.state_dict()["levels"]["loss"]["seen"] == 3
    assert rows(folder_run)[0]["optimizer/spikes_losses"] == 0


def test_spikes_are_in_the_file_after_a_validation(folder_run):
    callback = GradientSpikeMonitor(GradientSpikeMonitorConfig(log_to_disk=True), folder_run)
    send_event(callback, FitStart, 0, 0)
    callback.add(1, float("inf"), 1.0)
    evaluated(callback, {"loss": 1.0}, step=1)
    assert (folder_run.folder / "gradient_spikes.npz").exists()


def spike_events(callback: GradientSpikeMonitor, steps: range) -> None:
    """The steps, and the ends of epochs of 8 of them."""
    values = USUAL * FACTORS
    for step in steps:
        weights = np.ones(1)
        columns = {
            name: SimpleNamespace(values=values[step - 1 : step, index], weights=weights)
            for index, name in enumerate(("loss", "optimizer/grad_global_norm"))
        }
        send_event(callback, StepMetrics, step, (step + 7) // 8, SimpleNamespace(columns=columns, first=step))
        if step % 8 == 0:
            send_event(callback, EpochEnd, step, step // 8, {}, 1.0, 0.0, None)


def begun(run: RunContext, step: int, state: dict | None = None) -> GradientSpikeMonitor:
    callback = GradientSpikeMonitor(GradientSpikeMonitorConfig(warmup_steps=4, log_to_disk=True), run)
    if state is not None:
        callback.load_state_dict(state)
    send_event(callback, FitStart, step, (step + 7) // 8)
    return callback


def finished(run: RunContext, callback: GradientSpikeMonitor) -> tuple:
    send_event(callback, FitEnd, 24, 3, "completed")
    return rows(run), (run.folder / "gradient_spikes.npz").read_bytes(), callback.state_dict()


def test_a_run_that_is_killed_counts_and_keeps_every_spike_once(tmp_path):
    with run_in(tmp_path / "whole") as run:
        whole = begun(run, 0)
        spike_events(whole, range(1, 25))
        expected = finished(run, whole)
    for saved_at, killed_at in product((0, 9, 10, 16, 20), (20, 24)):
        with noted_row(saved_at, killed_at), run_in(tmp_path / f"{saved_at}-{killed_at}") as run:
            first = begun(run, 0)
            spike_events(first, range(1, saved_at + 1))
            state, mark = first.state_dict(), run.logger.mark()()
            spike_events(first, range(saved_at + 1, killed_at + 1))
            run.logger.cut(mark)
            second = begun(run, saved_at, state)
            spike_events(second, range(saved_at + 1, 25))
            assert finished(run, second) == expected


def test_where_training_goes_back_the_file_does(folder_run):
    callback = begun(folder_run, 0)
    spike_events(callback, range(1, 11))
    state = callback.state_dict()
    spike_events(callback, range(11, 18))
    callback.load_state_dict(state)
    spike_events(callback, range(12, 18))  # the spike of step 11 is left out
    send_event(callback, FitEnd, 17, 3, "completed")
    with np.load(folder_run.folder / "gradient_spikes.npz", allow_pickle=False) as found:
        assert found["grad_norm_steps"].tolist() == [9, 17]
        assert found["loss_steps"].tolist() == [17]


def test_settings_by_which_everything_or_nothing_is_a_spike_are_refused():
    for key, value in [("threshold", 1.0), ("ema_decay", 1.0), ("warmup_steps", 0)]:
        with noted_row(key, value), pytest.raises(SettingsError, match=f"`{key}` must be"):
            GradientSpikeMonitorConfig(**{key: value})
