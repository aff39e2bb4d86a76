"""Descriptions of configurations: keys, types, defaults and help for `jax-trainer describe`, and JSON schemas."""

import functools
import inspect
import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from itertools import takewhile
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

from compoconf import LazyConfigUnion, Registry, registered

from jax_trainer.config.dumping import as_data
from jax_trainer.config.redaction import redact
from jax_trainer.config.settings import candidates, config_classes, config_of, expected, hints_of, is_generic, options

_ENTRY = re.compile(r"    (?P<names>\w+(?:, \w+)*)(?: \([^)]*\))?:(?: (?P<text>.*))?")


@dataclass(frozen=True)
class Key:
    """One key of a configuration."""

    name: str
    expects: str
    default: Any  # plain data, secrets redacted; `MISSING` for a required key
    help: str

    @property
    def is_required(self) -> bool:
        """Whether the key has no default."""
        return self.default is MISSING


@dataclass(frozen=True)
class Described:
    """A registered class: its interface, a summary, and its keys."""

    name: str
    interface: str
    summary: str
    keys: tuple[Key, ...]


def registered_classes() -> Iterator[Described]:
    """Every registered class once, by interface and name; under the most general of several interfaces."""
    seen: set[type] = set()
    interfaces = sorted(registered(), key=lambda interface: (len(interface.__mro__), interface.__name__))
    for interface in interfaces:
        classes = {name: Registry.get_class(interface, name) for name in registered(interface)}
        yield from (describe(interface, cls, name) for name, cls in classes.items() if cls not in seen)
        seen.update(classes.values())


def describe(interface: type, cls: type, name: str = "") -> Described:
    """The description of a class that is registered for `interface`; `name` if it is registered under another name."""
    summary = (inspect.getdoc(cls) or "").partition("\n")[0]
    return Described(name or cls.__name__, interface.__name__, summary, keys_of(config_of(cls)))


def keys_of(config: type) -> tuple[Key, ...]:
    """The keys of a configuration class."""
    hints, helps = hints_of(config), help_of(config)
    return tuple(
        Key(field.name, expected(hints[field.name]), _default(config, field), helps.get(field.name, ""))
        for field in fields(config)  # type: ignore[arg-type]
        if field.init
    )


def _default(config: type, field: Field[Any]) -> Any:
    if field.default is MISSING and field.default_factory is MISSING:
        return MISSING
    try:  # the effective default, which `__post_init__` may derive from other keys
        value = getattr(config(), field.name)
    except Exception:  # another key is required
        value = field.default if field.default_factory is MISSING else field.default_factory()
    return redact(_plain(as_data(value)), field.name)


def _plain(value: Any) -> Any:
    """`value` as YAML data; objects that YAML cannot represent, such as functions, by their name."""
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    is_plain = value is None or isinstance(value, bool | int | float | str)
    return value if is_plain else getattr(value, "__name__", str(value))


def help_of(config: type) -> dict[str, str]:
    """The help text of each key, from the `Args:` in the docstrings of the class and its bases."""
    found: dict[str, str] = {}
    for cls in reversed(config.__mro__):
        _, _, entries = f"\n{inspect.cleandoc(cls.__dict__.get('__doc__') or '')}".partition("\nArgs:\n")
        names: list[str] = []
        for line in takewhile(lambda line: not line or line.startswith(" "), entries.splitlines()):
            match = _ENTRY.fullmatch(line.rstrip())
            if match is not None:
                names = match["names"].split(", ")
                found |= dict.fromkeys(names, match["text"] or "")
            elif names:
                found |= {name: f"{found[name]} {line.strip()}".strip() for name in names}
    return found


_SCHEMA = "https://json-schema.org/draft/2020-12/schema"


def json_schema(root: type) -> dict[str, Any]:
    """A JSON schema of the configuration class `root`."""
    writer = _SchemaWriter()
    section = writer.section(root, ())
    files = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
    include = {"include": {"description": "Base files, whose values this file overrides.", **files}}
    # required keys may be in an included file
    required = {"anyOf": [{"required": ["include"]}, {"required": section.pop("required")}]}
    properties = {"properties": {**include, **section["properties"]}}
    return {"$schema": _SCHEMA, **section, **properties, **required, "$defs": writer.definitions}


_REFERENCE = {"type": "string", "pattern": r"^\$\{[^{}]*\}$"}  # allowed instead of any value
_TYPES = {int: "integer", float: "number", bool: "boolean", str: "string", NoneType: "null"}


class _SchemaWriter:
    """Collects the schema of each configuration class once."""

    def __init__(self) -> None:
        self.definitions: dict[str, Any] = {}
        self._names: dict[type, str] = {}

    def section(self, config: type, names: Sequence[str]) -> dict[str, Any]:
        """The schema of a configuration class; `names` are the values of `class_name`."""
        hints, keys = hints_of(config), keys_of(config)
        properties: dict[str, Any] = {"class_name": {"enum": list(names)}} if names else {}
        for key in keys:
            described = {"description": key.help} if key.help else {}
            default = {} if key.is_required else {"default": key.default}
            properties[key.name] = {**described, **self.schema(hints[key.name]), **default}
        required = [key.name for key in keys if key.is_required]
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}

    def schema(self, hint: Any) -> dict[str, Any]:
        """The schema of the values that the annotation `hint` allows."""
        if Any in options(hint):
            return {}
        return {"anyOf": [*(self._one(option) for option in options(hint)), _REFERENCE]}

    def _one(self, hint: Any) -> dict[str, Any]:
        origin, args = get_origin(hint), get_args(hint)
        if origin is Annotated:
            return functools.reduce(
                operator.or_, (getattr(bound, "schema", {}) for bound in args[1:]), self._one(args[0])
            )
        if hint in _TYPES:
            return {"type": _TYPES[hint]}
        if origin is Literal:
            return {"enum": list(args)}
        if origin is tuple and args[1:] != (...,):
            items = [self.schema(arg) for arg in args]
            return {"type": "array", "prefixItems": items, "items": False, "minItems": len(args)}
        if is_generic(hint, Mapping):
            value = self.schema(args[1])
            if config_classes(args[1]):  # null: all keys have their defaults
                value = {"anyOf": [value, {"type": "null"}]}
            return {"type": "object", "additionalProperties": value}
        if is_generic(hint, Sequence):
            return {"type": "array", "items": self.schema(args[0])}
        if isinstance(hint, LazyConfigUnion):
            names: dict[type, list[str]] = {}
            for one in candidates(hint):
                names.setdefault(one.config, []).append(one.name)
            allowed = [self._reference(config, names[config]) for config in names]
            return {"anyOf": allowed} if allowed else {"not": {}}  # no class is registered: nothing is valid
        return self._reference(hint, ()) if is_dataclass(hint) and isinstance(hint, type) else {}

    def _reference(self, config: type, names: Sequence[str]) -> dict[str, Any]:
        if config not in self._names:
            twins = sum(known.__name__ == config.__name__ for known in self._names)
            name = self._names[config] = f"{config.__name__}{twins or ''}"  # before the section, which may recurse
            self.definitions[name] = self.section(config, names)
        return {"$ref": f"#/$defs/{self._names[config]}"}
