"""Named losses: a loss function may return several losses by name; their weighted sum is minimised."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

LossWeight = float | Callable[[Any], Any]  # a number, or a function of the step
LossWeights = Mapping[str, LossWeight]
LOSS_PREFIX = "loss/"  # of the metrics of named losses


def total_loss(losses: Any, weights: LossWeights | None, step: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The weighted sum of named losses, and each of them by the name of its metric; one loss is returned as it is.

    Args:
        losses: what a loss function returned: one number, or several by name.
        weights: one for each name; None: all are 1.
        step: the number of optimizer steps so far, the argument of weights that are functions.

    >>> total, parts = total_loss({"ce": jnp.array(2.0), "aux": jnp.array(4.0)}, {"ce": 1.0, "aux": 0.5}, step=0)
    >>> float(total), list(parts)
    (4.0, ['loss/ce', 'loss/aux'])
    """
    if not isinstance(losses, Mapping):
        if weights is not None:
            raise ValueError(
                f"`losses` has weights for {', '.join(weights)}, but the loss function returned one number. Return a "
                "dict of losses with these names, or leave out `losses`."
            )
        return losses, {}
    weights = dict.fromkeys(losses, 1.0) if weights is None else weights
    if weights.keys() != losses.keys():
        raise ValueError(
            f"The loss function returned the losses {', '.join(losses)}, but `losses` has weights for "
            f"{', '.join(weights)}. Give every loss a weight, and every weight a loss."
        )
    return weighted_sum(losses, weights, step), {f"{LOSS_PREFIX}{name}": loss for name, loss in losses.items()}


def weighted_sum(losses: Mapping[str, jax.Array], weights: LossWeights, step: Any) -> jax.Array:
    """The sum of those `losses` that have a weight, each times its weight; a constant weight of 0 costs nothing."""
    terms = [
        loss * jnp.asarray(weight(step), loss.dtype) if callable(weight := weights[name]) else loss * weight
        for name, loss in losses.items()
        if weights.get(name, 0) != 0
    ]
    return sum(terms[1:], start=terms[0]) if terms else jnp.zeros((), next(iter(losses.values())).dtype)
