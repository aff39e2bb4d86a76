"""An MLP conditioned on the time and a label, for generative models of points and small images."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any

from compoconf import register
from flax import nnx
from jaxtyping import Array, Float, Int

from jax_trainer.adapters import BaseModelConfig, BaseModelNNX
from jax_trainer.config.settings import AtLeast, Problem
from jax_trainer.models.conditioning import Conditioning
from jax_trainer.models.layers import ACTIVATIONS, ActFn, Size, flat, flat_size, precise


@dataclass
class ConditionalMLPConfig(BaseModelConfig):
    """Configuration of `ConditionalMLP`.

    Args:
        hidden: width of each hidden layer.
        num_classes: number of labels; 0: no label conditioning.
        act_fn: activation after each hidden layer.
    """

    hidden: tuple[Size, ...] = (128, 128, 128)
    num_classes: Annotated[int, AtLeast(0)] = 0
    act_fn: ActFn = "silu"

    def problems(self) -> Iterator[Problem]:
        """Reports a network without hidden layers, in which time and label are added."""
        if not self.hidden:
            yield "hidden", "`hidden` must have at least one layer: time and label are added there."


class ConditionedLayer(nnx.Module):
    """A linear layer of the input plus one of the condition: [batch, inputs], [batch, known] → [batch, outputs]."""

    def __init__(self, inputs: int, known: int, outputs: int, *, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(inputs, outputs, rngs=rngs)
        self.known = nnx.Linear(known, outputs, use_bias=False, rngs=rngs)

    def __call__(
        self, x: Float[Array, "batch inputs"], known: Float[Array, "batch known"]
    ) -> Float[Array, "batch outputs"]:
        """[batch, inputs], [batch, known] → [batch, outputs]."""
        return self.linear(x) + self.known(known)


@register
class ConditionalMLP(BaseModelNNX):
    """An MLP conditioned on time and label: x [batch, …], t [batch], labels [batch] or None → like x.

    Time and label are added in every hidden layer. The output layer is initialized to zero.
    """

    config: ConditionalMLPConfig

    def __init__(self, config: ConditionalMLPConfig, *, exmp_input: Any, rngs: nnx.Rngs) -> None:
        size, known = flat_size(exmp_input), config.hidden[0]
        self.config = config
        self.conditioning = Conditioning(config.num_classes, known, rngs=rngs)
        self.layers = nnx.List(
            ConditionedLayer(inputs, known, outputs, rngs=rngs) for inputs, outputs in pairwise((size, *config.hidden))
        )
        self.out = nnx.Linear(config.hidden[-1], size, kernel_init=nnx.initializers.zeros, rngs=rngs)

    def __call__(
        self, x: Float[Array, "batch ..."], t: Float[Array, "batch"], condition: Int[Array, "batch"] | None = None
    ) -> Float[Array, "batch ..."]:
        """[batch, …], [batch], [batch] or None → like x, in float32 at least."""
        act_fn = ACTIVATIONS[self.config.act_fn]
        known = act_fn(self.conditioning(t, condition))
        hidden = flat(x).astype(known.dtype)
        for layer in self.layers:
            hidden = act_fn(layer(hidden, known))
        return precise(self.out, hidden).reshape(x.shape)
