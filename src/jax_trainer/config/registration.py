"""Resolves names of registered classes: a user's class overrides a built-in one of the same name.

compoconf keeps the first class of a name and ignores later ones. With this module, `@register` gives the name to the
user's class, whichever is first; a class that is defined again (a notebook cell, a reloaded module) replaces the old
one; and two user classes with one name are an error. An overridden built-in class stays registered under its full path,
`jax_trainer.models.cnn.CNN`, for its configuration and for files.
"""

import logging
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from compoconf import Registry
from compoconf.compoconf import _get_config_class

LOG = logging.getLogger("jax_trainer")
_PACKAGE = __name__.partition(".")[0]
_sections: list[tuple[type, ...]] = []
_config_class: Callable[[type], Any] = _get_config_class
unavailable: dict[str, str] = {}  # installed projects that cannot be imported, whose classes are missing, and why


class NameTakenError(TypeError):
    """Two user classes are registered under one name."""


def missing_projects() -> str:
    """A sentence about each installed project whose classes are missing, for a message about an unknown name."""
    return "".join(f" {text}" for text in unavailable.values())


def same_section(*interfaces: type) -> None:
    """Declares that one section of a file can be of any of these interfaces, so that they share a namespace."""
    _sections.append(interfaces)


def full_name(cls: type) -> str:
    """The module path of a class; for a script, the path by which it would be imported."""
    module = cls.__module__
    if module == "__main__":
        main = sys.modules["__main__"]
        spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
        module = spec.name if spec is not None else Path(file).stem if file else module
    return f"{module}.{cls.__qualname__}"


def is_ours(cls: type) -> bool:
    """Whether the class is part of this package."""
    return cls.__module__.partition(".")[0] == _PACKAGE


def registered_name(cls: type, interface: type) -> str | None:
    """The name under which exactly this class is registered for `interface`; None if it is not."""
    names = (cls.__name__, full_name(cls))
    return next((name for registry in _registries([interface]) for name in names if registry.get(name) is cls), None)


def implementation_of(config: Any) -> type | None:
    """The registered class of a configuration."""
    found = (registry.get(getattr(config, "class_name", "")) for registry in Registry._registries.values())
    return next((cls for cls in found if cls is not None and _config_class(cls) is type(config)), None)


def path_in_files(cls: type) -> str:
    """The module path of a class in files: for built-in classes, and for user classes that override one."""
    return full_name(cls) if is_ours(cls) or displaced(cls.__name__) else ""


def stored_name(config: Any) -> str:
    """The name of a configuration's class in a file: its full path if a built-in class has the same name."""
    name, cls = getattr(config, "class_name", ""), implementation_of(config)
    return name if cls is None or is_ours(cls) else path_in_files(cls) or name


def displaced(name: str) -> type | None:
    """The built-in class that a user class overrides under `name`."""
    known = (cls for registry in Registry._registries.values() for key, cls in registry.items() if key != name)
    return next((cls for cls in known if cls.__name__ == name and is_ours(cls)), None)


def _register(cls: type) -> None:
    """Adds a class to the registries of its interfaces; `compoconf.register` calls it."""
    name, own = cls.__name__, _registries(cls.__mro__)
    for registry in _rivals(cls):
        holder = registry.get(name, cls)
        if holder is cls:
            continue
        if full_name(holder) == full_name(cls):  # the same class, before it was redefined
            _rename(holder, None)
        elif is_ours(cls) and not is_ours(holder):
            for one in own:
                one[full_name(cls)] = cls
            _config_class(cls).class_name = full_name(cls)
            return _announce(holder, cls)
        elif is_ours(holder) and not is_ours(cls):
            _rename(holder, full_name(holder))
            if _config_class(cls) is _config_class(holder):
                _config_class(cls).class_name = name  # a shared configuration belongs to the user's class
            _announce(cls, holder)
        elif not is_ours(cls) and any(registry is one for one in own):
            raise NameTakenError(
                f"Two classes are registered as `{name}`: {full_name(holder)} and {full_name(cls)}. Rename one of them."
            )
    type(Registry).add_class_to_registry(Registry, cls)
    return None


Registry.add_class_to_registry = _register


def _announce(cls: type, ours: type) -> None:
    LOG.warning(
        f"`{cls.__name__}` is your class {full_name(cls)}; the built-in one is now registered as `{full_name(ours)}`."
    )


def _rename(cls: type, name: str | None) -> None:
    """Registers a class under another name, or under none."""
    for registry in Registry._registries.values():
        if registry.get(cls.__name__) is cls:
            del registry[cls.__name__]
            if name is not None:
                registry[name] = cls
    config = _config_class(cls)
    if name is not None and config.class_name == cls.__name__:
        config.class_name = name


def _rivals(cls: type) -> list[dict[str, type]]:
    """The registries in which two classes of one name would conflict."""
    shared = [other for section in _sections if issubclass(cls, section) for other in section]
    return _registries([*cls.__mro__, *shared])


def _registries(interfaces: Iterable[type]) -> list[dict[str, type]]:
    names = dict.fromkeys(map(Registry._unique_name, interfaces))
    return [Registry._registries[name] for name in names if name in Registry._registries]
