import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Optional, Union

import pytest
from compoconf import RegistrableConfigInterface, register, register_interface

from jax_trainer.config.settings import (
    Above,
    AtLeast,
    AtMost,
    Below,
    IsRegex,
    Problem,
    Settings,
    SettingsError,
    config_classes,
    expected,
    fits,
    hints_of,
    listed,
    options,
    written,
)
from tests.rows import each

Size = Annotated[int, AtLeast(1)]


@register_interface
class SettingsPet(RegistrableConfigInterface):
    """Something alive."""


@register_interface
class SettingsPlant(RegistrableConfigInterface):
    """Something green."""


@register_interface
class SettingsNothing(RegistrableConfigInterface):
    """Nothing implements it."""


@dataclass
class CatConfig(Settings):
    """A cat."""

    lives: Annotated[int, AtLeast(1), AtMost(9)] = 9


@dataclass
class DogConfig(Settings):
    """A dog."""

    name: str = "Rex"


@dataclass
class FernConfig(Settings):
    """A fern."""


@register
class SettingsCat(SettingsPet):
    config: CatConfig


@register
class SettingsDog(SettingsPet):
    config: DogConfig


@register
class SettingsFern(SettingsPlant):
    config: FernConfig


@dataclass
class House(Settings):
    """Many kinds of keys."""

    rooms: Annotated[int, AtLeast(1)] = 4
    height: Annotated[float, Above(0), Below(100)] = 6
    colour: Literal["red", "white"] = "red"
    pet: SettingsPet.cfgtype | None = None
    names: tuple[str, ...] = ()

    def problems(self) -> Iterator[Problem]:
        """Cats need space."""
        if isinstance(self.pet, CatConfig) and self.rooms < 2:
            yield "rooms", f"a cat needs 2 rooms, got {self.rooms}."
            yield "pet", "or take another pet."


@each(
    "hint, good, bad",
    [
        (int, [0, -5, 2**63 - 1], [True, 2**63, 10**400, 1.0, "1", None]),
        (float, [0, 1.5, -2], [True, float("nan"), float("inf"), -float("inf"), 10**400, "1", None, 1j]),
        (bool, [True, False], [0, 1, "true", None]),
        (str, ["", "a"], [1, None, b"a"]),
        (None, [None], [0, "", False]),
        (Any, [None, 1, "a", len], []),
        (int | None, [1, None], [True, "1"]),
        (Optional[int], [1, None], ["1"]),  # noqa: UP045 - people write it
        (Union[int, str], [1, "a"], [1.5]),  # noqa: UP007
        (Literal["a", 1, None], ["a", 1, None], ["b", True, 1.0]),
        (Annotated[int, AtLeast(1)], [1, 2], [0, True, 1.5]),
        (Annotated[float, Above(0), AtMost(2)], [0.1, 2], [0, 2.1, float("nan")]),
        (Annotated[float, Below(1)], [0.9], [1]),
        (Annotated[int | None, AtLeast(1)], [1, None], [0]),
        (Annotated[Annotated[int, AtLeast(1)] | None, AtMost(3)], [1, 3, None], [0, 4]),
        (Size | None, [1, None], [0]),
        (Annotated[int, "a note"], [1], ["1"]),
        (Annotated[str, IsRegex()], ["", "a.*"], ["[", "(" * 5000 + ")" * 5000, "a{99999999999}", 5]),
        (list[int], [[], [1, 2], (1,)], [[1.5], "12", 1, {1}]),
        (Sequence[str], [["a"], ("a",)], ["a", [1]]),
        (tuple[int, ...], [(), (1, 2), [1]], [(1, "a"), 1]),
        (tuple[int, str], [(1, "a"), [1, "a"]], [(1,), (1, "a", 2), ("a", 1)]),
        (tuple[()], [(), []], [(1,)]),
        (list, [[1, "a"], ()], ["a", {}]),
        (tuple, [(1, "a"), []], ["a"]),
        (dict, [{}, {"a": len}], [[], {1: 2}]),
        (dict[str, int], [{}, {"a": 1}], [{"a": "b"}, {1: 1}, [("a", 1)]]),
        (Mapping[Literal["a"], float], [{"a": 1}], [{"b": 1}]),
        (dict[str, list[int]], [{"a": [1]}], [{"a": [True]}]),
        (CatConfig, [CatConfig()], [DogConfig(), {"lives": 9}, CatConfig]),
        (SettingsPet.cfgtype, [CatConfig(), DogConfig()], [FernConfig(), None, {}, SettingsCat]),
        (SettingsPet.cfgtype | None, [CatConfig(), None], [FernConfig()]),
        (None | SettingsPet.cfgtype, [CatConfig(), None], [FernConfig()]),
        (SettingsPet.cfgtype | SettingsPlant.cfgtype, [CatConfig(), FernConfig()], [None]),
        (Annotated[float, AtLeast(0)] | SettingsPet.cfgtype, [0.5, CatConfig()], [-1, FernConfig()]),
        (Annotated[SettingsPet.cfgtype, "a note"], [CatConfig()], [FernConfig()]),
        (dict[str, SettingsPet.cfgtype], [{"a": CatConfig()}], [{"a": FernConfig()}]),
    ],
)
def test_a_value_fits_its_annotation_strictly(hint: Any, good: list[Any], bad: list[Any]):
    assert [value for value in good if not fits(hint, value)] == []
    assert [value for value in bad if fits(hint, value)] == []


