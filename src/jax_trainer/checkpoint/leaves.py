"""A state as a flat mapping from dotted names to arrays, and the comparison of two of them."""

import difflib
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_trainer.checkpoint.names import label, shown
from jax_trainer.checkpoint.record import CheckpointError
from jax_trainer.core import PyTree, leaf_path

_MOST_LINES = 30
_MOST_GUESSES = 20  # each compares one name with all unmatched ones


class Spec(NamedTuple):
    """The dtype and the shape of an array."""

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"

    @classmethod
    def of(cls, leaf: Any) -> "Spec":
        """The spec of an array or `ShapeDtypeStruct`; a typed key has its implementation as dtype."""
        return cls(f"key<{impl}>" if (impl := impl_of(leaf)) else str(leaf.dtype), tuple(leaf.shape))

    @property
    def nbytes(self) -> int:
        """The size of such an array in bytes."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


def named_leaves(state: PyTree) -> dict[str, Any]:
    """The leaves of `state` by dotted name, in the order of the tree."""
    named: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        name = leaf_path(path)
        if name in named:
            raise CheckpointError(f"Two arrays of the state are called {name!r}. Rename one of them.")
        if problem := _problem(leaf):
            raise CheckpointError(f"{name} {problem}")
        named[name] = leaf
    return named


def impl_of(leaf: Any) -> str:
    """The name of the implementation of a typed key or its `ShapeDtypeStruct`; "" for other arrays."""
    if isinstance(leaf.dtype, str) or not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return ""
    return str(leaf.dtype._impl.name)  # `jax.random.key_impl` takes no ShapeDtypeStruct


def as_stored(leaf: Any) -> Any:
    """`leaf` as it is stored: the key data of a typed key, and other arrays unchanged."""
    if not impl_of(leaf):
        return leaf
    if isinstance(leaf, jax.Array):
        return jax.random.key_data(leaf)
    key_data = jax.eval_shape(jax.random.key_data, leaf)
    return Spec(str(key_data.dtype), key_data.shape)


def field_of(name: str) -> str:
    """The field of the state that contains the array with this dotted name.

    >>> field_of("opt_state.0.mu.out.bias")
    'opt_state'
    """
    return name.partition(".")[0]


def _problem(leaf: Any) -> str:
    if not (hasattr(leaf, "dtype") and hasattr(leaf, "shape")):
        return (
            f"is {shown(leaf)}, a Python {type(leaf).__name__}. Only arrays can be saved: convert it by `jnp.asarray`."
        )
    if impl_of(leaf):
        return ""
    dtype = np.dtype(leaf.dtype)
    if not dtype.isnative or not (jnp.issubdtype(dtype, np.number) or dtype == np.bool_):
        return f"has the dtype {dtype}. Only numeric dtypes in native byte order can be saved."
    return ""


def check_fits(found: Mapping[str, Spec], wanted: Mapping[str, Spec], checkpoint: Path) -> None:
    """Fails unless a checkpoint has exactly the wanted arrays; lists all differences."""
    lines = list(_differences(found, wanted))
    if not lines:
        return
    listed = "\n".join(f"  {line}" for line in lines[:_MOST_LINES])
    more = f"\n  … and {len(lines) - _MOST_LINES} more" if len(lines) > _MOST_LINES else ""
    raise CheckpointError(
        f"The checkpoint {checkpoint} does not match the state to restore:\n{listed}{more}\n"
        "Use the model, the optimizer and the precision that it was saved with."
    )


def _differences(found: Mapping[str, Spec], wanted: Mapping[str, Spec]) -> Iterator[str]:
    for name in wanted.keys() & found.keys():
        if wanted[name] != found[name]:
            yield f"{name}: expected {wanted[name]}, found {found[name]}"
    extra = [name for name in found if name not in wanted]
    for number, name in enumerate(name for name in wanted if name not in found):
        guess = _renamed(name, wanted[name], found, extra) if number < _MOST_GUESSES else ""
        yield f"{name}: expected {wanted[name]}, missing in the checkpoint{guess}"
    for name in extra:
        yield f"{label(name)}: not expected, found {found[name]}"


def _renamed(name: str, spec: Spec, found: Mapping[str, Spec], extra: list[str]) -> str:
    alike = [other for other in extra if found[other] == spec and other.isprintable()]
    close = difflib.get_close_matches(name, alike[:500], n=1)
    return f" (it has {close[0]}: renamed?)" if close else ""
