"""The parsed tree of a configuration: plain values with their file and line."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from jax_trainer.config.problems import Location


class Broken:
    """A value that could not be read; its problem is collected already."""

    def __repr__(self) -> str:
        return "…"


BROKEN = Broken()
Scalar = str | int | float | bool | None
_NUMBER = re.compile(r"0|[1-9][0-9]{0,8}")


def is_number(key: str) -> bool:
    """Whether a key is a number: an index, or the key of a mapping from numbers."""
    return _NUMBER.fullmatch(key) is not None


@dataclass(frozen=True, slots=True)
class Node:
    """A value and its location. A section is a dict of nodes, a list is a list of nodes."""

    value: "Scalar | Broken | dict[str, Node] | list[Node]"
    location: Location

    @property
    def is_section(self) -> bool:
        """Whether the value is a mapping."""
        return isinstance(self.value, dict)

    @property
    def section(self) -> "dict[str, Node]":
        """The entries of a mapping; empty for any other value."""
        return self.value if isinstance(self.value, dict) else {}

    def children(self) -> "Iterator[tuple[str, Node]]":
        """The child nodes, by key or by index."""
        if isinstance(self.value, dict):
            yield from self.value.items()
        elif isinstance(self.value, list):
            yield from ((str(number), item) for number, item in enumerate(self.value))

    def child(self, name: str) -> "Node | None":
        """The child under this key or index, if any."""
        if isinstance(self.value, list):
            return self.value[int(name)] if is_number(name) and int(name) < len(self.value) else None
        return self.section.get(name)

    def at(self, path: str) -> "Node | None":
        """The node at a dotted path, if any."""
        found: Node | None = self
        for name in path.split(".") if path else ():
            found = found.child(name) if found is not None else None
        return found

    def location_of(self, path: str) -> Location:
        """The location of a dotted path, or of its nearest ancestor in the file."""
        found = self
        for name in path.split("."):
            below = found.child(name)
            if below is None:
                break
            found = below
        return found.location

    def data(self) -> Any:
        """The value without locations."""
        if isinstance(self.value, dict):
            return {name: node.data() for name, node in self.value.items()}
        return [node.data() for node in self.value] if isinstance(self.value, list) else self.value

    def with_child(self, name: str, node: "Node") -> "Node":
        """A copy with `node` under a key, or replacing an item of a list."""
        if isinstance(self.value, list):
            return replace(self, value=[node if str(n) == name else old for n, old in enumerate(self.value)])
        return replace(self, value={**self.section, name: node})


def merged(base: Node, over: Node) -> Node:
    """`base` with the keys of `over`, merged recursively. Another `class_name` replaces the section."""
    if not (base.is_section and over.is_section) or _is_another_class(base, over):
        return over
    result = dict(base.section)
    for name, node in over.section.items():
        result[name] = merged(result[name], node) if name in result else node
    return Node(result, over.location)


def _is_another_class(base: Node, over: Node) -> bool:
    old, new = (node.section.get("class_name") for node in (base, over))
    return old is not None and new is not None and old.data() != new.data()
