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
    return Record.of(1755, position, metrics or {}, callbacks)


def written(folder: Path, content: str | dict[str, Any]) -> Path:
    text = content if isinstance(content, str) else json.dumps(json.loads(record().text()) | content)
    (folder / RECORD).write_text(text)
    return folder


def test_a_record_round_trips(tmp_path):
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


def test_omitted_fields_are_recorded(tmp_path):
    text = replace(record(), without=["opt_state"]).text()
    assert Record.read(written(tmp_path, text)).saved(tmp_path).without == ("opt_state",)


def test_a_record_without_callbacks_has_no_key_for_them(tmp_path):
    content = json.loads(record().text())
    assert not {"callbacks", "without"} & content.keys()
    saved = Record.read(written(tmp_path, content)).saved(tmp_path)
    assert (saved.callbacks, saved.without) == ({}, ())


def test_a_record_contains_the_versions_that_wrote_it():
    versions = json.loads(record().text())["versions"]
    assert {"jax", "flax", "optax", "orbax-checkpoint", "numpy"} <= versions.keys()


def test_a_position_that_is_not_plain_is_an_error_with_its_path():
    problems = [
        ({"rng": np.array([None])}, r"the state of the data\['rng'\] is array.*dtype object"),
        ({"at": [0, {1, 2}]}, r"\['at'\]\[1\] is \{1, 2\}, of type set"),
        ({frozenset(): "x"}, r"the key frozenset\(\) of the state of the data is frozenset"),
        (object, "of type type"),
    ]
    for state, problem in problems:
        with pytest.raises(CheckpointError, match=f"position.*{problem}"):
            record(Position(1, 1, state))


def test_a_callback_with_an_invalid_state_is_named_with_the_allowed_types():
    problems = [
        ({"EarlyStopping": {"best": 1 + 2j}}, "callbacks['EarlyStopping']['best'] is (1+2j), of type complex"),
        ({"fine": {}, "Confusion": {"m": [np.array(["x"])]}}, "callbacks['Confusion']['m'][0] is array(['x']"),
    ]
    for callbacks, problem in problems:
        with pytest.raises(CheckpointError, match=re.escape(problem)) as error:
            record(callbacks=callbacks)
        assert "`state_dict`" in str(error.value) and "numpy arrays" in str(error.value)


def test_the_state_of_a_run_round_trips_exactly(tmp_path):
    run = {"meter": {"sum": (np.float64(0.1), -math.inf)}, "$": {"$": b"x"}, "rows": {3: np.arange(3)}}
    again = Record.read(written(tmp_path, record().with_run(run).text())).saved(tmp_path).run
    assert again.keys() == run.keys() and again["$"] == run["$"]
    assert again["meter"] == run["meter"] and type(again["meter"]["sum"][0]) is np.float64
    np.testing.assert_array_equal(again["rows"][3], np.arange(3))
    with pytest.raises(CheckpointError, match=r"run\['a'\]"):
        record().with_run({"a": object()})


def test_arguments_may_change_afterwards():
    state, callbacks, run = {"at": [1]}, {"a": {"seen": [1], "all": np.zeros(2)}}, {"b": [1]}
    held = record(Position(1, 1, state), callbacks=callbacks).with_run(run)
    before = held.text()
    state["at"].append(2)
    callbacks["a"]["seen"].append(2)
    callbacks["a"]["all"][:] = 1
    run["b"].append(2)
    assert held.text() == before


def test_a_recursive_position_is_an_error():
    state: list[Any] = []
    state.append(state)
    with pytest.raises(CheckpointError, match="nested too deeply"):
        record(Position(1, 1, state))


def test_subclasses_of_dict_are_accepted(tmp_path):
    text = record(Position(1, 1, OrderedDict(b=1, a=2))).text()
    assert Record.read(written(tmp_path, text)).data_state == {"b": 1, "a": 2}
    text = record(callbacks=defaultdict(dict, mine=defaultdict(int, seen=3))).text()
    assert Record.read(written(tmp_path, text)).callbacks == {"mine": {"seen": 3}}


def test_a_metric_that_is_no_number_is_an_error():
    for value in (np.zeros(3), "good", None):
        with pytest.raises(CheckpointError, match="'val/confusion' is .* not a scalar"):
            record(metrics={"val/confusion": value})


INVALID = [
    *("", "nonsense", "[]", "null", '{"format": 4}', "[" * 100_000, '{"format": NaN}', "\xff" * 10),
    *({"step": -1}, {"step": 1.0}, {"step": True}, {"step": "3"}, {"format": True}, {"format": "3"}, {"epoch": None}),
    *({"metrics": {"val/acc": "high"}}, {"metrics": {"val/acc": [1]}}, {"metrics": []}, {"versions": {"jax": 1}}),
    *({"empty": {"a": ["float32", [-1]]}}, {"empty": {"a": "float32"}}, {"callbacks": None}, {"callbacks": []}),
    *({"without": "opt_state"}, {"without": ["params"]}, {"without": [["opt_state"]]}, {"keys": {"rng": 3}}),
    *({"class_path": "os.system"}, {"run": []}),
]


def test_an_invalid_record_is_an_error_with_its_path(tmp_path):
    for content in INVALID:
        with pytest.raises(CheckpointError, match=f"^{tmp_path} is damaged: checkpoint.json: ") as error:
            Record.read(written(tmp_path, content))
        assert len(str(error.value)) < 500


def test_an_unknown_format_is_a_separate_error(tmp_path):
    for number in (0, 1, 2, 3, 10**30):
        with pytest.raises(UnknownFormatError, match=f"format {number},.*format 4"):
            Record.read(written(tmp_path, {"format": number, "shape_of_things": "to come"}))


def test_a_link_or_a_pipe_is_not_read(tmp_path):
    (tmp_path / "real.json").write_text(record().text())
    (tmp_path / RECORD).symlink_to(tmp_path / "real.json")
    with pytest.raises(CheckpointError, match="cannot be opened"):
        Record.read(tmp_path)
    (tmp_path / RECORD).unlink()
    os.mkfifo(tmp_path / RECORD)
    with pytest.raises(CheckpointError, match="not a regular file"):
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
