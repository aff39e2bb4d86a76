import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from compoconf import RegistrableConfigInterface, register, register_interface

from jax_trainer.config import ConfigError, as_data, config_from
from jax_trainer.config.settings import AtLeast, Settings
from tests.config.config_things import (
    Paper,
    Sketch,
    SketchCircleConfig,
    SketchLineConfig,
    SketchPenConfig,
    SketchSquareConfig,
    complaint,
    complaints,
    sketch,
)
from tests.rows import each


def test_values_get_the_types_of_their_annotations(tmp_path: Path):
    text = """
    title: words
    pages: 2
    scale: 3
    is_draft: false
    line: dotted
    margins: [1, 2]
    tags: [a, b]
    limit: null
    paper: {height: 5}
    grey: 0
    notes: {a: b}
    extra: {any: [1, 2.5, null, {thing: true}]}
    """
    made = sketch(tmp_path, text)
    expected = Sketch(
        title="words",
        pages=2,
        scale=3.0,
        line="dotted",
        margins=(1, 2),
        tags=["a", "b"],
        paper=Paper(height=5),
        grey=0.0,
        notes={"a": "b"},
        extra={"any": [1, 2.5, None, {"thing": True}]},
    )
    assert made == expected
    assert isinstance(made.margins, tuple)
    assert isinstance(made.scale, float)
    assert isinstance(made.grey, float)


WHOLE = "expected an integer of at least 1, found"


@each(
    "line, message",
    [
        ("pages: 1.5", f"pages: {WHOLE} 1.5."),
        ("pages: 1.0", f"pages: {WHOLE} 1.0."),
        ("pages: true", f"pages: {WHOLE} true."),
        ("pages: '1'", f"pages: {WHOLE} '1'."),
        ("pages:", f"pages: {WHOLE} null."),
        ("pages: 0", f"pages: {WHOLE} 0."),
        ("pages: -3", f"pages: {WHOLE} -3."),
        ("pages: {a: 1}", f"pages: {WHOLE} {{'a': 1}}."),
        ("pages: [1]", f"pages: {WHOLE} [1]."),
        ("scale: .nan", "scale: expected a number above 0 and of at most 10, found nan."),
        ("scale: .inf", "scale: expected a number above 0 and of at most 10, found inf."),
        ("scale: 0", "scale: expected a number above 0 and of at most 10, found 0."),
        ("scale: 11", "scale: expected a number above 0 and of at most 10, found 11."),
        ("scale: 1e400", "scale: expected a number above 0 and of at most 10, found inf."),
        ("scale: 1,5", "scale: expected a number above 0 and of at most 10, found '1,5'."),
        ("scale: false", "scale: expected a number above 0 and of at most 10, found false."),
        ("grey: .nan", "grey: expected a number of at least 0 or a section with a `class_name` of SketchCircle, "),
        ("is_draft: yes", "is_draft: expected true or false, found 'yes'."),
        ("is_draft: 1", "is_draft: expected true or false, found 1."),
        ("title: 5", "title: expected text, found 5."),
        ("title: [a]", "title: expected text, found ['a']."),
        ("line: dahsed", "line: expected one of solid, dashed, dotted, found 'dahsed'. Did you mean `dashed`?"),
        ("line: 5", "line: expected one of solid, dashed, dotted, found 5."),
        ("margins: [1]", "margins: expected a list of 2: an integer, an integer, found a list of 1."),
        ("margins: 5", "margins: expected a list of 2: an integer, an integer, found 5."),
        ("margins: [1, 2.5]", "margins.1: expected an integer, found 2.5."),
        ("tags: a", "tags: expected a list, each text, found 'a'."),
        ("tags: [a, 5]", "tags.1: expected text, found 5."),
        ("pattern: '['", "pattern: expected text that is a regular expression, found '['."),
        ("limit: -1", "limit: expected an integer of at least 0 or null, found -1."),
        ("notes: [a]", "notes: expected a section whose values are each text, found ['a']."),
        ("notes: {a: 5}", "notes.a: expected text, found 5."),
        ("paper: 5", "paper: expected a section of Paper, found 5."),
        ("paper:", "paper: expected a section of Paper, found null."),
        ("paper: {widht: 5}", "paper.widht: Paper has no key `widht`. Did you mean `width`?"),
        ("paper: {depth: 5}", "paper.depth: Paper has no key `depth`. Its keys: height, width"),
        (
            "paper: {class_name: Papier}",
            "paper.class_name: expected one of Paper, found 'Papier'. Did you mean `Paper`?",
        ),
        ("tittle: x", "tittle: Sketch has no key `tittle`. Did you mean `title`?"),
        ("Title: x", "Title: Sketch has no key `Title`. Did you mean `title`?"),
        ("isdraft: true", "isdraft: Sketch has no key `isdraft`. Did you mean `is_draft`?"),
        ("class_name: os.system", "class_name: expected one of Sketch, found 'os.system'."),
        ("tool:", "tool: expected a section with a `class_name` of SketchPen, found null."),
        ("shape: 5", "SketchCircle, SketchLine, SketchSquare or null, found 5."),
        (
            "shape: {class_name: SketchSquare}",
            "shape.side: the key `side` is missing: expected a number of at least 0.",
        ),
        ("shape: {class_name: SketchCirle}", "found 'SketchCirle'. Did you mean `SketchCircle`?"),
        ("shape: {class_name: SketchPen}", "found 'SketchPen'."),
        (
            "shape: {class_name: own.SketchLine}",
            "found 'own.SketchLine'.",
        ),
        ("shape: {class_name: null}", "expected one of SketchCircle, SketchLine, SketchSquare, found null."),
        ("is_draft: true\npages: 9", "pages: a draft has at most 5 pages, got 9."),
    ],
)
def test_a_value_that_does_not_fit_is_an_error_with_place_key_expectation_and_finding(
    tmp_path: Path, line: str, message: str
):
    problem = complaint(tmp_path, f"# a comment\nextra: 1\n{line}\n")
    number = 3 + line.count("\n")
    assert problem.startswith(f"sketch.yaml:{number}: ")
    assert message in problem


