"""A non-finite loss or gradient: the error, what is kept, and which callbacks are notified."""

import json
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jax_trainer.callbacks import LambdaCallback
from jax_trainer.checkpoint.store import CheckpointStore
from jax_trainer.config.settings import SettingsError
from jax_trainer.core import NonFiniteError
from jax_trainer.datasets import ArrayLoader
from jax_trainer.testing import assert_same_bits
from tests.trainer.trainer_runs import EXAMPLE, NUMBERS, STEPS, Plain, first_examples, plain_for, rows, train_plain

BAD = 3  # the step whose batch has a NaN in it


def broken(step: int = BAD, value: float = np.nan) -> ArrayLoader:
    """Batches of which one, in an epoch without shuffling, has a number that is not finite."""
    arrays = {name: np.array(array) for name, array in NUMBERS.items()}
    arrays["x"][32 * (step - 1) + 5, 1] = value
    return ArrayLoader(arrays, 32)


def failed_run(folder: Any, flavour: str = "nnx", **changes: Any) -> tuple[Any, NonFiniteError]:
    trainer = plain_for(flavour, folder, **{"detect_nans": True, "check_val_every_n_epoch": 0, **changes})
    with pytest.raises(NonFiniteError) as caught:
        trainer.train_model(broken())
    return trainer, caught.value


@pytest.mark.parametrize(
    ("flavour", "changes"),
    [
        ("nnx", {"resident": True, "steps_per_call": "epoch"}),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [("linen", {}), ("nnx", {"steps_per_call": 4}), ("linen", {"resident": True})]
        ),
    ],
    ids=str,
)
def test_the_step_the_metric_and_the_first_gradient_are_named(flavour, tmp_path, changes):
    trainer, error = failed_run(tmp_path, flavour, **changes)
    first = sorted(trainer.state.params)[0]
    assert error.step == BAD
    for part in ("Step 3:", "loss", f"the gradients of {first}", "the batch at x", "on_nonfinite: skip"):
        assert part in str(error)


@pytest.mark.parametrize(
    ("flavour", "changes"),
    [("nnx", {"steps_per_call": 4, "resident": True}), pytest.param("linen", {}, marks=pytest.mark.slow)],
    ids=str,
)
def test_the_batch_and_the_state_before_it_are_kept(flavour, tmp_path, changes):
    trainer, _ = failed_run(tmp_path, flavour, **changes)
    kept = trainer.folder.path / "nonfinite"
    with np.load(kept / "batch.npz") as batch:
        assert set(batch) == set(EXAMPLE)
        for name, array in broken().epoch(1).__iter__().__next__().items():
            assert batch[name].dtype == array.dtype
        np.testing.assert_array_equal(batch["x"], list(broken().epoch(1))[BAD - 1]["x"])
    healthy = plain_for(flavour, tmp_path, detect_nans=True, check_val_every_n_epoch=0, max_steps=BAD - 1)
    healthy.train_model(broken())
    state, saved = CheckpointStore(kept / "state").restore("latest", like=healthy.state)
    assert saved.step == BAD - 1 and (saved.position.epoch, saved.position.epoch_step) == (1, BAD - 1)
    assert_same_bits(state, healthy.state)
    report = json.loads((kept / "report.json").read_text())
    assert report["step"] == BAD and report["batch"] == ["x"] and "loss" in report["metrics"]


def test_loggers_and_callbacks_are_finalised(tmp_path):
    heard: list[Any] = []
    watcher = LambdaCallback(
        on_exception=lambda error: heard.append(str(error)[:6]), finalize=lambda status: heard.append(status)
    )
    trainer, _ = failed_run(tmp_path, given=[watcher])
    assert heard == ["Step 3", "failed"]
    assert "Run failed" in (trainer.folder.path / "run.log").read_text()


def test_stop_ends_the_run_without_an_error_and_tests(tmp_path):
    trainer = plain_for("nnx", tmp_path, on_nonfinite="stop", train_epochs=3)
    results = trainer.train_model(broken(), first_examples(64), first_examples(32))
    assert set(results) == {"test"}
    assert (trainer.folder.path / "nonfinite" / "batch.npz").exists()
    assert all(np.isfinite(leaf).all() for leaf in trainer.state.params["out"].values())


def test_skip_omits_the_update_and_continues(tmp_path):
    trainer = plain_for("nnx", tmp_path, on_nonfinite="skip", check_val_every_n_epoch=0)
    trainer.train_model(broken())
    epoch = rows(trainer)[-1]
    assert int(trainer.state.step) == STEPS
    assert epoch["guard/skipped_epoch"] == 1 and np.isfinite(epoch["train/loss_epoch"])
    assert not (trainer.folder.path / "nonfinite").exists()


