from pathlib import Path

import pytest

from jax_trainer.config import ConfigError, Location
from jax_trainer.tools.tuning import Choice, Range, read_space
from tests.tools.tuning.tuning_runs import space_file

GOOD = """\
# rates
optimizer.learning_rate.peak_value: {low: 1e-4, high: 1e-1, log: true}
"model.c_hid": {low: 8, high: 64, step: 8}
optimizer.class_name: [AdamW, no, Lion]
model.channels:
  - [8]
  - [16, 32]
optimizer.learning_rate:
- 1e-3
- {class_name: ConstantSchedule, value: 2e-3}
seed: {low: 0, high: 3}
trainer.ema: [null, 0.9]
"""


def test_a_file_has_ranges_and_choices_by_dotted_keys(tmp_path: Path):
    file = space_file(tmp_path, GOOD)
    space = read_space(file)
    assert space.dimensions == (
        Range("optimizer.learning_rate.peak_value", 1e-4, 1e-1, log=True),
        Range("model.c_hid", 8, 64, step=8),
        Choice("optimizer.class_name", ("AdamW", "no", "Lion")),
        Choice("model.channels", ([8], [16, 32])),
        Choice("optimizer.learning_rate", (1e-3, {"class_name": "ConstantSchedule", "value": 2e-3})),
        Range("seed", 0, 3),
        Choice("trainer.ema", (None, 0.9)),
    )
    assert [one.location for one in space.dimensions] == [Location(str(file), line) for line in (2, 3, 4, 5, 8, 11, 12)]


def test_python_data_says_the_same_as_a_file(tmp_path: Path):
    data = {
        "optimizer.learning_rate.peak_value": {"low": 1e-4, "high": 1e-1, "log": True},
        "model.c_hid": {"low": 8, "high": 64, "step": 8},
        "optimizer.class_name": ("AdamW", "no", "Lion"),
    }
    assert read_space(data).dimensions == read_space(space_file(tmp_path, GOOD)).dimensions[:3]


def test_numbers_are_integers_if_low_high_and_step_are():
    space = read_space(
        {
            "integer": {"low": 1, "high": 9, "step": 2},
            "by_step": {"low": 0.1, "high": 0.3, "step": 0.1},
            "by_end": {"low": 0, "high": 1.0},
        }
    )
    assert [one.is_integer for one in space.dimensions if isinstance(one, Range)] == [True, False, False]
    assert [one.extremes for one in space.dimensions] == [(1, 9), (0.1, 0.3), (0.0, 1.0)]
    assert [one.grid for one in space.dimensions] == [(1, 3, 5, 7, 9), (0.1, 0.2, 0.3), None]


