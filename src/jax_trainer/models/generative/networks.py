"""The network protocol of generative models, and networks made of others: guided, cast, with a teacher."""

from collections.abc import Callable
from types import MethodType
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Num, PRNGKeyArray

from jax_trainer.models.conditional import NO_LABEL

Key = PRNGKeyArray
Condition = Num[Array, "batch *features"] | None
Examples = Float[Array, "batch *features"]
PerExample = Float[Array, "batch"]  # a number for each
Progress = float | Float[Array, ""]  # of the training, from 0 to 1
Field = Callable[[Examples, Float[Array, ""]], Examples]
Denoiser = Callable[[Examples, PerExample, Condition], Examples]
# an array like `x`, from a number and a label or features of each example: a module or a function
Network = Callable[[Examples, PerExample, Condition], Examples]
AnyNetwork = TypeVar("AnyNetwork")


def spread(values: PerExample, like: Examples) -> Float[Array, "batch *ones"]:
    """One number per example, reshaped to broadcast with `like`."""
    return values.reshape(values.shape + (1,) * (like.ndim - 1))


def per_example(values: Examples) -> PerExample:
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
    for part in jax.tree.leaves(copy, is_leaf=lambda part: isinstance(part, nnx.Module)):
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


# condition dropout in training, and classifier-free guidance


def null_condition(condition: Num[Array, "batch *features"]) -> Num[Array, "batch *features"]:
    """The null condition: `NO_LABEL` for labels, zeros for features."""
    is_label = jnp.issubdtype(condition.dtype, jnp.integer)
    return jnp.full_like(condition, NO_LABEL if is_label else 0)


def dropped(key: Key, condition: Condition, rate: float) -> Condition:
    """`condition`, replaced by the null condition with probability `rate` for each example."""
    if condition is None or rate == 0:
        return condition
    is_dropped = jax.random.bernoulli(key, rate, (len(condition),) + (1,) * (condition.ndim - 1))
    return jnp.where(is_dropped, null_condition(condition), condition)


def guided(network: Network, scale: float) -> Network:
    """Classifier-free guidance: a network with the output `uncond + scale · (cond − uncond)`.

    Both are computed in one call with twice the batch. A scale of 1 is the network itself, 0 ignores the condition.
    """
    if scale == 1:
        return network

    def call(x: Array, t: Array, condition: Condition) -> Array:
        if condition is None:
            return network(x, t, None)
        null = null_condition(condition)
        if scale == 0:
            return network(x, t, null)
        twice = jnp.concatenate([condition, null])
        conditioned, unconditioned = jnp.split(network(jnp.concatenate([x, x]), jnp.concatenate([t, t]), twice), 2)
        return unconditioned + scale * (conditioned - unconditioned)

    return call


# a student and its teacher


class Frozen(nnx.Variable):
    """A weight that is not trained: not an `nnx.Param`, so optimizers and EMA ignore it; checkpoints contain it."""


class Distilled(nnx.Module):
    """A student, which is called and trained, and its frozen teacher. Create it with `distilled`."""

    def __init__(self, student: nnx.Module, frozen: nnx.Module) -> None:
        self.student = student
        self.frozen = frozen

    @property
    def teacher(self) -> Any:
        """A copy of the teacher in evaluation mode."""
        return evaluating(self.frozen)

    def __call__(self, x: Examples, t: PerExample, condition: Condition = None) -> Examples:
        """The output of the student."""
        student: Any = self.student
        return student(x, t, condition)


def distilled(student: nnx.Module, teacher: nnx.Module) -> Distilled:
    """A `Distilled` of copies of both, with `Frozen` weights of the teacher; the arguments are not modified.

    Pass `teacher` for both to initialize the student with the weights of the teacher.
    """
    frozen = jax.tree.map(_frozen, twin(teacher), is_leaf=lambda part: isinstance(part, nnx.Variable))
    return Distilled(twin(student), frozen)


def are_alike(module: nnx.Module, other: nnx.Module) -> bool:
    """Whether two modules have parameters of the same names and shapes."""
    one, two = (nnx.to_pure_dict(nnx.state(each, nnx.Param)) for each in (module, other))
    return jax.tree.map(jnp.shape, one) == jax.tree.map(jnp.shape, two)


def _frozen(variable: Any) -> Any:
    # random streams are not weights, and are reseeded when a module is trained
    is_weight = isinstance(variable, nnx.Variable) and not isinstance(variable, nnx.RngState)
    return Frozen(variable.get_value()) if is_weight else variable
