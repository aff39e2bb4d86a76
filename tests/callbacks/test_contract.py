"""The contract of all built-in callbacks: they change training by edits only, and resume exactly."""

import json
import os
import signal
import traceback
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import optuna
import pytest
from compoconf import Registry, registered

from jax_trainer.callbacks import (
    Callback,
    ConfusionMatrixCallback,
    ConfusionMatrixConfig,
    DisableGC,
    EarlyStopping,
    EarlyStoppingConfig,
    GradientSpikeMonitor,
    GradientSpikeMonitorConfig,
    HangMonitor,
    HistogramMonitor,
    JAXProfiler,
    JAXProfilerConfig,
    LambdaCallback,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelSummary,
    NormMonitor,
    OptunaPruning,
    ReduceLROnPlateau,
    ReduceLROnPlateauConfig,
    StochasticWeightAveraging,
    ThroughputMonitor,
    Unfreeze,
)
from jax_trainer.core import TrainState, copy_state
from jax_trainer.datasets import Position
from jax_trainer.engine import EpochEnd, EvalRoundEnd, Event, Every, Plan, StepEnd, StopTraining
from jax_trainer.testing import assert_same_bits, fault
from tests.callbacks.callback_runs import STEPS, fit, matrix_program, rows, run_in

optuna.logging.set_verbosity(optuna.logging.WARNING)


def trial() -> optuna.Trial:
    return optuna.create_study(pruner=optuna.pruners.NopPruner()).ask()


def spike_monitor() -> GradientSpikeMonitor:
    # low enough to find spikes in a few training steps
    config = GradientSpikeMonitorConfig(threshold=1.0001, ema_decay=0.3, warmup_steps=2, log_to_disk=True)
    return GradientSpikeMonitor(config)


MAKERS: dict[str, Callable[[], Callback]] = {
    "ModelCheckpoint": ModelCheckpoint,
    "LearningRateMonitor": LearningRateMonitor,
    "ConfusionMatrixCallback": lambda: ConfusionMatrixCallback(ConfusionMatrixConfig(figsize=(1, 1), dpi=20)),
    "JAXProfiler": lambda: JAXProfiler(JAXProfilerConfig(first_step=2, profile_n_steps=2)),
    "GradientSpikeMonitor": spike_monitor,
    "DisableGC": DisableGC,
    "HangMonitor": HangMonitor,
    "EarlyStopping": lambda: EarlyStopping(EarlyStoppingConfig(patience=100)),
    "ReduceLROnPlateau": lambda: ReduceLROnPlateau(ReduceLROnPlateauConfig(patience=100)),
    "StochasticWeightAveraging": lambda: StochasticWeightAveraging(swa_epoch_start=100),
    "Unfreeze": lambda: Unfreeze(schedule={0: ".*"}),
    "ThroughputMonitor": ThroughputMonitor,
    "ModelSummary": ModelSummary,
    "LambdaCallback": lambda: LambdaCallback(on_training_step=lambda *args: None, on_step_end=lambda event: None),
    "OptunaPruning": lambda: OptunaPruning(trial()),
    "NormMonitor": NormMonitor,
    "HistogramMonitor": lambda: HistogramMonitor(every_n_steps=3),
}
STOPPING = {
    # no improvement is that large, so the second evaluation after the first one ends the run: at step 8
    "stopping": lambda: EarlyStopping(EarlyStoppingConfig(patience=2, min_delta=100.0)),
}
TIMES = ("throughput/",)  # metrics that differ from run to run
PLAN = Plan(max_epochs=3, eval_every=Every(epochs=1, steps=6))  # evaluates after 4, 6, 8 and 12 steps
EVALUATED = (4, 6, 8, 12)


def test_every_registered_callback_is_in_the_contract():
    modules = {name: Registry.get_class(Callback, name).__module__ for name in registered(Callback)}  # type: ignore[arg-type]
    ours = {name for name, module in modules.items() if module.startswith("jax_trainer.")}
    sampling = {"SampleImages", "SampleText"}  # need a trainer that samples: see their own tests, and test_sampling.py
    assert ours - sampling == MAKERS.keys() - {"LambdaCallback", "OptunaPruning"}