def test_skipping_ends_after_too_many_in_a_row(tmp_path):
    class Always(Plain):
        """Is never finite."""

        def loss_function(self, model: Any, batch: Any, train: bool = True) -> Any:
            loss, metrics = super().loss_function(model, batch, train)
            return loss * jnp.nan, metrics

    trainer = plain_for("nnx", tmp_path, kind=Always, on_nonfinite="skip", max_skipped=2, check_val_every_n_epoch=0)
    with pytest.raises(NonFiniteError, match="Step 3:"):
        train_plain(trainer)


def test_metrics_of_nan_keys_are_checked_too(tmp_path):
    class Watched(Plain):
        """Reports something that is not finite."""

        def loss_function(self, model: Any, batch: Any, train: bool = True) -> Any:
            loss, metrics = super().loss_function(model, batch, train)
            return loss, {**metrics, "ratio": 1 / jnp.float32(not train)}

    with pytest.raises(NonFiniteError, match="Step 1:.* ratio"):
        train_plain(plain_for("nnx", tmp_path, kind=Watched, detect_nans=True, nan_keys=("train/ratio",)))


def test_a_non_finite_evaluation_ends_the_run_if_configured(tmp_path):
    options: dict[str, Any] = {"detect_nans": True, "nan_keys": ("train/loss", "val/loss")}
    trainer = plain_for("nnx", tmp_path, **options)
    with pytest.raises(NonFiniteError, match="Step 4:.* val/loss"):
        trainer.train_model(first_examples(128), broken())
    stopped = plain_for("nnx", tmp_path, **options, on_nonfinite="stop", train_epochs=3)
    assert list(stopped.train_model(first_examples(128), broken())) == [1]


def test_a_loss_that_is_not_finite_ends_the_run_by_itself(tmp_path_factory, subtests):
    for value in [np.nan, np.inf]:
        tmp_path = tmp_path_factory.mktemp("case")
        with subtests.test(value=value):
            trainer = plain_for("nnx", tmp_path, check_val_every_n_epoch=0)
            with pytest.raises(NonFiniteError, match=f"Step {BAD}: the loss was"):
                trainer.train_model(broken(value=value))


def test_ignore_trains_through_a_non_finite_loss(tmp_path):
    trainer = plain_for("nnx", tmp_path, check_val_every_n_epoch=0, on_nonfinite="ignore")
    trainer.train_model(broken())
    assert not np.isfinite(trainer.state.params["out"]["bias"]).all()
    with pytest.raises(SettingsError, match="`ignore`.*`detect_nans`"):
        plain_for("nnx", tmp_path, on_nonfinite="ignore", detect_nans=True)


@pytest.mark.parametrize("flavour", [pytest.param("linen", marks=pytest.mark.slow), "nnx"])
def test_detecting_changes_no_trained_bit(flavour, tmp_path):
    plain, watched = (plain_for(flavour, tmp_path, detect_nans=on, train_epochs=2) for on in (False, True))
    train_plain(plain)
    train_plain(watched)
    assert_same_bits(watched.state.params, plain.state.params)
    assert_same_bits(watched.state.opt_state, plain.state.opt_state)


def test_an_unknown_key_of_nan_keys_is_an_error_that_lists_the_known_ones(tmp_path):
    with pytest.raises((SettingsError, ValueError), match="ratoi.*loss"):
        train_plain(plain_for("nnx", tmp_path, detect_nans=True, nan_keys=("train/ratoi",)))


def test_a_custom_step_without_a_loss_ends_the_run_by_its_other_metrics(tmp_path):
    class Renamed(Plain):
        def create_training_function(self) -> Any:
            step = super().create_training_function()

            def renamed(state: Any, batch: Any) -> Any:
                state, report = step(state, batch)
                return state, {"total": report.metrics.by_name["loss"].value}

            return renamed

    trainer = plain_for("nnx", tmp_path, kind=Renamed, check_val_every_n_epoch=0)
    with pytest.raises(NonFiniteError, match=rf"Step {BAD}: 'total' was nan"):
        trainer.train_model(broken())


def test_no_weights_are_the_best_where_every_validation_is_nan(tmp_path):
    class OnlyLoss(Plain):
        def _evaluate(self, logits: Any, batch: Any) -> Any:
            return super()._evaluate(logits, batch)[0], {}

    trainer = plain_for("nnx", tmp_path, kind=OnlyLoss, callbacks={}, train_epochs=2)
    results = trainer.train_model(first_examples(64), broken(1))
    assert np.isnan([results[epoch]["val/loss"] for epoch in (1, 2)]).all()
    assert results.best is None
