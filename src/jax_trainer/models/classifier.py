"""A classifier with one hidden layer, for nnx and for linen."""

from dataclasses import dataclass
from typing import Any

from compoconf import register
from flax import linen as nn
from flax import nnx
from jaxtyping import Array, Float

from jax_trainer.adapters import BaseModelConfig, BaseModelLinen, BaseModelNNX
from jax_trainer.models.layers import ACTIVATIONS, BATCH_NORM_MOMENTUM, ActFn, Hidden, Size, flat, flat_size


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
        self.hidden = Hidden(
            *(flat_size(exmp_input), config.c_hid), act_fn=config.act_fn, norm=config.batch_norm, rngs=rngs
        )
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
