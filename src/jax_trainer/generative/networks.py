"""What a network of a generative model is, and the few ways in which objectives use one."""

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
    """Anything that can be called so: a module, or a function."""

    def __call__(
        self, x: Float[Array, "batch *features"], t: Float[Array, "batch"], condition: Condition, /
    ) -> Float[Array, "batch *features"]:
        """An array like `x`; `t` is a number per example, `condition` its label or features, or None."""
        ...


def spread(values: Float[Array, "batch"], like: Float[Array, "batch *features"]) -> Float[Array, "batch *ones"]:
    """One number per example, with as many axes as `like` has, so that the two can be multiplied."""
    return values.reshape(values.shape + (1,) * (like.ndim - 1))


def per_example(values: Float[Array, "batch *features"]) -> Float[Array, "batch"]:
    """The mean over everything but the batch."""
    return values.reshape(len(values), -1).mean(axis=1)


def in_float32(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """`x` in float32, or as it is if it is more exact than that."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def computing_in(dtype: Any, network: Network) -> Network:
    """`network` given its input in `dtype`, and answering in float32; times are never rounded."""

    def call(x: Array, t: Array, condition: Condition) -> Array:
        return in_float32(network(x.astype(dtype), t, condition))

    return call


def twin(network: AnyNetwork) -> AnyNetwork:
    """`network` once more, with the same weights and random streams: what one draws or counts, the other will, too."""
    return jax.tree.map(lambda leaf: leaf, network)


def evaluating(network: AnyNetwork) -> AnyNetwork:
    """A twin of `network` in which every module is in evaluation mode: it draws nothing and changes nothing."""
    copy = twin(network)
    for part in jax.tree.leaves(copy, is_leaf=_is_module):
        if isinstance(part, nnx.Module):
            part.eval()
    return copy


def as_argument(network: Any) -> Any:
    """`network` as a pytree, so that a compiled function can be given it with other weights.

    Modules and `jax.tree_util.Partial` are pytrees. What another function closes over is compiled into it: a new
    function is compiled anew, and one that closes over a module would not see that module's later weights.
    """
    if isinstance(network, MethodType) and isinstance(network.__self__, nnx.Module):
        return jax.tree_util.Partial(network.__func__, network.__self__)
    is_tree = not jax.tree_util.all_leaves([network])
    return network if is_tree else jax.tree_util.Partial(network)


def _is_module(part: Any) -> bool:
    return isinstance(part, nnx.Module)
