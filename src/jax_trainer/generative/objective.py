"""What a generative network learns, and how samples are drawn from it: the interface of all objectives."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
from compoconf import RegistrableConfigInterface, register_interface
from jaxtyping import Array, Float, PRNGKeyArray

from jax_trainer.core import compiled_function
from jax_trainer.generative.conditions import dropped, guided
from jax_trainer.generative.networks import Condition, Network, as_argument, evaluating
from jax_trainer.settings import AtLeast, AtMost, ValueSettings, config_of


@dataclass
class ObjectiveConfig(ValueSettings):
    """The keys that every objective has.

    Args:
        condition_dropout: the share of examples whose condition is left out in training; guidance needs some.
        guidance: how strongly samples follow their condition; 1: as trained, 0: not at all, more: more than trained.
        steps: how many steps a sample takes.
    """

    condition_dropout: Annotated[float, AtLeast(0), AtMost(1)] = 0.1
    guidance: float = 1.0
    steps: Annotated[int, AtLeast(1)] = 1


@register_interface
class Objective(RegistrableConfigInterface):
    """What a network `network(x, t, condition)` learns: implement `losses` and `draw`, annotate `config`.

    Two with equal configurations are equal.
    """

    config: Any  # the class of an objective's own configuration, which derives from `ObjectiveConfig`

    def __init__(self, config: ObjectiveConfig | None = None) -> None:
        self.config = config_of(type(self))() if config is None else config

    def loss(
        self,
        key: PRNGKeyArray,
        network: Network,
        x: Float[Array, "batch *features"],
        condition: Condition = None,
        *,
        progress: float | Float[Array, ""] | None = None,
    ) -> Float[Array, "batch"]:
        """The loss of every example. The network is called in the type of `x`; all else is float32.

        Args:
            key: what noise, times and left out conditions are drawn with.
            network: the network, in the mode it should be in.
            x: the data.
            condition: labels, or numbers; None: none for any example.
            progress: which share of the training is over, from 0 to 1; None: all of it.
        """
        drop_key, key = jax.random.split(key)
        condition = dropped(drop_key, condition, self.config.condition_dropout)
        return self.losses(key, network, x, condition, 1.0 if progress is None else progress)

    def sample(
        self,
        key: PRNGKeyArray,
        network: Network,
        shape: Sequence[int],
        condition: Condition | np.ndarray = None,
        *,
        steps: int | None = None,
        guidance: float | None = None,
    ) -> Float[Array, "batch *features"]:
        """Samples of this shape, one for each condition. Compiled once for a shape, not for new weights.

        Args:
            key: what the noise is drawn with.
            network: a module, whichever mode it is in: it is not changed; or a function, see `as_argument`.
            shape: the number of samples, and the shape of one.
            condition: as in `loss`.
            steps: None: as the configuration says.
            guidance: None: as the configuration says.
        """
        chosen = int(self.config.steps if steps is None else steps)
        given = None if condition is None else jnp.asarray(condition)
        _check_request(tuple(shape), given, chosen)
        return _compiled_draw(
            *(key, as_argument(network), given),
            objective=self,
            shape=tuple(shape),
            steps=chosen,
            guidance=float(self.config.guidance if guidance is None else guidance),
        )

    def losses(
        self,
        key: PRNGKeyArray,
        network: Network,
        x: Float[Array, "batch *features"],
        condition: Condition,
        progress: float | Float[Array, ""],
    ) -> Float[Array, "batch"]:
        """The loss of every example, with the conditions that are left out left out already."""
        raise NotImplementedError(f"{type(self).__name__} has no `losses`.")

    def draw(
        self, key: PRNGKeyArray, network: Network, shape: tuple[int, ...], condition: Condition, steps: int
    ) -> Float[Array, "batch *features"]:
        """Samples from a network that is in evaluation mode and guided; pure, so that it can be compiled."""
        raise NotImplementedError(f"{type(self).__name__} has no `draw`.")

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.config == getattr(other, "config", None)

    def __hash__(self) -> int:
        return hash((type(self), self.config))


def _draw(
    key: PRNGKeyArray,
    network: Any,
    condition: Condition,
    *,
    objective: Objective,
    shape: tuple[int, ...],
    steps: int,
    guidance: float,
) -> Float[Array, "batch *features"]:
    return objective.draw(key, guided(evaluating(network), guidance), shape, condition, steps)


# one for all objectives and networks: what was compiled for a shape serves whoever asks for it again
_compiled_draw = compiled_function(_draw, static=("objective", "shape", "steps", "guidance"))


def _check_request(shape: tuple[int, ...], condition: Condition, steps: int) -> None:
    if len(shape) < 2 or min(shape) < 1:
        raise ValueError(
            f"`shape` must be the number of samples and then the shape of one, got {shape}. "
            "For 16 samples of 8 × 8 pixels write (16, 8, 8, 1)."
        )
    if condition is not None and (condition.ndim < 1 or len(condition) != shape[0]):
        found = f"{len(condition)} conditions" if condition.ndim else "a single condition"
        raise ValueError(
            f"{found} for {shape[0]} samples of `shape` {shape}. Give one for each sample, or None for none at all."
        )
    if steps < 1:
        raise ValueError(f"`steps` must be at least 1, got {steps}.")
