"""Imports go downward: this table is the map, and no file may import past it."""

import ast
import re
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "jax_trainer"

MAY_IMPORT = {
    "processes": set(),
    "core": set(),
    "adapters": {"core", "interfaces"},
    "optimizer": {"core", "settings"},
    "datasets": {"core", "processes", "settings", "suggestions"},
    "models": {"core", "interfaces", "settings"},
    "generative": {"core", "models", "settings"},
    "engine": {"core", "datasets", "processes", "settings"},
    "logger": {"core", "settings"},
    "checkpoint": {"core", "datasets", "processes", "settings"},
    "callbacks": {
        *("core", "processes", "settings", "suggestions", "engine", "logger", "checkpoint", "datasets", "optimizer"),
    },
    "runs": {
        *("core", "processes", "settings", "config", "engine", "logger", "checkpoint", "callbacks", "datasets"),
    },
    "styles": {
        *("core", "interfaces", "settings", "adapters", "engine", "optimizer", "datasets", "models", "logger"),
        *("checkpoint", "callbacks", "processes", "runs", "redaction", "suggestions"),
    },
    "config": {"settings", "redaction", "registration", "suggestions"},
    "trainer": {
        *("core", "interfaces", "settings", "adapters", "engine", "optimizer", "datasets", "models", "logger"),
        *("checkpoint", "callbacks", "processes", "runs", "config", "generative", "registration", "suggestions"),
    },
    "tuning": {"core", "settings", "redaction", "config", "trainer", "callbacks", "checkpoint", "suggestions"},
    "cli": {
        *("core", "interfaces", "settings", "config", "trainer", "tuning", "datasets", "models", "optimizer"),
        *("checkpoint", "processes", "runs", "redaction", "registration", "suggestions"),
    },
    "testing": {"core", "engine", "adapters", "datasets"},
}
CORE_DEPENDENCIES = {
    *("compoconf", "jax", "flax", "jaxtyping", "optax", "numpy", "orbax", "rich", "yaml"),
    "jax_trainer",
}
# optional dependencies are imported only in these files
OPTIONAL = {"datasets/records.py": {"grain"}, "datasets/stream.py": {"cloudpickle"}}
ONLY_JIT = SOURCE / "core" / "compile.py"

FILES = sorted(SOURCE.rglob("*.py"))
PACKAGE_FILES = [file for file in FILES if file.parent != SOURCE]


def imports(file: Path) -> set[str]:
    nodes = list(ast.walk(ast.parse(file.read_text())))
    plain = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return plain | {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom) and not node.level}


def name_of(file: Path) -> str:
    return str(file.relative_to(SOURCE))


def test_the_table_names_every_package():
    packages = {folder.name for folder in SOURCE.iterdir() if (folder / "__init__.py").exists()}
    assert packages == set(MAY_IMPORT)


@pytest.mark.parametrize("file", PACKAGE_FILES, ids=name_of)
def test_imports_go_downward(file: Path):
    package = file.relative_to(SOURCE).parts[0]
    used = {name.split(".")[1] for name in imports(file) if name.startswith("jax_trainer.")}
    assert used - {package} <= MAY_IMPORT[package]
    assert "jax_trainer" not in imports(file), "import from a subpackage, not from `jax_trainer`"


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_nothing_is_imported_inside_a_function_or_for_type_checking_only(file: Path):
    tree = ast.parse(file.read_text())
    inner = [
        node
        for scope in ast.walk(tree)
        if isinstance(scope, ast.FunctionDef | ast.If)
        for node in ast.walk(scope)
        if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    assert not inner


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_only_the_core_dependencies_are_imported(file: Path):
    roots = {name.split(".")[0] for name in imports(file)}
    assert roots <= CORE_DEPENDENCIES | set(sys.stdlib_module_names) | OPTIONAL.get(name_of(file), set())


@pytest.mark.parametrize("file", [file for file in FILES if file != ONLY_JIT], ids=name_of)
def test_jit_is_called_in_one_file_only(file: Path):
    calls = [
        node.attr
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in ("jit", "pmap", "pjit")
    ]
    assert not calls


@pytest.mark.parametrize(
    "file", [f for f in FILES if name_of(f).startswith(("trainer/", "styles/fitting/"))], ids=name_of
)
def test_only_adapters_tell_the_kinds_of_models_apart(file: Path):
    question = r"model_mode\s*[!=]=|\.mode\s*[!=]=|isinstance\([^)]*\bnnx?\.Module|issubclass\([^)]*\bnnx?\.Module"
    assert not re.findall(question, file.read_text())


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_the_library_makes_no_unsafe_call(file: Path):
    unsafe = r"pickle|(?<![.\w])(eval|exec)\(|yaml\.load|full_load|import_module|extractall|shell=True"
    text = file.read_text().replace("allow_pickle=False", "")
    if name_of(file) == "datasets/stream.py":  # sends functions to worker processes that it has started
        text = text.replace("cloudpickle", "")
    assert not re.findall(unsafe, text)


@pytest.mark.parametrize("package", sorted(MAY_IMPORT))
def test_a_package_states_its_purpose(package: str):
    assert len(ast.get_docstring(ast.parse((SOURCE / package / "__init__.py").read_text())) or "") > 40


def test_the_slow_twins_exist():
    lines = (Path(__file__).parent / "slow_twins.txt").read_text().splitlines()
    functions = {line.split("[")[0] for line in lines if not line.startswith("#")}
    for function in functions:
        file, name = function.split("::")
        assert f"def {name}(" in (Path(__file__).parents[1] / file).read_text()
