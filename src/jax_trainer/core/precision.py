"""Float dtypes of parameters, computation and outputs."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jax_trainer.core.metrics import PyTree


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Float dtypes of parameters, computation and outputs (loss, metrics, predictions). None: unchanged.

    >>> Precision.named("bf16").compute.__name__
    'bfloat16'
    """

    param: Any = None
    compute: Any = None
    output: Any = None

    @classmethod
    def named(cls, name: "str | Precision") -> "Precision":
        """`"f32"`, `"bf16"` (bf16 computation, f32 weights) or `"bf16_full"` (bf16 weights, too)."""
        if isinstance(name, Precision):
            return name
        if name not in _NAMED:
            raise ValueError(f"No precision {name!r}. Use one of {', '.join(_NAMED)}, or a `Precision(…)`.")
        return _NAMED[name]


_NAMED = {
    "f32": Precision(param=jnp.float32, compute=jnp.float32, output=jnp.float32),
    "bf16": Precision(param=jnp.float32, compute=jnp.bfloat16, output=jnp.float32),
    "bf16_full": Precision(param=jnp.bfloat16, compute=jnp.bfloat16, output=jnp.float32),
}


def cast_floats(tree: PyTree, dtype: Any) -> PyTree:
    """`tree` with its float arrays in `dtype`; integers, booleans and keys are unchanged."""
    if dtype is None:
        return tree

    def cast(leaf: Any) -> Any:
        is_float = hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating)
        return leaf.astype(dtype) if is_float else leaf

    return jax.tree.map(cast, tree)


def cast_like(tree: PyTree, reference: PyTree) -> PyTree:
    """`tree` with the dtypes of `reference`."""
    return jax.tree.map(lambda leaf, like: jnp.asarray(leaf, like.dtype), tree, reference)
