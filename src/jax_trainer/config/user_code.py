"""Imports user code that registers classes: only on explicit request, never because a file asks for it."""

import importlib.util
import sys
from pathlib import Path

import compoconf


class UserCodeError(ImportError):
    """User code that cannot be imported."""


def import_user_code(what: str | Path) -> None:
    """Imports a module by name (`my_package.models`) or a `.py` file, which registers its classes."""
    if str(what).endswith(".py"):
        _import_file(Path(what))
    else:
        _import_by_name(str(what))


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
