"""Metrics of the order of scores: the areas under the ROC and the precision-recall curve.

They are exact, and so need all scores: a step returns one row per example, which the host keeps until the end of the
evaluation, 4 bytes × (classes + 2) each. By default they are not computed in training.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from compoconf import register

from jax_trainer.metrics.classification import ClassMetricConfig, scores_and_targets
from jax_trainer.metrics.metric import MetricInterface, ratio


@dataclass
class CurveConfig(ClassMetricConfig):
    """The keys of metrics of curves.

    Args:
        log_mode: the phases in which it is reported: any, train, val, test, or eval (validation and test).
        log_freq: in training, reported per window of steps (step), per epoch (epoch), or both (any).
        from_logits: outputs are logits, of several classes by softmax; false: probabilities.
        average: over classes, each against all others: macro, weighted by the number of targets, or none (an array). Of
            two classes, only the second counts.
    """

    log_mode: Literal["any", "train", "val", "test", "eval"] = "eval"
    log_freq: Literal["any", "step", "epoch"] = "epoch"
    average: Literal["macro", "weighted", "none"] = "macro"


class CurveArea(MetricInterface):
    """Base of the areas under curves; a subclass computes that of one class."""

    config: Any  # a subclass of `CurveConfig`
    mode: ClassVar[Literal["sum", "concat"]] = "concat"

    def statistics(self, outputs: jax.Array, targets: jax.Array, weights: Any = None) -> jax.Array:
        scores, target, weights = scores_and_targets(self.config, outputs, targets, weights)
        scores = scores.astype(jnp.float32)
        if scores.ndim == 1:
            scores = scores[:, None]
        elif scores.shape[-1] == 2:  # ordered by the second class; the difference of logits is not rounded to 0 or 1
            scores = scores[:, 1:] - scores[:, :1] if self.config.from_logits else scores[:, 1:]
        elif self.config.from_logits:
            scores = jax.nn.softmax(scores)
        return jnp.concatenate([scores, target[:, None], weights[:, None]], axis=1, dtype=jnp.float32)

    def compute(self, statistics: np.ndarray) -> float | np.ndarray:
        rows = np.asarray(statistics, np.float64)
        rows = rows[rows[:, -1] > 0]  # examples of weight 0 may be padding
        scores, target, weights = rows[:, :-2], rows[:, -2], rows[:, -1]
        if scores.shape[1] == 1:
            return self.area(scores[:, 0], target == 1, weights)
        areas = np.array([self.area(column, target == number, weights) for number, column in enumerate(scores.T)])
        if self.config.average == "none" or np.isnan(scores).any():
            return areas if self.config.average == "none" else np.nan
        of_class = np.array([weights[target == number].sum() for number in range(len(areas))])
        counted = np.where(np.isnan(areas), 0, of_class if self.config.average == "weighted" else 1.0)
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


@dataclass
class AUROCConfig(CurveConfig):
    """Configuration of `AUROC`."""


@register
class AUROC(CurveArea):
    """The area under the ROC curve; classes without an example, or with all of them, are left out.

    >>> AUROC().value(np.array([0.1, 0.4, 0.35, 0.8]), np.array([0, 0, 1, 1]))
    0.75
    """

    config: AUROCConfig

    def area(self, scores: np.ndarray, is_true: np.ndarray, weights: np.ndarray) -> float:
        if np.isnan(scores).any() or is_true.all() or not is_true.any():
            return np.nan
        true, false = (np.append(0, part) for part in _cumulated(scores, is_true, weights))
        return float(np.trapezoid(true, false) / (true[-1] * false[-1]))


@dataclass
class AveragePrecisionConfig(CurveConfig):
    """Configuration of `AveragePrecision`."""


@register
class AveragePrecision(CurveArea):
    """The mean precision at every recall, without interpolation; classes without an example are left out.

    >>> round(AveragePrecision().value(np.array([0.1, 0.4, 0.35, 0.8]), np.array([0, 0, 1, 1])), 4)
    0.8333
    """

    config: AveragePrecisionConfig

    def area(self, scores: np.ndarray, is_true: np.ndarray, weights: np.ndarray) -> float:
        if np.isnan(scores).any() or not is_true.any():
            return np.nan
        true, false = _cumulated(scores, is_true, weights)
        return float((np.diff(true, prepend=0) * ratio(true, true + false, empty=0.0)).sum() / true[-1])
