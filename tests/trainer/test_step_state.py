"""Who assigns `state` gets what was assigned, or an error: never a training that went on without it."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jax_trainer.callbacks import Callback, CallbackConfig
from jax_trainer.testing import assert_same_bits
from tests.trainer.trainer_runs import Plain, plain_for, train_plain

ONE_EPOCH: dict[str, Any] = {"train_epochs": 1, "enable_progress_bar": False}


def zeroed(state: Any) -> Any:
    return state.replace(params=jax.tree.map(jnp.zeros_like, state.params))


class Assigning(Plain):
    """Assigns its state in one of its methods."""

    where: str

    def _assign(self, where: str) -> None:
        if where == self.where:
            self.state = zeroed(self.state)

    def train_epoch(self, train_loader: Any, epoch_idx: int, train_metrics: Any = None) -> Any:
        self._assign("before the epoch")
        found = super().train_epoch(train_loader, epoch_idx, train_metrics)
        self._assign("after the epoch")
        return found

    def on_training_start(self) -> None:
        self._assign("on_training_start")

    def on_training_epoch_start(self, epoch_idx: int) -> None:
        self._assign("on_training_epoch_start")

    def on_training_epoch_end(self, train_metrics: Any, epoch_idx: int) -> None:
        self._assign("on_training_epoch_end")

    def on_validation_epoch_end(self, eval_metrics: Any, epoch_idx: int) -> None:
        self._assign("on_validation_epoch_end")

    def on_training_end(self) -> None:
        self._assign("on_training_end")


class AssigningCallback(Callback):
    config: CallbackConfig
    to_trainer = False

    def on_training_epoch_end(self, train_metrics: Any, epoch: int) -> None:
        target = self.trainer if self.to_trainer else self
        target.state = zeroed(self.state)


def test_the_state_of_a_trainer_has_the_collections_of_its_model_as_that_of_a_step(tmp_path):
    state = plain_for("linen", tmp_path, hidden=True).state
    assert state.batch_stats.keys() == {"norm"} and state.mutable_variables == {"batch_stats": state.batch_stats}
    assert plain_for("linen", tmp_path).state.batch_stats == {}


IN_BETWEEN = [
    "before the epoch",
    "after the epoch",
    "on_training_epoch_start",
    "on_training_epoch_end",
    "on_validation_epoch_end",
]


def test_assigning_the_state_during_a_run_is_an_error(tmp_path_factory, subtests):
    for where in IN_BETWEEN:
        tmp_path = tmp_path_factory.mktemp("case")
        with subtests.test(where=where):
            trainer = plain_for("nnx", tmp_path, kind=Assigning, **ONE_EPOCH)
            trainer.where = where
            with pytest.raises(RuntimeError, match=r"`state`(?s:.*)`load_weights`"):
                train_plain(trainer)
            trainer.state = zeroed(trainer.state)  # between runs


def test_a_callback_that_assigns_a_state_gets_the_same_error(tmp_path_factory, subtests):
    for to_trainer in [True, False]:
        tmp_path = tmp_path_factory.mktemp("case")
        with subtests.test(to_trainer=to_trainer):
            callback = AssigningCallback()
            callback.to_trainer = to_trainer
            trainer = plain_for("nnx", tmp_path, given=[callback], **ONE_EPOCH)
            with pytest.raises(RuntimeError, match=r"`state`(?s:.*)`load_weights`"):
                train_plain(trainer)


def test_a_state_that_is_assigned_when_training_starts_or_ends_is_used(tmp_path):
    starting, before = (plain_for("nnx", tmp_path, kind=Assigning, **ONE_EPOCH) for _ in range(2))
    starting.where, before.where = "on_training_start", ""
    before.state = zeroed(before.state)
    for trainer in (starting, before):
        train_plain(trainer)
    assert_same_bits(starting.state.params, before.state.params)
    ending = plain_for("nnx", tmp_path, kind=Assigning, **ONE_EPOCH)
    ending.where = "on_training_end"
    train_plain(ending)
    assert_same_bits(ending.state, zeroed(ending.state))
