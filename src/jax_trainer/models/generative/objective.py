"""The interface of generative objectives: loss and sampling."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
from compoconf import RegistrableConfigInterface, register_interface
from jaxtyping import PRNGKeyArray

from jax_trainer.config.settings import AtLeast, AtMost, ValueSettings, config_of
from jax_trainer.core import compiled_function
from jax_trainer.models.generative.networks import (
    Condition,
    Examples,
    Network,
    PerExample,
    Progress,
    as_argument,
    dropped,
    evaluating,
    guided,
)


@dataclass
class ObjectiveConfig(ValueSettings):
    """The keys of every objective.

    Args:
        condition_dropout: probability of dropping the condition in training; guidance needs it to be above 0.
        guidance: scale of classifier-free guidance; 1: no guidance, 0: unconditional.
        steps: number of sampling steps.
    """

    condition_dropout: Annotated[float, AtLeast(0), AtMost(1)] = 0.1
    guidance: float = 1.0
    steps: Annotated[int, AtLeast(1)] = 1


@register_interface
class Objective(RegistrableConfigInterface):
    """The objective of a network `network(x, t, condition)`: implement `losses` and `draw`, annotate `config`.

    Objectives with equal configurations are equal.
    """

    config: Any  # a subclass of `ObjectiveConfig`

    def __init__(self, config: ObjectiveConfig | None = None) -> None:
        self.config = config_of(type(self))() if config is None else config

    def loss(
        self,
        key: PRNGKeyArray,
        network: Network,
        x: Examples,
        condition: Condition = None,
        *,
        progress: Progress | None = None,
    ) -> PerExample:
        """The loss of every example. The network is called in the dtype of `x`; everything else is float32.

        Args:
            key: random key of noise, times and condition dropout.
            network: the network, in training or evaluation mode.
            x: the data.
            condition: labels or features; None: unconditional.
            progress: fraction of the training that is over, from 0 to 1; None: 1.
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
    ) -> Examples:
        """Draws samples of this shape, one for each condition. Compiled once per shape; new weights do not recompile.

        Args:
            key: random key of the noise.
            network: a module, which is copied and used in evaluation mode; or a function, see `as_argument`.
            shape: number of samples, followed by the shape of one.
            condition: labels or features; None: unconditional.
            steps: number of sampling steps; None: that of the configuration.
            guidance: guidance scale; None: that of the configuration.
        """
        num_steps = int(self.config.steps if steps is None else steps)
        conditions = None if condition is None else jnp.asarray(condition)
        _check_arguments(tuple(shape), conditions, num_steps)
        return _compiled_draw(
            *(key, as_argument(network), conditions),
            objective=self,
            shape=tuple(shape),
            steps=num_steps,
            guidance=float(self.config.guidance if guidance is None else guidance),
        )

    def losses(
        self, key: PRNGKeyArray, network: Network, x: Examples, condition: Condition, progress: Progress
    ) -> PerExample:
        """The loss of every example, after condition dropout."""
        raise NotImplementedError(f"{type(self).__name__} has no `losses`.")

    def draw(
        self, key: PRNGKeyArray, network: Network, shape: tuple[int, ...], condition: Condition, steps: int
    ) -> Examples:
        """Samples from a guided network in evaluation mode; a pure function, which is compiled."""
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
) -> Examples:
    return objective.draw(key, guided(evaluating(network), guidance), shape, condition, steps)


# shared by all objectives and networks, so that each shape is compiled once
_compiled_draw = compiled_function(_draw, static=("objective", "shape", "steps", "guidance"))


def _check_arguments(shape: tuple[int, ...], condition: Condition, steps: int) -> None:
    if len(shape) < 2 or min(shape) < 1:
        raise ValueError(
            f"`shape` must be the number of samples followed by the shape of one, got {shape}. "
            "For 16 samples of 8 × 8 pixels write (16, 8, 8, 1)."
        )
    if condition is not None and (condition.ndim < 1 or len(condition) != shape[0]):
        found = f"{len(condition)} conditions" if condition.ndim else "a single condition"
        raise ValueError(f"{found} for {shape[0]} samples of `shape` {shape}. Pass one for each sample, or None.")
    if steps < 1:
        raise ValueError(f"`steps` must be at least 1, got {steps}.")
