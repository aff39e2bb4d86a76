"""Reads a file and the command line into one tree of values: includes, then overrides, then references."""

import codecs
import os
import re
import stat
from collections.abc import Sequence
from pathlib import Path

from jax_trainer.config.nodes import BROKEN, Node, merged
from jax_trainer.config.problems import ConfigError, Location, Problems, shown
from jax_trainer.config.references import resolved
from jax_trainer.config.yaml_text import MAX_BYTES, MAX_DEPTH, key_problem, parse
from jax_trainer.suggestions import suggestion

INCLUDE = "include"
MAX_FILES = 20

_OVERRIDE = re.compile(r"(?P<path>[^=\s]+?)=(?P<value>.*)", re.DOTALL)


def read_tree(file: Path, overrides: Sequence[str], problems: Problems, *, may_include: bool = True) -> Node:
    """The values of a file with its includes, overrides applied and references resolved.

    Problems are added to `problems`; raises if the rest cannot be read.
    """
    tree = _Files(problems, may_include).read(file, Location(str(file)))
    return resolved(overridden(tree, overrides, problems), problems)


def read_dotted(file: Path, problems: Problems) -> Node:
    """The values of a file whose top-level keys are dotted paths, without includes, overrides and references."""
    return parse(_Files(problems, may_include=False).text(file, Location(str(file))), str(file), problems, dotted=True)


class _Files:
    """Reads a file and its includes, within limits on the number of files and their total size."""

    def __init__(self, problems: Problems, may_include: bool) -> None:
        self._problems, self._may_include = problems, may_include
        self._files, self._bytes_left = 0, MAX_BYTES

    def read(self, file: Path, included_at: Location, above: tuple[Path, ...] = ()) -> Node:
        """The values of `file`, which is included at `included_at`; `above` are the files that include it."""
        real = Path(os.path.realpath(str(file).replace("\0", "?")))
        self._files += 1
        if real in above:
            chain = " includes ".join(path.name for path in (*above[above.index(real) :], real))
            raise self._fatal(included_at, INCLUDE, f"Circular include: {chain}.")
        if self._files > MAX_FILES:
            raise self._fatal(included_at, INCLUDE, f"More than {MAX_FILES} files are included.")
        is_own = not above and self._may_include  # named on the command line, where it may be a pipe
        tree = parse(self.text(file, included_at, any_kind=is_own), str(file), self._problems)
        if not tree.is_section:
            # the content is not shown: a link may point at a private file
            found = "nothing" if tree.value is None else "a list" if isinstance(tree.value, list) else "a single value"
            raise self._fatal(tree.location, "", f"expected keys and values, found {found}.")
        own = Node({name: node for name, node in tree.section.items() if name != INCLUDE}, tree.location)
        bases = tree.section.get(INCLUDE, Node([], tree.location))
        if INCLUDE in tree.section and not self._may_include:
            raise self._fatal(bases.location, INCLUDE, "a stored configuration cannot include other files.")
        result = Node({}, own.location)
        for base in bases.value if isinstance(bases.value, list) else [bases]:
            result = merged(result, self.read(file.parent / self._name(base), base.location, (*above, real)))
        return merged(result, own)

    def _name(self, node: Node) -> str:
        if isinstance(node.value, str) and node.value.isprintable() and node.value.endswith((".yaml", ".yml")):
            return node.value
        text = f"expected the name of a .yaml file, or a list of them, found {shown(node.data())}."
        raise self._fatal(node.location, INCLUDE, text)

    def text(self, file: Path, included_at: Location, *, any_kind: bool = True) -> str:
        """The text of `file`, which is included at `included_at`; with `any_kind`, also of a pipe."""
        try:
            with open(file, "rb", opener=None if any_kind else _open_at_once) as stream:
                if not (any_kind or stat.S_ISREG(os.fstat(stream.fileno()).st_mode)):
                    text = f"{file} cannot be read: it is a pipe or a device. Include a regular file."
                    raise self._fatal(included_at, "", text)
                data = stream.read(MAX_BYTES + 1)
        except FileNotFoundError:
            near = suggestion(file.name, [other.name for other in file.parent.glob("*.y*ml")])
            raise self._fatal(included_at, "", f"File not found: {file}.{near}") from None
        except ConfigError:
            raise
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise self._fatal(included_at, "", f"{file} cannot be read: {reason}.") from None
        self._bytes_left -= len(data)
        if self._bytes_left < 0:
            name = f"{file}, with its includes," if self._files > 1 else str(file)
            text = f"{name} is larger than {MAX_BYTES:,} bytes. A configuration is a few pages at most."
            raise self._fatal(included_at, "", text)
        try:
            return data.removeprefix(codecs.BOM_UTF8).decode("utf-8")
        except UnicodeDecodeError as error:
            line = data[: error.start].count(b"\n") + 1
            text = f"This is not UTF-8 text: {error.reason} at byte {error.start}. Save the file as UTF-8."
            raise self._fatal(Location(str(file), line), "", text) from None

    def _fatal(self, location: Location, key: str, text: str) -> ConfigError:
        self._problems.add(location, key, text)
        return self._problems.error()


def _open_at_once(path: str, flags: int) -> int:
    """Opens a file without blocking, even if it is a pipe without a writer."""
    return os.open(path, flags | os.O_NONBLOCK)


def overridden(tree: Node, overrides: Sequence[str], problems: Problems) -> Node:
    """`tree` with each override `path.to.key=value` applied; values are parsed as in a file."""
    location = Location("command line")
    for override in overrides:
        match = _OVERRIDE.fullmatch(override)
        if match is None:
            key = re.split(r"[=:\s]", override, maxsplit=1)[0]
            problems.add(location, "", f"expected `path.to.key=value`, found {shown(override, key)}.")
            continue
        path, names = match["path"], match["path"].split(".")
        problem = _path_problem(tree, names)
        if problem:
            problems.add(location, path, problem)
        else:
            tree = _put(tree, names, _override_value(match["value"], path, location, problems))
    return tree


def _override_value(text: str, path: str, location: Location, problems: Problems) -> Node:
    own = Problems()
    try:
        value = parse(text, location.source, own, numbered=False).value
    except ConfigError:
        value = BROKEN
    for problem in own:
        problems.add(location, f"{path}.{problem.key}".rstrip("."), problem.text)
    return Node(value, location)


def _path_problem(tree: Node, names: Sequence[str]) -> str:
    """Why a value cannot be set at this path; "" if it can."""
    if len(names) > MAX_DEPTH:
        return f"the path has more than {MAX_DEPTH} parts."
    holder: Node | None = tree
    for name in names:
        if not name:
            return "the path has an empty part."
        if key_problem(name):
            return key_problem(name)
        if holder is not None and isinstance(holder.value, list) and holder.child(name) is None:
            return f"item {name!r} is out of range: the list at {holder.location} has {len(holder.value)} items."
        if holder is not None and not isinstance(holder.value, dict | list | None):
            return f"`{name}` cannot be set inside a scalar ({holder.location}). Override the scalar itself."
        holder = holder.child(name) if holder is not None else None
    return ""


def _put(tree: Node, names: Sequence[str], node: Node) -> Node:
    if not names:
        return node
    name, *rest = names
    return tree.with_child(name, _put(tree.child(name) or Node({}, node.location), rest, node))
