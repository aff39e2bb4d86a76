import time
from typing import Any

import jax
import numpy as np
import pytest

from jax_trainer.callbacks import ModelCheckpointConfig
from jax_trainer.config import ConfigError
from jax_trainer.config.settings import SettingsError
from jax_trainer.core import NonFiniteError
from jax_trainer.datasets import ArrayLoader
from jax_trainer.engine import evaluate
from jax_trainer.testing import assert_close, assert_same_bits, numbered_loader
from jax_trainer.trainer import TrainerConfig
from tests.trainer.trainer_runs import (
    NUMBERS,
    STEPS,
    Plain,
    Watcher,
    WatcherConfig,
    first_examples,
    plain_for,
    rows,
    train_plain,
    values,
)


@pytest.fixture(scope="module")
def usual(tmp_path_factory):
    """One epoch with nothing set."""
    trainer = plain_for("nnx", tmp_path_factory.mktemp("usual"))
    return trainer, train_plain(trainer)


def trained(folder, **changes: Any) -> Plain:
    trainer = plain_for("nnx", folder, callbacks={"watcher": WatcherConfig()}, **changes)
    train_plain(trainer)
    return trainer


def evaluated_steps() -> list[int]:
    return list(Watcher.last.evaluated)


class Seeing(Plain):
    """Keeps what the loss was given."""

    logits: list[Any]

    def _evaluate(self, logits: Any, batch: Any) -> Any:
        self.logits = [*getattr(self, "logits", []), logits]
        return super()._evaluate(logits, batch)


def test_accumulate_computes_gradients_in_parts(tmp_path):
    trainer = plain_for("nnx", tmp_path, kind=Seeing, accumulate=2)
    trainer.dry_run(numbered_loader(32 * STEPS))
    assert {logits.shape for logits in trainer.logits} == {(16, 4), (32, 4)}  # evaluation uses the full batch


def test_precision_is_that_of_computing_and_of_weights(tmp_path_factory, subtests):
    for precision, computed, stored in [
        ("f32", "float32", "float32"),
        ("bf16", "bfloat16", "float32"),
        ("bf16_full", "bfloat16", "bfloat16"),
    ]:
        tmp_path = tmp_path_factory.mktemp("case")
        with subtests.test(precision=precision, computed=computed, stored=stored):
            trainer = plain_for("nnx", tmp_path, kind=Seeing, precision=precision)
            report = trainer.dry_run(numbered_loader(32 * STEPS))
            assert {str(logits.dtype) for logits in trainer.logits} == {computed}
            assert {leaf.dtype for leaf in report.parameters} == {stored}


def test_the_ema_weights_are_kept_evaluated_and_continued(tmp_path):
    trainer = plain_for("nnx", tmp_path, ema=0.5, max_steps=1, val_every_n_steps=1)
    first = trainer.state
    results = train_plain(trainer)
    once = trainer.state
    keep = np.float32(2 / 11)  # of a decay that begins small
    assert_close(once.extra["ema"], mixed(keep, first.params, once.params))
    swapped = once.replace(params=once.extra["ema"], extra={**once.extra, "ema": once.params})
    of_weights = evaluate(trainer.program, swapped, {"val": first_examples(64)})["val"]
    assert of_weights["loss"] != results[1]["val/loss"]
    assert evaluate(trainer.program, once, {"val": first_examples(64)})["val"]["loss"] == results[1]["val/loss"]
    train_plain(trainer)
    assert_close(trainer.state.extra["ema"], mixed(keep, once.extra["ema"], trainer.state.params))


def mixed(keep: Any, old: Any, new: Any) -> Any:
    return jax.tree.map(lambda a, b: keep * np.asarray(a) + (1 - keep) * np.asarray(b), old, new)


@pytest.mark.parametrize("steps_per_call", [pytest.param(3, marks=pytest.mark.slow), "epoch"])
def test_steps_per_call_are_dispatched_together(usual, tmp_path, steps_per_call):
    trainer = trained(tmp_path, steps_per_call=steps_per_call)
    assert Watcher.last.chunks == ([3, 1] if steps_per_call == 3 else [4])
    assert_close(trainer.state.params, usual[0].state.params)


