"""Metrics of scores: the areas under curves, log-loss, perplexity and calibration.

Areas are exact, and so need all scores: a step returns one row per example, which the host keeps until the end of the
evaluation, 4 bytes × (classes + 2) each, or 12 bytes per label. By default they are not computed in training. The other
statistics are sums of floats: float32 within a step, float64 over steps, so that their last digits depend on how the
examples are split into batches.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from compoconf import register

from jax_trainer.config.settings import AtLeast
from jax_trainer.metrics.classification import ClassMetric, ClassMetricConfig, Examples
from jax_trainer.metrics.metric import ratio, weighted_sum


@dataclass
class CurveConfig(ClassMetricConfig):
    """The keys of metrics of curves.

    Args:
        log_mode: the phases in which it is reported: any, train, val, test, or eval (validation and test).
        log_freq: in training, reported per window of steps (step), per epoch (epoch), or both (any).
        from_logits: outputs are logits, of several classes by softmax; false: probabilities.
        average: over labels, or over classes, each against all others: macro, weighted by the number of targets, or
            none (an array). Of two classes, only the second counts.
    """

    log_mode: Literal["any", "train", "val", "test", "eval"] = "eval"
    log_freq: Literal["any", "step", "epoch"] = "epoch"
    average: Literal["macro", "weighted", "none"] = "macro"


class CurveArea(ClassMetric):
    """Base of the areas under curves; a subclass computes that of one class."""

    config_class = CurveConfig
    mode: ClassVar[Literal["sum", "concat"]] = "concat"
    needs_scores: ClassVar[bool] = True

    def statistics_of(self, of: Examples) -> jax.Array:
        (scores, target, weights), columns = of[:3], of.labels or 1
        if scores.ndim == 1:
            scores = scores.reshape(-1, columns)
        elif scores.shape[-1] == 2:  # ordered by the second class; the difference of logits is not rounded to 0 or 1
            scores = scores[:, 1:] - scores[:, :1] if self.config.from_logits else scores[:, 1:]
        elif self.config.from_logits:
            scores = jax.nn.softmax(scores)
        parts = [scores, target.reshape(-1, columns), weights.reshape(-1, columns)]
        return jnp.concatenate(parts, axis=1, dtype=jnp.float32)

    def result_of(self, statistics: np.ndarray) -> float | np.ndarray:
        rows, average = np.asarray(statistics, np.float64), self.config.average
        columns = rows.shape[1] // 3 if self.config.multilabel else 1  # of targets, and of weights
        scores, target, weights = np.split(rows, [-2 * columns, -columns], axis=1)
        is_binary = scores.shape[1] == columns
        is_true = target == (1 if is_binary else np.arange(scores.shape[1]))
        weights = np.broadcast_to(weights, scores.shape)
        counts = weights > 0  # what has weight 0 may be padding
        by_class = zip(scores.T, is_true.T, weights.T, counts.T, strict=True)
        areas = np.array([self.area(score[n], true[n], weight[n]) for score, true, weight, n in by_class])
        if average == "none" and (self.config.multilabel or not is_binary):
            return areas
        if np.isnan(scores[counts]).any():
            return np.nan
        of_class = np.where(is_true, weights, 0).sum(0)
        counted = np.where(np.isnan(areas), 0, of_class if average == "weighted" else 1.0)
        return float(ratio(np.where(counted > 0, areas * counted, 0).sum(), counted.sum()))

    def area(self, scores: np.ndarray, is_true: np.ndarray, weights: np.ndarray) -> float:
        """The area under the curve of one class; NaN if it is not defined."""
        raise NotImplementedError(f"{type(self).__name__} has no `area`.")


def _cumulated(scores: np.ndarray, is_true: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The weights of true and of false examples at or above each score, from the highest score on."""
    order = np.argsort(-scores, kind="stable")
    last = np.append(np.diff(scores[order]) != 0, True)  # of equal scores
    true, false = np.where(is_true, weights, 0)[order], np.where(is_true, 0, weights)[order]
    return np.cumsum(true)[last], np.cumsum(false)[last]