def test_all_problems_come_at_once_in_the_order_of_their_places(tmp_path: Path):
    text = (
        "pages: 1.5\nscal: 2\npaper:\n  width: x\n  hight: 3\nshapes:\n  a: {class_name: Nothing}\n  b: {radius: -1}\n"
    )
    found = [
        (str(problem.location).rpartition("/")[2], problem.key) for problem in complaints(tmp_path, text, "lien=1")
    ]
    assert found == [
        ("sketch.yaml:1", "pages"),
        ("sketch.yaml:2", "scal"),
        ("sketch.yaml:4", "paper.width"),
        ("sketch.yaml:5", "paper.hight"),
        ("sketch.yaml:7", "shapes.a.class_name"),
        ("sketch.yaml:8", "shapes.b.radius"),
        ("command line", "lien"),
    ]


@each(
    "section, made",
    [
        ("{class_name: SketchCircle}", SketchCircleConfig()),
        ("{class_name: SketchCircle, radius: 2}", SketchCircleConfig(radius=2.0)),
        ("{radius: 2}", SketchCircleConfig(radius=2.0)),
        ("{side: 2}", SketchSquareConfig(side=2.0)),
        ("{side: 2, name: x}", SketchSquareConfig(side=2.0, name="x")),
    ],
)
def test_a_class_is_found_by_its_name_or_where_only_one_has_the_keys(tmp_path: Path, section: str, made: Any):
    assert sketch(tmp_path, f"shape: {section}\n").shape == made


def test_one_class_alone_needs_no_name(tmp_path: Path):
    assert sketch(tmp_path, "tool: {}\n").tool == SketchPenConfig()


@each(
    "section, message",
    [
        ("{}", "several classes have these keys: SketchCircle, SketchLine."),
        ("{radius: 1, side: 1}", "no class has exactly these keys. Classes: SketchCircle, SketchLine, SketchSquare."),
    ],
)
def test_a_class_is_not_guessed(tmp_path: Path, section: str, message: str):
    problem = complaint(tmp_path, f"shape: {section}\n")
    assert problem == f"sketch.yaml:1: shape.class_name: the key `class_name` is missing, and {message}"


