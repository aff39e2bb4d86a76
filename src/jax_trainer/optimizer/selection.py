"""Selects parameters by regular expressions.

In this package, expressions are matched from the start of the dotted path of a parameter (`re.match`), such as
`encoder.layers.0.kernel`: `encoder` matches all of the encoder, `.*kernel$` every kernel. An empty one matches none.
"""

import re
from collections.abc import Sequence

import jax

from jax_trainer.core import PyTree, leaf_path
from jax_trainer.settings import SettingsError

MAX_LISTED = 20  # names in a message


def parameter_paths(params: PyTree) -> list[str]:
    """The dotted path of every parameter.

    >>> parameter_paths({"dense": {"bias": 0.0, "kernel": 0.0}})
    ['dense.bias', 'dense.kernel']
    """
    return [leaf_path(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]


def is_match(regex: str, path: str) -> bool:
    """Whether `regex` matches the parameter at `path`.

    >>> is_match("encoder", "encoder.kernel"), is_match("kernel", "encoder.kernel"), is_match("", "encoder.kernel")
    (True, False, False)
    """
    return bool(regex) and re.match(regex, path) is not None


def require_match(key: str, regex: str, paths: Sequence[str], *, among: str = "parameter") -> None:
    """Raises if the expression of the key `key` matches none of `paths`."""
    if any(is_match(regex, path) for path in paths):
        return
    raise SettingsError(
        [
            (
                key,
                f"`{key}` {regex!r} matches no {among} of: {listed(paths)}. "
                "It is matched from the start of the path: prepend '.*' to match anywhere.",
            )
        ]
    )


def listed(paths: Sequence[str]) -> str:
    """Names for a message, at most `MAX_LISTED`.

    >>> listed([])
    'none'
    """
    rest = f" and {len(paths) - MAX_LISTED} more" if len(paths) > MAX_LISTED else ""
    return (", ".join(paths[:MAX_LISTED]) or "none") + rest
