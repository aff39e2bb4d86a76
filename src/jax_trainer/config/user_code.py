"""Brings in classes of the user's: because a person asks for it, never because a file says so."""

import importlib.util
import sys
from pathlib import Path

import compoconf


class UserCodeError(ImportError):
    """Code that was asked for and cannot be imported."""


def import_user_code(what: str | Path) -> None:
    """Imports a module by name (`my_package.models`) or a `.py` file, so that the classes in it are registered."""
    if str(what).endswith(".py"):
        _import_file(Path(what))
    else:
        _import_by_name(str(what))


def _import_by_name(name: str) -> None:
    missing = f"There is no module {name!r} to import. Give one that is installed or in this folder, or a .py file."
    if not all(part.isidentifier() for part in name.split(".")):
        raise UserCodeError(missing)
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # as `python -m` does: the package beside the configuration is found
    try:
        compoconf.load(name, recurse=False)
    except ModuleNotFoundError as error:
        if f"{name}.".startswith(f"{error.name}."):
            raise UserCodeError(missing) from error
        raise  # the module is there, and something that it needs is not


def _import_file(file: Path) -> None:
    if not file.is_file():
        raise UserCodeError(f"There is no file {file} to import.")
    file, name = file.resolve(), file.stem
    if _is_taken(name, file):
        raise UserCodeError(f"{file} would be imported as {name!r}, which is another module. Rename the file.")
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


def _is_taken(name: str, file: Path) -> bool:
    """Whether another module has this name: one that is imported, or one that would be."""
    if name in sys.modules:
        origin = getattr(sys.modules[name], "__file__", None)
        return origin is None or Path(origin).resolve() != file
    spec = importlib.util.find_spec(name) if name.isidentifier() else None
    return spec is not None and spec.origin is not None and Path(spec.origin).resolve() != file
