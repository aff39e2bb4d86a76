"""A network together with the one that it learns from, which never changes."""

from typing import Any

import jax
from flax import nnx
from jaxtyping import Array, Float

from jax_trainer.generative.networks import Condition, evaluating, twin


class Frozen(nnx.Variable):
    """A weight that is not trained: no parameter, so optimizers and averages leave it alone; checkpoints hold it."""


class Distilled(nnx.Module):
    """A student, which is what is called and trained, and its teacher. Make it with `distilled`."""

    def __init__(self, student: nnx.Module, frozen: nnx.Module) -> None:
        self.student = student
        self.frozen = frozen

    @property
    def teacher(self) -> Any:
        """The teacher, in evaluation mode always; a copy, so that no call of it changes anything."""
        return evaluating(self.frozen)

    def __call__(
        self, x: Float[Array, "batch *features"], t: Float[Array, "batch"], condition: Condition = None
    ) -> Float[Array, "batch *features"]:
        """What the student answers."""
        student: Any = self.student
        return student(x, t, condition)


def distilled(student: nnx.Module, teacher: nnx.Module) -> Distilled:
    """Copies of both, the teacher's with `Frozen` weights; the modules that are given stay as they are.

    The student begins with its own weights: give `teacher` for both to begin with the teacher's.
    """
    frozen = jax.tree.map(_frozen, twin(teacher), is_leaf=lambda part: isinstance(part, nnx.Variable))
    return Distilled(twin(student), frozen)


def _frozen(variable: Any) -> Any:
    # random streams stay what they are: they are no weights, and whoever trains a module gives it fresh ones
    is_weight = isinstance(variable, nnx.Variable) and not isinstance(variable, nnx.RngState)
    return Frozen(variable.get_value()) if is_weight else variable
