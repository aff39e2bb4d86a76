"""Reads a file and the command line into one tree of values: includes, then overrides, then references."""

import codecs
import os
import re
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from jax_trainer.config.problems import BROKEN, Broken, ConfigError, Location, Node, Problems, Scalar, merged, shown
from jax_trainer.config.settings import written
from jax_trainer.config.yaml_text import MAX_BYTES, MAX_DEPTH, key_problem, parse
from jax_trainer.diagnostics.suggestions import suggestion

FOLDER = Path(__file__).parents[1] / "configs"
SPACES = FOLDER / "spaces"
_FACT = re.compile(r"^# (Data|Device|Expected): (.+?)(?: on two CPU cores.*)?[.,]?$", re.MULTILINE)


@dataclass(frozen=True)
class ReadyConfig:
    """A configuration of the package, as the comments at the top of its file describe it.

    Args:
        name: what `jax-trainer train` takes.
        summary: what it trains.
        data: the files that it needs.
        device: what it is meant for.
        expected: the result.
    """

    name: str
    summary: str
    data: str
    device: str
    expected: str

    @classmethod
    def of(cls, file: Path) -> "ReadyConfig":
        """What the header of `file` says; raises if a line of it is missing."""
        text = file.read_text(encoding="utf-8")
        facts = dict(_FACT.findall(text))
        if missing := {"Data", "Device", "Expected"} - facts.keys():
            raise ValueError(f"{file} has no line `# {min(missing)}: …` in its header.")
        summary = text.partition("\n")[0].removeprefix("# ").rstrip(".")
        return cls(file.stem, summary, facts["Data"], facts["Device"], facts["Expected"])


def ready_names() -> list[str]:
    """The names of all configurations of the package."""
    return sorted(file.stem for file in FOLDER.glob("*.yaml"))


def config_path(name: str | Path, folder: Path = FOLDER) -> Path:
    """The file that `name` means: its path, or the name of a configuration of the package; a file of the user wins.

    >>> config_path("digits").name, config_path("mine.yaml").name
    ('digits.yaml', 'mine.yaml')
    """
    path = Path(name)
    ready = folder / f"{path}.yaml"
    is_name = re.fullmatch(r"\w+", str(name)) is not None
    return ready if is_name and not path.is_file() and ready.is_file() else path


INCLUDE = "include"
MAX_FILES = 20

MAX_CHAIN = 40  # references in a chain
MAX_CHARS = 100_000  # that references insert into strings, in total

_REFERENCE = re.compile(r"(?P<escaped>\$\$\{)|\$\{(?P<path>[^{}]*)\}|(?P<unclosed>\$\{)")
_OVERRIDE = re.compile(r"(?P<path>[^=\s]+?)=(?P<value>.*)", re.DOTALL)


def read_tree(file: Path, overrides: Sequence[str], problems: Problems, *, may_include: bool = True) -> Node:
    """The values of a file, or of a configuration of the package by name, with includes, overrides and references.

    Problems are added to `problems`; raises if the rest cannot be read.
    """
    file = config_path(file)
    tree = _Files(problems, may_include).read(file, Location(str(file)))
    return resolved(overridden(tree, overrides, problems), problems)


