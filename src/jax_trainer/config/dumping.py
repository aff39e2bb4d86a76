"""Writes configurations so that reading them gives the same again, without the secrets in them."""

from dataclasses import fields, is_dataclass
from typing import Any

import yaml

from jax_trainer.config.secrets import redact
from jax_trainer.config.yaml_text import scalar_of
from jax_trainer.settings import Settings


def as_data(config: Any) -> Any:
    """A configuration as nested dicts, lists and plain values, with `class_name` where it has one."""
    if isinstance(config, Settings):
        return _named(config, config.stored())
    if is_dataclass(config) and not isinstance(config, type):
        return _named(config, {field.name: getattr(config, field.name) for field in fields(config) if field.init})
    if isinstance(config, dict):
        return {str(name): as_data(value) for name, value in config.items()}
    return [as_data(value) for value in config] if isinstance(config, list | tuple) else config


def _named(config: Any, values: dict[str, Any]) -> dict[str, Any]:
    name = getattr(config, "class_name", "")
    plain = {key: as_data(value) for key, value in values.items()}
    return {"class_name": name, **plain} if name else plain


def dump_config(config: Any) -> str:
    """A configuration as YAML that `load_config` reads; secrets are hidden."""
    return dump_data(_escaped(redact(as_data(config))))


def dump_data(data: Any) -> str:
    """Plain data as YAML."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120, default_flow_style=None)


def _escaped(data: Any) -> Any:
    if isinstance(data, dict):
        return {name: _escaped(value) for name, value in data.items()}
    if isinstance(data, list):
        return [_escaped(value) for value in data]
    return data.replace("${", "$${") if isinstance(data, str) else data


class _Dumper(yaml.SafeDumper):
    """Quotes texts that our reading would take for something else."""

    def ignore_aliases(self, data: Any) -> bool:
        """The same list in two places is written twice: there are no aliases in a configuration."""
        return True


def _text(dumper: _Dumper, text: str) -> yaml.Node:
    is_ambiguous = not isinstance(scalar_of(text), str)
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"' if is_ambiguous else None)


_Dumper.add_representer(str, _text)
