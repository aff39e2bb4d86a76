"""A configuration as it was written: plain values that remember their place."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from jax_trainer.config.problems import Place


class Broken:
    """Stands for a value that could not be read; what is wrong with it is written down already."""

    def __repr__(self) -> str:
        return "…"


BROKEN = Broken()
Scalar = str | int | float | bool | None
_NUMBER = re.compile(r"0|[1-9][0-9]{0,8}")


@dataclass(frozen=True, slots=True)
class Node:
    """A value and its place. A section is a dict of nodes, a list is a list of them."""

    value: "Scalar | Broken | dict[str, Node] | list[Node]"
    place: Place

    @property
    def is_section(self) -> bool:
        """Whether it holds keys."""
        return isinstance(self.value, dict)

    @property
    def section(self) -> "dict[str, Node]":
        """Its keys; none where it is no section."""
        return self.value if isinstance(self.value, dict) else {}

    def children(self) -> "Iterator[tuple[str, Node]]":
        """What it holds, by key or by number."""
        if isinstance(self.value, dict):
            yield from self.value.items()
        elif isinstance(self.value, list):
            yield from ((str(number), item) for number, item in enumerate(self.value))

    def child(self, name: str) -> "Node | None":
        """What it holds under this key or number."""
        if isinstance(self.value, list):
            return self.value[int(name)] if _NUMBER.fullmatch(name) and int(name) < len(self.value) else None
        return self.section.get(name)

    def at(self, path: str) -> "Node | None":
        """What stands under a dotted path."""
        found: Node | None = self
        for name in path.split(".") if path else ():
            found = found.child(name) if found is not None else None
        return found

    def place_of(self, path: str) -> Place:
        """The place of a dotted path, or of the nearest section above it that was written."""
        found = self
        for name in path.split("."):
            below = found.child(name)
            if below is None:
                break
            found = below
        return found.place

    def data(self) -> Any:
        """The value alone, without places."""
        if isinstance(self.value, dict):
            return {name: node.data() for name, node in self.value.items()}
        return [node.data() for node in self.value] if isinstance(self.value, list) else self.value

    def with_child(self, name: str, node: "Node") -> "Node":
        """The same with `node` under a key, or in place of a list's item."""
        if isinstance(self.value, list):
            return replace(self, value=[node if str(n) == name else old for n, old in enumerate(self.value)])
        return replace(self, value={**self.section, name: node})


def merged(base: Node, over: Node) -> Node:
    """`base` with the keys of `over`, section by section. Another `class_name` replaces a section as a whole."""
    if not (base.is_section and over.is_section) or _is_another_class(base, over):
        return over
    result = dict(base.section)
    for name, node in over.section.items():
        result[name] = merged(result[name], node) if name in result else node
    return Node(result, over.place)


def _is_another_class(base: Node, over: Node) -> bool:
    old, new = (node.section.get("class_name") for node in (base, over))
    return old is not None and new is not None and old.data() != new.data()