@each("key", ["_target_", "class_path", "classname"])
def test_another_key_for_the_class_is_answered_with_ours(tmp_path: Path, key: str):
    problem = complaint(tmp_path, f"shape: {{{key}: SketchCircle, radius: 1}}\n")
    assert f"`class_name` instead of `{key}`" in problem


def test_in_a_dict_of_parts_the_key_may_be_the_class_and_nothing_means_defaults(tmp_path: Path):
    text = """
    shapes:
      SketchCircle:
      SketchSquare: {side: 3}
      mine: {class_name: SketchCircle, radius: 2}
      SketchLine: {class_name: SketchCircle}
    """
    assert sketch(tmp_path, text).shapes == {
        "SketchCircle": SketchCircleConfig(),
        "SketchSquare": SketchSquareConfig(side=3.0),
        "mine": SketchCircleConfig(radius=2.0),
        "SketchLine": SketchCircleConfig(),
    }


def test_a_key_that_is_nearly_a_class_is_answered_with_it(tmp_path: Path):
    assert complaint(tmp_path, "shapes: {SketchCirkle: }\n").endswith("Did you mean `SketchCircle`?")


@each("name", ["[SketchCircle]", "{a: b}", "5", "true", "''", "SketchCircleConfig"])
def test_only_the_name_of_a_class_of_the_interface_is_a_class(tmp_path: Path, name: str):
    problem = complaint(tmp_path, f"shape:\n  class_name: {name}\n")
    assert problem.startswith("sketch.yaml:2: shape.class_name: ") and "SketchCircle, SketchLine" in problem


@register_interface
class SketchFrame(RegistrableConfigInterface):
    """What is around a sketch."""


@register_interface
class SketchGlass(RegistrableConfigInterface):
    """What is in front of it."""


@dataclass
class FrameConfig(Settings):
    """Wood.

    Args:
        wood: of which tree.
    """

    wood: str = "oak"


@dataclass
class GlassConfig(Settings):
    """Glass.

    Args:
        thickness: in millimetres.
    """

    thickness: int = 2


register(type("SketchCover", (SketchFrame,), {"config_class": FrameConfig}))
register(type("SketchCover", (SketchGlass,), {"config_class": GlassConfig}))


@dataclass
class Cover(Settings):
    """Two interfaces at one key, and names of the user's own.

    Args:
        cover: wood or glass.
        sizes: by name.
        numbers: of anything.
        pair: a number and a word.
        count: of at least one, if any.
    """

    cover: SketchFrame.cfgtype | SketchGlass.cfgtype | None = None
    sizes: dict[Literal["small", "large"], int] = field(default_factory=dict)
    numbers: list = field(default_factory=list)
    pair: tuple = ()
    count: Annotated[int | None, AtLeast(1)] = None


def test_of_two_classes_with_one_name_the_one_with_the_keys_is_meant():
    assert config_from({"cover": {"class_name": "SketchCover", "wood": "ash"}}, Cover).cover == FrameConfig("ash")
    assert config_from({"cover": {"class_name": "SketchCover", "thickness": 1}}, Cover).cover == GlassConfig(1)
    with pytest.raises(ConfigError, match="test_checking.FrameConfig, "):
        config_from({"cover": {"class_name": "SketchCover"}}, Cover)


def test_the_keys_of_a_dict_may_have_a_type():
    assert config_from({"sizes": {"small": 1}}, Cover).sizes == {"small": 1}
    with pytest.raises(ConfigError, match="sizes.lagre: .*small, large.*`large`"):
        config_from({"sizes": {"lagre": 1}}, Cover)


@dataclass
class ByEpoch(Settings):
    sizes: int | dict[Annotated[int, AtLeast(0)], int] = 1


def test_numbers_as_keys_of_a_file_are_numbers_and_can_be_stored():
    made = config_from({"sizes": {"0": 64, "5": 128}}, ByEpoch)
    assert made.sizes == {0: 64, 5: 128}
    assert config_from(as_data(made), ByEpoch) == made
    with pytest.raises(ConfigError, match=r"sizes.first: expected a key that is an integer of at least 0"):
        config_from({"sizes": {"first": 64}}, ByEpoch)


