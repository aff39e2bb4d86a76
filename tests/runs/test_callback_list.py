"""The order of callbacks, and their states after resuming."""

from types import SimpleNamespace
from typing import Any

import pytest

from jax_trainer.callbacks import EarlyStoppingConfig, LambdaCallback, ModelCheckpoint, ModelCheckpointConfig
from jax_trainer.runs import named_callbacks
from jax_trainer.runs.callback_list import CallbackList


class Remembering:
    def __init__(self, **state):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = dict(state)


def test_callbacks_that_save_are_notified_last():
    saver, other, record, first, more = ModelCheckpoint(), LambdaCallback(), Remembering(), object(), object()
    watching = CallbackList({"saver": saver, "other": other}, {"run/record": record})
    assert watching.observers([first], [more]) == [first, record, more, other, saver]


def test_all_callbacks_restore_their_states():
    callback, record, silent = Remembering(best=1), Remembering(rows=2), Remembering()
    callbacks: Any = {"early": callback}
    states = CallbackList(callbacks, {"run/record": record, "run/silent": silent}).states()
    assert states == {"early": {"best": 1}, "run/record": {"rows": 2}}
    fresh, also = Remembering(best=None), Remembering()
    callbacks = {"early": fresh}
    CallbackList(callbacks, {"run/new": also}).load_states(SimpleNamespace(path="run", callbacks=states))  # type: ignore[arg-type]
    assert (fresh.state, also.state) == ({"best": 1}, {})


def test_callbacks_of_a_list_are_named_after_their_class_and_numbered():
    given = [ModelCheckpointConfig(), EarlyStoppingConfig(monitor="val/loss"), EarlyStoppingConfig(monitor="val/acc")]
    names = list(named_callbacks(given, ["ModelCheckpoint"]))
    assert names == [
        "ModelCheckpoint_2",
        "EarlyStopping",
        "EarlyStopping_2",
    ]


def test_a_value_that_is_no_callback_is_refused_by_name():
    with pytest.raises(TypeError, match="'mine' is a function"):
        named_callbacks({"mine": lambda: None})  # type: ignore[dict-item]
