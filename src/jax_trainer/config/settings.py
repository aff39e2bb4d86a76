"""Validated configurations: dataclasses whose annotations have types and bounds.

A configuration derives from `Settings`. The bounds in its annotations validate values, and appear in error messages, in
the JSON schema and in the help:

>>> @dataclass
... class MLPConfig(Settings):
...     width: Annotated[int, AtLeast(1)] = 64
...     dropout: Annotated[float, AtLeast(0), Below(1)] = 0.0
>>> MLPConfig(width=0, dropout=1.5)
Traceback (most recent call last):
jax_trainer.config.settings.SettingsError: `width` must be an integer of at least 1, got 0.
`dropout` must be a number of at least 0 and below 1, got 1.5.
"""

import operator
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self, Union, get_args, get_origin, get_type_hints

from compoconf import ConfigInterface, LazyConfigUnion, RegistrableConfigInterface, Registry, parsing, registered
from compoconf.parsing import _make_union_parser

from jax_trainer.config.registration import implementation_of, path_in_files
from jax_trainer.diagnostics.suggestions import check_keywords, keywords_of, suggestion, value_hint

Problem = tuple[str, str]  # a dotted key, and its error message


@dataclass(frozen=True)
class _Limit:
    """A bound on one side of `limit`."""

    limit: float
    compare: ClassVar[Callable[[Any, Any], bool]]
    phrase: ClassVar[str]
    schema_key: ClassVar[str]

    def allows(self, value: Any) -> bool:
        return type(self).compare(value, self.limit)

    @property
    def description(self) -> str:
        return f"{self.phrase} {self.limit}"

    @property
    def schema(self) -> dict[str, Any]:
        return {self.schema_key: self.limit}


class AtLeast(_Limit):
    """A number of at least `limit`."""

    compare, phrase, schema_key = operator.ge, "of at least", "minimum"


class Above(_Limit):
    """A number larger than `limit`."""

    compare, phrase, schema_key = operator.gt, "above", "exclusiveMinimum"


class AtMost(_Limit):
    """A number of at most `limit`."""

    compare, phrase, schema_key = operator.le, "of at most", "maximum"


class Below(_Limit):
    """A number smaller than `limit`."""

    compare, phrase, schema_key = operator.lt, "below", "exclusiveMaximum"


@dataclass(frozen=True)
class IsRegex:
    """Text that is a regular expression."""

    description: ClassVar[str] = "that is a regular expression"
    schema: ClassVar[dict[str, Any]] = {"format": "regex"}

    def allows(self, value: Any) -> bool:
        try:
            re.compile(value)
        except (re.error, RecursionError, OverflowError):  # the last two: brackets too deep, counts too large
            return False
        return True


@dataclass(frozen=True)
class InPython:
    """Marks an alternative of an annotation that only Python can pass; files and help texts have the others."""


class SettingsError(ValueError):
    """Invalid values of a configuration. `problems` has the key and the message of each."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__(self.problems)

    def __str__(self) -> str:
        return "\n".join(text for _, text in self.problems)

    def under(self, key: str) -> "SettingsError":
        """The error with its keys prefixed by `key`, the section that contains this configuration."""
        return SettingsError([(f"{key}.{name}" if name else key, text) for name, text in self.problems])


@contextmanager
def errors_of(key: str, *kinds: type[Exception]) -> Iterator[None]:
    """Raises errors in the block as those of the key: a `SettingsError` of its section, and others of these kinds."""
    try:
        yield
    except SettingsError as error:
        raise error.under(key) from None
    except kinds as error:
        raise SettingsError([(key, str(error))]) from None


@dataclass
class Settings(ConfigInterface):
    """The base class of configurations: validates all values on creation."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Refuses unknown keywords, with a suggestion."""
        known = keywords_of(cls.__init__)
        if known is not None:
            check_keywords(cls.__name__, kwargs, known)
        return super().__new__(cls)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.class_name = ""  # until a class is registered with it: not inherited from the parent

    def __post_init__(self) -> None:
        hints, found = hints_of(type(self)), []
        for name, given in self.stored().items():
            value = plain(given)
            if not fits(hints[name], value):
                near = value_suggestion(hints[name], value, name)
                found.append((name, f"`{name}` must be {expected(hints[name])}, got {value!r}.{near}"))
            elif (value := as_float(hints[name], value)) is not given:
                object.__setattr__(self, name, value)
        # constraints between keys are checked only if each key is valid
        found = found or list(self.problems())
        if found:
            raise SettingsError(found)

    def problems(self) -> Iterator[Problem]:
        """Constraints between keys: override it, and yield key and message of each violation."""
        yield from ()

    def stored(self) -> dict[str, Any]:
        """The keys and values from which this configuration can be created again."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.init}


@dataclass
class ValueSettings(Settings):
    """Settings that hash by value, as static arguments of a compiled function must; do not mutate them."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.__dict__.get("__hash__") is None:
            cls.__hash__ = ValueSettings.__hash__  # `@dataclass` removes an inherited one, and keeps a class's own

    def __hash__(self) -> int:
        values = (getattr(self, field.name) for field in fields(self) if field.compare)
        # configurations that differ only in their lists, mappings and sections are told apart by comparing them
        return hash((type(self), *(value for value in values if isinstance(value, str | int | float | None))))