def test_lists_of_anything_hold_anything():
    made = config_from({"numbers": [1, "a", None], "pair": [1, "b"]}, Cover)
    assert (made.numbers, made.pair) == ([1, "a", None], (1, "b"))


@each("count, fits", [(None, True), (1, True), (0, False), (1.0, False)])
def test_a_bound_on_a_union_is_about_its_numbers(count: Any, fits: bool):
    if fits:
        assert config_from({"count": count}, Cover).count == count
    else:
        with pytest.raises(ConfigError, match="count: .* 1 or null, found"):
            config_from({"count": count}, Cover)


@dataclass
class Foreign:
    """A dataclass of somebody else's, with checks of its own."""

    size: int = 1
    kind: str = "a"

    def __post_init__(self) -> None:
        if self.size in (13, 14):
            raise AssertionError("13 is unlucky") if self.size == 13 else AssertionError
        if self.kind == "b":
            raise ValueError("b is taken")


@each(
    "data, message",
    [
        ({"size": 13}, "configuration: Foreign rejects these values: 13 is unlucky"),
        ({"size": 14}, r"configuration: Foreign rejects these values: AssertionError\(\)"),
        ({"kind": "b"}, "configuration: Foreign rejects these values: b is taken"),
        ({"size": "x"}, "configuration: size: expected an integer, found 'x'"),
    ],
)
def test_any_dataclass_is_checked_and_its_own_checks_are_reported(data: Any, message: str):
    assert config_from({"size": 2}, Foreign) == Foreign(2)
    with pytest.raises(ConfigError, match=message):
        config_from(data, Foreign)


def test_a_line_config_without_keys_says_so(tmp_path: Path):
    assert sketch(tmp_path, "shape: {class_name: SketchLine}\n").shape == SketchLineConfig()
    assert complaint(tmp_path, "shape: {class_name: SketchLine, length: 3}\n").endswith("Its keys: none.")


@register_interface
class SketchAnimal(RegistrableConfigInterface):
    """Something that runs out of the picture."""

    def __init__(self, config: Any) -> None:
        self.config = config


@dataclass
class SketchDogConfig(Settings):
    legs: int = 4


@register
class SketchDog(SketchAnimal):
    config: SketchDogConfig


@register
class SketchPuppy(SketchDog):  # with the configuration of its parent, whose name compoconf gives to the latest class
    pass


@dataclass
class Kennel(Settings):
    first: SketchAnimal.cfgtype
    second: SketchAnimal.cfgtype


def test_classes_that_share_a_configuration_can_all_be_named():
    data = {"first": {"class_name": "SketchDog", "legs": 3}, "second": {"class_name": "SketchPuppy"}}
    kennel = config_from(data, Kennel)
    assert type(kennel.first.instantiate(SketchAnimal)) is SketchDog
    assert type(kennel.second.instantiate(SketchAnimal)) is SketchPuppy
    assert as_data(kennel)["first"] == {"class_name": "SketchDog", "legs": 3}


def test_an_invalid_default_is_found_when_a_file_leaves_it():
    @dataclass
    class Wrong(Settings):
        size: Annotated[int, AtLeast(1)] = 0

    with pytest.raises(ConfigError, match="size.*at least 1.*0"):
        config_from({}, Wrong)
    assert config_from({"size": 1}, Wrong).size == 1


class NotEmpty:
    """A bound of a whole list or section."""

    description = "that is not empty"

    def allows(self, value: Any) -> bool:
        return len(value) > 0


@dataclass
class Filled(Settings):
    sizes: Annotated[list[int], NotEmpty()] | None = None
    names: Annotated[dict[str, int], NotEmpty()] | None = None


@each("key", ["sizes", "names"])
def test_a_bound_may_be_about_a_whole_list_or_section(key: str):
    good, empty = {"sizes": ([1], []), "names": ({"a": 1}, {})}[key]
    assert getattr(config_from({key: good}, Filled), key) == good
    with pytest.raises(ConfigError, match=f"{key}: expected .*not empty.*, found {re.escape(str(empty))}"):
        config_from({key: empty}, Filled)
