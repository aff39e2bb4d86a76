"""Names of leaves, the way people write them: `encoder.layers.0.kernel`."""

from typing import Any


def leaf_path(path: tuple[Any, ...]) -> str:
    """The dotted name of a leaf.

    >>> import jax
    >>> leaf_path(jax.tree_util.tree_leaves_with_path({"a": [1, 2]})[1][0])
    'a.1'
    """
    return ".".join(_word(entry) for entry in path)


def _word(entry: Any) -> str:
    for attribute in ("key", "name", "idx"):
        if hasattr(entry, attribute):
            return str(getattr(entry, attribute))
    return str(entry)