@cache
def hints_of(config: type) -> dict[str, Any]:
    """The annotations of a configuration, with their bounds."""
    return get_type_hints(config, include_extras=True)


def options(hint: Any) -> tuple[Any, ...]:
    """The alternatives of a union (also of `X.cfgtype`), each with its bounds; otherwise `hint` itself.

    >>> options(int | None)
    (<class 'int'>, <class 'NoneType'>)
    """
    if get_origin(hint) is Annotated:
        kind, *notes = get_args(hint)
        if InPython() in notes:
            return ()
        bounds = [note for note in notes if hasattr(note, "allows")]
        return tuple(
            Annotated[(option, *bounds)] if bounds and option is not NoneType else option for option in options(kind)
        )
    parts = _parts(hint)
    return (
        (_OF_ANYTHING.get(hint, hint),) if parts == (hint,) else tuple(one for part in parts for one in options(part))
    )


def _parts(hint: Any) -> tuple[Any, ...]:
    """The alternatives as they are written."""
    if hasattr(hint, "_others"):  # compoconf's type of `X.cfgtype | None`
        return (hint._lazy, *hint._others)
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


_OF_ANYTHING = {list: list[Any], tuple: tuple[Any, ...], dict: dict[str, Any]}


def kinds(hint: Any) -> list[Any]:
    """The alternatives of `hint` without their bounds."""
    return [get_args(option)[0] if get_origin(option) is Annotated else option for option in options(hint)]


def words(hint: Any) -> list[str]:
    """The strings that `hint` lists as valid values."""
    literals = [get_args(kind) for kind in kinds(hint) if get_origin(kind) is Literal]
    return [word for values in literals for word in values if isinstance(word, str)]


def is_generic(hint: Any, kind: type) -> bool:
    """Whether `hint` is a `kind` of something, as `list[int]` is a `Sequence`."""
    origin = get_origin(hint)
    return isinstance(origin, type) and issubclass(origin, kind)


def as_float(hint: Any, value: Any) -> Any:
    """`value`, as a float if it is an integer and `hint` allows only floats."""
    if type(value) is not int:
        return value
    allowed = kinds(hint)
    return float(value) if float in allowed and int not in allowed else value


def config_of(cls: Any) -> type:
    """The configuration class of a registered class: its `config_class`, or the annotation of its `config`."""
    return cls.config_class if cls.config_class is not None else hints_of(cls)["config"]


class Candidate(NamedTuple):
    """A possible class of a section: its name, its configuration, and its path as an alternative name."""

    name: str
    config: type
    path: str


def candidates(hint: Any) -> list[Candidate]:
    """The classes that `hint` allows for a section: registered classes, or a dataclass, with their configurations.

    The names are the registry's. A configuration class has only one name, that of the class that was registered with it
    last, and a derived class may share its configuration.
    """
    found: list[Candidate] = []
    for option in options(hint):
        if isinstance(option, LazyConfigUnion):
            interface = option.registry_class
            classes = {name: Registry.get_class(interface, name) for name in registered(interface)}
            found += [Candidate(name, config_of(cls), path_in_files(cls)) for name, cls in classes.items()]
        elif isinstance(option, type) and is_dataclass(option):
            name = getattr(option, "class_name", "") or option.__name__
            found.append(Candidate(name, option, ""))
        elif isinstance(option, type) and issubclass(option, RegistrableConfigInterface):
            raise TypeError(f"Annotate with `{option.__name__}.cfgtype`, not with the interface itself.")
    return list(dict.fromkeys(found))


