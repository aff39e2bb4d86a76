"""From a file and the command line to one tree of values: includes, then overrides, then references."""

import re
from collections.abc import Sequence
from pathlib import Path

from jax_trainer.config.nodes import Node, merged
from jax_trainer.config.problems import ConfigError, ConfigProblem, Place, suggestion
from jax_trainer.config.yaml_text import MAX_BYTES, parse

INCLUDE = "include"
MAX_INCLUDES = 20
MAX_TEXT = 10_000  # of a value that references were put into

_OVERRIDE = re.compile(r"(?P<path>[^=\s]+?)=(?P<value>.*)", re.DOTALL)
_REFERENCE = re.compile(r"\$(?P<escaped>\$)?\{(?P<path>[^{}]*)\}")


def read_tree(file: Path, overrides: Sequence[str] = ()) -> Node:
    """The values of a file with what it includes, with overrides, with references replaced."""
    return resolved(overridden(_read_with_includes(file, Place(str(file)), ()), overrides))


def _read_with_includes(file: Path, asked_at: Place, above: tuple[Path, ...]) -> Node:
    whole = file.resolve()
    if whole in above:
        chain = " includes ".join(path.name for path in (*above[above.index(whole) :], whole))
        raise ConfigError([ConfigProblem(asked_at, INCLUDE, f"Files include each other in a circle: {chain}.")])
    if len(above) >= MAX_INCLUDES:
        raise ConfigError([ConfigProblem(asked_at, INCLUDE, f"More than {MAX_INCLUDES} files include each other.")])
    tree = _read(file, asked_at)
    bases = tree.section.get(INCLUDE)
    own = Node({name: node for name, node in tree.section.items() if name != INCLUDE}, tree.place)
    if bases is None:
        return own
    result = Node({}, own.place)
    for base in bases.value if isinstance(bases.value, list) else [bases]:
        if not isinstance(base.value, str) or Path(base.value).suffix not in (".yaml", ".yml"):
            text = f"expected the name of a .yaml file, or a list of them, found {base.data()!r}."
            raise ConfigError([ConfigProblem(base.place, INCLUDE, text)])
        result = merged(result, _read_with_includes(file.parent / base.value, base.place, (*above, whole)))
    return merged(result, own)


def _read(file: Path, asked_at: Place) -> Node:
    def refuse(text: str) -> ConfigError:
        return ConfigError([ConfigProblem(asked_at, "", text)])

    try:
        with file.open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
    except FileNotFoundError:
        near = suggestion(file.name, [other.name for other in file.parent.glob("*.y*ml")] if file.parent else [])
        raise refuse(f"There is no file {file}.{near}") from None
    except OSError as error:
        raise refuse(f"{file} cannot be read: {error.strerror}.") from None
    if len(data) > MAX_BYTES:
        raise refuse(f"{file} is larger than {MAX_BYTES:,} bytes. A configuration is a few pages at most.")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        text = f"This is not UTF-8 text: {error.reason} at byte {error.start}. Save the file as UTF-8."
        raise ConfigError([ConfigProblem(Place(str(file), line), "", text)]) from None
    tree = parse(text, str(file))
    if tree.value is None:
        raise refuse("The file is empty.")
    if not tree.is_section:
        kind = "a list" if isinstance(tree.value, list) else f"{tree.value!r}"
        raise ConfigError([ConfigProblem(tree.place, "", f"expected keys and values, found {kind}.")])
    return tree


def overridden(tree: Node, overrides: Sequence[str]) -> Node:
    """`tree` with `path.to.key=value` for every override; values are read as in a file."""
    problems: list[ConfigProblem] = []
    for override in overrides:
        place = Place("command line")
        match = _OVERRIDE.fullmatch(override)
        if match is None:
            problems.append(ConfigProblem(place, "", f"expected `path.to.key=value`, found {override!r}."))
            continue
        try:
            value = parse(match["value"], place.source, numbered=False)
            tree = _put(tree, match["path"].split("."), Node(value.value, place), match["path"])
        except ConfigError as error:
            problems += [ConfigProblem(place, match["path"], problem.text) for problem in error.problems]
    if problems:
        raise ConfigError(problems)
    return tree


