import random
import time
from pathlib import Path
from typing import Any

import pytest

from jax_trainer.config import ConfigError, Loaded, Location, config_from, dump_config, load_config
from jax_trainer.config.settings import SettingsError
from jax_trainer.datasets import DatasetConfig
from tests.config.config_things import Paper, Sketch, SketchCircleConfig, SketchSquareConfig, written
from tests.rows import each

GOOD = """\
title: "A sketch"   # with a comment
pages: 3
scale: 1e-1
margins: [1, 2]
tags:
  - first
  - 'second one'
shape:
  class_name: SketchCircle
  radius: ${scale}
shapes:
  SketchCircle:
  SketchSquare: {side: 2, name: "s${pages}"}
paper: {width: 10, height: 20}
notes: {a: b, c: "d\\te"}
extra: |
  some text
  on lines
"""


def test_a_file_becomes_a_configuration_that_knows_its_places(tmp_path: Path):
    file = written(tmp_path, GOOD)
    loaded = load_config(file, Sketch, ["paper.width=11"])
    assert isinstance(loaded, Loaded)
    assert loaded.value == Sketch(
        title="A sketch",
        pages=3,
        scale=0.1,
        margins=(1, 2),
        tags=["first", "second one"],
        shape=SketchCircleConfig(radius=0.1),
        shapes={"SketchCircle": SketchCircleConfig(), "SketchSquare": SketchSquareConfig(side=2.0, name="s3")},
        paper=Paper(11, 20),
        notes={"a": "b", "c": "d\te"},
        extra="some text\non lines\n",
    )
    assert loaded.tree.location_of("shape.radius") == Location(str(file), 10)
    assert loaded.tree.location_of("paper.width") == Location("command line")


def test_python_data_is_checked_like_a_file():
    data = {"pages": 2, "margins": (1, 2), "shape": {"class_name": "SketchSquare", "side": 1}, "limit": "${pages}"}
    made = config_from(data, Sketch, ["title=x"])
    assert made == Sketch(title="x", pages=2, margins=(1, 2), shape=SketchSquareConfig(side=1.0), limit=2)
    with pytest.raises(ConfigError) as caught:
        config_from({"page": 2, "scale": "x"}, Sketch, ["limit=true"])
    assert [problem.key for problem in caught.value.problems] == ["limit", "page", "scale"]


@each(
    "data, message",
    [
        ([1, 2], r"configuration: expected a section of Sketch, found \[1, 2\]"),
        ({"notes": {"a.b": "c"}}, "configuration: notes: A key must be a name without dots, got 'a.b'"),
        ({"include": "x.yaml"}, "configuration: include: Sketch has no key `include`"),
        ({"extra": object}, None),
        ({"title": object()}, "configuration: title: expected text, found <object object"),
    ],
)
def test_python_data_that_no_file_could_hold_is_refused(data: Any, message: str | None):
    if message is None:
        assert config_from(data, Sketch).extra is object
    else:
        with pytest.raises(ConfigError, match=message):
            config_from(data, Sketch)


def test_python_data_of_any_depth_is_answered():
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(ConfigError, match="nested more than 40 deep"):
        config_from({"extra": endless}, Sketch)


def test_an_error_after_loading_has_the_file_and_line(tmp_path: Path):
    file = written(tmp_path, GOOD)
    loaded = load_config(file, Sketch, ["paper.width=11"])
    found = [
        ("shape.radius", "too wide."),
        ("paper.width", "too narrow."),
        ("paper.colour", "missing."),
        ("", "all bad."),
    ]
    error = loaded.error(SettingsError(found))
    assert str(error).replace(str(file), "sketch.yaml").splitlines() == [
        "sketch.yaml:1: all bad.",
        "sketch.yaml:10: shape.radius: too wide.",
        "sketch.yaml:14: paper.colour: missing.",
        "command line: paper.width: too narrow.",
    ]


def test_keys_that_follow_from_others_stay_out_of_what_is_stored(tmp_path: Path):
    config = config_from({"global_batch_size": 64, "data_dir": "x"}, DatasetConfig)
    assert config.local_batch_size == 64
    again = load_config(written(tmp_path, dump_config(config)), DatasetConfig).value
    assert again == config
    assert again.explicit == {"global_batch_size"}


def test_a_damaged_file_is_read_or_refused_and_never_anything_else(tmp_path: Path):
    chance = random.Random(0)
    pieces = [
        b"\x00",
        b"\xff",
        b"\t",
        b"${",
        b"}",
        b"&a ",
        b"*a",
        b"!!x ",
        b": ",
        b"- ",
        b"[",
        b"{",
        b"'",
        b'"',
        b"\n",
        b"%",
    ]
    outcomes = {"read": 0, "refused": 0}
    slowest = 0.0
    for _ in range(400):
        data = bytearray(GOOD.encode())
        for _ in range(chance.randint(1, 6)):
            at = chance.randrange(len(data))
            piece = chance.choice(
                [*pieces, bytes([chance.randrange(256)]), bytes(data[at : at + chance.randint(1, 60)])]
            )
            data[at : at + chance.choice([0, 1, len(piece), 40])] = piece * chance.choice([1, 1, 1, 30])
        file = written(tmp_path, bytes(data))
        began = time.process_time()
        try:
            load_config(file, Sketch)
            outcomes["read"] += 1
        except ConfigError as error:
            outcomes["refused"] += bool(error.problems)
        slowest = max(slowest, time.process_time() - began)
    assert sum(outcomes.values()) == 400 and min(outcomes.values()) > 10
    assert slowest < 1
