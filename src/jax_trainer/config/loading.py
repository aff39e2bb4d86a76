"""Reads configurations: from files, from overrides, from Python data; with the same checks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from jax_trainer.config.checking import Checker
from jax_trainer.config.files import overridden, read_tree, resolved
from jax_trainer.config.nodes import Node
from jax_trainer.config.problems import ConfigError, ConfigProblem, Place
from jax_trainer.settings import SettingsError

Config = TypeVar("Config")


@dataclass(frozen=True)
class Loaded(Generic[Config]):
    """A configuration, and where each of its values was written."""

    value: Config
    tree: Node

    def error(self, error: SettingsError) -> ConfigError:
        """What was found to be wrong later on, with the places where it was written."""
        problems = error.problems
        return ConfigError(ConfigProblem(self.tree.place_of(key), key, text) for key, text in problems)


def load_config(file: str | Path, root: type[Config], overrides: Sequence[str] = ()) -> Loaded[Config]:
    """The configuration of kind `root` in a YAML file, with overrides such as `trainer.train_epochs=3`.

    All that is wrong comes in one `ConfigError`.
    """
    return _checked(read_tree(Path(file), overrides), root)


def config_from(data: Mapping[str, Any], root: type[Config], overrides: Sequence[str] = ()) -> Config:
    """The same from nested dicts, lists and numbers, as other programs make them."""
    return _checked(resolved(overridden(_as_node(data, "configuration"), overrides)), root).value


def _checked(tree: Node, root: type[Config]) -> Loaded[Config]:
    checker = Checker()
    value = checker.configuration(root, tree, "")
    if checker.problems:
        raise ConfigError(checker.problems)
    return Loaded(value, tree)


def _as_node(data: Any, source: str) -> Node:
    place = Place(source)
    if isinstance(data, Mapping):
        return Node({str(name): _as_node(value, source) for name, value in data.items()}, place)
    if isinstance(data, list | tuple):
        return Node([_as_node(value, source) for value in data], place)
    return Node(data, place)
