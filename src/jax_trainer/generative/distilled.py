"""A student network with its frozen teacher."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jax_trainer.generative.networks import Condition, evaluating, twin


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

    def __call__(
        self, x: Float[Array, "batch *features"], t: Float[Array, "batch"], condition: Condition = None
    ) -> Float[Array, "batch *features"]:
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
