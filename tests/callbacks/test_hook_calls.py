"""Hooks are checked when a callback is made, and called by the names of their parameters."""
# other signatures than those of the base are what is tested here
# pyright: reportIncompatibleMethodOverride=false

from typing import Any

import pytest

from jax_trainer.callbacks import Callback, CallbackConfig, LambdaCallback
from jax_trainer.callbacks.hook_calls import call_hook
from jax_trainer.engine import Every, Plan
from tests.callbacks.callback_runs import fit, run_in
from tests.rows import noted_row

PLAN = Plan(max_epochs=1, eval_every=Every(epochs=1))
FOREIGN = {
    "on_train_start": "on_training_start",
    "on_train_begin": "on_training_start",
    "on_fit_end": "on_training_end",
    "on_train_epoch_start": "on_training_epoch_start",
    "on_epoch_begin": "on_training_epoch_start",
    "on_train_epoch_end": "on_training_epoch_end",
    "on_epoch_end": "on_training_epoch_end",
    "on_train_batch_end": "on_training_step",
    "on_validation_start": "on_validation_epoch_start",
    "on_validation_end": "on_validation_epoch_end",
    "on_test_end": "on_test_epoch_end",
    "on_save_checkpoint": "state_dict",
    "on_trainig_epoch_end": "on_training_epoch_end",
    "on_validation_epoch_ended": "on_validation_epoch_end",
    "on_steps_end": "on_step_end",
}


def callback_with(**methods: Any) -> Any:
    return type("Own", (Callback,), {"__annotations__": {"config": CallbackConfig}, **methods})()


def test_a_hook_of_another_name_is_refused_with_ours_when_the_callback_is_made():
    for name in FOREIGN:
        with (
            noted_row(name),
            pytest.raises(TypeError, match=rf"`Own\.{name}` .*Did you mean `{FOREIGN[name]}`"),
        ):
            callback_with(**{name: lambda self, *_: None})


def test_a_hook_that_is_like_none_of_ours_is_refused_with_all_of_them():
    with pytest.raises(TypeError, match=r"`Own\.on_wednesdays` .*on_exception, .*on_validation_epoch_start"):
        callback_with(on_wednesdays=lambda self: None)


def test_what_is_no_method_may_be_called_as_it_likes():
    made = callback_with(on_gpu=False, on_time=property(lambda self: 1), helper=lambda self: None)
    assert (made.on_gpu, made.on_time) == (False, 1)


WRONG = {
    "at another position": (lambda self, epoch, found: None, r"\(epoch, found\).*`found`"),
    "a Lightning signature": (lambda self, trainer, pl_module: None, r"\(trainer, pl_module\).*`trainer`"),
    "a Keras signature": (lambda self, e, logs: None, r"\(e, logs\).*`e`"),
    "too many": (lambda self, m, e, third: None, r"\(m, e, third\).*`m`"),
    "too few": (lambda self, m: None, r"\(m\).*`m`"),
}


def test_parameters_that_fit_neither_by_name_nor_by_position_are_refused_with_the_signature():
    for case in WRONG:
        with noted_row(case):
            hook, signature = WRONG[case]
            with pytest.raises(TypeError, match=rf"{signature}.*`train_metrics`, `epoch`"):
                callback_with(on_training_epoch_end=hook)


def test_a_function_is_checked_like_a_method():
    with pytest.raises(TypeError, match=r"\(m, e, x\).*`eval_metrics`, `epoch`"):
        LambdaCallback(on_validation_epoch_end=lambda m, e, x: None)


FORMS = {
    "in order": (lambda eval_metrics, epoch: (eval_metrics, epoch), ("m", 3)),
    "swapped": (lambda epoch, eval_metrics: (epoch, eval_metrics), (3, "m")),
    "other names": (lambda epoch_idx, metrics: (epoch_idx, metrics), (3, "m")),
    "unused": (lambda _epoch, _metrics: (_epoch, _metrics), (3, "m")),
    "one": (lambda epoch: epoch, 3),
    "none": (lambda: "none", "none"),
    "by position": (lambda *given: given, ("m", 3)),
    "own names": (lambda m, e: (m, e), ("m", 3)),
    "one own name": (lambda m, epoch: (m, epoch), ("m", 3)),
    "own names and a default": (lambda m, e, times=2: (m, e, times), ("m", 3, 2)),
    "own names and more": (lambda m, e, val_loader: (m, e, val_loader), ("m", 3, "l")),
    "by name": (lambda **given: given, {"eval_metrics": "m", "epoch": 3}),
    "the rest by name": (lambda epoch, **rest: (epoch, rest), (3, {"eval_metrics": "m"})),
    "with a default": (lambda eval_metrics, times=2: (eval_metrics, times), ("m", 2)),
    "more than it must": (lambda val_loader, epoch: (val_loader, epoch), ("l", 3)),
    "keywords only": (lambda *, epoch: epoch, 3),
}


def test_a_hook_gets_what_its_parameters_are_called():
    for form, (hook, expected) in FORMS.items():
        assert call_hook(hook, {"val_loader": "l"}, eval_metrics="m", epoch=3) == expected, form


def test_the_only_argument_of_a_hook_may_be_called_anything():
    got: list[Any] = []
    call_hook(lambda e: got.append(e), epoch=3)
    call_hook(got.append, status="failed")
    assert got == [3, "failed"]


def test_hooks_with_swapped_parameters_get_their_values_in_a_run(tmp_path):
    got: list[Any] = []

    class Swapped(Callback):
        """Has everything in another order than ours."""

        config: CallbackConfig

        def on_training_epoch_end(self, epoch_idx):
            got.append(("train", epoch_idx))

        def on_validation_epoch_end(self, epoch_idx, eval_metrics):
            got.append(("val", epoch_idx, "val/loss" in eval_metrics))

        def on_training_step(self, step_idx, step_metrics):
            got.append(("step", step_idx, "train/loss" in step_metrics))

        def on_step_end(self):
            got.append("step end")

        def finalize(self):
            got.append("end")

    with run_in(tmp_path) as run:
        fit(Swapped(run=run), plan=PLAN)
    assert ("train", 1) in got and ("val", 1, True) in got and ("step", 1, True) in got
    assert "step end" in got and got[-1] == "end"
