"""A JSON schema of a configuration, for editors that check and complete while one types."""

from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

from compoconf import LazyConfigUnion

from jax_trainer.config.describing import keys_of
from jax_trainer.settings import Above, AtLeast, AtMost, Below, IsRegex, config_classes, hints_of, options

SCHEMA = "https://json-schema.org/draft/2020-12/schema"


def json_schema(root: type) -> dict[str, Any]:
    """A JSON schema of the configuration `root`, for editors that check and complete while one types."""
    writer = _SchemaWriter()
    section = writer.section(root)
    include = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
    properties = {
        "include": {"description": "Files whose values this one changes.", **include},
        **section["properties"],
    }
    return {"$schema": SCHEMA, **section, "properties": properties, "$defs": writer.definitions}


_TYPES = {int: "integer", float: "number", bool: "boolean", str: "string", NoneType: "null"}
_BOUNDS = {AtLeast: "minimum", Above: "exclusiveMinimum", AtMost: "maximum", Below: "exclusiveMaximum"}


class _SchemaWriter:
    """Collects the schemas of configuration classes, so that each is written once."""

    def __init__(self) -> None:
        self.definitions: dict[str, Any] = {}

    def section(self, config: type) -> dict[str, Any]:
        """The schema of a configuration's keys."""
        hints, keys = hints_of(config), keys_of(config)
        name = getattr(config, "class_name", "")
        properties: dict[str, Any] = {"class_name": {"const": name}} if name else {}
        for key in keys:
            described = {"description": key.help} if key.help else {}
            default = {} if key.is_required else {"default": key.default}
            properties[key.name] = {**described, **self.schema(hints[key.name]), **default}
        required = [key.name for key in keys if key.is_required]
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}

    def schema(self, hint: Any) -> dict[str, Any]:
        """The schema of what may stand where `hint` is the annotation."""
        parts = [self._one(option) for option in options(hint)]
        # a reference may stand for any value
        parts.append({"type": "string", "pattern": r"^\$\{.*\}$"})
        return {"anyOf": parts} if hint is not Any else {}

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
            return {"type": "array", "prefixItems": [self.schema(arg) for arg in args], "items": False}
        if isinstance(origin, type) and issubclass(origin, Mapping):
            return {"type": "object", "additionalProperties": {"anyOf": [self.schema(args[1]), {"type": "null"}]}}
        if isinstance(origin, type) and issubclass(origin, Sequence):
            return {"type": "array", "items": self.schema(args[0])}
        if isinstance(hint, LazyConfigUnion):
            return {"anyOf": [self._reference(config) for config in config_classes(hint)]}
        return self._reference(hint) if is_dataclass(hint) and isinstance(hint, type) else {}

    def _reference(self, config: type) -> dict[str, Any]:
        name = config.__name__
        if name not in self.definitions:
            self.definitions[name] = {}  # a class that contains itself finds its name taken
            self.definitions[name] = self.section(config)
        return {"$ref": f"#/$defs/{name}"}