def init_fields(config: type) -> dict[str, Field[Any]]:
    """The fields of a configuration that a section can set, by name."""
    return {field.name: field for field in fields(config) if field.init} if is_dataclass(config) else {}


def is_required(field: Field[Any]) -> bool:
    """Whether a field has no default."""
    return field.default is MISSING and field.default_factory is MISSING


def could_be(config: type, keys: Set[str]) -> bool:
    """Whether a section with exactly these keys can be this configuration."""
    known = init_fields(config)
    return {name for name, field in known.items() if is_required(field)} <= keys <= known.keys()


def _make_section_parser(hint: Any, strict: bool, strict_types: bool) -> Callable[..., Any]:
    """compoconf's parser of a union, which finds the class of a section without `class_name` as in a file.

    compoconf would take the first class that has these keys, whatever the key of the section is.
    """
    parse = _make_union_parser(hint, strict, strict_types)

    def parse_section(data: Any, key_history: str = "") -> Any:
        is_section = isinstance(data, Mapping) and "class_name" not in data
        keys = set[str](data) if is_section else set[str]()
        allowed = candidates(hint) if is_section or data is None else []
        named = [one for one in allowed if one.name == key_history.rpartition(".")[2]]
        fitting = [one.name for one in allowed if is_section and could_be(one.config, keys)]
        if not named and len(fitting) > 1:
            raise ValueError(
                f"{key_history or 'The section'} has no `class_name`, and several classes have its keys: "
                f"{listed(fitting)}. Add `class_name`, or let the name of a class be the key of its section."
            )
        if not named:
            return parse(data, key_history)
        value: Any = parse({**(data or {}), "class_name": named[0].config.class_name}, key_history)
        value.class_name = named[0].name  # several classes may share a configuration
        return value

    return parse_section if any(isinstance(kind, LazyConfigUnion) for kind in kinds(hint)) else parse


parsing._make_union_parser = _make_section_parser


def config_classes(hint: Any) -> tuple[type, ...]:
    """The configuration classes that `hint` allows: those registered for an interface, or a dataclass itself."""
    return tuple(dict.fromkeys(one.config for one in candidates(hint)))


def classes_in(value: Any, path: str = "") -> Iterator[tuple[str, type]]:
    """The registered class of every configuration in `value`, by its dotted key."""
    parts: Iterable[tuple[Any, Any]] = ()
    if is_dataclass(value) and not isinstance(value, type):
        cls = implementation_of(value)
        yield from [(path, cls)] if cls is not None else []
        parts = [(field.name, getattr(value, field.name)) for field in fields(value)]
    elif isinstance(value, Mapping):
        parts = value.items()
    elif isinstance(value, list | tuple):
        parts = enumerate(value)
    for name, part in parts:
        yield from classes_in(part, f"{path}.{name}".lstrip("."))


def plain(value: Any) -> Any:
    """`value` with Python numbers in place of those of numpy and JAX, also inside lists and mappings.

    >>> import numpy as np
    >>> plain([np.int64(3), np.array(0.5), "text"])
    [3, 0.5, 'text']
    """
    if isinstance(value, dict):
        parts = {name: plain(item) for name, item in value.items()}
        return parts if any(parts[name] is not item for name, item in value.items()) else value
    if type(value) in (list, tuple):
        items = [plain(item) for item in value]
        return type(value)(items) if any(new is not old for new, old in zip(items, value, strict=True)) else value
    is_number = getattr(getattr(value, "dtype", None), "kind", "") in ("b", "i", "u", "f") and value.ndim == 0
    return value.item() if is_number else value


def value_suggestion(hint: Any, value: Any, key: str = "") -> str:
    """A hint for an invalid value: the closest valid word, or the largest number."""
    if _is_too_large(value):
        return f" An integer has at most 64 bits: it is at most {_LARGEST}."
    is_word = isinstance(value, str | int) and not isinstance(value, bool)
    return value_hint(key, value) or (suggestion(str(value), words(hint)) if is_word else "")


def fits(hint: Any, value: Any) -> bool:
    """Whether `value` is valid for the annotation `hint`; strictly: true is not a number, 1.5 not an integer."""
    if fits_in_files(hint, value):
        return True
    of_python = (get_args(part)[0] for part in _parts(hint) if InPython() in get_args(part))
    return any(fits(kind, value) for kind in of_python)


def fits_in_files(hint: Any, value: Any) -> bool:
    """Whether `value` is valid for `hint` also in a file."""
    return any(_fits_one(option, value) for option in options(hint))


_LARGEST = 2**63 - 1


