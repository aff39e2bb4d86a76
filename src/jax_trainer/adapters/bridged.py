"""Linen modules in nnx modules (`nnx.bridge.ToNNX`), whose first call creates their variables."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jax_trainer.adapters.calls import arguments

_OWN = ("to_nnx__", "_pytree__")  # prefixes of attributes that are not variables


def lacks_variables(module: nnx.Module) -> bool:
    """Whether `module` contains a linen module without variables, because it was never called."""
    return bool(_bare(module))


def with_variables(module: Any, inputs: Any, key: jax.Array) -> Any:
    """`module`, with the missing variables of its linen modules initialised by a call with `inputs`.

    Args:
        module: changed in place.
        inputs: of the call; a tuple is several arguments.
        key: for linen modules created without `rngs`.
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
