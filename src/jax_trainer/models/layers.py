"""Layers and helpers that several models share."""

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Annotated, Any, Literal, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jax_trainer.config.settings import AtLeast, Below

Arrays = TypeVar("Arrays", bound=tuple[Any, ...])
Tokens = Int[Array, "batch time"]
Mask = Bool[Array, "batch time"] | None  # False for padding
Vectors = Float[Array, "batch time width"]  # of the tokens
Images = Float[Array, "batch height width channels"]
Size = Annotated[int, AtLeast(1)]  # of a part of a model, in its configuration
Rate = Annotated[float, AtLeast(0), Below(1)]  # of dropout
ActFn = Literal["elu", "gelu", "gelu_exact", "leaky_relu", "relu", "sigmoid", "silu", "tanh"]

ACTIVATIONS: dict[ActFn, Callable[[jax.Array], jax.Array]] = {
    "elu": jax.nn.elu,
    "gelu": jax.nn.gelu,  # approximated with tanh
    "gelu_exact": partial(jax.nn.gelu, approximate=False),
    "leaky_relu": jax.nn.leaky_relu,
    "relu": jax.nn.relu,
    "sigmoid": jax.nn.sigmoid,
    "silu": jax.nn.silu,
    "tanh": jax.nn.tanh,
}

# low, so that the running statistics forget their initial values within a dozen steps
BATCH_NORM_MOMENTUM = 0.9
INIT_STD = 0.02  # small: initial predictions are nearly uniform, although the embedding is also the head


def unchanged(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """The identity, in place of an optional layer."""
    return x


def batch_norm(
    features: int, enabled: bool = True, *, scale_init: Callable[..., jax.Array] = nnx.initializers.ones, rngs: nnx.Rngs
) -> Callable[[jax.Array], jax.Array]:
    """BatchNorm over the last axis, or the identity. It computes in float32 and returns the dtype of its input."""
    if not enabled:
        return unchanged
    return nnx.BatchNorm(
        features, momentum=BATCH_NORM_MOMENTUM, promote_dtype=_not_promoted, scale_init=scale_init, rngs=rngs
    )


def _not_promoted(arrays: Arrays, /, *, dtype: Any = None, inexact: bool = True) -> Arrays:
    # the running statistics are float32, and would promote everything after them
    return arrays


class Hidden(nnx.Module):
    """Linear, optional BatchNorm, activation, dropout: [batch, inputs] → [batch, outputs]."""

    def __init__(
        self, inputs: int, outputs: int, *, act_fn: ActFn, dropout: float = 0.0, norm: bool = False, rngs: nnx.Rngs
    ) -> None:
        self.linear = nnx.Linear(inputs, outputs, rngs=rngs)
        self.norm = batch_norm(outputs, norm, rngs=rngs)
        self.act_fn = ACTIVATIONS[act_fn]
        self.dropout = nnx.Dropout(dropout, rngs=rngs)

    def __call__(self, x: Float[Array, "batch inputs"]) -> Float[Array, "batch outputs"]:
        """[batch, inputs] → [batch, outputs]."""
        return self.dropout(self.act_fn(self.norm(self.linear(x))))


def linear(inputs: int, outputs: int, *, bias: bool = False, std: float = INIT_STD, rngs: nnx.Rngs) -> nnx.Linear:
    """A linear layer of a transformer."""
    return nnx.Linear(inputs, outputs, use_bias=bias, kernel_init=nnx.initializers.normal(std), rngs=rngs)


def vectors(count: int, width: int, *, rngs: nnx.Rngs) -> nnx.Param:
    """An embedding table, [count, width]. (The output dtype of `nnx.Embed` is fixed at construction.)"""
    return nnx.Param(nnx.initializers.normal(INIT_STD)(rngs.params(), (count, width)))


class Perceptron(nnx.Module):
    """An MLP with one hidden layer, with a gate or without: [batch, time, width] → [batch, time, width]."""

    def __init__(self, act_fn: ActFn, *, hidden: nnx.Linear, out: nnx.Linear, gate: nnx.Linear | None = None) -> None:
        self.act_fn, self.hidden, self.out, self.gate = ACTIVATIONS[act_fn], hidden, out, gate

    def __call__(self, x: Vectors) -> Vectors:
        """[batch, time, width] → [batch, time, width]."""
        hidden = self.hidden(x)
        return self.out(self.act_fn(hidden) if self.gate is None else self.act_fn(self.gate(x)) * hidden)


def precise(layer: nnx.Linear, x: Float[Array, "*shape inputs"]) -> Float[Array, "*shape outputs"]:
    """The output of a linear layer, accumulated and returned in float32 at least."""
    dtype = jnp.promote_types(x.dtype, jnp.float32)
    product = jnp.matmul(x, layer.kernel[...], preferred_element_type=dtype)
    return product if layer.bias is None else product + layer.bias[...].astype(dtype)


def recomputed(block: Any, *inputs: jax.Array) -> jax.Array:
    """The output of a block, rematerialized in the backward pass.

    `nnx.remat` writes to the block even if nothing in it changes, which is an error inside a JAX loop if the block was
    created outside of it, such as in sampling. The only random part of a block is its `dropout`.
    """
    graph, random, rest = nnx.split(block, nnx.RngState, ...)

    @jax.checkpoint
    def call(random: nnx.State, rest: nnx.State, *inputs: jax.Array) -> tuple[jax.Array, nnx.State]:
        copied = nnx.merge(graph, random, rest, copy=True)
        return copied(*inputs), nnx.state(copied, nnx.RngState)

    output, random = call(random, rest, *inputs)
    if block.dropout.rate and not block.dropout.deterministic:
        nnx.update(block, random)
    return output


def through(blocks: Iterable[Any], x: jax.Array, *inputs: jax.Array, remat: bool) -> jax.Array:
    """The output of the last of `blocks`; `remat`: rematerialized in the backward pass."""
    for block in blocks:
        x = recomputed(block, x, *inputs) if remat else block(x, *inputs)
    return x


def image_shape(model: str, shape: tuple[int, ...], patch: int = 1) -> tuple[int, int, int]:
    """Height, width and channels of a batch of images of this shape, which can be split into patches."""
    if len(shape) != 4:
        raise ValueError(f"{model} takes images [batch, height, width, channels], got an input of shape {shape}.")
    _, height, width, channels = shape
    if height % patch or width % patch:
        text = f"`patch` must divide height and width of the images evenly, got {patch} for {height} × {width} pixels."
        raise ValueError(text)
    return height, width, channels


def flat(x: Float[Array, "batch ..."]) -> Float[Array, "batch features"]:
    """[batch, …] → [batch, features]."""
    return x.reshape(x.shape[0], -1)


def flat_size(exmp_input: Any) -> int:
    """Number of features of each flattened example of a batch.

    >>> flat_size(jax.ShapeDtypeStruct((128, 28, 28, 1), "float32"))
    784
    """
    if len(exmp_input.shape) < 2:
        raise ValueError(
            f"An input of shape {exmp_input.shape} has no features. Pass [batch, …], with at least two axes."
        )
    return math.prod(exmp_input.shape[1:])
