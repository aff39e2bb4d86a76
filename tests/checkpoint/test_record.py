import json
import math
import os
import re
from collections import OrderedDict, defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jax_trainer.checkpoint.record import RECORD, CheckpointError, Record, UnknownFormatError
from jax_trainer.datasets import Position


def record(
    position: Position = Position(2, 7), metrics: dict[str, Any] | None = None, callbacks: dict[Any, Any] | None = None
) -> Record:
    return Record.of(1755, position, metrics or {}, {"params.none": ("float32", (0, 3))}, callbacks)


def written(folder: Path, content: str | dict[str, Any]) -> Path:
    text = content if isinstance(content, str) else json.dumps(json.loads(record().text()) | content)
    (folder / RECORD).write_text(text)
    return folder


def test_what_is_written_is_read(tmp_path):
    metrics = {"val/acc": 0.1 + 0.2, "a": math.nan, "b": math.inf, "c": -math.inf, "d": np.float32(0.1), "e": 3}
    state = {"offset": 2**70, "name": "é\udc80", "nested": [None, True, -1.5, {"": []}]}
    callbacks = {"EarlyStopping": {"best": 0.1 + 0.2, "waited": 3}, "mine": {"seen": [None, {"é": True}]}, "none": {}}
    text = record(Position(2, 7, state), metrics, callbacks).text()
    assert "NaN" not in text and "Infinity" not in text
    saved = Record.read(written(tmp_path, text)).saved(tmp_path)
    assert (saved.step, saved.epoch, saved.position, saved.path) == (1755, 2, Position(2, 7, state), tmp_path)
    assert (saved.callbacks, saved.without) == (callbacks, ())
    assert math.isnan(saved.metrics["a"])
    assert {**saved.metrics, "a": 0} == {**{name: float(value) for name, value in metrics.items()}, "a": 0}


def test_what_is_left_out_is_said(tmp_path):
    text = replace(record(), without=["opt_state"]).text()
    assert Record.read(written(tmp_path, text)).saved(tmp_path).without == ("opt_state",)


def test_a_record_without_callbacks_has_no_word_of_them_as_before_they_were_saved(tmp_path):
    content = json.loads(record().text())
    assert not {"callbacks", "without"} & content.keys()
    saved = Record.read(written(tmp_path, content)).saved(tmp_path)
    assert (saved.callbacks, saved.without) == ({}, ())


def test_it_says_which_versions_wrote_it():
    versions = json.loads(record().text())["versions"]
    assert {"jax", "flax", "optax", "orbax-checkpoint", "numpy"} <= versions.keys()


@pytest.mark.parametrize(
    ("state", "problem"),
    [
        ({"rng": np.zeros(3)}, r"the state of the data\['rng'\] is array.*ndarray"),
        ({"at": [0, (1, 2)]}, r"\['at'\]\[1\] is \(1, 2\), of type tuple"),
        (b"bytes", "of type bytes"),
        ({"n": np.int64(3)}, "of type int64"),
        ({3: "x"}, "has the key 3, of type int"),
        ([math.nan], r"\[0\] is nan"),
        (object, "of type type"),
    ],
)
def test_a_position_that_is_not_plain_json_is_an_error_that_points_at_it(state, problem):
    with pytest.raises(CheckpointError, match=f"position in the data cannot be saved: .*{problem}"):
        record(Position(1, 1, state))


@pytest.mark.parametrize(
    ("callbacks", "problem"),
    [
        ({"EarlyStopping": {"best": math.inf}}, "callbacks['EarlyStopping']['best'] is inf, of type float"),
        ({"fine": {}, "Confusion": {"m": [np.eye(2)]}}, "callbacks['Confusion']['m'][0] is array([[1., 0.],"),
        ({"Spikes": {"last": np.float32(1)}}, "callbacks['Spikes']['last'] is np.float32(1.0), of type float32"),
        ({"Spikes": {1: 2}}, "callbacks['Spikes'] has the key 1, of type int"),
        ({"Spikes": ("a",)}, "callbacks['Spikes'] is ('a',), of type tuple"),
        ({7: {}}, "callbacks has the key 7, of type int"),
    ],
)
def test_a_callback_whose_state_is_not_plain_json_is_named_and_told_what_it_may_hold(callbacks, problem):
    with pytest.raises(CheckpointError, match=f"state of a callback cannot be saved: {re.escape(problem)}") as error:
        record(callbacks=callbacks)
    assert "A `state_dict` may hold text, finite numbers, true, false, None, and lists and dicts" in str(error.value)


def test_a_position_that_goes_on_for_ever_is_an_error():
    state: list[Any] = []
    state.append(state)
    with pytest.raises(CheckpointError, match="nested too deeply"):
        record(Position(1, 1, state))


