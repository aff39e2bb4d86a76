"""Float dtypes of parameters, computation and outputs."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jax_trainer.diagnostics.leaves import PyTree
from jax_trainer.diagnostics.suggestions import suggestion


@dataclass(frozen=True, kw_only=True)
class LossScale:
    """A dynamic loss scale, by which the loss is multiplied so that small gradients do not vanish in float16.

    Args:
        initial: the scale of the first step.
        growth: the scale is multiplied by it after `interval` steps in a row without an overflow.
        backoff: the scale is multiplied by it after an overflow, whose step is skipped.
        interval: steps between two increases.
    """

    initial: float = 2.0**16
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Float dtypes of parameters, computation and outputs (loss, metrics, predictions). None: unchanged.

    `loss_scale` is that of the loss in training; None: the loss is not scaled.

    >>> Precision.named("bf16").compute.__name__
    'bfloat16'
    """

    param: Any = None
    compute: Any = None
    output: Any = None
    loss_scale: LossScale | None = None

    @classmethod
    def named(cls, name: "str | Precision | None") -> "Precision":
        """`"f32"`, `"bf16"` (bf16 computation, f32 weights), `"bf16_full"` (bf16 weights, too) or `"f16"` (f16
        computation with a dynamic loss scale, f32 weights); None: unchanged.
        """
        if name is None:
            return cls()
        if isinstance(name, Precision):
            return name
        if name not in _NAMED:
            hint = suggestion(str(name), _NAMED)
            raise ValueError(f"No precision {name!r}.{hint} Use one of {', '.join(_NAMED)}, or a `Precision(…)`.")
        return _NAMED[name]


_NAMED = {
    "f32": Precision(param=jnp.float32, compute=jnp.float32, output=jnp.float32),
    "bf16": Precision(param=jnp.float32, compute=jnp.bfloat16, output=jnp.float32),
    "bf16_full": Precision(param=jnp.bfloat16, compute=jnp.bfloat16, output=jnp.float32),
    "f16": Precision(param=jnp.float32, compute=jnp.float16, output=jnp.float32, loss_scale=LossScale()),
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
