"""Tab completion of the command line: configurations, keys, values and class names. It imports no JAX.

What can be completed is the JSON Schema of configuration files. It is computed once per version of the code, by
`jax-trainer schema`, and kept in the user's cache folder, because JAX takes longer to import than one waits for a key.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from jax_trainer.config.files import read_tree, ready_names
from jax_trainer.config.loading import ENTRY_POINTS
from jax_trainer.config.problems import ConfigError, Location, Node, Problems
from jax_trainer.diagnostics.files import write_atomically
from jax_trainer.tools.cli.main import parser

Schema = dict[str, Any]
_SOURCE = Path(__file__).parents[2]  # all of the package
_PATIENCE = 60.0  # seconds


def complete() -> None:
    """Answers the shell that asks for completions, and exits."""
    import argcomplete
    from argcomplete.completers import DirectoriesCompleter, FilesCompleter

    yaml_files, folders = FilesCompleter(("yaml", "yml")), DirectoriesCompleter()
    completers = {
        "config": lambda prefix, **_: [*ready_names(), *yaml_files(prefix)],
        "changes": _changes,
        "names": lambda prefix, **_: class_names(schema()),
        "folder": lambda prefix, **_: folders(prefix),
    }
    root = parser()
    commands = next(one for one in root._actions if isinstance(one, argparse._SubParsersAction))
    for command in commands.choices.values():
        for action in command._actions:  # argparse has no public way to them
            if action.dest in completers:
                action.completer = completers[action.dest]  # type: ignore[attr-defined]
    argcomplete.autocomplete(root)


def schema() -> Schema:
    """The JSON Schema of configuration files, from the cache folder; computed if this code has none there yet."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "jax_trainer"
    file = folder / f"schema-{_digest_of_the_code()}.json"
    if not file.is_file():
        command = [sys.executable, "-m", "jax_trainer", "schema", "--json"]
        environment = {name: value for name, value in os.environ.items() if name != "_ARGCOMPLETE"}
        done = subprocess.run(command, env=environment, capture_output=True, check=True, timeout=_PATIENCE)
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob("schema-*.json"):
            old.unlink(missing_ok=True)
        write_atomically(file, done.stdout.decode())
    return json.loads(file.read_text(encoding="utf-8"))


def _digest_of_the_code() -> str:
    """Changes with every source file of ours and of the installed projects that register classes."""
    specs = [find_spec(point.value.partition(".")[0]) for point in entry_points(group=ENTRY_POINTS)]
    folders = [_SOURCE, *(Path(spec.origin).parent for spec in specs if spec is not None and spec.origin)]
    files = (file for folder in folders for file in sorted(folder.rglob("*.py")))
    return hashlib.sha256("".join(f"{file}{file.stat().st_mtime_ns}" for file in files).encode()).hexdigest()[:16]


def _changes(prefix: str, parsed_args: argparse.Namespace, **_: Any) -> list[str]:
    """The overrides and files that continue a word, by the values of the file and of the overrides before it."""
    from argcomplete.completers import FilesCompleter

    folder, command = getattr(parsed_args, "folder", None), getattr(parsed_args, "command", "")
    path = Path(getattr(parsed_args, "config", None) or "") if folder is None else Path(folder) / "config.yaml"
    given = [one for one in getattr(parsed_args, "changes", None) or () if "=" in one]
    try:
        tree = read_tree(path, given, Problems(), may_include=folder is None)
    except ConfigError:  # it cannot be read yet
        tree = Node({}, Location(""))
    words = {"resume=auto": ("train", "launch"), "allow_changes=": ("train", "launch", "resume")}
    own = [word for word, commands in words.items() if command in commands]
    return [*keys_and_values(schema(), tree, prefix), *own, *FilesCompleter(("py",))(prefix)]


def keys_and_values(document: Schema, tree: Node, prefix: str) -> list[str]:
    """The overrides that continue `prefix`: keys with their `=`, or after it, values.

    Args:
        document: the JSON Schema of configuration files.
        tree: the values of the file; its class names select the keys of a section.
        prefix: the word so far.
    """
    path, equals, _ = prefix.partition("=")
    *above, last = path.split(".")
    if equals:
        sections = _sections(document, tree, above, any_class=last == "class_name")
        kinds = [kind for one in sections for kind in _kinds(document, one["properties"].get(last, {}))]
        values = [("true", "false") if kind.get("type") == "boolean" else kind.get("enum", ()) for kind in kinds]
        return sorted({f"{path}={value}" for some in values for value in some if isinstance(value, str)})
    here, found = tree.at(".".join(above)), set[str]()
    named = [] if here is None or not here.is_section else [name for name, _ in here.children()]
    for one in _sections(document, tree, above):
        for name in (name for name in {*_names(document, one), *named} if name.startswith(last)):
            key = ".".join([*above, name])
            inner = _sections(document, tree, [*above, name])
            found |= {f"{key}.{child}=" for part in inner for child in _names(document, part)}
            if not inner or any("type" in kind for kind in _kinds(document, one["properties"].get(name, {}))):
                found.add(f"{key}=")
    return sorted(found)


def class_names(document: Schema) -> list[str]:
    """The names of all classes that a file can name."""
    return sorted({name for one in document["$defs"].values() for name in _class_of(one)})


def _sections(document: Schema, tree: Node, path: Sequence[str], *, any_class: bool = False) -> list[Schema]:
    """What the section at `path` can be: of the class that the file names there, or else of all of them."""
    found = [document]
    for depth, name in enumerate(path, 1):
        members = [one["properties"].get(name) or one.get("additionalProperties") for one in found]
        found = [kind for member in members for kind in _kinds(document, member) if "properties" in kind]
        node = tree.at(".".join([*path[:depth], "class_name"]))
        chosen = name if node is None else node.data()  # a callback is named by its key
        if not (any_class and depth == len(path)):
            found = [one for one in found if chosen in _class_of(one)] or found
    return found


def _names(document: Schema, section: Schema) -> list[str]:
    """The keys of a section; for one whose keys are free, the classes that can be below them."""
    others = _kinds(document, section.get("additionalProperties"))
    classes = [name for kind in others for name in _class_of(kind)]
    return [*section["properties"], *classes]


def _kinds(document: Schema, schema: Any) -> Iterator[Schema]:
    """The alternatives of a schema, with references resolved; `${…}` is none of them, nor "no other keys"."""
    if not isinstance(schema, dict):
        return
    if "$ref" in schema:
        yield from _kinds(document, document["$defs"][schema["$ref"].rpartition("/")[2]])
    elif "anyOf" in schema and "properties" not in schema:
        for one in schema["anyOf"]:
            yield from _kinds(document, one)
    elif schema.get("type") == "object":
        yield {"properties": {}, **{name: value for name, value in schema.items() if name != "type"}}
    elif schema and "pattern" not in schema and "not" not in schema:
        yield schema


def _class_of(section: Schema) -> list[str]:
    return section.get("properties", {}).get("class_name", {}).get("enum", [])