@cache
def state_without_callbacks() -> TrainState:
    """The trained state without callbacks."""
    return fit(program=matrix_program(), plan=PLAN)


@pytest.mark.parametrize("name", [name for name in MAKERS if name != "DisableGC"])  # it touches no state
def test_a_callback_changes_no_trained_bit(tmp_path, name):
    callback = MAKERS[name]()
    with run_in(tmp_path, epochs=100) as run:
        callback.attach(run)
        assert_same_bits(fit(callback, program=matrix_program(), plan=PLAN), state_without_callbacks())


class StopAndSave:
    """Stops the run after the evaluation at `step`, and records what a checkpoint would; the last observer."""

    def __init__(self, callback: Callback, step: int) -> None:
        self._callback, self._step = callback, step
        self._position = Position()
        self.saved: SimpleNamespace | None = None

    def handle(self, event: Event) -> None:
        match event:
            case StepEnd() | EpochEnd():
                self._position = event.position
            case EvalRoundEnd() if event.step == self._step:
                states = json.dumps(self._callback.state_dict(), allow_nan=False)
                self.saved = SimpleNamespace(state=copy_state(event.state), position=self._position, states=states)
                raise StopTraining


def logged(folder: Path, *runs: Any) -> list[Any]:
    """Everything that a callback logged, except times."""
    written = [
        {name: None if name.startswith(TIMES) else value for name, value in row.items()} for row in rows(runs[-1])
    ]
    figures = [figure for run in runs for figure in run.logger.figures]
    return [written, figures, spikes_in(folder)]


def spikes_in(folder: Path) -> dict[str, list[float]]:
    file = folder / "gradient_spikes.npz"
    if not file.exists():
        return {}
    with np.load(file, allow_pickle=False) as found:
        return {name: found[name].tolist() for name in found}


def run_once(folder: Path, make: Callable[[], Callback], plan: Plan) -> tuple[Callback, list[Any]]:
    callback = make()
    with run_in(folder, epochs=100) as run:
        callback.attach(run)
        fit(callback, program=matrix_program(), plan=plan)
        return callback, logged(folder, run)


def run_interrupted(folder: Path, make: Callable[[], Callback], plan: Plan, step: int) -> tuple[Callback, list[Any]]:
    """The same in two runs: the second one resumes where the first one was interrupted."""
    first = make()
    stop = StopAndSave(first, step)
    with run_in(folder, epochs=100) as before:
        first.attach(before)
        fit(first, stop, program=matrix_program(), plan=plan)
    saved = stop.saved
    assert saved is not None
    second = make()
    if isinstance(first, OptunaPruning) and isinstance(second, OptunaPruning):
        second.trial = first.trial  # the same trial: a resumed one rejects values that it already has
    with run_in(folder, epochs=100) as run:
        second.attach(run)
        second.load_state_dict(json.loads(saved.states))
        fit(second, program=matrix_program(), plan=plan, state=saved.state, at=saved.position)
        return second, logged(folder, before, run)


@pytest.mark.parametrize("step", [6, pytest.param(8, marks=pytest.mark.slow)])  # within an epoch, and at its end
@pytest.mark.parametrize("name", [*MAKERS, *STOPPING])
def test_a_callback_survives_an_interruption(tmp_path, name, step):
    make = {**MAKERS, **STOPPING}[name]
    uninterrupted, expected = run_once(tmp_path / "once", make, PLAN)
    resumed, found = run_interrupted(tmp_path / "interrupted", make, PLAN, step)
    assert found == expected
    assert resumed.state_dict() == uninterrupted.state_dict()


@pytest.mark.parametrize(
    "name", [pytest.param("stopping", marks=pytest.mark.slow), "GradientSpikeMonitor", "HistogramMonitor"]
)
def test_a_callback_survives_an_interruption_with_several_steps_per_call(tmp_path, name):
    make = {**MAKERS, **STOPPING}[name]
    chunks = Plan(max_epochs=3, eval_every=Every(epochs=1, steps=6), steps_per_call=4)
    uninterrupted, expected = run_once(tmp_path / "once", make, PLAN)
    resumed, found = run_interrupted(tmp_path / "interrupted", make, chunks, 6)
    assert found == expected
    assert resumed.state_dict() == uninterrupted.state_dict()


