import math
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_trainer.config.problems import ConfigError, Location, Node, Problems
from jax_trainer.config.yaml_text import MAX_DEPTH, MAX_VALUES, parse, scalar_of
from tests.config.config_things import complaint, complaints, sketch
from tests.rows import each


def data_of(text: str) -> Any:
    problems = Problems()
    node = parse(text, "text", problems)
    assert not problems
    return node.data()


@each(
    "word, value",
    [
        ("1e-3", 0.001),
        ("1E5", 100000.0),
        ("-2.5e+3", -2500.0),
        (".5", 0.5),
        ("1.", 1.0),
        ("+3", 3),
        ("007", 7),
        ("1_000", 1000),
        ("0x1F", 31),
        ("0o17", 15),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("", None),
        ("-.inf", -math.inf),
        ("1e400", math.inf),
    ],
)
def test_an_unquoted_word_has_the_type_that_it_looks_like(word: str, value: Any):
    assert scalar_of(word) == value
    assert type(scalar_of(word)) is type(value)


def test_nan_is_a_number():
    assert isinstance(number := scalar_of(".nan"), float) and math.isnan(number)


@each(
    "word",
    [
        "no",
        "yes",
        "on",
        "off",
        "y",
        "1.2.3",
        "12:30",
        "2026-11-15",
        "1__0",
        "_1",
        "0x",
        "-0x1",
        "1e",
        "e3",
        "nan",
        "inf",
    ],
)
def test_other_words_are_text(word: str):
    assert data_of(f"a: {word}") == {"a": word}


@each("word", ["1", "true", "null", "", "1e-3", "~"])
@each("quote", ["'", '"'])
def test_a_quoted_word_is_text(word: str, quote: str):
    assert data_of(f"a: {quote}{word}{quote}") == {"a": word}


def test_a_number_with_too_many_digits_is_text():
    assert data_of(f"a: {'9' * 200}") == {"a": "9" * 200}


def test_sections_lists_and_long_texts_are_read():
    text = "a:\n  - 1\n  - {b: [x, y]}\nc: |\n  one\n  two\n'd e': >\n  one\n  two\n"
    assert data_of(text) == {"a": [1, {"b": ["x", "y"]}], "c": "one\ntwo\n", "d e": "one two\n"}


def test_a_value_remembers_the_line_of_its_key_and_an_item_its_own():
    tree = parse("a:\n  b:\n\n    1\n  c:\n    - 1\n    - 2\n", "f.yaml", Problems())
    lines = {path: tree.location_of(path) for path in ("a", "a.b", "a.c", "a.c.1", "a.c.7", "a.z.b")}
    assert lines == {
        "a": Location("f.yaml", 1),
        "a.b": Location("f.yaml", 2),
        "a.c": Location("f.yaml", 5),
        "a.c.1": Location("f.yaml", 7),
        "a.c.7": Location("f.yaml", 5),
        "a.z.b": Location("f.yaml", 1),
    }


def test_a_key_that_stands_twice_is_an_error_with_both_lines(tmp_path: Path):
    message = complaint(tmp_path, "pages: 1\ntitle: x\npages: 2\n")
    assert message.startswith("sketch.yaml:3: pages: ") and "sketch.yaml:1" in message


def test_a_key_that_stands_twice_further_down_is_found_by_its_path(tmp_path: Path):
    message = complaint(tmp_path, "extra:\n  - {}\n  - a: 1\n    a: 1\n")
    assert message.startswith("sketch.yaml:4: extra.1.a: Duplicate key `a`")


@each(
    "text, message",
    [
        ("extra: !!python/object/apply:os.system [echo]\n", "sketch.yaml:1: extra: Tags"),
        ("extra: !!python/name:os.system\n", "sketch.yaml:1: extra: Tags"),
        ("title: x\nextra: !!str 5\n", "sketch.yaml:2: extra: Tags"),
        ("extra: ! 5\n", "sketch.yaml:1: extra: Tags"),
        ("extra: !<tag:yaml.org,2002:python/module:os> {}\n", "sketch.yaml:1: extra: Tags"),
        ("!!python/name:os.system title: 5\n", "sketch.yaml:1: Tags"),
        ("extra: &anchor 5\n", "sketch.yaml:1: extra: Anchors"),
        ("extra: *anchor\n", "sketch.yaml:1: extra: Aliases"),
        ("*anchor : 5\n", "sketch.yaml:1: Aliases"),
        ("paper:\n  <<: {width: 1}\n", "sketch.yaml:2: paper.<<: Merge keys"),
        ("paper.width: 5\n", "sketch.yaml:1: paper.width: A key must be a name without dots, got 'paper.width'"),
        ("'': 5\n", "sketch.yaml:1: A key must be a name"),
        ("a=b: 5\n", "sketch.yaml:1: a=b: A key must be a name"),
        (f"{'k' * 201}: 5\n", f"sketch.yaml:1: {'k' * 200}: A key may have at most 200 characters."),
        ("title: a\n---\ntitle: b\n", "sketch.yaml:2: A second document starts here"),
        ("? [a, b]\n: 5\n", "sketch.yaml:1: A key must be a string"),
        ("? {a: b}\n: 5\n", "sketch.yaml:1: A key must be a string"),
    ],
)
def test_tags_anchors_and_other_than_plain_data_are_refused_at_their_line(tmp_path: Path, text: str, message: str):
    assert complaint(tmp_path, text).startswith(message)


