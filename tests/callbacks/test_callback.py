from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np
import pytest
from compoconf import parse_config, register

from jax_trainer.callbacks import (
    Callback,
    CallbackConfig,
    GradientSpikeMonitorConfig,
    JAXProfilerConfig,
    LambdaCallback,
    LearningRateMonitorConfig,
)
from jax_trainer.config.settings import SettingsError
from jax_trainer.core import FlatState, copy_state
from jax_trainer.datasets import DatasetConfig, DatasetModule
from jax_trainer.engine import Event, Every, Plan, StopTraining, eval_events, evaluate
from jax_trainer.testing import EventRecorder, fault, numbered_loader
from tests.callbacks.callback_runs import EXAMPLE, STEPS, fit, program_of, scripted, scripted_program
from tests.rows import noted_row

STEP_HOOKS = ("on_step_end", "on_training_step", "on_steps_reported", "on_save_point")
HOOKS = [name for name in vars(Callback) if name.startswith("on_")] + ["finalize"]


@dataclass
class WitnessConfig(CallbackConfig):
    """Nothing of its own."""


@register
class Witness(Callback):
    """Writes down every hook and what it was given."""

    config: WitnessConfig

    def __init__(self, config: WitnessConfig, run: Any = None) -> None:
        self.calls: list[tuple[Any, ...]] = []
        super().__init__(config, run)

    def names(self, *, without: tuple[str, ...] = STEP_HOOKS) -> list[Any]:
        shown = [(name.removeprefix("on_"), given) for name, *given in self.calls if name not in without]
        return [name if not given else (name, given[-1]) for name, given in shown]


def writes_down(name: str):
    def hook(self: Witness, *given: Any) -> None:
        assert self.state is self.event.state
        self.calls.append((name, *given))

    return hook


for _name in HOOKS:
    setattr(Witness, _name, writes_down(_name))


def epoch_of(number: int, *, due: bool = True) -> list[Any]:
    def pair(name: str) -> list[Any]:
        return [(name, number), (f"filtered_{name}", number)][: 1 + due]

    around = ("training_epoch_start", "training_epoch_end", "validation_epoch_start", "validation_epoch_end")
    return [call for name in around for call in pair(name)]


def test_the_hooks_of_a_run_come_in_order():
    witness = Witness(WitnessConfig())
    fit(witness)
    middle = [*epoch_of(1), *epoch_of(2)]
    assert witness.names() == ["training_start", *middle, "training_end", ("finalize", "completed")]


def test_filtered_hooks_come_every_so_many_epochs():
    for every, due in [(1, {1, 2, 3, 4}), (-1, {1, 2, 3, 4}), (2, {2, 4}), (3, {3}), (0, set())]:
        with noted_row(every, due):
            witness = Witness(WitnessConfig(every_n_epochs=every))
            fit(witness, plan=Plan(max_epochs=4, eval_every=Every(epochs=1)))
            expected = [call for number in range(1, 5) for call in epoch_of(number, due=number in due)]
            assert witness.names()[1:-2] == expected


def test_hooks_get_metrics_by_their_full_names():
    witness, seen = Witness(WitnessConfig()), EventRecorder()
    fit(witness, seen)
    given = {name: metrics for name, metrics, *_ in (call for call in witness.calls if len(call) == 3)}
    assert given["on_training_epoch_end"]["train/loss"] == seen.epochs[2]["loss"]
    assert given["on_training_epoch_end"]["optimizer/grad_global_norm"] == seen.epochs[2]["optimizer/grad_global_norm"]
    assert given["on_validation_epoch_end"] == {f"val/{name}": value for name, value in seen.evals[-1][2].items()}
    assert given["on_filtered_validation_epoch_end"] == given["on_validation_epoch_end"]


