"""Loads configurations from YAML files, overrides and Python data, with the same checks.

User code that registers classes is imported on explicit request, or because its installed package declares an entry
point for us; never because a file asks for it.
"""

import importlib.util
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Generic, TypeVar

import compoconf

from jax_trainer.config.checking import Checker, settings_problem
from jax_trainer.config.files import overridden, read_tree, resolved
from jax_trainer.config.problems import BROKEN, ConfigError, ConfigProblem, Location, Node, Problems
from jax_trainer.config.redaction import secret_values
from jax_trainer.config.registration import LOG, NameTakenError, unavailable
from jax_trainer.config.settings import SettingsError, plain
from jax_trainer.config.yaml_text import MAX_DEPTH, key_problem

Config = TypeVar("Config")
ENTRY_POINTS = "jax_trainer"  # the group


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
        parts: dict[str, Node] = {}
        for name, value in data.items():
            if text := key_problem(str(name)):
                problems.add(location, path, text)
            else:
                parts[str(name)] = _as_node(value, f"{path}.{name}".strip("."), depth + 1, problems)
        return Node(parts, location)
    if isinstance(data, list | tuple):
        items = [_as_node(value, f"{path}.{n}".strip("."), depth + 1, problems) for n, value in enumerate(data)]
        return Node(items, location)
    return Node(plain(data), location)


class UserCodeError(ImportError):
    """User code that cannot be imported."""


def import_user_code(what: str | Path) -> None:
    """Imports a module by name (`my_package.models`) or a `.py` file, which registers its classes."""
    if str(what).endswith(".py"):
        _import_file(Path(what))
    else:
        _import_by_name(str(what))


def import_installed_projects() -> None:
    """Imports the installed packages that register classes for us: those with an entry point in our group.

    One that cannot be imported is warned about, and named where one of its classes may be missing.
    """
    for point in entry_points(group=ENTRY_POINTS):
        project = point.name if point.dist is None else point.dist.name
        try:
            _import_by_name(point.value)
            unavailable.pop(project, None)
        except NameTakenError:
            raise
        except Exception as error:  # whatever the code of the project raises
            text = f"The installed project {project} cannot be imported ({type(error).__name__}: {error}): its classes "
            text += f"are missing. Repair it, or remove it with `pip uninstall {project}`."
            if project not in unavailable:
                LOG.warning(text)
            unavailable[project] = text


def _import_by_name(name: str) -> None:
    missing = f"No module {name!r} to import. Name one that is installed or in this folder, or a .py file."
    if not all(part.isidentifier() for part in name.split(".")):
        raise UserCodeError(missing)
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # as `python -m` does, to find packages in the working directory
    try:
        compoconf.load(name, recurse=False)
    except ModuleNotFoundError as error:
        if f"{name}.".startswith(f"{error.name}."):
            raise UserCodeError(missing) from error
        raise  # the module exists, but an import inside it fails


def _import_file(file: Path) -> None:
    if not file.is_file():
        raise UserCodeError(f"File not found: {file}. It cannot be imported.")
    file, name = file.resolve(), file.stem
    if _is_name_in_use(name, file):
        raise UserCodeError(f"{file} cannot be imported as {name!r}: another module has this name. Rename the file.")
    if name in sys.modules:
        return
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their annotations up there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise


def _is_name_in_use(name: str, file: Path) -> bool:
    """Whether another module, imported or importable, has this name."""
    if name in sys.modules:
        origin = getattr(sys.modules[name], "__file__", None)
        return origin is None or Path(origin).resolve() != file
    spec = importlib.util.find_spec(name) if name.isidentifier() else None
    return spec is not None and spec.origin is not None and Path(spec.origin).resolve() != file
