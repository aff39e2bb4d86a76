"""Leaves of a tree of arrays: their dotted paths (`encoder.layers.0.kernel`) and statistics (min, max, mean, std)."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

PyTree = Any
Batch = Any
_NUMBERS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "min": jnp.min,
    "max": jnp.max,
    "mean": jnp.mean,
    "std": jnp.std,
    "val": jnp.sum,  # of a single element: its value, whatever its shape
}
_FOLDED = {"min": "min", "max": "max"}  # how values of several steps are aggregated; the others are averaged
STATISTICS = tuple(_NUMBERS)
MAX_LISTED = 20  # names in a message


def leaf_path(path: tuple[Any, ...]) -> str:
    """The dotted path of a leaf.

    >>> leaf_path(jax.tree_util.tree_leaves_with_path({"a": [1, 2]})[1][0])
    'a.1'
    """
    return ".".join(_name(entry) for entry in path)


def _name(entry: Any) -> str:
    for attribute in ("key", "name", "idx"):
        if hasattr(entry, attribute):
            return str(getattr(entry, attribute))
    return str(entry)


def parameter_paths(params: PyTree) -> list[str]:
    """The dotted path of every parameter.

    >>> parameter_paths({"dense": {"bias": 0.0, "kernel": 0.0}})
    ['dense.bias', 'dense.kernel']
    """
    return [leaf_path(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]


def leaves_by_path(tree: PyTree) -> dict[str, Any]:
    """The leaves by their dotted path."""
    return {leaf_path(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def listed(paths: Sequence[str]) -> str:
    """Names for a message, at most `MAX_LISTED`.

    >>> listed([])
    'none'
    """
    rest = f" and {len(paths) - MAX_LISTED} more" if len(paths) > MAX_LISTED else ""
    return (", ".join(paths[:MAX_LISTED]) or "none") + rest


def differing_leaf(one: PyTree, other: PyTree) -> tuple[str, Any, Any] | None:
    """The path of the first leaf with another shape, and its shape in both trees, None where it is absent.

    >>> differing_leaf({"a": jnp.ones(2)}, {"a": jnp.ones(2), "b": jnp.ones(3)})
    ('b', None, (3,))
    """
    shapes, others = ({path: jnp.shape(leaf) for path, leaf in leaves_by_path(tree).items()} for tree in (one, other))
    wrong = min((name for name in shapes.keys() | others.keys() if shapes.get(name) != others.get(name)), default=None)
    return None if wrong is None else (wrong, shapes.get(wrong), others.get(wrong))


def check_modes(name: str, modes: Sequence[str]) -> None:
    """Raises unless `modes` is a sequence of known modes."""
    if isinstance(modes, str) or not isinstance(modes, Sequence):
        raise TypeError(f"`{name}` must be a sequence of modes, got {modes!r}. Write `{name}=('mean',)`.")
    unknown = [mode for mode in modes if mode not in STATISTICS]
    if unknown:
        raise ValueError(f"`{name}` has {unknown[0]!r}; use some of {', '.join(STATISTICS)}.")


def leaf_statistics(prefix: str, tree: PyTree, modes: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Training metrics `prefix/path_mode` of every float leaf of `tree`, in float32.

    If `modes` includes `val`, a leaf with one element has `val` only, because the others equal it. Larger leaves have
    no `val`.

    >>> metrics = leaf_statistics("param", {"scale": jnp.ones(1), "w": jnp.arange(3) / 2}, ("max", "val"))
    >>> {name: float(entry["value"]) for name, entry in metrics.items()}
    {'param/scale_val': 1.0, 'param/w_max': 1.0}
    """
    if not modes:
        return {}
    return {
        f"{prefix}/{'_'.join(filter(None, (path, mode)))}": {
            "value": _NUMBERS[mode](jax.lax.stop_gradient(leaf).astype(jnp.float32)),
            "mode": _FOLDED.get(mode, "mean"),
            "log_mode": "train",
        }
        for path, leaf in float_leaves(tree)
        for mode in modes
        if (mode == "val") == (leaf.size == 1 and "val" in modes)
    }


def float_leaves(tree: PyTree) -> list[tuple[str, Any]]:
    """The dotted paths and arrays of all leaves of floats that are not empty."""
    arrays = [(path, leaf) for path, leaf in leaves_by_path(tree).items() if hasattr(leaf, "dtype")]
    return [(path, leaf) for path, leaf in arrays if jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.size > 0]