def _is_too_large(value: Any) -> bool:
    if isinstance(value, list | tuple | dict):
        return any(map(_is_too_large, value.values() if isinstance(value, dict) else value))
    return type(value) is int and not -_LARGEST - 1 <= value <= _LARGEST


def _fits_one(hint: Any, value: Any) -> bool:
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return fits(args[0], value) and all(bound.allows(value) for bound in args[1:])
    if hint is Any:
        return not _is_too_large(value)
    if hint in (None, NoneType):
        return value is None
    if hint is float:
        return type(value) in (int, float) and abs(value) <= sys.float_info.max
    if hint in (int, bool, str):
        return type(value) is hint and not _is_too_large(value)
    if origin is Literal:
        return any(type(value) is type(arg) and value == arg for arg in args)
    if origin is tuple and args[1:] != (...,):
        return isinstance(value, tuple | list) and len(args) == len(value) and all(map(fits, args, value))
    if is_generic(hint, Sequence):
        return isinstance(value, tuple | list) and all(fits(args[0], item) for item in value)
    if is_generic(hint, Mapping):
        return isinstance(value, Mapping) and all(fits(args[0], k) and fits(args[1], v) for k, v in value.items())
    if isinstance(hint, LazyConfigUnion):
        return isinstance(value, config_classes(hint))
    return isinstance(value, origin or hint) if isinstance(origin or hint, type) else True


def checked(data: Any, hints: Mapping[str, Any]) -> Any:
    """`data`, if it is a mapping with exactly the keys of `hints` and valid values; a `ValueError` otherwise.

    >>> checked({"waited": "2"}, {"waited": int})
    Traceback (most recent call last):
    ValueError: waited must be an integer, is '2'
    """
    if not isinstance(data, Mapping):
        raise ValueError(f"{data!r:.80} is not a section with {listed(hints)}")
    if odd := [*(hints.keys() - data.keys()), *(data.keys() - hints.keys())]:
        raise ValueError(f"it {'lacks' if odd[0] in hints else 'has an unknown'} {odd[0]!r:.80}")
    wrong = [name for name, value in data.items() if not fits(hints[name], value)]
    if wrong:
        raise ValueError("; ".join(f"{name} must be {expected(hints[name])}, is {data[name]!r:.80}" for name in wrong))
    return data


def expected(hint: Any) -> str:
    """A description of the valid values of the annotation `hint`.

    >>> expected(Annotated[int, AtLeast(1)] | None)
    'an integer of at least 1 or null'
    """
    parts: list[str] = []
    for option in options(hint):
        text, of_these = _expected_one(option), f"a list, each {' or '.join(parts)}"
        parts.append("a list of such" if parts and text == of_these else text)
    return " or ".join(dict.fromkeys(parts))


_DESCRIPTIONS = {int: "an integer", float: "a number", bool: "true or false", str: "text", NoneType: "null"}


def _expected_one(hint: Any) -> str:
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return f"{expected(args[0])} {' and '.join(bound.description for bound in args[1:])}"
    if hint in _DESCRIPTIONS:
        return _DESCRIPTIONS[hint]
    if origin is Literal:
        return f"one of {', '.join(map(written, args))}"
    if origin is tuple and args[1:] != (...,):
        return f"a list of {len(args)}: {', '.join(map(expected, args))}"
    if is_generic(hint, Mapping):
        return f"a section whose values are each {expected(args[1])}"
    if is_generic(hint, Sequence):
        return f"a list, each {expected(args[0])}"
    if isinstance(hint, LazyConfigUnion):
        names = listed(one.name for one in candidates(hint))
        return f"a section with a `class_name` of {names or 'a registered class (none is registered)'}"
    name = getattr(hint, "class_name", "") or getattr(hint, "__name__", str(hint))
    return "anything" if hint is Any else f"a section of {name.removesuffix('Config')}"


def written(value: Any) -> str:
    """A single value in YAML.

    >>> written(True), written(None), written(0.5), written("text")
    ('true', 'null', '0.5', 'text')
    """
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def listed(names: Iterable[str], most: int = 12) -> str:
    """Names in alphabetical order, at most `most`.

    >>> listed("cab", most=2)
    'a, b and 1 more (`jax-trainer describe` shows all)'
    """
    ranked = sorted(names)
    more = f" and {len(ranked) - most} more (`jax-trainer describe` shows all)" if len(ranked) > most else ""
    return ", ".join(ranked[:most]) + more
