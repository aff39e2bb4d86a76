"""Descriptions of the registered classes: keys, types, defaults and help, for `jax-trainer describe`."""

import inspect
import re
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, Field, dataclass, fields
from typing import Any

from compoconf import Registry, registered

from jax_trainer.config.dumping import as_data
from jax_trainer.redaction import redact
from jax_trainer.settings import config_of, expected, hints_of

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
        lines = inspect.cleandoc(cls.__dict__.get("__doc__") or "").splitlines()
        entries = _lines_after(lines, "Args:")
        names: list[str] = []
        for line in entries:
            match = _ENTRY.fullmatch(line.rstrip())
            if match is not None:
                names = match["names"].split(", ")
                found |= dict.fromkeys(names, match["text"] or "")
            elif names:
                found |= {name: f"{found[name]} {line.strip()}".strip() for name in names}
    return found


def _lines_after(lines: Sequence[str], mark: str) -> Sequence[str]:
    if mark not in lines:
        return ()
    rest = lines[lines.index(mark) + 1 :]
    end = next((number for number, line in enumerate(rest) if line and not line.startswith(" ")), len(rest))
    return rest[:end]
