"""Multilayer perceptrons: a classifier with one hidden layer, for nnx and for linen, and one with any number."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from compoconf import register
from flax import linen as nn
from flax import nnx
from jaxtyping import Array, Float

from jax_trainer.adapters import BaseModelConfig, BaseModelLinen, BaseModelNNX
from jax_trainer.models.layers import ACTIVATIONS, BATCH_NORM_MOMENTUM, ActFn, Hidden, Rate, Size, flat, flat_size


@dataclass
class SimpleClassifierConfig(BaseModelConfig):
    """Configuration of `SimpleClassifier`.

    Args:
        c_hid: width of the hidden layer.
        num_classes: number of classes.
        act_fn: activation of the hidden layer.
        batch_norm: apply BatchNorm before the activation.
    """

    c_hid: Size = 32
    num_classes: Size = 10
    act_fn: ActFn = "gelu"
    batch_norm: bool = True


@register
class SimpleClassifier(BaseModelNNX):
    """A classifier with one hidden layer on flattened input: [batch, …] → [batch, num_classes]."""

    config: SimpleClassifierConfig

    def __init__(self, config: SimpleClassifierConfig, *, exmp_input: Any, rngs: nnx.Rngs) -> None:
        self.config = config
        inputs, options = flat_size(exmp_input), {"act_fn": config.act_fn, "norm": config.batch_norm}
        self.hidden = Hidden(inputs, config.c_hid, **options, rngs=rngs)
        self.out = nnx.Linear(config.c_hid, config.num_classes, rngs=rngs)

    def __call__(self, x: Float[Array, "batch ..."]) -> Float[Array, "batch num_classes"]:
        """[batch, …] → [batch, num_classes]."""
        return self.out(self.hidden(flat(x)))


@dataclass
class SimpleClassifierLinenConfig(SimpleClassifierConfig):
    """Configuration of `SimpleClassifierLinen`."""


@register
class SimpleClassifierLinen(BaseModelLinen):
    """`SimpleClassifier` for linen: [batch, …] → [batch, num_classes]."""

    config: SimpleClassifierLinenConfig

    @nn.compact
    def __call__(self, x: Float[Array, "batch ..."], train: bool = False) -> Float[Array, "batch num_classes"]:
        """[batch, …] → [batch, num_classes]."""
        x = nn.Dense(self.config.c_hid, name="hidden")(flat(x))
        if self.config.batch_norm:
            x = nn.BatchNorm(use_running_average=not train, momentum=BATCH_NORM_MOMENTUM, name="norm")(x)
        return nn.Dense(self.config.num_classes, name="out")(ACTIVATIONS[self.config.act_fn](x))


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
        options = {"act_fn": config.act_fn, "dropout": config.dropout, "norm": config.batch_norm}
        self.layers = nnx.List(Hidden(*size, **options, rngs=rngs) for size in pairwise(sizes))
        self.out = nnx.Linear(sizes[-1], config.num_classes, rngs=rngs)

    def __call__(self, x: Float[Array, "batch ..."]) -> Float[Array, "batch num_classes"]:
        """[batch, …] → [batch, num_classes]."""
        x = flat(x)
        for layer in self.layers:
            x = layer(x)
        return self.out(x)
