"""Linen modules inside of nnx ones (`nnx.bridge.ToNNX`), whose variables are made by their first call."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jax_trainer.adapters.calls import arguments

_OWN = ("to_nnx__", "_pytree__")  # what such a module has besides variables


def lacks_variables(module: nnx.Module) -> bool:
    """Whether a linen module in it was never called, and so has no variables yet."""
    return bool(_bare(module))


def with_variables(module: Any, inputs: Any, key: jax.Array) -> Any:
    """`module`, in which linen modules that lack variables have those of a call with `inputs`.

    Args:
        module: is changed in place.
        inputs: what it is called with; a tuple is several arguments.
        key: what those that were made without `rngs` draw from.
    """
    bare = _bare(module)
    if not bare:
        return module
    for node in bare:
        if node.to_nnx__rngs is None:
            node.to_nnx__rngs = nnx.data(nnx.Rngs(key))
    return nnx.bridge.lazy_init(module, *jax.tree.map(jnp.asarray, arguments(inputs)))


def _bare(module: nnx.Module) -> list[nnx.bridge.ToNNX]:
    bridged = [node for _, node in nnx.iter_modules(module) if isinstance(node, nnx.bridge.ToNNX)]
    return [node for node in bridged if all(name.startswith(_OWN) for name in vars(node))]
