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
        return
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # as `python -m` does: the package beside the configuration is found
    try:
        compoconf.load(str(what))
    except ModuleNotFoundError as error:
        raise UserCodeError(
            f"There is no module {error.name!r} to import. Give a module that is installed or in this folder, "
            "or the path of a .py file."
        ) from error


def _import_file(file: Path) -> None:
    if not file.is_file():
        raise UserCodeError(f"There is no file {file} to import.")
    name = file.stem
    known = sys.modules.get(name)
    if known is not None:
        if Path(getattr(known, "__file__", None) or "").resolve() == file.resolve():
            return
        raise UserCodeError(f"{file} would be imported as {name!r}, which is another module. Rename the file.")
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
