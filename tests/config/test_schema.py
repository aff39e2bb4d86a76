import json
from dataclasses import dataclass
from typing import Annotated, Any

import pytest
from compoconf import RegistrableConfigInterface, register_interface
from jsonschema import Draft202012Validator

from jax_trainer.config import ConfigError, as_data, config_from, json_schema
from jax_trainer.config.describing import _SchemaWriter
from jax_trainer.config.settings import AtLeast, Settings
from tests.config.config_things import Paper, Sketch, SketchCircleConfig, SketchSquareConfig
from tests.rows import each

SCHEMA = json_schema(Sketch)
VALIDATOR = Draft202012Validator(SCHEMA)

GOOD: list[dict[str, Any]] = [
    {},
    as_data(Sketch()),
    as_data(Sketch(shape=SketchCircleConfig(), shapes={"a": SketchSquareConfig(side=1.0)}, grey=SketchCircleConfig())),
    {"title": "x", "pages": 3, "scale": 0.5, "is_draft": True, "line": "dashed", "margins": [1, 2], "tags": ["a"]},
    {"limit": None, "notes": {"a": "b"}, "extra": {"anything": [1, None]}},
    {"shapes": {"SketchCircle": None, "SketchSquare": {"side": 3}}},
    {"pages": "${limit}", "limit": 3, "scale": "${pages}"},
]
BAD: list[dict[str, Any]] = [
    {"tittle": "x"},
    {"title": 5},
    {"pages": 0},
    {"pages": 1.5},
    {"pages": True},
    {"pages": "3"},
    {"pages": None},
    {"scale": 0},
    {"scale": 11},
    {"is_draft": "yes"},
    {"line": "wavy"},
    {"margins": [1]},
    {"margins": [1, 2, 3]},
    {"margins": [1, "x"]},
    {"tags": "a"},
    {"limit": -1},
    {"shape": {"class_name": "SketchPen"}},
    {"shape": {"class_name": "SketchCircle", "side": 1}},
    {"shape": {"class_name": "SketchSquare"}},
    {"shape": 5},
    {"tool": {"share": 1}},
    {"tool": None},
    {"paper": {"depth": 1}},
    {"notes": {"a": None}},
    {"class_name": 5},
]


def test_the_schema_is_a_schema_and_json():
    Draft202012Validator.check_schema(SCHEMA)
    assert json.loads(json.dumps(SCHEMA, allow_nan=False)) == SCHEMA


@each("data", GOOD)
def test_the_schema_accepts_what_is_read(data: dict[str, Any]):
    assert config_from(data, Sketch)
    assert not list(VALIDATOR.iter_errors(data))


@each("data", BAD)
def test_the_schema_refuses_what_is_refused(data: dict[str, Any]):
    with pytest.raises(ConfigError):
        config_from(data, Sketch)
    assert not VALIDATOR.is_valid(data)


def test_keys_have_their_help_and_default():
    pages = SCHEMA["properties"]["pages"]
    assert (pages["description"], pages["default"]) == ("how many there are.", 1)
    assert SCHEMA["$defs"]["SketchCircleConfig"]["properties"]["class_name"] == {"enum": ["SketchCircle"]}


def test_a_required_key_may_stand_in_an_included_file():
    validator = Draft202012Validator(json_schema(SketchSquareConfig))
    assert validator.is_valid({"side": 1})
    assert validator.is_valid({"include": "base.yaml"})
    assert validator.is_valid({"include": ["base.yaml"], "name": "x"})
    assert not validator.is_valid({"name": "x"})
    assert not validator.is_valid({"include": 5})


def twin() -> type:
    return dataclass(
        type("Paper", (Settings,), {"__annotations__": {"folds": int}, "folds": 0, "__module__": __name__})
    )


@dataclass
class Tree(Settings):
    """A tree.

    Args:
        left: another one.
        size: of at least one, if any.
    """

    left: "Tree | None" = None
    size: Annotated[int | None, AtLeast(1)] = None


def test_a_class_may_contain_itself():
    validator = Draft202012Validator(json_schema(Tree))
    assert validator.is_valid({"left": {"left": {"size": 2}}})
    assert validator.is_valid({"left": {"left": {"size": None}}})
    assert not validator.is_valid({"left": {"left": {"size": 0}}})


def test_two_classes_of_one_name_are_kept_apart():
    other = twin()
    writer = _SchemaWriter()
    writer.schema(Paper | other)
    assert set(writer.definitions) == {"Paper", "Paper1"}
    assert set(writer.definitions["Paper1"]["properties"]) == {"folds"}


@register_interface
class SketchNobody(RegistrableConfigInterface):
    """Nothing implements it."""


def test_an_interface_without_classes_allows_nothing():
    schema = _SchemaWriter().schema(SketchNobody.cfgtype | int)
    Draft202012Validator.check_schema(schema)
    assert Draft202012Validator(schema).is_valid(1) and not Draft202012Validator(schema).is_valid({})
