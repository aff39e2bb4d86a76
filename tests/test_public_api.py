"""What is exported is documented and annotated, and importing it costs and does little."""

import importlib
import inspect
import pkgutil
import runpy
import subprocess
import sys
import textwrap
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import jax_trainer


@cache
def public_modules() -> dict[str, ModuleType]:
    """Every package, and every module with `__all__`."""
    names = [found.name for found in pkgutil.walk_packages(jax_trainer.__path__, "jax_trainer.")]
    modules = {name: importlib.import_module(name) for name in names if not name.endswith("__main__")}
    return {"jax_trainer": jax_trainer} | {name: one for name, one in modules.items() if hasattr(one, "__all__")}


def exported() -> dict[str, Any]:
    return {f"{path}.{name}": getattr(one, name) for path, one in public_modules().items() for name in one.__all__}


def test_every_package_exports_names():
    packages = {f"jax_trainer.{found.name}" for found in pkgutil.iter_modules(jax_trainer.__path__) if found.ispkg}
    private = {"core", "diagnostics", "runs", "tools"}
    assert packages - set(public_modules()) == {f"jax_trainer.{name}" for name in private}


def test_exports_are_sorted_and_unique():
    """Constants, classes, then functions, as the linter sorts them."""
    order = lambda name: (not name.isupper(), not name[0].isupper(), name)
    of = {path: list(module.__all__) for path, module in public_modules().items()}
    assert {path: names for path, names in of.items() if names != sorted(set(names), key=order)} == {}


def test_a_star_import_leaves_the_nnx_of_flax_in_place():
    names: dict[str, Any] = {}
    exec("from flax import nnx\nfrom jax_trainer import *\nfrom jax_trainer import nnx as ours", names)
    assert names["nnx"].__name__ == "flax.nnx" and "fit" in names and names["ours"].__name__.startswith("jax_trainer.")


def test_what_is_exported_exists_and_is_documented():
    own = {
        path: vars(thing).get("__doc__") if inspect.isclass(thing) else thing.__doc__
        for path, thing in exported().items()
        if inspect.isclass(thing) or inspect.isfunction(thing)
    }
    assert [path for path, text in own.items() if not text] == []


def test_public_methods_of_exported_classes_are_documented_by_them_or_by_what_they_override():
    classes = {thing for thing in exported().values() if inspect.isclass(thing)}
    undocumented = [
        f"{one.__module__}.{one.__qualname__}.{name}"
        for one in classes
        if one.__module__.startswith("jax_trainer")
        for name, method in vars(one).items()
        if not name.startswith("_") and (inspect.isfunction(method) or isinstance(method, property | classmethod))
        if name not in getattr(one, "__dataclass_fields__", {})  # a function as a default
        if not inspect.getdoc(getattr(one, name))
    ]
    assert undocumented == []


def test_exported_functions_are_annotated():
    signatures = {path: inspect.signature(thing) for path, thing in exported().items() if inspect.isfunction(thing)}
    bare = [
        f"{path}({parameter.name})"
        for path, signature in signatures.items()
        for parameter in signature.parameters.values()
        if parameter.annotation is parameter.empty
    ]
    assert bare == []
    assert [path for path, one in signatures.items() if one.return_annotation is one.empty] == []


def test_importing_loads_no_part_until_it_is_used_no_optional_tool_and_no_device():
    script = """
    import sys, threading
    import jax_trainer
    loaded = {name for name in sys.modules if name.startswith("jax_trainer.") or name == "jax"}
    assert loaded == {"jax_trainer.diagnostics", "jax_trainer.diagnostics.optional_import"}
    assert set(jax_trainer.__all__) <= set(dir(jax_trainer))
    assert jax_trainer.config.settings.Settings and "jax" not in sys.modules
    assert jax_trainer.fit is jax_trainer.styles.fit
    assert not hasattr(jax_trainer, "fitt")

    from jax_trainer import *
    heavy = {"torch", "tensorboardX", "tensorboard", "wandb", "matplotlib", "optuna", "grain", "orbax", "keras"}
    assert not heavy & set(sys.modules), heavy & set(sys.modules)
    assert threading.active_count() == 1
    from jax._src import xla_bridge
    assert not xla_bridge._backends, "a device was initialised"
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_type_checkers_read_the_one_list_of_public_names():
    module = runpy.run_path(str(Path(__file__).parent.parent / "scripts" / "write_stub.py"))
    for file, text in module["STUBS"].items():
        assert file.read_text() == text(), "Run `python scripts/write_stub.py`."
