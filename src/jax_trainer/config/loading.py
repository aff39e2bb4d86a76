"""Loads configurations from YAML files, overrides and Python data, with the same checks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from jax_trainer.config.checking import Checker, settings_problem
from jax_trainer.config.files import overridden, read_tree
from jax_trainer.config.nodes import BROKEN, Node
from jax_trainer.config.problems import ConfigError, ConfigProblem, Location, Problems
from jax_trainer.config.references import resolved
from jax_trainer.config.yaml_text import MAX_DEPTH, key_problem
from jax_trainer.redaction import secret_values
from jax_trainer.settings import SettingsError, plain

Config = TypeVar("Config")


@dataclass(frozen=True)
class Loaded(Generic[Config]):
    """A configuration with the file and line of each value."""

    value: Config
    tree: Node

    def error(self, error: SettingsError) -> ConfigError:
        """`error`, which was raised after loading, with the file and line of each value."""
        problems = [
            ConfigProblem(self.tree.location_of(key), key, settings_problem(key, text)) for key, text in error.problems
        ]
        return ConfigError(problems, secrets=secret_values(self.tree.data()))


def load_config(
    file: str | Path, root: type[Config], overrides: Sequence[str] = (), *, may_include: bool = True
) -> Loaded[Config]:
    """Loads a configuration of type `root` from a YAML file, with overrides such as `trainer.train_epochs=3`.

    Raises one `ConfigError` with all problems. Use `may_include=False` for an untrusted file.
    """
    problems = Problems()
    return _checked(read_tree(Path(file), overrides, problems, may_include=may_include), root, problems)


def config_from(data: Mapping[str, Any], root: type[Config], overrides: Sequence[str] = ()) -> Config:
    """Loads a configuration of type `root` from nested dicts, lists and scalars."""
    problems = Problems()
    tree = overridden(_as_node(data, "", 0, problems), overrides, problems)
    return _checked(resolved(tree, problems), root, problems).value


def _checked(tree: Node, root: type[Config], problems: Problems) -> Loaded[Config]:
    secrets = secret_values(tree.data())
    value = Checker(problems, secrets).make(root, tree, "")
    if problems:
        raise problems.error(secrets)
    return Loaded(value, tree)


def _as_node(data: Any, path: str, depth: int, problems: Problems) -> Node:
    location = Location("configuration")
    if depth > MAX_DEPTH:
        problems.add(location, path, f"Sections are nested more than {MAX_DEPTH} deep.")
        return Node(BROKEN, location)
    if isinstance(data, Mapping):
        wrong = [text for name in data if (text := key_problem(str(name)))]
        for text in wrong:
            problems.add(location, path, text)
        parts = {str(name): value for name, value in data.items() if not key_problem(str(name))}
        return Node(
            {name: _as_node(value, f"{path}.{name}".strip("."), depth + 1, problems) for name, value in parts.items()},
            location,
        )
    if isinstance(data, list | tuple):
        items = [_as_node(value, f"{path}.{n}".strip("."), depth + 1, problems) for n, value in enumerate(data)]
        return Node(items, location)
    return Node(plain(data), location)