def test_everything_that_is_not_plain_data_is_found_at_once_with_what_else_is_wrong(tmp_path: Path):
    text = "title: !!str x\ntags: &a [x]\nnotes: *a\npages: 0\npages: 1\n"
    assert [(problem.location.line, problem.key) for problem in complaints(tmp_path, text)] == [
        (1, "title"),
        (2, "tags"),
        (3, "notes"),
        (4, "pages"),
        (5, "pages"),
    ]


@each("text", ["%YAML 1.2\n---\ntitle: x\n", "---\ntitle: x\n...\n", "\ufefftitle: x\n", "title: x"])
def test_one_document_may_be_marked_as_such(tmp_path: Path, text: str):
    assert sketch(tmp_path, text).title == "x"


@each(
    "text, message",
    [
        ("title: x\n\tpages: 2\n", "sketch.yaml:2: YAML does not allow tabs"),
        ("paper:\n\twidth: 2\n", "sketch.yaml:2: YAML does not allow tabs"),
        ("title: [1, 2\npages: 3\n", "sketch.yaml:2: Invalid YAML: while parsing a flow sequence"),
        ("# a\ttab\ntitle: 'x\n", "sketch.yaml:3: Invalid YAML: while scanning a quoted scalar"),
        ("title: x: y\n", "sketch.yaml:1: Invalid YAML: mapping values are not allowed here"),
        ("title: @x\n", "sketch.yaml:1: Invalid YAML: while scanning for the next token found character '@'"),
        ("title: !a!b x\n", "sketch.yaml:1: Quote a string that starts with `!`."),
        (
            "title: x\npages: \x01\n",
            "sketch.yaml:2: Invalid YAML: write the character 0x1 as an escape",
        ),
        ("title: x\npages: \x00\n", "sketch.yaml:2: Invalid YAML: write the character 0x0"),
        ('pages: 1\ntitle: "\\UFFFFFFFF"\n', "sketch.yaml:2: Invalid YAML: the number of an escape or of the version"),
        (f"%YAML 1.{'1' * 5000}\n---\ntitle: x\n", "sketch.yaml:1: Invalid YAML: the number of an escape"),
        ('pages: 1\ntitle: "\\uD800"\n', "sketch.yaml:2: title: This string contains an unpaired surrogate escape."),
        ('"\\uD800": 1\n', "sketch.yaml:1: This string contains an unpaired surrogate escape."),
    ],
)
def test_invalid_yaml_is_reported_with_its_line_and_cause(tmp_path: Path, text: str, message: str):
    assert complaint(tmp_path, text).startswith(message)


@each("start, end", [("[", "]"), ("{a: ", "}"), ("- ", "")])
def test_depth_has_a_bound_that_is_far_away(start: str, end: str):
    assert data_of(start * MAX_DEPTH + end * MAX_DEPTH)
    with pytest.raises(ConfigError, match=f"nested more than {MAX_DEPTH} deep"):
        data_of(start * (MAX_DEPTH + 1) + end * (MAX_DEPTH + 1))


def test_the_number_of_values_has_a_bound():
    assert len(data_of(f"[{'1,' * (MAX_VALUES - 1)}]")) == MAX_VALUES - 1
    with pytest.raises(ConfigError, match="5,000 values"):
        data_of(f"[{'1,' * MAX_VALUES}]")


@settings(max_examples=200, deadline=1000)
@given(st.text(alphabet=st.sampled_from("ab1 :-[]{}&*!?#|>'\"%@`\n\t,.$~<=\\\x00é"), max_size=40))
def test_any_text_is_read_or_refused(text: str):
    with suppress(ConfigError):
        assert isinstance(parse(text, "text", Problems()), Node)


@given(st.text(max_size=30))
def test_any_word_has_a_meaning(word: str):
    assert scalar_of(word) is None or isinstance(scalar_of(word), bool | int | float | str)