@each(
    "hint, words",
    [
        (int, "an integer"),
        (float | None, "a number or null"),
        (bool, "true or false"),
        (Any, "anything"),
        (Literal["a", True, None, 1], "one of a, true, null, 1"),
        (Annotated[float, AtLeast(0), Below(1)], "a number of at least 0 and below 1"),
        (Annotated[int | None, Above(0), AtMost(9)], "an integer above 0 and of at most 9 or null"),
        (Annotated[int, "a note"], "an integer"),
        (Annotated[str, IsRegex()], "text that is a regular expression"),
        (list[int], "a list, each an integer"),
        (tuple[str, ...], "a list, each text"),
        (tuple[int, str], "a list of 2: an integer, text"),
        (list, "a list, each anything"),
        (dict, "a section whose values are each anything"),
        (dict[str, float], "a section whose values are each a number"),
        (CatConfig, "a section of SettingsCat"),
        (SettingsPet.cfgtype, "a section with a `class_name` of SettingsCat, SettingsDog"),
        (SettingsNothing.cfgtype, "a section with a `class_name` of a registered class (none is registered)"),
        (SettingsPet.cfgtype | float, "a section with a `class_name` of SettingsCat, SettingsDog or a number"),
    ],
)
def test_an_annotation_is_described(hint: Any, words: str):
    assert expected(hint) == words


def test_the_alternatives_of_a_union_keep_their_bounds():
    assert options(Size | None) == options(Annotated[int | None, AtLeast(1)]) == (Size, type(None))
    assert options(SettingsPet.cfgtype | None | int) == (SettingsPet.cfgtype, type(None), int)


def test_the_configurations_of_an_interface_are_those_registered_now():
    assert config_classes(SettingsPet.cfgtype | CatConfig | None) == (CatConfig, DogConfig)
    assert config_classes(int | None) == ()
    with pytest.raises(TypeError, match="`SettingsPet.cfgtype`"):
        config_classes(SettingsPet)


def test_values_that_fit_make_a_configuration():
    house = House(rooms=2, height=3.5, colour="white", pet=CatConfig(3), names=("a",))
    assert house.stored() == {"rooms": 2, "height": 3.5, "colour": "white", "pet": CatConfig(3), "names": ("a",)}
    assert House() == House()
    assert isinstance(House(height=3).height, float)


def test_all_invalid_values_are_reported_at_once():
    with pytest.raises(SettingsError) as caught:
        House(rooms=0, height=float("nan"), colour="blue", pet=5, names="abc")  # type: ignore[arg-type]
    said = dict(caught.value.problems)
    expected = {
        "rooms": "at least 1.*got 0",
        "height": "above 0.*below 100.*got nan",
        "colour": "red, white.*got 'blue'",
        "pet": "SettingsCat, SettingsDog.*null.*got 5",
        "names": "list.*text.*got 'abc'",
    }
    assert [key for key, pattern in expected.items() if not re.search(f"`{key}`.*{pattern}", said[key])] == []
    assert list(said) == list(expected)
    assert len(str(caught.value).splitlines()) == len(expected)
    assert isinstance(caught.value, ValueError)


def test_constraints_between_keys_are_checked_when_each_is_valid():
    with pytest.raises(SettingsError) as caught:
        House(rooms=1, pet=CatConfig())
    assert caught.value.problems == (("rooms", "a cat needs 2 rooms, got 1."), ("pet", "or take another pet."))
    with pytest.raises(SettingsError, match=r"^`height` must be .*$"):
        House(rooms=1, pet=CatConfig(), height=0)


def test_problems_can_be_seen_from_further_up():
    error = SettingsError([("rooms", "too few."), ("", "all wrong.")]).under("trip.house")
    assert error.problems == (("trip.house.rooms", "too few."), ("trip.house", "all wrong."))
    assert str(error) == "too few.\nall wrong."


def test_keys_that_are_not_given_to_a_configuration_are_not_checked():
    @dataclass
    class Counted(Settings):
        """It has a value that nobody gives."""

        size: int = 1
        total: int = field(init=False, default=0)

        def __post_init__(self) -> None:
            super().__post_init__()
            self.total = self.size * 2

    assert Counted(3).stored() == {"size": 3}
    assert set(hints_of(Counted)) == {"class_name", "size", "total"}


@each("value, text", [(True, "true"), (None, "null"), (1, "1"), (0, "0"), (0.001, "0.001"), ("a", "a")])
def test_a_value_is_written_as_in_a_file(value: Any, text: str):
    assert written(value) == text


def test_names_are_listed_in_order_and_not_too_many():
    assert listed([]) == ""
    assert listed(["b", "a"]) == "a, b"
    shown = listed(map(str, range(15)))
    assert shown.count(", ") == 11 and "3 more" in shown
