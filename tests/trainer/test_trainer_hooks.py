"""The hooks of a trainer are checked when it is made, and called by the names of their parameters."""
# other signatures than those of the base are what is tested here
# pyright: reportIncompatibleMethodOverride=false

from typing import Any

import pytest

from jax_trainer.testing import numbered_loader
from tests.trainer.trainer_runs import STEPS, Plain, first_examples, plain_for

FOREIGN = {
    "on_train_epoch_end": "Did you mean `on_training_epoch_end`",
    "on_train_start": "Did you mean `on_training_start`",
    "on_validation_end": "Did you mean `on_validation_epoch_end`",
    "on_epoch_end": "Did you mean `on_training_epoch_end`",
    "on_train_batch_end": "A `Callback` can have `on_training_step`",
    "on_save_checkpoint": "A `Callback` can have `state_dict`",
    "on_trainig_start": "Did you mean `on_training_start`",
    "training_step": "Did you mean `loss_function`",
    "validation_step": "Did you mean `loss_function`",
    "configure_optimizers": "Did you mean `init_optimizer`",
    "train_dataloader": "Did you mean `train_model`",
    "predict_step": "Did you mean `predict`",
    "finalize": "Did you mean `on_training_end`",
    "train_step": "Did you mean `loss_function`",
    "on_wednesdays": "on_test_epoch_end",
}


def made(tmp_path: Any, **methods: Any) -> Any:
    return plain_for("nnx", tmp_path, kind=type("Own", (Plain,), methods))


def test_a_method_that_is_never_called_is_refused_with_the_right_name(tmp_path_factory, subtests):
    for name in FOREIGN:
        tmp_path = tmp_path_factory.mktemp("case")
        with subtests.test(name=name), pytest.raises(TypeError, match=rf"`Own\.{name}` .*{FOREIGN[name]}"):
            made(tmp_path, **{name: lambda self, *_: None})


def test_a_trainer_with_custom_steps_may_name_them_freely(tmp_path):
    own = {"training_step": lambda self: None, "create_training_function": lambda self: self.training_step}
    assert made(tmp_path, **own).training_step() is None


def test_a_parameter_that_nothing_is_known_about_is_refused_before_training(tmp_path_factory, subtests):
    for hook, right in [
        ("on_training_epoch_end", "`train_metrics`, `epoch_idx`"),
        ("on_validation_epoch_end", "`eval_metrics`, `epoch_idx`, `val_loader`"),
        ("on_test_epoch_end", "`test_metrics`, `epoch_idx`, `test_loader`"),
    ]:
        tmp_path = tmp_path_factory.mktemp("case")
        with (
            subtests.test(hook=hook, right=right),
            pytest.raises(TypeError, match=rf"parameter `outputs`.*{right}"),
        ):
            made(tmp_path, **{hook: lambda self, outputs, epoch_idx: None})


def test_the_hooks_of_the_guide_get_what_they_ask_for(tmp_path):
    got: list[Any] = []

    class Guide(Plain):
        """Has the signatures of document 001."""

        def on_training_epoch_end(self, epoch_idx):
            got.append(("train", epoch_idx))

        def on_validation_epoch_end(self, epoch_idx, eval_metrics, val_loader):
            got.append(("val", epoch_idx, val_loader is loader))
            eval_metrics["val/own"] = 2.0

        def on_test_epoch_end(self, epoch, test_loader):
            got.append(("test", epoch, sorted(test_loader)))

    loader, test = first_examples(64), first_examples(32)
    trainer = plain_for("nnx", tmp_path, kind=Guide)
    results = trainer.train_model(numbered_loader(32 * STEPS), loader, {"a": test, "b": test})
    assert got == [("train", 1), ("val", 1, True), ("test", 1, ["a", "b"])]
    assert results[1]["val/own"] == 2.0


def test_a_method_that_is_spelt_almost_like_one_to_override_is_named(tmp_path, caplog):
    class Misspelt(Plain):
        def init_optimiser(self, num_epochs: int, num_train_steps_per_epoch: int) -> Any:
            raise AssertionError

    plain_for("linen", tmp_path, kind=Misspelt)
    assert "`Misspelt.init_optimiser`" in caplog.text and "`init_optimizer`" in caplog.text
    caplog.clear()
    plain_for("linen", tmp_path)
    assert "Did you mean" not in caplog.text
