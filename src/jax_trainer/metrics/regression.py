"""Metrics of numbers: MSE, RMSE, MAE and R²."""

from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from compoconf import register

from jax_trainer.metrics.metric import MetricInterface, ratio, weighted_sum, weights_of

ROUNDING = 1e-6  # relative, of sums in float32: a smaller difference of sums is 0


def _pair(outputs: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    if outputs.shape != targets.shape:
        raise ValueError(
            f"The outputs have shape {outputs.shape}, and the targets {targets.shape}. Give both the same shape, such "
            "as with `outputs.squeeze(-1)`: otherwise every output would be compared with every target."
        )
    return outputs.astype(jnp.float32), targets.astype(jnp.float32)


class MeanError(MetricInterface):
    """Base of mean errors of all values; a subclass computes that of each."""

    def statistics(self, outputs: jax.Array, targets: jax.Array, weights: Any = None) -> jax.Array:
        outputs, targets = _pair(outputs, targets)
        weights = weights_of(weights, outputs.shape)
        errors = self.error(outputs - targets)
        return jnp.stack([weighted_sum(errors, weights), weights.sum().astype(errors.dtype)])

    def error(self, difference: jax.Array) -> jax.Array:
        """The error of each value, from the difference of output and target."""
        raise NotImplementedError(f"{type(self).__name__} has no `error`.")

    def compute(self, statistics: np.ndarray) -> float:
        return float(ratio(*statistics))


@register
class MSE(MeanError):
    """The mean squared error.

    >>> MSE().value(np.array([1.0, 2.0]), np.array([1.0, 4.0]), weights=np.array([3.0, 1.0]))
    1.0
    """

    def error(self, difference: jax.Array) -> jax.Array:
        return difference**2


@register
class RMSE(MSE):
    """The square root of the mean squared error of all values."""

    def compute(self, statistics: np.ndarray) -> float:
        return float(np.sqrt(super().compute(statistics)))


@register
class MAE(MeanError):
    """The mean absolute error."""

    def error(self, difference: jax.Array) -> jax.Array:
        return jnp.abs(difference)


@register
class R2(MetricInterface):
    """The coefficient of determination R²: 1 is perfect, 0 is as good as the mean; of several outputs, their mean.

    Of constant targets it is 1 if all outputs are exact, and otherwise 0.

    >>> R2().value(np.array([1.0, 2.0, 4.0]), np.array([1.0, 2.0, 3.0]))
    0.5
    """

    # a row per batch, with moments about a center of its own: sums of squares of large targets would cancel
    mode: ClassVar[Literal["sum", "concat"]] = "concat"

    def statistics(self, outputs: jax.Array, targets: jax.Array, weights: Any = None) -> jax.Array:
        outputs, targets = _pair(outputs, targets)
        count = len(targets)
        weights = weights_of(weights, targets.shape).astype(jnp.float32).reshape(count, -1)
        outputs, targets = outputs.reshape(weights.shape), targets.reshape(weights.shape)
        total = weights.sum(0)
        center = weighted_sum(targets, weights, axis=0) / jnp.where(total > 0, total, 1)
        offsets = targets - center
        moments = [weighted_sum(part, weights, axis=0) for part in (offsets, offsets**2, (outputs - targets) ** 2)]
        return jnp.stack([total, center, *moments])[None]

    def compute(self, statistics: np.ndarray) -> float:
        rows = np.asarray(statistics, np.float64)
        weights, centers, first, second, residual = np.moveaxis(rows[(rows[:, 0] > 0).any(1)], 1, 0)
        if not len(weights):
            return np.nan
        centers = centers - centers[:1]
        shift = centers - ratio((weights * centers + first).sum(0), weights.sum(0))
        terms = np.stack([second, 2 * shift * first, weights * shift**2])
        spread = terms.sum((0, 1))
        spread = np.where(spread > ROUNDING * np.abs(terms).sum((0, 1)), spread, 0)
        residual = residual.sum(0)
        scores = np.where(spread == 0, residual == 0, 1 - ratio(residual, spread))
        return float(scores.mean())