def test_a_resident_set_is_not_cut_into_batches_on_the_host(usual, tmp_path):
    class Unused(ArrayLoader):
        """Must not be iterated."""

        def epoch(self, number: int, start: int = 0) -> Any:
            raise AssertionError("a batch was made on the host")

    trainer = plain_for("nnx", tmp_path, resident=True)
    trainer.train_model(Unused(NUMBERS, 32, shuffle=True))
    assert_close(trainer.state.params, usual[0].state.params)


@pytest.mark.parametrize(
    ("changes", "steps", "evaluated"),
    [
        ({"train_epochs": None, "max_steps": 10}, 10, [4, 8, 10]),
        ({"train_epochs": 3, "max_steps_per_epoch": 2}, 6, [2, 4, 6]),
        ({"train_epochs": 4, "check_val_every_n_epoch": 2, "val_every_n_steps": 3}, 16, [3, 6, 8, 9, 12, 15, 16]),
        ({"train_epochs": 5, "overfit_batches": 1}, 5, [1, 2, 3, 4, 5]),
        ({"train_epochs": 5, "check_val_every_n_epoch": 0, "fast_dev_run": 2}, 2, [2]),
        pytest.param({"train_epochs": 3, "max_steps": 6}, 6, [4, 6], marks=pytest.mark.slow),
        pytest.param({"train_epochs": None, "fast_dev_run": 2}, 2, [2], marks=pytest.mark.slow),
        pytest.param({"train_epochs": 2, "check_val_every_n_epoch": 0}, 8, [], marks=pytest.mark.slow),
    ],
    ids=lambda given: ",".join(given) if isinstance(given, dict) else "",
)
def test_the_plan_has_the_configured_length_and_validations(tmp_path, changes, steps, evaluated):
    trainer = trained(tmp_path, **changes)
    assert int(trainer.state.step) == steps
    assert evaluated_steps() == evaluated


def test_overfitting_sees_the_same_batches_again_and_again(tmp_path):
    again = trained(tmp_path / "again", overfit_batches=1, train_epochs=3, check_val_every_n_epoch=0)
    [first] = list(numbered_loader(32 * STEPS).epoch(1))[:1]
    hand_written = plain_for("nnx", tmp_path / "hand_written", train_epochs=3)
    hand_written.train_model([first])
    assert_same_bits(again.state, hand_written.state)


def test_a_fast_run_limits_the_test_as_well(tmp_path):
    trainer = plain_for("nnx", tmp_path, fast_dev_run=1)
    results = trainer.train_model(numbered_loader(32 * STEPS), first_examples(64), first_examples(96))
    assert results["test"] == trainer.test_model(first_examples(32))


@pytest.mark.parametrize("epochs", [None, pytest.param(10**6, marks=pytest.mark.slow)])
def test_max_time_ends_a_run_and_nothing_before_it_does(tmp_path, epochs):
    began = time.monotonic()
    trainer = trained(tmp_path, train_epochs=epochs, max_time=0.5, check_val_every_n_epoch=0)
    assert 0.5 <= time.monotonic() - began < 20
    assert 0 < int(trainer.state.step) < 10**6 * STEPS


def test_a_training_without_any_limit_is_refused_before_anything_is_done(tmp_path):
    trainer = plain_for("nnx", tmp_path / "new", train_epochs=None)
    with pytest.raises(SettingsError, match="`train_epochs`.*`max_steps`.*`max_time`"):
        train_plain(trainer)
    with pytest.raises(SettingsError, match="`train_epochs`"):
        trainer.dry_run(numbered_loader(32 * STEPS))
    assert not (tmp_path / "new").exists()


def test_num_epochs_of_train_model_needs_no_other_limit(tmp_path):
    trainer = plain_for("nnx", tmp_path, train_epochs=None)
    train_plain(trainer, num_epochs=2)
    assert int(trainer.state.step) == 2 * STEPS


def test_a_run_limited_by_steps_resumes_to_a_later_limit_as_if_it_had_never_ended(tmp_path):
    saver = {"saver": ModelCheckpointConfig(monitor="val/loss")}
    short = plain_for("nnx", tmp_path / "short", train_epochs=None, max_steps=6, callbacks=saver)
    train_plain(short)
    longer = plain_for("nnx", tmp_path / "short", train_epochs=None, max_steps=11, callbacks=saver)
    train_plain(longer, resume=short.folder.path)
    complete = plain_for("nnx", tmp_path / "complete", train_epochs=None, max_steps=11, callbacks=saver)
    train_plain(complete)
    assert_same_bits(longer.state, complete.state)
    assert [row["epoch"] for row in rows(longer) if "epoch" in row][-1] == 3


