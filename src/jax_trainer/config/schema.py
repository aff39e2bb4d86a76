"""JSON schemas of configurations, for validation and completion in editors."""

from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

from compoconf import LazyConfigUnion

from jax_trainer.config.describing import keys_of
from jax_trainer.settings import Above, AtLeast, AtMost, Below, IsRegex, candidates, config_classes, hints_of, options

SCHEMA = "https://json-schema.org/draft/2020-12/schema"


def json_schema(root: type) -> dict[str, Any]:
    """A JSON schema of the configuration class `root`."""
    writer = _SchemaWriter()
    section = writer.section(root, ())
    files = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
    include = {"include": {"description": "Base files, whose values this file overrides.", **files}}
    # required keys may be in an included file
    required = {"anyOf": [{"required": ["include"]}, {"required": section.pop("required")}]}
    properties = {"properties": {**include, **section["properties"]}}
    return {"$schema": SCHEMA, **section, **properties, **required, "$defs": writer.definitions}


_REFERENCE = {"type": "string", "pattern": r"^\$\{[^{}]*\}$"}  # allowed instead of any value
_TYPES = {int: "integer", float: "number", bool: "boolean", str: "string", NoneType: "null"}
_BOUNDS = {AtLeast: "minimum", Above: "exclusiveMinimum", AtMost: "maximum", Below: "exclusiveMaximum"}


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
            bounds = {_BOUNDS[type(bound)]: bound.limit for bound in args[1:] if type(bound) in _BOUNDS}
            regex = {"format": "regex"} if any(isinstance(bound, IsRegex) for bound in args[1:]) else {}
            return {**self._one(args[0]), **bounds, **regex}
        if hint in _TYPES:
            return {"type": _TYPES[hint]}
        if origin is Literal:
            return {"enum": list(args)}
        if origin is tuple and args[1:] != (...,):
            items = [self.schema(arg) for arg in args]
            return {"type": "array", "prefixItems": items, "items": False, "minItems": len(args)}
        if isinstance(origin, type) and issubclass(origin, Mapping):
            value = self.schema(args[1])
            if config_classes(args[1]):  # null: all keys have their defaults
                value = {"anyOf": [value, {"type": "null"}]}
            return {"type": "object", "additionalProperties": value}
        if isinstance(origin, type) and issubclass(origin, Sequence):
            return {"type": "array", "items": self.schema(args[0])}
        if isinstance(hint, LazyConfigUnion):
            names = {
                config: [one.name for one in candidates(hint) if one.config is config]
                for config in config_classes(hint)
            }
            return {"anyOf": [self._reference(config, names[config]) for config in names]}
        return self._reference(hint, ()) if is_dataclass(hint) and isinstance(hint, type) else {}

    def _reference(self, config: type, names: Sequence[str]) -> dict[str, Any]:
        if config not in self._names:
            twins = sum(known.__name__ == config.__name__ for known in self._names)
            name = self._names[config] = f"{config.__name__}{twins or ''}"  # before the section, which may recurse
            self.definitions[name] = self.section(config, names)
        return {"$ref": f"#/$defs/{self._names[config]}"}