def test_the_runs_of_the_contract_have_spikes_and_stop_early(tmp_path):
    _, written = run_once(tmp_path / "spikes", spike_monitor, PLAN)
    steps = written[2]["loss_steps"]
    assert sum(row["optimizer/spikes_losses"] for row in written[0]) == len(steps)
    assert min(steps) <= 6 < max(steps)
    stopping, _ = run_once(tmp_path / "stopping", STOPPING["stopping"], PLAN)
    assert "after step 8" in stopping.state_dict()["stopped"]


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in MAKERS if name != "OptunaPruning"])  # a trial has one run
def test_a_second_run_of_a_callback_logs_the_same_as_the_first(tmp_path, name):
    callback, results = MAKERS[name](), []
    for folder in (tmp_path / "first", tmp_path / "second"):
        with run_in(folder, epochs=100) as run:
            callback.attach(run)
            fit(callback, program=matrix_program(), plan=PLAN)
            results.append((logged(folder, run), callback.state_dict()))
    assert results[0] == results[1]


def raises(*args: Any) -> None:
    raise ZeroDivisionError("mine")


def stops(*args: Any) -> None:
    raise StopTraining("enough")


def interrupts(*args: Any) -> None:
    os.kill(os.getpid(), signal.SIGINT)


ENDINGS = {
    "completed": ({}, None),
    "stopped": ({"on_training_epoch_end": stops}, None),
    "interrupted": ({"on_training_epoch_end": interrupts}, KeyboardInterrupt),
    "failed": ({"on_validation_epoch_start": raises}, ZeroDivisionError),
    "failed at once": ({"on_training_start": raises}, ZeroDivisionError),
    "failed in a step": ({}, Exception),
    "failed at the end": ({"on_training_end": raises}, ZeroDivisionError),
}
STATUS = {"failed at once": "failed", "failed in a step": "failed", "failed at the end": "completed"}


def recording(ends: list[tuple[str, str]], name: str, finalize: Callable[[str], None]) -> Callable[[str], None]:
    def recorded(status: str) -> None:
        ends.append((name, status))
        finalize(status)

    return recorded


@pytest.mark.parametrize("ending", ENDINGS)
def test_every_callback_is_finalized_once_however_the_run_ends(tmp_path, ending):
    hooks, error = ENDINGS[ending]
    callbacks = {name: make() for name, make in MAKERS.items()}
    ends: list[tuple[str, str]] = []
    for name, callback in callbacks.items():
        callback.finalize = recording(ends, name, callback.finalize)  # type: ignore[assignment]
    with run_in(tmp_path, epochs=100) as run:
        for callback in callbacks.values():
            callback.attach(run)
        observers = [*list(callbacks.values())[:6], LambdaCallback(**hooks), *list(callbacks.values())[6:]]
        plan = Plan(max_epochs=1, eval_every=Every(epochs=1))
        if error is None:
            fit(*observers, program=matrix_program(), plan=plan)
        else:
            with fault("step:raise:2" if ending == "failed in a step" else "never:raise:1"), pytest.raises(error):
                fit(*observers, program=matrix_program(), plan=plan)
        for callback in callbacks.values():
            callback.attach(run)  # an error if the callback were still attached to the run
    assert ends == [(name, STATUS.get(ending, ending)) for name in callbacks]


def test_a_callback_that_raises_ends_the_run_with_its_own_traceback(tmp_path):
    with run_in(tmp_path, epochs=100) as run:
        monitor = ThroughputMonitor(run=run)
        with pytest.raises(ZeroDivisionError, match="mine") as failure:
            fit(LambdaCallback(on_training_epoch_end=raises), monitor, program=matrix_program(), plan=PLAN)
    names = [frame.name for frame in traceback.extract_tb(failure.value.__traceback__)]
    assert names[-1] == "raises"
    assert failure.value.__cause__ is None


def test_a_callback_that_stops_the_run_does_not_prevent_the_save(tmp_path):
    with run_in(tmp_path, epochs=100) as run:
        saver = ModelCheckpoint(run=run)
        fit(LambdaCallback(on_validation_epoch_end=stops), saver, program=matrix_program(), plan=PLAN)
    assert [step for step, _, _ in run.checkpoints.kept] == [STEPS]  # type: ignore[union-attr]
