"""Parameters by name: which of them a regular expression means.

Everywhere in this room an expression is tried from the start of a parameter's dotted path (`re.match`), as in
`encoder.layers.0.kernel`: `encoder` means all of the encoder, `.*kernel$` every kernel. An empty one means none.
"""

import re
from collections.abc import Sequence

import jax

from jax_trainer.core import PyTree, leaf_path
from jax_trainer.settings import SettingsError

SHOWN = 20  # so many names fit into a message that somebody reads


def parameter_paths(params: PyTree) -> list[str]:
    """The dotted path of every parameter.

    >>> parameter_paths({"dense": {"bias": 0.0, "kernel": 0.0}})
    ['dense.bias', 'dense.kernel']
    """
    return [leaf_path(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]


def is_match(regex: str, path: str) -> bool:
    """Whether `regex` means the parameter at `path`.

    >>> is_match("encoder", "encoder.kernel"), is_match("kernel", "encoder.kernel"), is_match("", "encoder.kernel")
    (True, False, False)
    """
    return bool(regex) and re.match(regex, path) is not None


def require_match(key: str, regex: str, paths: Sequence[str], *, among: str = "parameter") -> None:
    """Refuses an expression, given as `key`, that means none of `paths`."""
    if any(is_match(regex, path) for path in paths):
        return
    raise SettingsError(
        [
            (
                key,
                f"`{key}` {regex!r} matches no {among}. There are {listed(paths)}. "
                "It is tried from the start of the name: '.*' in front finds it anywhere.",
            )
        ]
    )


def listed(paths: Sequence[str]) -> str:
    """Names for a message, cut to a number that can be read.

    >>> listed([])
    'none'
    """
    rest = f" and {len(paths) - SHOWN} more" if len(paths) > SHOWN else ""
    return (", ".join(paths[:SHOWN]) or "none") + rest
