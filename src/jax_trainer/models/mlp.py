"""A multilayer perceptron."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from compoconf import register
from flax import nnx
from jaxtyping import Array, Float

from jax_trainer.adapters import BaseModelConfig, BaseModelNNX
from jax_trainer.models.layers import ActFn, Hidden, Rate, Size, flat, flat_size


@dataclass
class MLPConfig(BaseModelConfig):
    """Configuration of `MLP`.

    Args:
        hidden: width of each hidden layer; an empty list makes a linear model.
        num_classes: number of outputs, one per class; 1 for scalar regression.
        act_fn: activation after each hidden layer.
        dropout: dropout rate of the hidden layers.
        batch_norm: apply BatchNorm before each activation.
    """

    hidden: tuple[Size, ...] = (128, 128)
    num_classes: Size = 10
    act_fn: ActFn = "gelu"
    dropout: Rate = 0.0
    batch_norm: bool = False


@register
class MLP(BaseModelNNX):
    """A multilayer perceptron on flattened input: [batch, …] → [batch, num_classes]."""

    config: MLPConfig

    def __init__(self, config: MLPConfig, *, exmp_input: Any, rngs: nnx.Rngs) -> None:
        sizes = (flat_size(exmp_input), *config.hidden)
        self.config = config
        self.layers = nnx.List(
            Hidden(
                *(inputs, outputs),
                act_fn=config.act_fn,
                dropout=config.dropout,
                norm=config.batch_norm,
                rngs=rngs,
            )
            for inputs, outputs in pairwise(sizes)
        )
        self.out = nnx.Linear(sizes[-1], config.num_classes, rngs=rngs)

    def __call__(self, x: Float[Array, "batch ..."]) -> Float[Array, "batch num_classes"]:
        """[batch, …] → [batch, num_classes]."""
        x = flat(x)
        for layer in self.layers:
            x = layer(x)
        return self.out(x)