def _put(tree: Node, names: Sequence[str], node: Node, path: str) -> Node:
    if not names:
        return node
    name, *rest = names
    if isinstance(tree.value, list) and tree.child(name) is None:
        text = f"there is no item {name!r} in a list of {len(tree.value)} at {tree.place}."
        raise ConfigError([ConfigProblem(node.place, path, text)])
    if not isinstance(tree.value, dict | list | None):
        text = f"`{name}` cannot be set inside of {tree.value!r} ({tree.place}). Override the value as a whole."
        raise ConfigError([ConfigProblem(node.place, path, text)])
    if not name:
        raise ConfigError([ConfigProblem(node.place, path, "the path has an empty part.")])
    return tree.with_child(name, _put(tree.child(name) or Node({}, node.place), rest, node, path))


def resolved(tree: Node) -> Node:
    """`tree` with every `${path.to.value}` replaced by that value; `$${` is a plain `${`."""
    resolver = _Resolver(tree)
    result = resolver.replaced(tree, "")
    if resolver.problems:
        raise ConfigError(resolver.problems)
    return result


class _Resolver:
    """Replaces references, each value once, and notices circles."""

    def __init__(self, tree: Node) -> None:
        self._tree = tree
        self._done: dict[str, Node] = {}
        self._under_way: list[str] = []
        self.problems: list[ConfigProblem] = []

    def replaced(self, node: Node, path: str) -> Node:
        if isinstance(node.value, dict | list):
            parts = [(name, self.replaced(part, f"{path}.{name}".lstrip("."))) for name, part in node.children()]
            return Node(dict(parts) if node.is_section else [part for _, part in parts], node.place)
        if path not in self._done:
            self._under_way.append(path)
            self._done[path] = self._scalar(node, path) if isinstance(node.value, str) else node
            self._under_way.pop()
        return self._done[path]

    def _scalar(self, node: Node, path: str) -> Node:
        assert isinstance(node.value, str)
        whole = _REFERENCE.fullmatch(node.value)
        if whole is not None and not whole["escaped"]:
            return Node(self._value_of(whole["path"].strip(), node, path), node.place)
        text = _REFERENCE.sub(lambda match: self._in_text(match, node, path), node.value)
        if len(text) > max(MAX_TEXT, len(node.value)):
            self._complain(node, path, f"the references make a text of more than {MAX_TEXT:,} characters.")
            text = ""
        return Node(text, node.place)

    def _in_text(self, match: re.Match[str], node: Node, path: str) -> str:
        if match["escaped"]:
            return match[0][1:]
        value = self._value_of(match["path"].strip(), node, path)
        return {True: "true", False: "false"}.get(value, str(value)) if isinstance(value, bool) else str(value)

    def _value_of(self, target: str, node: Node, path: str) -> str | int | float | bool | None:
        found = self._tree.at(target) if target else None
        if found is None:
            known = _paths(self._tree)
            self._complain(node, path, f"`${{{target}}}` stands for nothing.{suggestion(target, known)}")
        elif isinstance(found.value, dict | list):
            self._complain(node, path, f"`${{{target}}}` is a section or list; a reference is to one value.")
        elif target in self._under_way:
            self._complain(node, path, f"`${{{target}}}` refers to itself in a circle.")
        else:
            value = self.replaced(found, target).value
            assert not isinstance(value, dict | list)
            return value
        return None

    def _complain(self, node: Node, path: str, text: str) -> None:
        self.problems.append(ConfigProblem(node.place, path, text))


def _paths(tree: Node, above: str = "") -> list[str]:
    return [
        path
        for name, node in tree.children()
        for path in (_paths(node, f"{above}{name}.") if isinstance(node.value, dict | list) else [f"{above}{name}"])
    ]
