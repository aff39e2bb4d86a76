"""The small parts that networks share, and how a network finds its sizes in an example of its input."""

import math
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

Arrays = TypeVar("Arrays", bound=tuple[Any, ...])
ActFn = Literal["elu", "gelu", "leaky_relu", "relu", "sigmoid", "silu", "tanh"]

ACTIVATIONS: dict[ActFn, Callable[[jax.Array], jax.Array]] = {
    "elu": jax.nn.elu,
    "gelu": jax.nn.gelu,
    "leaky_relu": jax.nn.leaky_relu,
    "relu": jax.nn.relu,
    "sigmoid": jax.nn.sigmoid,
    "silu": jax.nn.silu,
    "tanh": jax.nn.tanh,
}

# of the running statistics: those of an epoch of a dozen steps must not be mostly their initial values
BATCH_NORM_MOMENTUM = 0.9


def unchanged(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """What stands where a layer was not asked for."""
    return x


def batch_norm(
    features: int,
    wanted: bool = True,
    *,
    scale_init: Callable[..., jax.Array] = nnx.initializers.ones,
    rngs: nnx.Rngs,
) -> Callable[[jax.Array], jax.Array]:
    """BatchNorm over the last axis, or nothing. It computes in float32 and answers in the type that it is given."""
    if not wanted:
        return unchanged
    return nnx.BatchNorm(
        features, momentum=BATCH_NORM_MOMENTUM, promote_dtype=_not_promoted, scale_init=scale_init, rngs=rngs
    )


def _not_promoted(arrays: Arrays, /, *, dtype: Any = None, inexact: bool = True) -> Arrays:
    # the running statistics are float32 always, and everything after them would be so too
    return arrays


class Hidden(nnx.Module):
    """Linear, BatchNorm if wanted, activation, dropout: [batch, inputs] → [batch, outputs]."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        act_fn: ActFn,
        dropout: float = 0.0,
        norm: bool = False,
        rngs: nnx.Rngs,
    ) -> None:
        self.linear = nnx.Linear(inputs, outputs, rngs=rngs)
        self.norm = batch_norm(outputs, norm, rngs=rngs)
        self.act_fn = ACTIVATIONS[act_fn]
        self.dropout = nnx.Dropout(dropout, rngs=rngs)

    def __call__(self, x: Float[Array, "batch inputs"]) -> Float[Array, "batch outputs"]:
        """[batch, inputs] → [batch, outputs]."""
        return self.dropout(self.act_fn(self.norm(self.linear(x))))


def precise(layer: nnx.Linear, x: Float[Array, "*shape inputs"]) -> Float[Array, "*shape outputs"]:
    """What a linear layer answers, in float32 at least: with small weights, sums are not rounded to their type."""
    wanted = jnp.promote_types(x.dtype, jnp.float32)
    product = jnp.matmul(x, layer.kernel[...], preferred_element_type=wanted)
    return product if layer.bias is None else product + layer.bias[...].astype(wanted)


def recomputed(block: Any, *inputs: jax.Array) -> jax.Array:
    """What a block answers, without what its gradient needs: that is computed again when it is needed.

    `nnx.remat` would write to the block even where nothing in it changes, and nobody may do that in a loop of JAX which
    the block was made outside of, such as one that draws samples. What is random in the block is its `dropout`.
    """
    graph, random, rest = nnx.split(block, nnx.RngState, ...)

    @jax.checkpoint
    def call(random: nnx.State, rest: nnx.State, *inputs: jax.Array) -> tuple[jax.Array, nnx.State]:
        own = nnx.merge(graph, random, rest, copy=True)
        return own(*inputs), nnx.state(own, nnx.RngState)

    answer, random = call(random, rest, *inputs)
    if block.dropout.rate and not block.dropout.deterministic:
        nnx.update(block, random)
    return answer


def flat(x: Float[Array, "batch ..."]) -> Float[Array, "batch features"]:
    """[batch, …] → [batch, features]."""
    return x.reshape(len(x), -1)


def flat_size(exmp_input: Any) -> int:
    """How many features each example of a batch has when it is flat.

    >>> flat_size(jax.ShapeDtypeStruct((128, 28, 28, 1), "float32"))
    784
    """
    if len(exmp_input.shape) < 2:
        raise ValueError(
            f"An input of shape {exmp_input.shape} has no features. It must be [batch, …], with one axis more at least."
        )
    return math.prod(exmp_input.shape[1:])
