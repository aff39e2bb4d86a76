"""Dotted paths of leaves: `encoder.layers.0.kernel`."""

from typing import Any


def leaf_path(path: tuple[Any, ...]) -> str:
    """The dotted path of a leaf.

    >>> import jax
    >>> leaf_path(jax.tree_util.tree_leaves_with_path({"a": [1, 2]})[1][0])
    'a.1'
    """
    return ".".join(_name(entry) for entry in path)


def _name(entry: Any) -> str:
    for attribute in ("key", "name", "idx"):
        if hasattr(entry, attribute):
            return str(getattr(entry, attribute))
    return str(entry)
