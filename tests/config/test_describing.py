from dataclasses import MISSING, dataclass, field
from typing import Any

from jax_trainer.config import Key, keys_of, registered_classes
from jax_trainer.config.describing import describe, help_of
from jax_trainer.config.settings import Settings
from jax_trainer.datasets import DatasetConfig
from tests.config.config_things import Paper, Sketch, SketchCircle, SketchShape, SketchSquare
from tests.rows import each


def test_a_class_is_described_with_its_keys():
    described = describe(SketchShape, SketchCircle)
    assert (described.name, described.interface) == ("SketchCircle", "SketchShape")
    assert described.summary == "Draws something round."
    assert described.keys == (
        Key("radius", "a number above 0", 1.0, "from the middle to the line."),
        Key("name", "text", "", "what it is called."),
    )


def test_a_key_that_has_to_be_given_says_so():
    side, name = describe(SketchShape, SketchSquare).keys
    assert (side.is_required, side.default) == (True, MISSING)
    assert not name.is_required


def test_registered_classes_come_by_interface_and_name():
    ours = [(it.interface, it.name) for it in registered_classes() if it.interface in ("SketchShape", "SketchTool")]
    assert ours == [
        ("SketchShape", "SketchCircle"),
        ("SketchShape", "SketchLine"),
        ("SketchShape", "SketchSquare"),
        ("SketchTool", "SketchPen"),
    ]


def test_every_key_has_its_help():
    for config in (Sketch, Paper, DatasetConfig):
        assert [key.name for key in keys_of(config) if not key.help] == []


def test_defaults_are_plain_data_and_follow_from_others():
    defaults = {key.name: key.default for key in keys_of(Sketch)}
    assert defaults["paper"] == {"width": 210, "height": 297}
    assert defaults["tool"] == {"class_name": "SketchPen", "width": 1, "share": 0.5}
    assert defaults["margins"] == [0, 0]
    assert {key.name: key.default for key in keys_of(DatasetConfig)}["global_batch_size"] == 128


@dataclass
class Base(Settings):
    """The first.

    Args:
        one: the first key.
        two, three: two keys
            on two lines

            or three.
        four (int, optional): with a type.
        five:
            on the next line: all of it.

    Further text: not a key.
    """

    one: int
    two: int = 2
    three: list[int] = field(default_factory=lambda: [3])
    four: int = 4
    five: int = 5


@dataclass
class Derived(Base):
    """The second.

    Args:
        one: message anew.
        six: its own.
    """

    six: int = 6


def test_help_is_found_in_the_docstrings_of_a_class_and_its_bases():
    assert help_of(Derived) == {
        "one": "message anew.",
        "two": "two keys on two lines or three.",
        "three": "two keys on two lines or three.",
        "four": "with a type.",
        "five": "on the next line: all of it.",
        "six": "its own.",
    }


def test_other_keys_have_their_defaults_where_one_has_to_be_given():
    assert {key.name: key.default for key in keys_of(Derived)} == {
        "one": MISSING,
        "two": 2,
        "three": [3],
        "four": 4,
        "five": 5,
        "six": 6,
    }


def test_a_class_whose_defaults_do_not_go_together_is_described_all_the_same():
    @dataclass
    class Hopeless(Settings):
        """It cannot be made without keys."""

        size: int = 1

        def __post_init__(self) -> None:
            raise KeyError("size")

    (key,) = keys_of(Hopeless)
    assert (key.default, key.help) == (1, "")


@each("text", [None, "", "Args:", "Args:\n", "Args:\n    nothing here", "Args: one\n    two: three"])
def test_a_docstring_without_keys_helps_with_none(text: str | None):
    assert help_of(type("Silent", (), {"__doc__": text})) == {}


@dataclass
class OddDefaults(Settings):
    kind: Any = float
    act: Any = field(default_factory=lambda: [len, 1])


def test_a_default_that_no_file_can_hold_is_shown_by_its_name():
    assert [key.default for key in keys_of(OddDefaults)] == ["float", ["len", 1]]