def test_the_bar_counts_epochs_where_only_steps_are_limited(tmp_path):
    trained(tmp_path, train_epochs=None, max_steps=10)
    assert Watcher.last.run.epochs == 3


class Late(Plain):
    """Takes its time before the first step of an epoch."""

    def on_training_epoch_start(self, epoch_idx: int) -> None:
        time.sleep(0.3)


def test_a_run_whose_time_is_up_before_the_first_step_of_an_epoch_ends_well(tmp_path):
    trainer = plain_for("nnx", tmp_path, kind=Late, train_epochs=3, max_time=0.1, check_val_every_n_epoch=0)
    train_plain(trainer)
    assert int(trainer.state.step) == 0


def broken_at(batch: int) -> ArrayLoader:
    """Numbered data in order, of which one batch has something that is no number."""
    x = NUMBERS["x"].copy()
    x[32 * batch] = np.nan
    return ArrayLoader({**NUMBERS, "x": x}, 32)


def test_detect_nans_ends_the_run_with_the_weights_before(tmp_path):
    good = plain_for("nnx", tmp_path / "good", detect_nans=True, max_steps=2)
    good.train_model(broken_at(2))
    trainer = plain_for("nnx", tmp_path / "bad", detect_nans=True, callbacks={"saver": ModelCheckpointConfig()})
    with pytest.raises(NonFiniteError, match="Step 3:.* loss"):
        trainer.train_model(broken_at(2))
    assert_same_bits(trainer.state.params, good.state.params)
    assert_same_bits(trainer.state.opt_state, good.state.opt_state)
    assert not list(trainer.folder.checkpoints.iterdir())
    assert "Run failed" in (trainer.folder.path / "run.log").read_text()
    careless = plain_for("nnx", tmp_path / "careless", on_nonfinite="ignore")
    careless.train_model(broken_at(2))
    assert np.isnan(jax.tree.leaves(careless.state.params)[0]).all()


def test_norms_are_reported_unless_they_are_not_wanted(usual, tmp_path):
    assert len(list(values(usual[0], "optimizer/grad_global_norm_epoch"))) == 1
    trainer = trained(tmp_path, log_grad_norm=False)
    assert not [name for row in rows(trainer) for name in row if "norm" in name]
    assert_close(trainer.state.params, usual[0].state.params)


def test_what_makes_no_sense_is_refused(subtests):
    for changes, problem in [
        ({"train_epochs": 0}, "of at least 1 or null, got 0"),
        ({"max_time": 0}, "`max_time` must be a number above 0 or null, got 0"),
        ({"ema": 1.0}, "`ema` must be a number of at least 0 and below 1 or null, got 1.0"),
        ({"precision": "f8"}, "`precision` must be one of f32, bf16, bf16_full, f16 or null, got 'f8'"),
        ({"remat": {"match": "("}}, "remat.match: expected text that is a regular expression, found '('"),
        ({"remat": {"match": ".*", "policy": "dots"}}, "everything_saveable, found 'dots'"),
        ({"steps_per_call": 0}, "of at least 1 or one of epoch, got 0"),
        (
            {"callbacks": {"a": ModelCheckpointConfig(), "b": ModelCheckpointConfig()}},
            "ModelCheckpoint is possible, got 2: a, b.",
        ),
    ]:
        with subtests.test(changes=changes, problem=problem):
            with pytest.raises((SettingsError, ConfigError)) as error:
                TrainerConfig(**changes)
            assert problem in str(error.value)


def test_the_length_of_a_run_counts_epochs_of_different_lengths():
    loader = ArrayLoader(np.zeros((64, 2)), {0: 16, 2: 32})
    config = TrainerConfig(train_epochs=5)
    assert config.run_length(loader) == (5, {0: 4, 2: 2})
    assert config.total_steps(*config.run_length(loader)) == 4 + 4 + 2 + 2 + 2
    assert TrainerConfig(max_steps=11).run_length(loader) == (4, {0: 4, 2: 2})
    limited = TrainerConfig(train_epochs=5, max_steps_per_epoch=3)
    assert limited.total_steps(*limited.run_length(loader)) == 3 + 3 + 2 + 2 + 2
