from typing import Any

import pytest
from compoconf import registered

from jax_trainer.callbacks import Callback, LambdaCallback
from jax_trainer.engine import Plan, StepEnd
from tests.callbacks.callback_runs import STEPS, fit
from tests.rows import noted_row


def test_functions_are_called_with_the_arguments_of_their_hooks():
    calls: list[Any] = []
    callback = LambdaCallback(
        on_training_start=lambda: calls.append("start"),
        on_validation_epoch_end=lambda metrics, epoch: calls.append((sorted(metrics), epoch)),
        on_training_epoch_end=lambda m, e: calls.append(("train/loss" in m, e)),
        finalize=lambda status: calls.append(status),
    )
    fit(callback)
    names = ["val/acc", "val/loss"]
    assert calls == ["start", (True, 1), (names, 1), (True, 2), (names, 2), "completed"]


def test_steps_are_reported_where_there_is_a_function_for_them():
    steps: list[int] = []
    fit(LambdaCallback(on_training_step=lambda metrics, epoch, step: steps.append(step)), plan=Plan(max_epochs=1))
    fit(LambdaCallback(on_step_end=lambda event: steps.append(-event.step)), plan=Plan(max_epochs=1))
    assert steps == [*range(1, STEPS + 1), *range(-1, -STEPS - 1, -1)]


def test_without_one_a_step_costs_nothing():
    callback = LambdaCallback(finalize=lambda status: None)
    callback.handle(StepEnd(1, 1, None, 1, 1, None, None))  # type: ignore[arg-type]
    assert not callback.wants_steps
    assert not callback._overrides("on_training_step")


def test_an_unknown_hook_is_refused_with_a_guess():
    for name, hint in [
        ("on_trainig_start", "Did you mean `on_training_start`?"),
        ("finalise", "Did you mean `finalize`?"),
        ("zzz", "The hooks are finalize, on_edited, "),
    ]:
        with noted_row(name, hint):
            with pytest.raises(TypeError) as refused:
                LambdaCallback(**{name: print})
            assert f"Unknown hook {name!r}. {hint}" in str(refused.value)


def test_what_is_no_function_is_refused():
    with pytest.raises(TypeError, match="`on_training_start`.*function.*3"):
        LambdaCallback(on_training_start=3)  # type: ignore[arg-type]


def test_no_file_can_name_it():
    assert not {"LambdaCallback", "OptunaPruning"} & set(registered(Callback))
