"""References: `${path.to.value}` is replaced by another value of the configuration."""

import re
from functools import cached_property

from jax_trainer.config.nodes import BROKEN, Broken, Node, Scalar
from jax_trainer.config.problems import Problems
from jax_trainer.settings import written

MAX_CHAIN = 40  # references in a chain
MAX_CHARS = 100_000  # that references insert into strings, in total

_REFERENCE = re.compile(r"(?P<escaped>\$\$\{)|\$\{(?P<path>[^{}]*)\}|(?P<unclosed>\$\{)")


def resolved(tree: Node, problems: Problems) -> Node:
    """`tree` with every `${path.to.value}` replaced by that value; `$${` is a literal `${`."""
    return _Resolver(tree, problems).replaced(tree, "")


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
            self._done[path] = Node(self._value(node.value, node, path), node.location)
            self._stack.pop()
        return self._done[path]

    def _value(self, text: str, node: Node, path: str) -> Scalar | Broken:
        only = _REFERENCE.fullmatch(text)  # keeps the type of the value
        if only is not None and only["path"] is not None:
            return self._target(only["path"].strip(), node, path)
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
            return self._complain(node, path, "`${` has no closing `}`. For a literal `${`, write `$${`.")
        value = self._target(match["path"].strip(), node, path)
        if isinstance(value, Broken):
            return value
        text = written(value)
        self._chars_left -= len(text)
        if self._chars_left < 0:
            return self._complain(node, path, f"references expand to more than {MAX_CHARS:,} characters.")
        return text

    def _target(self, target: str, node: Node, path: str) -> Scalar | Broken:
        found = self._tree.at(target) if target else None
        if found is None:
            near = self._problems.suggestion(target, self._paths)
            return self._complain(node, path, f"`${{{target}}}` refers to a key that does not exist.{near}")
        if isinstance(found.value, dict | list):
            return self._complain(node, path, f"`${{{target}}}` is a section or list. Refer to a scalar.")
        if target in self._stack:
            return self._complain(node, path, f"`${{{target}}}` is a circular reference.")
        if len(self._stack) > MAX_CHAIN:
            return self._complain(node, path, f"a chain of references is longer than {MAX_CHAIN}.")
        value = self.replaced(found, target).value
        assert not isinstance(value, dict | list)
        return value

    def _complain(self, node: Node, path: str, text: str) -> Broken:
        self._problems.add(node.location, path, text)
        return BROKEN


def _paths(tree: Node, above: str = "") -> list[str]:
    return [
        path
        for name, node in tree.children()
        for path in (_paths(node, f"{above}{name}.") if isinstance(node.value, dict | list) else [f"{above}{name}"])
    ]