@register
class AUROC(CurveArea):
    """The area under the ROC curve; classes without an example, or with all of them, are left out.

    >>> AUROC().value(np.array([0.1, 0.4, 0.35, 0.8]), np.array([0, 0, 1, 1]))
    0.75
    """

    def area(self, scores: np.ndarray, is_true: np.ndarray, weights: np.ndarray) -> float:
        if np.isnan(scores).any() or is_true.all() or not is_true.any():
            return np.nan
        true, false = (np.append(0, part) for part in _cumulated(scores, is_true, weights))
        return float(np.trapezoid(true, false) / (true[-1] * false[-1]))


@register
class AveragePrecision(CurveArea):
    """The mean precision at every recall, without interpolation; classes without an example are left out.

    >>> round(AveragePrecision().value(np.array([0.1, 0.4, 0.35, 0.8]), np.array([0, 0, 1, 1])), 4)
    0.8333
    """

    def area(self, scores: np.ndarray, is_true: np.ndarray, weights: np.ndarray) -> float:
        if np.isnan(scores).any() or not is_true.any():
            return np.nan
        true, false = _cumulated(scores, is_true, weights)
        return float((np.diff(true, prepend=0) * ratio(true, true + false, empty=0.0)).sum() / true[-1])


@register
class LogLoss(ClassMetric):
    """The mean negative log-likelihood of the targets, in nats: cross entropy, also of binary classes and labels.

    >>> round(LogLoss(from_logits=False).value(np.array([[0.5, 0.5], [0.25, 0.75]]), np.array([0, 1])), 4)
    0.4904
    """

    needs_scores: ClassVar[bool] = True

    def statistics_of(self, of: Examples) -> jax.Array:
        scores, classes = of.outputs, 2 if of.outputs.ndim == 1 else of.outputs.shape[-1]
        is_class = (of.target >= 0) & (of.target < classes)
        target = jnp.where(is_class, of.target, 0)
        if self.config.from_logits and scores.ndim == 1:
            losses = optax.sigmoid_binary_cross_entropy(scores, target.astype(scores.dtype))
        elif self.config.from_logits:
            losses = optax.softmax_cross_entropy_with_integer_labels(scores, target)
        else:
            eps = jnp.finfo(scores.dtype).eps
            scores = jnp.clip(scores, eps, 1 - eps)
            of_class = jnp.stack([1 - scores, scores], axis=-1) if scores.ndim == 1 else scores
            losses = -jnp.log(jnp.take_along_axis(of_class, target[:, None], axis=-1)[:, 0])
        losses = jnp.where(is_class, losses, jnp.nan)  # of a target that is no class
        return jnp.stack([weighted_sum(losses, of.weights), of.weights.sum().astype(losses.dtype)])


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
        if self.config.from_logits:
            scores = jax.nn.sigmoid(scores) if scores.ndim == 1 else jax.nn.softmax(scores)
        scores = jnp.stack([1 - scores, scores], axis=-1) if scores.ndim == 1 else scores
        confidence, is_correct = scores.max(-1), scores.argmax(-1) == target
        number = jnp.clip(jnp.ceil(confidence * bins).astype(jnp.int32) - 1, 0, bins - 1)
        chosen = jnp.where(number[:, None] == jnp.arange(bins), weights.astype(jnp.float32)[:, None], 0)
        parts = (jnp.ones_like(confidence), confidence, is_correct.astype(jnp.float32))
        return jnp.stack([weighted_sum(part[:, None], chosen, axis=0) for part in parts])

    def result_of(self, statistics: np.ndarray) -> float:
        weights, confidence, correct = statistics
        return float(ratio(np.abs(correct - confidence).sum(), weights.sum()))
