"""Metrics of predicted probabilities: log-loss, perplexity and calibration.

Their statistics are sums of floats: float32 within a step, float64 over steps, so that their last digits depend on how
the examples are split into batches.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from compoconf import register

from jax_trainer.config.settings import AtLeast
from jax_trainer.metrics.classification import ClassMetric, ClassMetricConfig, Examples
from jax_trainer.metrics.metric import ratio, weighted_sum


@dataclass
class LogLossConfig(ClassMetricConfig):
    """Configuration of `LogLoss`.

    Args:
        from_logits: outputs are logits, as Optax losses expect them; false: probabilities.
    """


@register
class LogLoss(ClassMetric):
    """The mean negative log-likelihood of the targets, in nats: cross entropy, also of binary classes and labels.

    >>> round(LogLoss(from_logits=False).value(np.array([[0.5, 0.5], [0.25, 0.75]]), np.array([0, 1])), 4)
    0.4904
    """

    config: LogLossConfig
    needs_scores: ClassVar[bool] = True

    def statistics_of(self, of: Examples) -> jax.Array:
        losses = _losses(of.outputs, of.target, from_logits=self.config.from_logits)
        return jnp.stack([weighted_sum(losses, of.weights), of.weights.sum().astype(losses.dtype)])


def _losses(scores: jax.Array, target: jax.Array, *, from_logits: bool) -> jax.Array:
    """The negative log-likelihood of each target; NaN for a target that is no class."""
    classes = 2 if scores.ndim == 1 else scores.shape[-1]
    is_class = (target >= 0) & (target < classes)
    target = jnp.where(is_class, target, 0)
    if not from_logits:
        eps = jnp.finfo(scores.dtype).eps
        clipped = jnp.clip(scores, eps, 1 - eps)
        if scores.ndim == 1:
            chosen = jnp.where(target > 0, clipped, 1 - clipped)
        else:
            chosen = jnp.take_along_axis(clipped, target[:, None], axis=-1)[:, 0]
        losses = -jnp.log(chosen)
    elif scores.ndim == 1:
        losses = optax.sigmoid_binary_cross_entropy(scores, target.astype(scores.dtype))
    else:
        losses = optax.softmax_cross_entropy_with_integer_labels(scores, target)
    return jnp.where(is_class, losses, jnp.nan)


@register
class Perplexity(LogLoss):
    """The exponential of the mean negative log-likelihood of all tokens."""

    def result_of(self, statistics: np.ndarray) -> float:
        return float(np.exp(super().result_of(statistics)))


@dataclass
class ECEConfig(ClassMetricConfig):
    """Configuration of `ECE`.

    Args:
        from_logits: outputs are logits, as Optax losses expect them; false: probabilities.
        num_bins: number of bins of equal width between confidence 0 and 1.
    """

    num_bins: Annotated[int, AtLeast(1)] = 15


@register
class ECE(ClassMetric):
    """The expected calibration error: by how much confidence and accuracy differ, on average over bins of confidence.

    The confidence of a prediction is the probability of the predicted class; a bin includes its upper edge.
    """

    config: ECEConfig
    needs_scores: ClassVar[bool] = True

    def statistics_of(self, of: Examples) -> jax.Array:
        (scores, target, weights), bins = of[:3], self.config.num_bins
        if scores.ndim == 1:
            positive = jax.nn.sigmoid(scores) if self.config.from_logits else scores
            scores = jnp.stack([1 - positive, positive], axis=-1)
        elif self.config.from_logits:
            scores = jax.nn.softmax(scores)
        confidence, is_correct = scores.max(-1), scores.argmax(-1) == target
        number = jnp.clip(jnp.ceil(confidence * bins).astype(jnp.int32) - 1, 0, bins - 1)
        chosen = jnp.where(number[:, None] == jnp.arange(bins), weights.astype(jnp.float32)[:, None], 0)
        parts = (jnp.ones_like(confidence), confidence, is_correct.astype(jnp.float32))
        return jnp.stack([weighted_sum(part[:, None], chosen, axis=0) for part in parts])

    def result_of(self, statistics: np.ndarray) -> float:
        weights, confidence, correct = statistics
        return float(ratio(np.abs(correct - confidence).sum(), weights.sum()))
