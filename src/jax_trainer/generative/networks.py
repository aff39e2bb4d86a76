"""The network protocol of generative models, and helpers for calling and copying networks."""

from collections.abc import Callable
from types import MethodType
from typing import Any, Protocol, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Num

Condition = Num[Array, "batch *features"] | None
Examples = Float[Array, "batch *features"]
Field = Callable[[Examples, Float[Array, ""]], Examples]
Denoiser = Callable[[Examples, Float[Array, "batch"], Condition], Examples]
AnyNetwork = TypeVar("AnyNetwork")


class Network(Protocol):
    """A module or a function with this signature."""

    def __call__(
        self, x: Float[Array, "batch *features"], t: Float[Array, "batch"], condition: Condition, /
    ) -> Float[Array, "batch *features"]:
        """An array like `x`; `t` is a number per example, `condition` its label or features, or None."""
        ...


def spread(values: Float[Array, "batch"], like: Float[Array, "batch *features"]) -> Float[Array, "batch *ones"]:
    """One number per example, reshaped to broadcast with `like`."""
    return values.reshape(values.shape + (1,) * (like.ndim - 1))


def per_example(values: Float[Array, "batch *features"]) -> Float[Array, "batch"]:
    """The mean over all axes but the batch."""
    return values.reshape(len(values), -1).mean(axis=1)


def in_float32(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """`x` in float32, or in its dtype if that is wider."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def computing_in(dtype: Any, network: Network) -> Network:
    """`network` with its input cast to `dtype` and its output to float32; times are not cast."""

    def call(x: Array, t: Array, condition: Condition) -> Array:
        return in_float32(network(x.astype(dtype), t, condition))

    return call


def twin(network: AnyNetwork) -> AnyNetwork:
    """A copy of `network` with the same weights and the same state of its random streams."""
    return jax.tree.map(lambda leaf: leaf, network)


def evaluating(network: AnyNetwork) -> AnyNetwork:
    """A copy of `network` with every module in evaluation mode."""
    copy = twin(network)
    for part in jax.tree.leaves(copy, is_leaf=_is_module):
        if isinstance(part, nnx.Module):
            part.eval()
    return copy


def as_argument(network: Any) -> Any:
    """`network` as a pytree, so that other weights do not recompile a function that takes it.

    Modules and `jax.tree_util.Partial` are pytrees. Values that another function closes over are compiled as constants:
    a new function is compiled again, and one that closes over a module ignores later changes of its weights.
    """
    if isinstance(network, MethodType) and isinstance(network.__self__, nnx.Module):
        return jax.tree_util.Partial(network.__func__, network.__self__)
    is_tree = not jax.tree_util.all_leaves([network])
    return network if is_tree else jax.tree_util.Partial(network)


def _is_module(part: Any) -> bool:
    return isinstance(part, nnx.Module)
