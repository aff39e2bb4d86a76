"""The shape of a loss: one number. Anything else is refused while tracing, with the shapes that it was made from."""

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp

from jax_trainer.core.metrics import Batch, PyTree
from jax_trainer.core.paths import leaf_path

_OF_JAX = re.compile(r"only defined for scalar-output functions\. Output had shape: \(([\d, ]+)\)")
_PRIMES = (1009, 1013)  # numbers of rows that no array of a model has by chance


def check_loss(loss: Any, seen: Mapping[str, PyTree], examples: Collection[int] = ()) -> None:
    """Raises unless `loss` is one number, or one for each of as many examples as one of `examples` says.

    Args:
        loss: what a loss function returned.
        seen: what it was computed from, by name, for the message.
        examples: no such numbers: only one number is right.
    """
    shape = jnp.shape(loss)
    if shape and not (len(shape) == 1 and shape[0] in examples):
        raise _refused(shape, seen, "The loss", "one number" + ", or one per example" * bool(examples))


def check_pairing(
    function: Callable[[Any, Any], Any], predictions: Any, targets: Any, *, what: str = "The loss"
) -> None:
    """Raises if `function` compares predictions [n, 1] with targets [n] (or the reverse) by broadcasting to [n, n].

    That is found out by tracing it with different numbers of predictions and targets: a loss that compares each
    prediction with its own target cannot be computed of these.
    """
    arrays = [leaf if hasattr(leaf, "dtype") else jnp.asarray(leaf) for leaf in jax.tree.leaves((predictions, targets))]
    if len(arrays) != 2 or sorted(array.ndim for array in arrays) != [1, 2] or arrays[0].size != arrays[1].size:
        return
    if any(array.shape not in ((array.size,), (array.size, 1)) for array in arrays):
        return
    rows = [jax.ShapeDtypeStruct((n, *a.shape[1:]), a.dtype) for n, a in zip(_PRIMES, arrays, strict=True)]
    structure = jax.tree.structure((predictions, targets))
    try:
        traced = str(jax.make_jaxpr(lambda a, b: function(*structure.unflatten((a, b))))(*rows))
    except Exception:  # whatever it raises: numbers that differ do not go together, as it should be
        return
    if re.search(f"{_PRIMES[0]},{_PRIMES[1]}|{_PRIMES[1]},{_PRIMES[0]}", traced):
        size = arrays[0].size
        raise _refused(
            (size, size),
            {"predictions": predictions, "targets": targets},
            what,
            "of each prediction and its own target",
        )


@contextmanager
def explaining_shapes(batch: Batch) -> Iterator[None]:
    """Meanwhile JAX's error about gradients of something else than one number names the shapes of `batch`, too."""
    try:
        yield
    except TypeError as error:
        found = _OF_JAX.search(str(error))
        if found is None:
            raise
        shape = tuple(int(size) for size in found[1].split(",") if size.strip())
        refused = _refused(shape, {"batch": batch}, "The loss", "one number")
        raise refused.with_traceback(error.__traceback__) from None


def _refused(shape: tuple[int, ...], seen: Mapping[str, PyTree], what: str, allowed: str) -> ValueError:
    return ValueError(f"{what} must be {allowed}, got shape {shape} from {_shapes(seen)}. {_cure(shape, seen)}")


def _cure(shape: tuple[int, ...], seen: Mapping[str, PyTree]) -> str:
    if len(shape) == 2 and shape[0] == shape[1] > 1:
        n = shape[0]
        wide, flat = "predictions", "targets"
        if any(jnp.shape(leaf) == (n, 1) for leaf in jax.tree.leaves(seen.get(flat))):
            wide, flat = flat, wide
        return (
            f"{wide.capitalize()} [{n}, 1] against {flat} [{n}] broadcast to [{n}, {n}], every prediction with the "
            f"target of every example: squeeze the last axis of the {wide}, `{wide}.squeeze(-1)`."
        )
    return "Take its mean."


def _shapes(seen: Mapping[str, PyTree]) -> str:
    single = {name: tree[0] if isinstance(tree, tuple) and len(tree) == 1 else tree for name, tree in seen.items()}
    leaves = jax.tree_util.tree_leaves_with_path(single)
    return ", ".join(f"{leaf_path(path)} {jnp.shape(leaf)}" for path, leaf in leaves)