@pytest.mark.parametrize("steps_per_call", [1, pytest.param("epoch", marks=pytest.mark.slow)])
def test_every_step_is_reported_once_with_its_own_numbers(steps_per_call):
    witness, seen = Witness(WitnessConfig()), EventRecorder()
    fit(witness, seen, plan=Plan(max_epochs=2, steps_per_call=steps_per_call))
    reported = [call[1:] for call in witness.calls if call[0] == "on_training_step"]
    assert [(epoch, step) for _, epoch, step in reported] == [(1 + i // STEPS, 1 + i) for i in range(2 * STEPS)]
    assert [metrics["train/loss"] for metrics, _, _ in reported] == [seen.steps[s]["loss"] for s in sorted(seen.steps)]


class Spy(Witness):
    """Keeps a copy of every state that was evaluated."""

    def on_validation_epoch_end(self, eval_metrics: dict[str, Any], epoch: int) -> None:
        self.calls.append((copy_state(self.state), eval_metrics))


def test_the_state_in_a_validation_hook_is_the_one_that_was_evaluated():
    spy = Spy(WitnessConfig())
    fit(spy, plan=Plan(max_steps=2 * STEPS, eval_every=Every(steps=3)))
    evaluated = [call for call in spy.calls if len(call) == 2 and isinstance(call[1], dict)]
    assert [int(state.step) for state, _ in evaluated] == [3, 6]
    for state, metrics in evaluated:
        again = evaluate(program_of("functions"), state, {"val": numbered_loader(64)})["val"]
        assert {f"val/{name}": value for name, value in again.items()} == metrics


TWO = {"val_near": numbered_loader(32), "val_far": numbered_loader(64)}


def test_several_validation_sets_are_one_validation_with_the_metrics_of_all():
    witness, seen = Witness(WitnessConfig()), EventRecorder()
    fit(witness, seen, evals=TWO)
    middle = [*epoch_of(1), *epoch_of(2)]
    assert witness.names() == ["training_start", *middle, "training_end", ("finalize", "completed")]
    given = [call[1] for call in witness.calls if call[0] == "on_validation_epoch_end"]
    evaluated = [{f"{name}/{key}": value for key, value in metrics.items()} for _, name, metrics in seen.evals]
    assert given == [{**evaluated[0], **evaluated[1]}, {**evaluated[2], **evaluated[3]}]
    assert given == [call[1] for call in witness.calls if call[0] == "on_filtered_validation_epoch_end"]


def test_there_is_no_state_outside_a_hook():
    witness = Witness(WitnessConfig())
    fit(witness, plan=Plan(max_steps=1))
    with pytest.raises(RuntimeError, match="Witness.*hook"):
        _ = witness.state


def test_an_evaluation_of_a_test_set_calls_the_test_hooks():
    witness, program = Witness(WitnessConfig()), program_of("functions")
    state = program.init(jax.random.key(0), EXAMPLE)
    at = Event(7, 3, FlatState.of(state))
    for event in eval_events(program, at, {"test": numbered_loader(64)}, Plan(max_steps=0)):
        witness.handle(event)
    assert witness.names() == [("test_epoch_start", 3), ("test_epoch_end", 3)]
    assert set(witness.calls[-1][1]) == {"test/loss", "test/acc"}


def test_several_test_sets_are_one_test():
    witness, program = Witness(WitnessConfig()), program_of("functions")
    at = Event(7, 3, FlatState.of(program.init(jax.random.key(0), EXAMPLE)))
    sets = {"test_near": numbered_loader(32), "test_far": numbered_loader(64)}
    for _ in range(2):
        for event in eval_events(program, at, sets, Plan(max_steps=0)):
            witness.handle(event)
    assert witness.names() == 2 * [("test_epoch_start", 3), ("test_epoch_end", 3)]
    assert set(witness.calls[-1][1]) == {f"{name}/{metric}" for name in sets for metric in ("loss", "acc")}


def test_a_failure_is_reported_with_its_error_and_then_raised():
    witness = Witness(WitnessConfig())
    with fault("step:raise:3"), pytest.raises(Exception, match="step") as failure:
        fit(witness)
    assert witness.names()[-2:] == [("exception", failure.value), ("finalize", "failed")]
    assert "training_end" not in witness.names()


class Stopper(Witness):
    """Stops the run in its first epoch."""

    def on_training_epoch_end(self, train_metrics: dict[str, Any], epoch: int) -> None:
        raise StopTraining


def test_a_hook_may_stop_the_run():
    stopper = Stopper(WitnessConfig())
    fit(stopper)
    assert stopper.names()[-2:] == ["training_end", ("finalize", "stopped")]


class Clumsy(Witness):
    """Fails at the very end."""

    def on_training_end(self) -> None:
        raise OSError("no space left")


def test_finalize_comes_even_when_the_hook_before_it_fails():
    clumsy = Clumsy(WitnessConfig())
    with pytest.raises(OSError, match="no space left"):
        fit(clumsy, plan=Plan(max_steps=1))
    assert clumsy.calls[-1] == ("finalize", "completed")


def test_a_callback_of_ones_own_is_found_by_its_name(folder_run):
    config: Any = parse_config(Callback.cfgtype, {"class_name": "Witness", "every_n_epochs": 5})
    made = config.instantiate(Callback, folder_run)
    assert isinstance(made, Witness)
    assert made.config.every_n_epochs == 5
    assert made.run is folder_run


def test_the_sections_of_the_seed_document_are_read():
    for section, config in [
        ({"class_name": "LearningRateMonitor", "every_n_epochs": 1}, LearningRateMonitorConfig()),
        (
            {"class_name": "JAXProfiler", "every_n_minutes": 60, "first_step": 10, "profile_n_steps": 20},
            JAXProfilerConfig(profile_n_steps=20),
        ),
        (
            {
                "class_name": "GradientSpikeMonitor",
                "every_n_epochs": 1,
                "log_to_disk": True,
                "ema_decay": 0.99,
                "threshold": 3.0,
            },
            GradientSpikeMonitorConfig(log_to_disk=True, ema_decay=0.99, threshold=3.0),
        ),
    ]:
        assert parse_config(Callback.cfgtype, section) == config


def test_an_impossible_rhythm_is_refused():
    with pytest.raises(SettingsError, match="`every_n_epochs`.*-1.*got -2"):
        CallbackConfig(every_n_epochs=-2)


def test_a_callback_without_a_configuration_has_the_defaults_of_its_own():
    assert Patient().config == PatientConfig()
    assert Patient().config.limit == 3
    assert Plain().config == CallbackConfig()


def test_a_configuration_with_keys_that_must_be_given_is_asked_for():
    with pytest.raises(TypeError, match="Needy needs a configuration: .*'what'"):
        Needy()


@dataclass
class PatientConfig(CallbackConfig):
    """With a key of its own."""

    limit: int = 3


class Patient(Callback):
    """Counts epochs, and can be interrupted."""

    config: PatientConfig

    def reset(self) -> None:
        self.epochs = 0

    def state_dict(self) -> dict[str, Any]:
        return {"epochs": self.epochs}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.epochs = state["epochs"]

    def on_training_epoch_end(self, train_metrics: dict[str, Any], epoch: int) -> None:
        self.epochs += 1


class Plain(Callback):
    """Says nothing about its configuration."""


@dataclass
class NeedyConfig(CallbackConfig):
    """Has a key without a default."""

    what: str = field(kw_only=True)


class Needy(Callback):
    """Cannot do without a configuration."""

    config: NeedyConfig


@pytest.mark.parametrize("writes", [True, False])
def test_the_run_tells_a_callback_whether_its_process_writes(folder_run, writes):
    assert Callback(run=replace(folder_run, writes=writes)).is_primary == writes


def test_a_callback_that_belongs_to_no_run_says_so():
    for name in ("run", "trainer", "data_module", "is_primary"):
        with pytest.raises(RuntimeError, match="Patient is not attached.*attach"):
            getattr(Patient(), name)


def test_an_attached_callback_knows_its_run_its_trainer_and_its_data(folder_run):
    trainer, dataset = object(), DatasetModule(DatasetConfig(global_batch_size=4), np.zeros((8, 2)))
    run, given = replace(folder_run, trainer=trainer, dataset=dataset), []
    for callback in (LambdaCallback(set_dataset=given.append), Patient()):
        callback.attach(run)
        assert (callback.run, callback.trainer, callback.data_module) == (run, trainer, dataset)
    assert given == [dataset]
    without = LambdaCallback(set_dataset=given.append)
    without.attach(folder_run)
    assert (without.trainer, without.data_module, len(given)) == (None, None, 1)


def test_a_callback_restarts_with_a_second_run_and_keeps_what_it_was_given_before_the_first(folder_run):
    callback = Patient()
    callback.load_state_dict({"epochs": 5})
    callback.attach(folder_run)
    fit(callback)
    assert callback.epochs == 7
    callback.attach(replace(folder_run))
    assert callback.epochs == 0
    fit(callback)
    assert callback.state_dict() == {"epochs": 2}


def test_a_callback_cannot_watch_two_runs_at_once(folder_run):
    callback = Patient(run=folder_run)
    callback.attach(replace(folder_run))  # nothing has begun: training may have been refused
    nested = LambdaCallback(on_step_end=lambda event: callback.attach(folder_run))
    with pytest.raises(RuntimeError, match=f"Patient.*{folder_run.folder}"):
        fit(callback, nested)
    callback.attach(folder_run)


def test_windows_of_steps_are_reported_as_they_arrive():
    windows: list[tuple[int, int]] = []
    watcher = LambdaCallback(on_steps_reported=lambda event: windows.append((event.rows.first, event.rows.last)))
    fit(
        watcher,
        plan=Plan(max_epochs=2, metrics_every=3),
        program=scripted_program(),
        train=scripted([1.0] * 4),
        evals={},
    )
    assert windows == [(1, 3), (4, 4), (5, 6), (7, 8)]


def test_what_callbacks_know_is_asked_for_by_name(folder_run):
    patient = Patient()
    run = replace(folder_run, callback_states=lambda: {"patient": patient.state_dict()})
    assert folder_run.callback_states() == {}
    fit(patient)
    assert run.callback_states() == {"patient": {"epochs": 2}}
