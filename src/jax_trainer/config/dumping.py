"""Writes configurations as YAML that reads back equal, with secrets redacted."""

import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import yaml

from jax_trainer.config.redaction import redact
from jax_trainer.config.registration import stored_name
from jax_trainer.config.settings import Settings, plain
from jax_trainer.config.yaml_text import key_problem, scalar_of


def as_data(config: Any) -> Any:
    """A configuration as nested dicts, lists and scalars, with `class_name` for registered classes."""
    if isinstance(config, Settings):
        return _named(config, config.stored())
    if is_dataclass(config) and not isinstance(config, type):
        return _named(config, {field.name: getattr(config, field.name) for field in fields(config) if field.init})
    if isinstance(config, Mapping):
        return {str(name): as_data(value) for name, value in config.items()}
    return [as_data(value) for value in config] if isinstance(config, list | tuple) else plain(config)


def _named(config: Any, values: dict[str, Any]) -> dict[str, Any]:
    name = stored_name(config)
    plain = {key: as_data(value) for key, value in values.items()}
    return {"class_name": name, **plain} if name else plain


def dump_config(config: Any) -> str:
    """A configuration as YAML that `load_config` reads; secrets are redacted."""
    return dump_data(_escaped(redact(as_data(config))))


def dump_data(data: Any) -> str:
    """Plain data as YAML."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120, default_flow_style=None)


def _escaped(data: Any) -> Any:
    if isinstance(data, dict):
        for name in data:
            if key_problem(name):
                raise ValueError(f"The configuration cannot be written as YAML. {key_problem(name)}")
        return {name: _escaped(value) for name, value in data.items()}
    if isinstance(data, list):
        return [_escaped(value) for value in data]
    return data.replace("${", "$${") if isinstance(data, str) else data


class _Dumper(yaml.SafeDumper):
    """Quotes strings that our parser would read as another type; one line per key, lists of numbers on one line."""

    def ignore_aliases(self, data: Any) -> bool:
        return True  # our parser reads no aliases

    def represent_mapping(self, tag: str, mapping: Any, flow_style: bool | None = None) -> yaml.MappingNode:
        return super().represent_mapping(tag, mapping, flow_style=not mapping)


def _text(dumper: _Dumper, text: str) -> yaml.Node:
    # double quotes can represent every character, and keep whitespace at line ends
    is_safe = text.isprintable() and isinstance(scalar_of(text), str)
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if is_safe else '"')


_Dumper.add_representer(str, _text)


def finite(data: Any) -> Any:
    """`data` with NaN and infinity as text; as in `metrics.jsonl`.

    >>> finite({"loss": float("nan"), "acc": [0.5]})
    {'loss': 'nan', 'acc': [0.5]}
    """
    if isinstance(data, dict):
        return {name: finite(value) for name, value in data.items()}
    if isinstance(data, list | tuple):
        return [finite(value) for value in data]
    return str(data) if isinstance(data, float) and not math.isfinite(data) else data
