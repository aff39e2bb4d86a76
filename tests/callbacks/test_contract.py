"""What holds for every callback that is shipped: it changes nothing but by edits, and survives an interruption."""

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
from callback_runs import STEPS, fit, matrix_program, rows, run_in
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
    JAXProfiler,
    JAXProfilerConfig,
    LambdaCallback,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelSummary,
    OptunaPruning,
    Progress,
    ReduceLROnPlateau,
    ReduceLROnPlateauConfig,
    ThroughputMonitor,
)
from jax_trainer.core import TrainState, copy_state
from jax_trainer.datasets import Position
from jax_trainer.engine import EpochEnd, EvalRoundEnd, Event, Every, Plan, StepEnd, StopTraining
from jax_trainer.testing import assert_same_bits, fault

optuna.logging.set_verbosity(optuna.logging.WARNING)


def trial() -> optuna.Trial:
    return optuna.create_study(pruner=optuna.pruners.NopPruner()).ask()


def spike_monitor() -> GradientSpikeMonitor:
    # low enough to find some in a few steps of real training
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
    "ThroughputMonitor": ThroughputMonitor,
    "ModelSummary": ModelSummary,
    "Progress": Progress,
    "LambdaCallback": lambda: LambdaCallback(on_training_step=lambda *given: None, on_step_end=lambda event: None),
    "OptunaPruning": lambda: OptunaPruning(trial()),
}
STOPPING = {
    # nothing is better by that much, so the second look after the first ends the run: at step 8
    "stopping": lambda: EarlyStopping(EarlyStoppingConfig(patience=2, min_delta=100.0)),
}
TIMES = ("throughput/",)  # what no two runs have in common
PLAN = Plan(max_epochs=3, eval_every=Every(epochs=1, steps=6))  # evaluates after 4, 6, 8 and 12 steps
EVALUATED = (4, 6, 8, 12)


def test_all_that_files_can_name_are_held_to_the_contract():
    modules = {name: Registry.get_class(Callback, name).__module__ for name in registered(Callback)}  # type: ignore[arg-type]
    ours = {name for name, module in modules.items() if module.startswith("jax_trainer.")}
    drawing = {"SampleImages", "SampleText"}  # need a trainer that can draw: see their own tests, and test_sampling.py
    assert ours - drawing == MAKERS.keys() - {"LambdaCallback", "OptunaPruning"}


@cache
def without(flavour: str) -> TrainState:
    """What training gives with nobody watching."""
    return fit(program=matrix_program(flavour), plan=PLAN)


@pytest.mark.parametrize("name", MAKERS)
def test_it_changes_no_trained_bit(tmp_path, flavour, name):
    callback = MAKERS[name]()
    with run_in(tmp_path) as run:
        callback.attach(run)
        assert_same_bits(fit(callback, program=matrix_program(flavour), plan=PLAN), without(flavour))


class Cut:
    """Ends a run after an evaluation at `step`, and keeps what a checkpoint would: last in the list of observers."""

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
    """All that a callback wrote, without what depends on the clock."""
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


def whole(folder: Path, make: Callable[[], Callback], plan: Plan) -> tuple[Callback, list[Any]]:
    callback = make()
    with run_in(folder) as run:
        callback.attach(run)
        fit(callback, program=matrix_program("linen"), plan=plan)
        return callback, logged(folder, run)


def in_two(folder: Path, make: Callable[[], Callback], plan: Plan, step: int) -> tuple[Callback, list[Any]]:
    """The same in two runs, the second of which resumes where the first one was cut off."""
    first = make()
    cut = Cut(first, step)
    with run_in(folder) as before:
        first.attach(before)
        fit(first, cut, program=matrix_program("linen"), plan=plan)
    saved = cut.saved
    assert saved is not None
    second = make()
    if isinstance(first, OptunaPruning) and isinstance(second, OptunaPruning):
        second.trial = first.trial  # it goes on, too, and would complain about what it knows already
    with run_in(folder) as run:
        second.attach(run)
        second.load_state_dict(json.loads(saved.states))
        fit(second, program=matrix_program("linen"), plan=plan, state=saved.state, at=saved.position)
        return second, logged(folder, before, run)