BAD = {
    "": "space.yaml:1: expected keys of the experiment, such as `optimizer.learning_rate: {…}`, found nothing.",
    "- a.b": "space.yaml:1: expected keys of the experiment, such as `optimizer.learning_rate: {…}`, found ['a.b'].",
    "a.b: [1": "space.yaml:1: Invalid YAML: while parsing a flow sequence",
    "a.b: 1": "space.yaml:1: a.b: expected a list of values",
    "\nmodel:\n  c_hid: [1, 2]": "space.yaml:2: model: expected a list of values",
    "a.b: {}": "space.yaml:1: a.b: expected a list of values,",
    "a.b: {low: 1, hihg: 2}": [
        "space.yaml:1: a.b.hihg: a range has no key `hihg`. Did you mean `high`?",
        "space.yaml:1: a.b: the key `high` is missing: a range needs `low` and `high`.",
    ],
    "a.b: []": "space.yaml:1: a.b: expected a list of 1 to 200 values, found [].",
    "a.b: [1, 2, 1.0]": "space.yaml:1: a.b: duplicate value 1.0.",
    "a.b: [1, .nan]": "space.yaml:1: a.b: nan cannot be written to YAML.",
    "a.b:\n  low: 2\n  high: 1": "space.yaml:2: a.b.low: `low` must be below `high`, found 2 and 1.",
    "a.b: {low: x, high: true}": [
        "space.yaml:1: a.b.low: expected a number, found 'x'.",
        "space.yaml:1: a.b.high: expected a number, found true.",
    ],
    "a.b: {low: 0, high: .inf}": "space.yaml:1: a.b.high: expected a number, found inf.",
    "a.b: {low: 0, high: 1, log: yes}": "space.yaml:1: a.b.log: expected true or false, found 'yes'.",
    "a.b: {low: 0.0, high: 1, log: true}": "space.yaml:1: a.b.low: with `log: true`, `low` must be above 0, found 0.0.",
    "a.b: {low: 1, high: 4, log: true, step: 1}": "space.yaml:1: a.b.step: `step` and `log: true` exclude each other.",
    "a.b: {low: 1, high: 4, step: -1}": "space.yaml:1: a.b.step: expected a number above 0, found -1.",
    "a.b: {low: 8, high: 30, step: 8}": "space.yaml:1: a.b.high: steps of 8 from 8 do not reach 30. Use 24 or 32.",
    "a.b: {low: 0.1, high: 0.35, step: 0.1}": "space.yaml:1: a.b.high: steps of 0.1 from 0.1 do not reach 0.35.",
    "a.b: [1]\na.b: [2]": "space.yaml:2: a.b: Duplicate key `a.b`; the first is at",
    "a..b: [1]": "space.yaml:1: a..b: expected the dotted path of a key.",
    "a.b: {low: 1, high: 2, low.x: 1}": "space.yaml:1: a.b.low.x: A key must be a name without dots, got 'low.x'.",
    "a.b: !!python/name:os.system x": "space.yaml:1: a.b: Tags (`!`) are not supported",
    "a.b: &x [1]\nc.d: *x": [
        "space.yaml:1: a.b: Anchors (`&`) are not supported.",
        "space.yaml:2: c.d: Aliases (`*`) are not supported.",
    ],
    "dataset.aux.api_key: [hunter2, hunter3]": "space.yaml:1: dataset.aux.api_key: this key names a secret",
}


def test_what_is_wrong_is_reported_with_its_line(tmp_path: Path, subtests):
    for number, text in enumerate(BAD):
        folder = tmp_path / str(number)
        folder.mkdir()
        with subtests.test(text=text):
            expected = BAD[text]
            with pytest.raises(ConfigError) as caught:
                read_space(space_file(folder, text))
            problems = str(caught.value).replace(f"{folder}/", "").splitlines()
            for line in [expected] if isinstance(expected, str) else expected:
                assert any(one.startswith(line) for one in problems), problems
            assert len(problems) == (1 if isinstance(expected, str) else len(expected))
            assert "hunter" not in str(caught.value)


def test_all_problems_are_reported_at_once(tmp_path: Path):
    with pytest.raises(ConfigError) as caught:
        read_space(space_file(tmp_path, "a.b: 1\nc.d: []\ne.f: {low: 1, high: 2}\ng: {low: 2, high: 1}"))
    assert [problem.location.line for problem in caught.value.problems] == [1, 2, 4]


def test_python_data_is_checked_as_a_file_is(subtests):
    for data, text in [
        ({}, "space: expected keys of the experiment"),
        ({"x": {"low": 0}}, "space: x: the key `high` is missing"),
        ({"x": [object()]}, "cannot be written to YAML"),
        ({"x": [{1: 2}, [{2, 3}]]}, "cannot be written to YAML"),
    ]:
        with subtests.test(data=data), pytest.raises(ConfigError, match=text):
            read_space(data)


def test_a_file_that_cannot_be_read_is_reported_by_its_name(tmp_path: Path):
    space_file(tmp_path, GOOD)
    with pytest.raises(ConfigError, match="not found: .*spcae.yaml. Did you mean `space.yaml`?"):
        read_space(tmp_path / "spcae.yaml")
    with pytest.raises(ConfigError, match="Is a directory"):
        read_space(tmp_path)
    (tmp_path / "latin.yaml").write_bytes("a.b: [ä]".encode("latin-1"))
    with pytest.raises(ConfigError, match="This is not UTF-8 text"):
        read_space(tmp_path / "latin.yaml")
    (tmp_path / "large.yaml").write_bytes(b"a.b: [1] # " + b"x" * 100_000)
    with pytest.raises(ConfigError, match="larger than 100,000 bytes"):
        read_space(tmp_path / "large.yaml")
