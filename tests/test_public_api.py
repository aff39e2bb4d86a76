"""What is exported is documented and annotated, and importing it costs and does little."""

import ast
import importlib
import inspect
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import jax_trainer

ROOMS = [
    *("core", "adapters", "engine", "datasets", "optimizer", "models", "logger", "checkpoint", "callbacks", "config"),
    *("trainer", "tuning", "cli", "testing"),
]
MODULES = ["jax_trainer", *(f"jax_trainer.{room}" for room in ROOMS), "jax_trainer.datasets.examples"]


def exported() -> list[tuple[str, str]]:
    return [(module, name) for module in MODULES for name in importlib.import_module(module).__all__]


@pytest.mark.parametrize(("module", "name"), exported())
def test_an_exported_name_exists_and_is_documented(module: str, name: str):
    thing = getattr(importlib.import_module(module), name)
    if inspect.isclass(thing) or inspect.isfunction(thing):
        own = thing.__dict__.get("__doc__") if inspect.isclass(thing) else thing.__doc__
        assert own, f"{module}.{name} has no docstring"


def test_public_methods_of_exported_classes_are_documented_by_them_or_by_what_they_override():
    things = [getattr(importlib.import_module(module), name) for module, name in exported()]
    classes = {thing for thing in things if inspect.isclass(thing)}
    undocumented = [
        f"{one.__module__}.{one.__qualname__}.{name}"
        for one in classes
        if one.__module__.startswith("jax_trainer")
        for name, method in vars(one).items()
        if not name.startswith("_") and (inspect.isfunction(method) or isinstance(method, property | classmethod))
        if not inspect.getdoc(getattr(one, name))
    ]
    assert undocumented == []


@pytest.mark.parametrize(("module", "name"), exported())
def test_an_exported_function_is_annotated(module: str, name: str):
    thing = getattr(importlib.import_module(module), name)
    if not inspect.isfunction(thing):
        return
    signature = inspect.signature(thing)
    bare = [p.name for p in signature.parameters.values() if p.annotation is p.empty]
    assert not bare
    assert signature.return_annotation is not signature.empty


@pytest.mark.parametrize("module", MODULES)
def test_exports_are_sorted_and_unique(module: str):
    names = importlib.import_module(module).__all__
    assert len(set(names)) == len(names)


def test_importing_the_package_loads_no_part_of_it_until_it_is_used():
    script = """
    import sys
    import jax_trainer
    assert not [name for name in sys.modules if name.startswith("jax_trainer.") or name == "jax"]
    assert set(jax_trainer.__all__) <= set(dir(jax_trainer))
    assert jax_trainer.settings.Settings and "jax" not in sys.modules
    assert jax_trainer.fit is jax_trainer.styles.fit
    assert not hasattr(jax_trainer, "fitt")
    """
    assert run_script(script) == ""


def test_type_checkers_read_the_same_names():
    stub = ast.parse(Path(jax_trainer.__file__).with_suffix(".pyi").read_text())
    imported = {
        alias.asname or alias.name: (node.module, alias.name)
        for node in stub.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert {*imported, "__version__"} == set(jax_trainer.__all__)
    for name, (module, original) in imported.items():
        assert getattr(importlib.import_module(module or ""), original) is getattr(jax_trainer, name)


def test_importing_loads_no_optional_tool_and_touches_no_device():
    script = """
    import sys, threading
    from jax_trainer import *
    heavy = {"torch", "tensorboardX", "tensorboard", "wandb", "matplotlib", "optuna", "grain", "orbax", "keras"}
    assert not heavy & set(sys.modules), heavy & set(sys.modules)
    assert threading.active_count() == 1
    from jax._src import xla_bridge
    assert not xla_bridge._backends, "a device was initialised"
    """
    assert run_script(script) == ""


def run_script(script: str) -> str:
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    return done.stderr if done.returncode else ""