@pytest.mark.parametrize("step", [6, pytest.param(8, marks=pytest.mark.slow)])  # within an epoch, and at its end
@pytest.mark.parametrize("name", [*MAKERS, *STOPPING])
def test_it_survives_an_interruption(tmp_path, name, step):
    make = {**MAKERS, **STOPPING}[name]
    at_once, expected = whole(tmp_path / "whole", make, PLAN)
    resumed, found = in_two(tmp_path / "two", make, PLAN, step)
    assert found == expected
    assert resumed.state_dict() == at_once.state_dict()


@pytest.mark.parametrize("name", ["stopping", "GradientSpikeMonitor"])
def test_it_survives_an_interruption_with_several_steps_per_call(tmp_path, name):
    make = {**MAKERS, **STOPPING}[name]
    chunks = Plan(max_epochs=3, eval_every=Every(epochs=1, steps=6), steps_per_call=4)
    at_once, expected = whole(tmp_path / "whole", make, PLAN)
    resumed, found = in_two(tmp_path / "two", make, chunks, 6)
    assert found == expected
    assert resumed.state_dict() == at_once.state_dict()


def test_the_contract_is_about_something(tmp_path):
    _, written = whole(tmp_path / "spikes", spike_monitor, PLAN)
    steps = written[2]["loss_steps"]
    assert sum(row["optimizer/spikes_losses"] for row in written[0]) == len(steps)
    assert min(steps) <= 6 < max(steps)
    stopping, _ = whole(tmp_path / "stopping", STOPPING["stopping"], PLAN)
    assert "after step 8" in stopping.state_dict()["stopped"]


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in MAKERS if name != "OptunaPruning"])  # a trial has one run
def test_a_second_run_is_watched_like_the_first(tmp_path, name):
    callback, seen = MAKERS[name](), []
    for folder in (tmp_path / "first", tmp_path / "second"):
        with run_in(folder) as run:
            callback.attach(run)
            fit(callback, program=matrix_program("linen"), plan=PLAN)
            seen.append((logged(folder, run), callback.state_dict()))
    assert seen[0] == seen[1]


def raises(*given: Any) -> None:
    raise ZeroDivisionError("mine")


def stops(*given: Any) -> None:
    raise StopTraining("enough")


def interrupts(*given: Any) -> None:
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


def noting(ends: list[tuple[str, str]], name: str, finalize: Callable[[str], None]) -> Callable[[str], None]:
    def noted(status: str) -> None:
        ends.append((name, status))
        finalize(status)

    return noted


@pytest.mark.parametrize("ending", ENDINGS)
def test_all_are_finalised_once_however_a_run_ends(tmp_path, ending):
    hooks, error = ENDINGS[ending]
    callbacks = {name: make() for name, make in MAKERS.items()}
    ends: list[tuple[str, str]] = []
    for name, callback in callbacks.items():
        callback.finalize = noting(ends, name, callback.finalize)  # type: ignore[assignment]
    with run_in(tmp_path) as run:
        for callback in callbacks.values():
            callback.attach(run)
        observers = [*list(callbacks.values())[:6], LambdaCallback(**hooks), *list(callbacks.values())[6:]]
        plan = Plan(max_epochs=1, eval_every=Every(epochs=1))
        if error is None:
            fit(*observers, program=matrix_program("linen"), plan=plan)
        else:
            with fault("step:raise:2" if ending == "failed in a step" else "never:raise:1"), pytest.raises(error):
                fit(*observers, program=matrix_program("linen"), plan=plan)
        for callback in callbacks.values():
            callback.attach(run)  # would be refused if it still counted the run as running
    assert ends == [(name, STATUS.get(ending, ending)) for name in callbacks]


def test_a_callback_that_raises_ends_the_run_with_its_own_traceback(tmp_path):
    with run_in(tmp_path) as run:
        watching = ThroughputMonitor(run=run)
        with pytest.raises(ZeroDivisionError, match="mine") as failure:
            fit(LambdaCallback(on_training_epoch_end=raises), watching, program=matrix_program("linen"), plan=PLAN)
    names = [frame.name for frame in traceback.extract_tb(failure.value.__traceback__)]
    assert names[-1] == "raises"
    assert failure.value.__cause__ is None


def test_one_that_stops_the_run_does_not_keep_a_state_from_being_saved(tmp_path):
    with run_in(tmp_path) as run:
        saving = ModelCheckpoint(run=run)
        fit(LambdaCallback(on_validation_epoch_end=stops), saving, program=matrix_program("linen"), plan=PLAN)
    assert [step for step, _, _ in run.checkpoints.kept] == [STEPS]  # type: ignore[union-attr]
