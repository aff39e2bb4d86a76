"""References: `${path.to.value}` stands for a value that is written elsewhere."""

import re
from functools import cached_property

from jax_trainer.config.nodes import BROKEN, Broken, Node, Scalar
from jax_trainer.config.problems import Problems
from jax_trainer.settings import written

MAX_CHAIN = 40  # references that lead to each other
MAX_LETTERS = 100_000  # that references put into texts, in all of a configuration

_REFERENCE = re.compile(r"(?P<escaped>\$\$\{)|\$\{(?P<path>[^{}]*)\}|(?P<unclosed>\$\{)")


def resolved(tree: Node, problems: Problems) -> Node:
    """`tree` with every `${path.to.value}` replaced by that value; `$${` is a plain `${`."""
    return _Resolver(tree, problems).replaced(tree, "")


class _Resolver:
    """Replaces references, each value once, and notices circles."""

    def __init__(self, tree: Node, problems: Problems) -> None:
        self._tree, self._problems = tree, problems
        self._done: dict[str, Node] = {}
        self._under_way: list[str] = []
        self._letters_left = MAX_LETTERS

    @cached_property
    def _paths(self) -> list[str]:
        return _paths(self._tree)

    def replaced(self, node: Node, path: str) -> Node:
        if isinstance(node.value, dict | list):
            parts = [(name, self.replaced(part, f"{path}.{name}".lstrip("."))) for name, part in node.children()]
            return Node(dict(parts) if node.is_section else [part for _, part in parts], node.place)
        if not isinstance(node.value, str) or "${" not in node.value:
            return node
        if path not in self._done:
            self._under_way.append(path)
            self._done[path] = Node(self._value(node.value, node, path), node.place)
            self._under_way.pop()
        return self._done[path]

    def _value(self, text: str, node: Node, path: str) -> Scalar | Broken:
        whole = _REFERENCE.fullmatch(text)
        if whole is not None and whole["path"] is not None:
            return self._target(whole["path"].strip(), node, path)
        parts, at = [], 0
        for match in _REFERENCE.finditer(text):
            piece = self._piece(match, node, path)
            if isinstance(piece, Broken):
                return piece
            parts += [text[at : match.start()], piece]
            at = match.end()
        return "".join([*parts, text[at:]])

    def _piece(self, match: re.Match[str], node: Node, path: str) -> str | Broken:
        if match["escaped"]:
            return "${"
        if match["unclosed"]:
            return self._complain(node, path, "`${` begins a reference that `}` does not end. A plain `${` is `$${`.")
        value = self._target(match["path"].strip(), node, path)
        if isinstance(value, Broken):
            return value
        text = written(value)
        self._letters_left -= len(text)
        if self._letters_left < 0:
            return self._complain(node, path, f"references make texts of more than {MAX_LETTERS:,} characters.")
        return text

    def _target(self, target: str, node: Node, path: str) -> Scalar | Broken:
        found = self._tree.at(target) if target else None
        if found is None:
            near = self._problems.suggestion(target, self._paths)
            return self._complain(node, path, f"`${{{target}}}` stands for nothing.{near}")
        if isinstance(found.value, dict | list):
            return self._complain(node, path, f"`${{{target}}}` is a section or list; a reference is to one value.")
        if target in self._under_way:
            return self._complain(node, path, f"`${{{target}}}` refers to itself in a circle.")
        if len(self._under_way) > MAX_CHAIN:
            return self._complain(node, path, f"more than {MAX_CHAIN} references lead to each other.")
        value = self.replaced(found, target).value
        assert not isinstance(value, dict | list)
        return value

    def _complain(self, node: Node, path: str, text: str) -> Broken:
        self._problems.add(node.place, path, text)
        return BROKEN


def _paths(tree: Node, above: str = "") -> list[str]:
    return [
        path
        for name, node in tree.children()
        for path in (_paths(node, f"{above}{name}.") if isinstance(node.value, dict | list) else [f"{above}{name}"])
    ]