def read_dotted(file: Path, problems: Problems) -> Node:
    """The values of a file whose top-level keys are dotted paths, without includes, overrides and references."""
    file = config_path(file, SPACES)
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
            raise self._problems.fatal(included_at, INCLUDE, f"Circular include: {chain}.")
        if self._files > MAX_FILES:
            raise self._problems.fatal(included_at, INCLUDE, f"More than {MAX_FILES} files are included.")
        is_own = not above and self._may_include  # named on the command line, where it may be a pipe
        tree = parse(self.text(file, included_at, any_kind=is_own), str(file), self._problems)
        if not tree.is_section:
            # the content is not shown: a link may point at a private file
            found = "nothing" if tree.value is None else "a list" if isinstance(tree.value, list) else "a single value"
            raise self._problems.fatal(tree.location, "", f"expected keys and values, found {found}.")
        own = Node({name: node for name, node in tree.section.items() if name != INCLUDE}, tree.location)
        bases = tree.section.get(INCLUDE, Node([], tree.location))
        if INCLUDE in tree.section and not self._may_include:
            raise self._problems.fatal(bases.location, INCLUDE, "a stored configuration cannot include other files.")
        result = Node({}, own.location)
        for base in bases.value if isinstance(bases.value, list) else [bases]:
            result = merged(result, self.read(file.parent / self._name(base), base.location, (*above, real)))
        return merged(result, own)

    def _name(self, node: Node) -> str:
        if isinstance(node.value, str) and node.value.isprintable() and node.value.endswith((".yaml", ".yml")):
            return node.value
        text = f"expected the name of a .yaml file, or a list of them, found {shown(node.data())}."
        raise self._problems.fatal(node.location, INCLUDE, text)

    def text(self, file: Path, included_at: Location, *, any_kind: bool = True) -> str:
        """The text of `file`, which is included at `included_at`; with `any_kind`, also of a pipe."""
        try:
            with open(file, "rb", opener=None if any_kind else _open_at_once) as stream:
                if not (any_kind or stat.S_ISREG(os.fstat(stream.fileno()).st_mode)):
                    text = f"{file} cannot be read: it is a pipe or a device. Include a regular file."
                    raise self._problems.fatal(included_at, "", text)
                data = stream.read(MAX_BYTES + 1)
        except FileNotFoundError:
            near = suggestion(file.name, [other.name for other in file.parent.glob("*.y*ml")])
            if not near and self._files == 1:  # the file of the command itself, not one that it includes
                names = ready_names()
                near = f" Did you mean `{file.stem}`?" if file.stem in names else suggestion(file.stem, names)
            raise self._problems.fatal(included_at, "", f"File not found: {file}.{near}") from None
        except ConfigError:
            raise
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise self._problems.fatal(included_at, "", f"{file} cannot be read: {reason}.") from None
        self._bytes_left -= len(data)
        if self._bytes_left < 0:
            name = f"{file}, with its includes," if self._files > 1 else str(file)
            text = f"{name} is larger than {MAX_BYTES:,} bytes. A configuration is a few pages at most."
            raise self._problems.fatal(included_at, "", text)
        try:
            return data.removeprefix(codecs.BOM_UTF8).decode("utf-8")
        except UnicodeDecodeError as error:
            line = data[: error.start].count(b"\n") + 1
            text = f"This is not UTF-8 text: {error.reason} at byte {error.start}. Save the file as UTF-8."
            raise self._problems.fatal(Location(str(file), line), "", text) from None


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


def resolved(tree: Node, problems: Problems) -> Node:
    """`tree` with every `${path.to.value}` replaced by that value; `$${` is a literal `${`."""
    return _Resolver(tree, problems).replaced(tree, "")


class _UnresolvedError(ValueError):
    """Why a reference has no value; empty if that is reported elsewhere."""


class _Resolver:
    """Resolves each reference once, and detects circular ones."""

    def __init__(self, tree: Node, problems: Problems) -> None:
        self._tree, self._problems = tree, problems
        self._done: dict[str, Node] = {}
        self._stack: list[str] = []  # paths that are being resolved
        self._chars_left = MAX_CHARS

    @cached_property
    def _paths(self) -> list[str]:
        return _paths(self._tree)

    def replaced(self, node: Node, path: str) -> Node:
        if isinstance(node.value, dict | list):
            parts = [(name, self.replaced(part, f"{path}.{name}".lstrip("."))) for name, part in node.children()]
            return Node(dict(parts) if node.is_section else [part for _, part in parts], node.location)
        if not isinstance(node.value, str) or "${" not in node.value:
            return node
        if path not in self._done:
            self._stack.append(path)
            try:
                value = self._value(node.value)
            except _UnresolvedError as error:
                value = BROKEN
                if str(error):
                    self._problems.add(node.location, path, str(error))
            self._stack.pop()
            self._done[path] = Node(value, node.location)
        return self._done[path]

    def _value(self, text: str) -> Scalar:
        only = _REFERENCE.fullmatch(text)
        if only is not None and only["path"] is not None:
            return self._target(only["path"].strip())  # keeps the type of the value
        return _REFERENCE.sub(self._piece, text)

    def _piece(self, match: re.Match[str]) -> str:
        if match["escaped"]:
            return "${"
        if match["unclosed"]:
            raise _UnresolvedError("`${` has no closing `}`. For a literal `${`, write `$${`.")
        text = written(self._target(match["path"].strip()))
        self._chars_left -= len(text)
        if self._chars_left < 0:
            raise _UnresolvedError(f"references expand to more than {MAX_CHARS:,} characters.")
        return text

    def _target(self, target: str) -> Scalar:
        found = self._tree.at(target) if target else None
        if found is None:
            near = self._problems.suggestion(target, self._paths)
            raise _UnresolvedError(f"`${{{target}}}` refers to a key that does not exist.{near}")
        if isinstance(found.value, dict | list):
            raise _UnresolvedError(f"`${{{target}}}` is a section or list. Refer to a scalar.")
        if target in self._stack:
            raise _UnresolvedError(f"`${{{target}}}` is a circular reference.")
        if len(self._stack) > MAX_CHAIN:
            raise _UnresolvedError(f"a chain of references is longer than {MAX_CHAIN}.")
        value = self.replaced(found, target).value
        if isinstance(value, Broken):
            raise _UnresolvedError
        assert not isinstance(value, dict | list)
        return value


def _paths(tree: Node, above: str = "") -> list[str]:
    return [
        path
        for name, node in tree.children()
        for path in (_paths(node, f"{above}{name}.") if isinstance(node.value, dict | list) else [f"{above}{name}"])
    ]
