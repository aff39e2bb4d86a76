import string
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jax_trainer.config import as_data, config_from, dump_config, load_config, redact
from jax_trainer.config.dumping import dump_data
from jax_trainer.config.files import overridden
from jax_trainer.config.problems import Location, Node, Problems
from jax_trainer.config.redaction import is_secret
from jax_trainer.config.settings import AtLeast, Settings
from jax_trainer.config.yaml_text import parse
from tests.config.config_things import (
    Paper,
    Sketch,
    SketchCircleConfig,
    SketchLineConfig,
    SketchPenConfig,
    SketchSquareConfig,
    written,
)
from tests.rows import each

WORDS = """
    1 1.5 1e-3 1E5 .5 1_000 0x10 0o17 007 +1 - -- --- ... ? : ~ null Null true True yes no on off y n .nan .inf -.Inf
    nan inf 12:30 2026-11-15 2026-11-15T10:00:00 = << a: # a#b &a *a !a !!str % @ ` | > { } [ ] , ' " '' "a" \\ \\n
    C:\\new\\table $ $$ ${ $${ ${a ${a} $${a} $$${a} }${ tokens
"""
TRICKY = [
    *WORDS.split(),
    *("", " ", " x", "x ", "a  b", "\n", "\t", "a\nb", "a\n\n b\n", "\r\n", "a: b", "a #b", "- a", "? a", "it's"),
    *("\x00", "\x07", "\x1b[31m", "\x7f", "\x85", "\u2028", "\ufeff", "\u200b", "\xa0", "é", "日本", "🙂"),
    *("x" * 300, f"{'x' * 130} --- y", "word " * 60, f"{'a ' * 70}# not a comment", "password rules", "key: value"),
]

texts = st.one_of(
    st.sampled_from(TRICKY),
    st.text(st.sampled_from(f"{string.printable}${{}}é🙂\u2028\x85\x00"), max_size=40),
    st.text(max_size=20),
).filter(lambda text: redact(text) == text and "<hidden>" not in text)
names = st.text(st.sampled_from(f"{string.ascii_letters}_- 01~#&*!?é:{{"), min_size=1, max_size=12).filter(
    lambda name: name != "class_name" and not is_secret(name)
)
whole = st.integers(-(2**63), 2**63 - 1)
numbers = st.one_of(whole, st.floats(allow_nan=False))
plain = st.one_of(st.none(), st.booleans(), numbers, texts)
anything = st.recursive(
    plain, lambda parts: st.lists(parts, max_size=3) | st.dictionaries(names, parts, max_size=3), max_leaves=8
)
circles = st.builds(SketchCircleConfig, radius=st.floats(1e-300, 1e300), name=texts)
squares = st.builds(SketchSquareConfig, side=st.floats(0, 1e300), name=texts)
shapes = st.one_of(circles, squares, st.builds(SketchLineConfig))
sketches = st.builds(
    Sketch,
    title=texts,
    pages=st.integers(1, 5),
    scale=st.floats(0, 10, exclude_min=True),
    is_draft=st.booleans(),
    line=st.sampled_from(["solid", "dashed", "dotted"]),
    margins=st.tuples(whole, whole),
    tags=st.lists(texts, max_size=3),
    pattern=st.sampled_from(["", "a|b", "[0-9]+", "\\.x$"]),
    limit=st.none() | st.integers(0, 2**63 - 1),
    shape=st.none() | shapes,
    shapes=st.dictionaries(names, shapes, max_size=3),
    grey=st.floats(0, allow_nan=False, allow_infinity=False) | shapes,
    tool=st.builds(SketchPenConfig, width=st.integers(1, 2**63 - 1), share=st.floats(0, 1, exclude_max=True)),
    paper=st.builds(Paper, width=whole, height=whole),
    notes=st.dictionaries(names, texts, max_size=3),
    extra=anything,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sketches)
def test_a_configuration_that_is_written_reads_back_equal(tmp_path: Path, config: Sketch):
    text = dump_config(config)
    again = load_config(written(tmp_path, text), Sketch).value
    assert again == config
    assert dump_config(again) == text


@each("text", TRICKY)
def test_a_text_survives_whatever_it_looks_like(tmp_path: Path, text: str):
    config = Sketch(title=text, tags=[text, text], notes={"a": text}, shape=SketchCircleConfig(name=text), extra=text)
    assert load_config(written(tmp_path, dump_config(config)), Sketch).value == config
    assert parse(dump_data(text), "text", Problems()).data() == text


@settings(deadline=None)
@given(plain)
def test_a_value_that_is_written_is_the_same_as_an_override(value: Any):
    problems = Problems()
    tree = overridden(Node({}, Location("nowhere")), [f"a.b={dump_data(value)}"], problems)
    found = tree.data()["a"]["b"]
    assert not problems
    assert found == value
    assert type(found) is type(value)


@settings(deadline=None)
@given(anything)
def test_plain_data_that_is_written_is_read_again(data: Any):
    assert parse(dump_data(data), "text", Problems()).data() == data


def test_a_section_has_a_line_for_each_key_and_short_lists_stay_on_one():
    text = dump_config(
        Sketch(title="no", shapes={"a": SketchCircleConfig()}, tags=["x", "y"], scale=1e-5, extra={"a": {}})
    )
    assert (
        text
        == """\
title: 'no'
pages: 1
scale: 1.0e-05
is_draft: false
line: solid
margins: [0, 0]
tags: [x, y]
pattern: ""
limit: null
shape: null
shapes:
  a:
    class_name: SketchCircle
    radius: 1.0
    name: ""
grey: 0.5
tool:
  class_name: SketchPen
  width: 1
  share: 0.5
paper:
  width: 210
  height: 297
token: ""
notes: {}
extra:
  a: {}
"""
    )


def test_the_same_value_in_two_places_is_written_twice():
    shared = ["x"]
    text = dump_config(Sketch(tags=shared, extra=[shared, shared]))
    assert "&" not in text and "*" not in text
    assert config_from(parse(text, "text", Problems()).data(), Sketch).extra == [["x"], ["x"]]


def test_a_key_that_no_file_may_have_is_refused_when_it_is_written():
    with pytest.raises(ValueError, match="cannot be written.*'a.b'"):
        dump_config(Sketch(notes={"a.b": "c"}))


def test_a_whole_number_for_a_key_of_floats_is_written_as_it_will_be_read():
    @dataclass
    class Numbers(Settings):
        """Two numbers.

        Args:
            rate: takes floats.
            bounded: takes floats.
            count: takes integers.
            either: takes both.
        """

        rate: float | None = 1
        bounded: Annotated[float, AtLeast(-1)] = -1
        count: int = 2
        either: int | float = 3

    assert dump_config(Numbers()) == "rate: 1.0\nbounded: -1.0\ncount: 2\neither: 3\n"


def test_a_configuration_as_data_has_only_plain_values():
    config = replace(Sketch(), shape=SketchCircleConfig(radius=2.0), margins=(1, 2))
    data = as_data(config)
    assert data["shape"] == {"class_name": "SketchCircle", "radius": 2.0, "name": ""}
    assert data["margins"] == [1, 2]
    assert config_from(data, Sketch) == config