def test_a_record_that_somebody_nested_too_deeply_is_not_written_again():
    deep: list[Any] = []
    for _ in range(5_000):
        deep = [deep]
    with pytest.raises(CheckpointError, match="record of step 1755 is nested too deeply"):
        replace(record(), feed_state=deep).text()


def test_a_dict_with_an_order_is_as_good_as_a_dict(tmp_path):
    text = record(Position(1, 1, OrderedDict(b=1, a=2))).text()
    assert Record.read(written(tmp_path, text)).feed_state == {"b": 1, "a": 2}
    text = record(callbacks=defaultdict(dict, mine=defaultdict(int, seen=3))).text()
    assert Record.read(written(tmp_path, text)).callbacks == {"mine": {"seen": 3}}


def test_more_than_can_be_read_again_is_not_written():
    with pytest.raises(CheckpointError, match="has 1[0-9]{6} bytes, more than 1048576. The state of the data alone"):
        record(Position(1, 1, "x" * 1_100_000)).text()
    with pytest.raises(CheckpointError, match="than 1048576. The state of the callback 'Spikes' alone has 1100011"):
        record(Position(1, 1, "x" * 10), callbacks={"a": {}, "Spikes": {"all": "x" * 1_100_000}}).text()


@pytest.mark.parametrize("value", [np.zeros(3), "good", None])
def test_a_metric_that_is_no_number_is_an_error(value):
    with pytest.raises(CheckpointError, match="'val/confusion' is .* not one number"):
        record(metrics={"val/confusion": value})


@pytest.mark.parametrize(
    "content",
    [
        "",
        "nonsense",
        "[]",
        "null",
        '{"format": 1}',
        "[" * 100_000,
        "9" * 5_000,
        '{"format": NaN}',
        "\xff" * 10,
        " " * (1 << 21),
        {"step": -1},
        {"step": 1.0},
        {"step": True},
        {"step": "3"},
        {"format": True},
        {"format": "1"},
        {"epoch": None},
        {"metrics": {"val/acc": "high"}},
        {"metrics": {"val/acc": [1]}},
        {"metrics": []},
        {"empty": {"a": ["float32", [-1]]}},
        {"empty": {"a": "float32"}},
        {"versions": {"jax": 1}},
        {"callbacks": None},
        {"callbacks": []},
        {"without": "opt_state"},
        {"without": ["params"]},
        {"without": [["opt_state"]]},
        {"class_path": "os.system"},
    ],
    ids=lambda content: str(content)[:20],
)
def test_anything_else_is_an_error_with_its_path(tmp_path, content):
    with pytest.raises(CheckpointError, match=f"^{tmp_path}: checkpoint.json ") as error:
        Record.read(written(tmp_path, content))
    assert len(str(error.value)) < 500


def test_a_number_that_is_too_large_to_be_one_is_an_error(tmp_path):
    text = record(callbacks={"a": {"best": 7.125}}).text()
    assert Record.read(written(tmp_path, text)).callbacks["a"]["best"] == 7.125
    with pytest.raises(CheckpointError, match="checkpoint.json cannot be read: '7e999' is not a finite number"):
        Record.read(written(tmp_path, text.replace("7.125", "7e999")))


@pytest.mark.parametrize("number", [0, 2, 10**30])
def test_an_unknown_format_is_an_error_of_its_own(tmp_path, number):
    with pytest.raises(UnknownFormatError, match=f"was written in format {number}, and this version.* knows format 1"):
        Record.read(written(tmp_path, {"format": number, "shape_of_things": "to come"}))


def test_a_link_or_a_pipe_is_not_read(tmp_path):
    (tmp_path / "real.json").write_text(record().text())
    (tmp_path / RECORD).symlink_to(tmp_path / "real.json")
    with pytest.raises(CheckpointError, match="cannot be opened"):
        Record.read(tmp_path)
    (tmp_path / RECORD).unlink()
    os.mkfifo(tmp_path / RECORD)
    with pytest.raises(CheckpointError, match="not a plain file"):
        Record.read(tmp_path)


def test_damaged_bytes_give_a_checkpoint_error_or_a_checkpoint(tmp_path):
    good = record(Position(1, 2, {"a": [1]}), {"val/acc": 0.5}).text().encode()
    rng, refused = np.random.default_rng(0), 0
    for _ in range(200):
        damaged = bytearray(good)
        for place in rng.integers(len(good), size=rng.integers(1, 4)):
            damaged[place] = rng.integers(256)
        (tmp_path / RECORD).write_bytes(damaged)
        try:
            Record.read(tmp_path).saved(tmp_path)
        except CheckpointError:
            refused += 1
    assert refused > 100
