"""The history of metrics: a file that is appended to, and the lengths of it that checkpoints have."""

import json
import logging
from typing import Any

import numpy as np
import pytest

from jax_trainer.checkpoint.store import CheckpointError
from jax_trainer.engine import EpochEnd, EvalEnd, EvalRoundEnd
from jax_trainer.runs.history import HISTORY, History
from tests.rows import noted_row


def event_of(kind: Any, epoch: int, **fields: Any) -> Any:
    """An event with only the fields that the history reads."""
    event = object.__new__(kind)
    for name, value in {"epoch": epoch, "step": 10 * epoch, **fields}.items():
        object.__setattr__(event, name, value)
    return event


def eval_end(epoch: int, name: str = "val", loss: float = 0.25) -> EvalEnd:
    return event_of(EvalEnd, epoch, name=name, metrics={"loss": loss})


def grown(history: History, *epochs: int, loss: float = 0.5) -> dict:
    """Adds epochs with a validation each; returns the state that a checkpoint saves."""
    for epoch in epochs:
        history.handle(event_of(EpochEnd, epoch, metrics={"loss": loss, "odd": np.float32(epoch)}))
        history.handle(eval_end(epoch, loss=loss / 2))
    return history.state_dict()


def restored(file, state) -> History:
    history = History(file)
    history.load_state_dict(state)
    return history


def content(history: History) -> tuple:
    return history.training, history.validations, history.tests


@pytest.fixture
def file(tmp_path):
    return tmp_path / HISTORY


def test_a_state_has_a_length_and_the_file_has_the_metrics(file):
    history = History(file)
    few = grown(history, 1)
    assert not file.exists()  # written before a checkpoint is committed
    history.write()
    many = grown(history, *range(2, 500))
    history.write()
    assert many.keys() == {"lines", "digest"} and len(json.dumps(many)) < len(json.dumps(few)) + 10
    assert content(restored(file, many)) == content(history)
    first = restored(file, few)
    assert list(first.training) == [1] and type(first.training[1]["train/odd"]) is np.float32


def test_several_sets_and_metrics_of_hooks_are_one_validation(file):
    history = History(file)
    history.handle(eval_end(1))
    history.handle(eval_end(1, "more"))
    history.state_dict()
    history.add(event_of(EvalRoundEnd, 1, metrics={"val": {}, "more": {}}), {"val/own": 1.0})
    history.handle(eval_end(1, "test"))
    state = history.state_dict()
    history.write()
    assert content(restored(file, state)) == content(history)
    [(_, _, metrics)] = history.validations
    assert metrics.keys() == {"val/loss", "more/loss", "val/own"} and history.tests.keys() == {"test/loss"}


@pytest.mark.parametrize("torn", [b"", b'{"kind": "tr'], ids=["whole", "torn"])
def test_every_checkpoint_finds_its_metrics_after_a_run_went_back(file, torn):
    """As after kill -9: later lines are there, the last one may be incomplete, and another kill may follow."""
    history = History(file)
    states = [grown(history, epoch) for epoch in (1, 2, 3)]
    history.write()
    with file.open("ab") as opened:
        opened.write(torn)
    again = restored(file, states[0])
    other = grown(again, 2, loss=0.75)
    again.write()
    assert content(restored(file, other)) == content(again)
    assert again.training[2]["train/loss"] == 0.75 and 3 not in again.training
    for epochs, state in enumerate(states, start=1):  # the later checkpoints may still be there
        assert list(restored(file, state).training) == list(range(1, epochs + 1))
    last = restored(file, other)
    state = grown(last, 3)
    last.write()
    assert list(restored(file, state).training) == [1, 2, 3]
    assert restored(file, state).training[2]["train/loss"] == 0.75


def test_a_run_that_starts_again_in_its_folder_does_not_continue_the_old_metrics(file):
    history = History(file)
    grown(history, 1, 2)
    history.write()
    new = History(file)
    state = grown(new, 1, loss=0.75)
    new.write()
    assert content(restored(file, state)) == content(new) and list(new.training) == [1]


def test_after_a_failed_write_every_line_is_there_once(file, monkeypatch):
    history = History(file)
    grown(history, 1)
    history.write()
    state = grown(history, 2)
    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", lambda handle: (_ for _ in ()).throw(OSError(28, "full")))
        with pytest.raises(OSError, match="full"):
            history.write()
    history.write()
    assert content(restored(file, state)) == content(history)
    assert len(file.read_text().splitlines()) == state["lines"] == 4


@pytest.mark.parametrize("how", ["deleted", "shortened", "changed"])
def test_a_damaged_file_costs_the_metrics_and_a_warning(file, how, caplog):
    history = History(file)
    state = grown(history, 1, 2)
    history.write()
    text = file.read_text()
    file.unlink()
    if how != "deleted":
        file.write_text(text[:30] if how == "shortened" else text.replace("0.5", "0.6", 1))
    with caplog.at_level(logging.WARNING, "jax_trainer"):
        again = restored(file, state)
    assert content(again) == ({}, [], {})
    [warning] = caplog.records
    assert str(file) in warning.getMessage()
    new = grown(again, 3)
    again.write()
    assert list(restored(file, new).training) == [3]


def test_another_state_is_an_error(file):
    for state in [{}, {"lines": -1, "digest": ""}, {"lines": "2", "digest": ""}, {"training": []}]:
        with noted_row(state), pytest.raises(ValueError, match="."):
            restored(file, state)


def test_a_metric_that_is_not_plain_is_an_error_only_if_it_is_saved(file):
    history = History(file)
    event = eval_end(1)
    event.metrics["odd"] = object()
    history.handle(event)
    with pytest.raises(CheckpointError, match="odd"):
        history.state_dict()
