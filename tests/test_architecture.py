"""Imports go downward: this table is the map, and no file may import past it."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src" / "jax_trainer"

# a package imports only from those before it
ORDER = [
    *("diagnostics", "config", "sharding", "core", "adapters", "metrics", "optimizer", "datasets", "engine", "logger"),
    *("checkpoint", "callbacks", "runs", "styles", "models", "trainer", "tools", "testing"),
]
NEVER = {
    "models": set(ORDER) - {"trainer", "tools", "models"},  # nothing that trains knows what
    "styles": {"trainer", "tools", "testing", "models"},  # the styles are beside each other
    "tools": set(ORDER) - {"tools"},
    "testing": set(ORDER) - {"testing"},
}
# shortcuts: a method that imports its tool when it is called
SHORTCUTS = {("styles/fit_result.py", "jax_trainer.tools.reports")}
IMPORTED_AS = {"pyyaml": "yaml", "orbax-checkpoint": "orbax"}  # others are imported by the name of their package
PROJECT = tomllib.loads((SOURCE.parents[1] / "pyproject.toml").read_text())["project"]
# absent from many installations, or slow to import: a function that needs one may import it
LATE = {"IPython", "PIL", "argcomplete", "etils", "grain", "matplotlib", "optuna", "orbax", "pyarrow"}
LATE |= {"safetensors", "tensorboardX", "tokenizers", "torch"}
LATE |= {"fsspec", "mlflow", "ray", "wandb"}
# slow to import, and not always needed: JAX, and classes that only files can name
LATE_MODULES = {
    ("tools/cli/main.py", "jax"),
    ("tools/cli/main.py", "jax_trainer.tools.cli"),
    *SHORTCUTS,
    ("trainer/experiment.py", "jax_trainer.optimizer"),
}
# optional dependencies at the top of a file
OPTIONAL = {"datasets/records.py": {"grain"}}
ONLY_JIT = {"core/compile.py", "tools/exporting/__init__.py"}  # what runs an export imports nothing that trains

FILES = {str(file.relative_to(SOURCE)): file.read_text() for file in sorted(SOURCE.rglob("*.py"))}


@cache
def tree(name: str) -> list[ast.AST]:
    return list(ast.walk(ast.parse(FILES[name])))


def imports(nodes: list[ast.AST]) -> Iterator[str]:
    """The modules that these nodes import, by their full names."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module or ""


def test_the_top_of_the_package_has_the_packages_of_the_map_and_nothing_else():
    files = (file.relative_to(SOURCE).parts for file in SOURCE.rglob("*") if file.is_file())
    entries = {parts[0] for parts in files if "__pycache__" not in parts}
    assert entries == {*ORDER, "configs", "__init__.py", "__init__.pyi", "__main__.py", "py.typed"}


def test_imports_go_downward():
    places = {name: place for place, name in enumerate(ORDER)}
    used = {
        (name, module)
        for name in FILES
        if "/" in name
        for module in imports(tree(name))
        if module.startswith("jax_trainer.")
    }
    upward = {
        (name, module)
        for name, module in used
        if places[module.split(".")[1]] > places[name.split("/")[0]]
        or name.split("/")[0] in NEVER.get(module.split(".")[1], ())
    }
    assert upward == SHORTCUTS


def test_packages_import_from_packages_and_not_from_the_top():
    assert [name for name in FILES if "/" in name and "jax_trainer" in imports(tree(name))] == []


def test_only_optional_and_slow_packages_are_imported_inside_functions_and_nothing_for_type_checking_only():
    scopes = ast.FunctionDef | ast.AsyncFunctionDef | ast.If
    # the files of all commands are imported for a help text: their functions import what needs JAX
    late = {name: {*LATE, "jax_trainer"} if name.startswith("tools/cli/commands/") else LATE for name in FILES}
    inner = [
        (name, module)
        for name in FILES
        for scope in tree(name)
        if isinstance(scope, scopes)
        for module in imports(list(ast.walk(scope)))
        if isinstance(scope, ast.If) or module.split(".")[0] not in late[name]
    ]
    assert set(inner) == LATE_MODULES


def test_only_the_core_dependencies_are_imported():
    names = {re.split(r"[^\w-]", requirement)[0] for requirement in PROJECT["dependencies"]}
    core = {IMPORTED_AS.get(name, name.replace("-", "_")) for name in names}
    allowed = {"jax_trainer", *core, *sys.stdlib_module_names}
    used = {(name, module.split(".")[0]) for name in FILES for module in imports(tree(name))}
    assert [(name, root) for name, root in sorted(used) if root not in allowed | LATE | OPTIONAL.get(name, set())] == []


def test_jit_is_called_in_one_file_for_training_and_one_for_serving():
    calls = {
        (name, node.attr)
        for name in FILES
        for node in tree(name)
        if isinstance(node, ast.Attribute) and node.attr in ("jit", "pmap", "pjit")
    }
    assert {name for name, _ in calls} == ONLY_JIT, calls


def test_the_inside_of_jax_is_read_in_one_file():
    private = r"\bjax\._src|\bjax\.extend|\bjax\.interpreters|\.source_info|\._lowering|\._impl\b|\.global_state"
    traced = r"hasattr\(.*\"(?:val|eqns)\"\)|\"(?:\w*_)?jaxpr\"|\"branches\"|\"num_(?:consts|carry)\"|\"ft_in\""
    used = {name: found for name, text in FILES.items() if (found := re.findall(f"{private}|{traced}", text))}
    assert used.keys() == {"diagnostics/jax_internals.py"}, used


def test_only_adapters_tell_the_kinds_of_models_apart():
    question = r"model_mode\s*[!=]=|\.mode\s*[!=]=|isinstance\([^)]*\bnnx?\.Module|issubclass\([^)]*\bnnx?\.Module"
    files = [name for name in FILES if name.startswith(("trainer/", "styles/"))]
    assert {name: asked for name in files if (asked := re.findall(question, FILES[name]))} == {}


def test_the_library_makes_no_unsafe_call():
    unsafe = r"pickle|(?<![.\w])(?:eval|exec)\(|yaml\.load|full_load|import_module|extractall|shell=True"
    texts = {name: text.replace("allow_pickle=False", "") for name, text in FILES.items()}
    # imports the names of its own table when they are used
    texts["__init__.py"] = texts["__init__.py"].replace("importlib.import_module", "")
    # imports the files in its own folder
    texts["tools/cli/main.py"] = texts["tools/cli/main.py"].replace("importlib.import_module(_found.name)", "")
    assert {name: calls for name, text in texts.items() if (calls := re.findall(unsafe, text))} == {}


def test_a_package_states_its_purpose():
    docs = {package: ast.get_docstring(ast.parse(FILES[f"{package}/__init__.py"])) for package in ORDER}
    assert [package for package, text in docs.items() if len(text or "") <= 40] == []
