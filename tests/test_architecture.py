"""Imports go downward: this table is the map, and no file may import past it."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src" / "jax_trainer"

MAY_IMPORT = {
    "core": {"compilation_cache", "jax_internals", "optional_import", "suggestions"},
    "adapters": {"core", "settings", "registration"},
    "metrics": {"core", "settings", "suggestions"},
    "optimizer": {"core", "settings"},
    "datasets": {"output", "core", "settings", "storage", "suggestions"},
    "models": {"core", "interfaces", "settings"},
    "generative": {"core", "models", "settings"},
    "engine": {"core", "datasets", "settings", "stop_signals"},
    "logger": {"output", "core", "json_values", "settings", "storage"},
    "checkpoint": {"output", "core", "datasets", "jax_internals", "settings"},
    "mirror": {"core", "checkpoint", "settings", "storage"},
    "multihost": {"core", "datasets", "checkpoint", "engine", "jax_internals", "stop_signals"},
    "callbacks": {
        *("core", "jax_internals", "output", "settings", "suggestions", "engine", "logger", "checkpoint", "datasets"),
        "optimizer",
    },
    "runs": {
        *("core", "multihost", "settings", "config", "engine", "logger", "checkpoint", "callbacks", "datasets"),
        *("mirror", "optimizer", "output", "redaction", "registration", "storage", "suggestions"),
    },
    "predicting": {"core", "checkpoint", "datasets", "engine", "json_values", "runs"},
    "styles": {
        *("core", "interfaces", "settings", "adapters", "engine", "optimizer", "datasets", "models", "logger"),
        *("checkpoint", "callbacks", "metrics", "mirror", "predicting", "reports", "runs", "output", "redaction"),
        *("storage", "suggestions"),
    },
    "config": {"settings", "redaction", "registration", "suggestions"},
    "reports": {"checkpoint", "output", "redaction", "settings", "suggestions"},
    "trainer": {
        *("core", "interfaces", "settings", "adapters", "engine", "optimizer", "datasets", "models", "logger"),
        *("checkpoint", "callbacks", "metrics", "mirror", "predicting", "runs", "config", "generative", "output"),
        *("registration", "storage", "suggestions"),
    },
    "pretrained": {
        *("core", "adapters", "checkpoint", "config", "datasets", "models", "settings", "suggestions", "trainer"),
    },
    "exporting": {
        *("core", "checkpoint", "compilation_cache", "config", "datasets", "jax_internals", "json_values"),
        *("optional_import", "predicting", "pretrained", "suggestions", "trainer"),
    },
    "tuning": {
        "output",
        "core",
        "settings",
        "redaction",
        "config",
        "trainer",
        "callbacks",
        "checkpoint",
        "suggestions",
    },
    "cli": {
        *("core", "interfaces", "settings", "config", "trainer", "tuning", "datasets", "models", "optimizer"),
        *("checkpoint", "multihost", "runs", "output", "redaction", "registration", "reports"),
        *("exporting", "json_values", "launching", "mirror", "optional_import", "pretrained", "stop_signals"),
        *("storage", "suggestions"),
    },
    "launching": {"multihost", "optional_import", "stop_signals"},
    "testing": {"core", "engine", "adapters", "datasets"},
}
IMPORTED_AS = {"pyyaml": "yaml", "orbax-checkpoint": "orbax"}  # others are imported by the name of their package
PROJECT = tomllib.loads((SOURCE.parents[1] / "pyproject.toml").read_text())["project"]
# absent from many installations, or slow to import: a function that needs one may import it
LATE = {"IPython", "PIL", "argcomplete", "etils", "grain", "matplotlib", "optuna", "orbax", "pyarrow"}
LATE |= {"rouge_score", "sacrebleu", "safetensors", "tensorboardX", "tokenizers", "torch"}
LATE |= {"fsspec", "mlflow", "ray", "wandb"}
# slow to import, and not always needed: JAX, and classes that only files can name
LATE_MODULES = {
    ("cli/main.py", "jax"),
    ("cli/main.py", "jax_trainer.cli"),
    ("exporting/__init__.py", "jax_trainer.exporting"),
    ("trainer/experiment.py", "jax_trainer.optimizer"),
}
# optional dependencies at the top of a file
OPTIONAL = {"datasets/records.py": {"grain"}}
ONLY_JIT = {"core/compile.py", "exporting/artifact.py"}  # what runs an export imports nothing that trains

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


def test_the_table_names_every_package():
    packages = {folder.name for folder in SOURCE.iterdir() if (folder / "__init__.py").exists()}
    assert packages == set(MAY_IMPORT)


def test_imports_go_downward():
    used = {
        (name, module.split(".")[1])
        for name in FILES
        if "/" in name
        for module in imports(tree(name))
        if module.startswith("jax_trainer.")
    }
    packages = {name: name.split("/")[0] for name in FILES}
    assert [(name, one) for name, one in sorted(used) if one not in {packages[name], *MAY_IMPORT[packages[name]]}] == []


def test_packages_import_from_packages_and_not_from_the_top():
    assert [name for name in FILES if "/" in name and "jax_trainer" in imports(tree(name))] == []


def test_only_optional_and_slow_packages_are_imported_inside_functions_and_nothing_for_type_checking_only():
    scopes = ast.FunctionDef | ast.AsyncFunctionDef | ast.If
    # the files of all commands are imported for a help text: their functions import what needs JAX
    late = {name: {*LATE, "jax_trainer"} if name.startswith("cli/commands/") else LATE for name in FILES}
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
    assert used.keys() == {"jax_internals.py"}, used


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
    texts["cli/main.py"] = texts["cli/main.py"].replace("importlib.import_module(_found.name)", "")
    assert {name: calls for name, text in texts.items() if (calls := re.findall(unsafe, text))} == {}


def test_a_package_states_its_purpose():
    docs = {package: ast.get_docstring(ast.parse(FILES[f"{package}/__init__.py"])) for package in MAY_IMPORT}
    assert [package for package, text in docs.items() if len(text or "") <= 40] == []
