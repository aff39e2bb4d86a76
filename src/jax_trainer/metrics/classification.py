"""Metrics of predicted classes: accuracy, precision, recall, F1, IoU and Dice, and the confusion matrix.

Their statistics are counts, which are exact for masks and in any order of the batches; float weights are summed in
float32 within a step, and in float64 over steps.
"""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from compoconf import register

from jax_trainer.metrics.metric import MetricConfig, MetricInterface, ratio, weights_of
from jax_trainer.settings import AtLeast

Average = Literal["micro", "macro", "weighted", "binary", "none"]


@dataclass
class ClassMetricConfig(MetricConfig):
    """The keys of metrics of classes.

    Args:
        num_classes: number of classes; null: that of the outputs, or of the trainer.
        ignore_class: targets of this class are left out; null: none.
        from_logits: outputs without an axis of classes are logits of the positive class, which is predicted above 0;
            false: they are probabilities, and it is predicted above 0.5.
    """

    num_classes: Annotated[int, AtLeast(2)] | None = None
    ignore_class: int | None = None
    from_logits: bool = True


class Classified(NamedTuple):
    """The predicted and the true class of every value, [n], and its weight; `num_classes` None: not known."""

    predicted: jax.Array
    target: jax.Array
    weights: jax.Array
    num_classes: int | None

    @property
    def classes(self) -> int:
        """The number of classes; an error if it is not known."""
        if self.num_classes is None:
            raise ValueError("`num_classes` is not set, and the outputs are predicted classes, not scores. Set it.")
        return self.num_classes


def scores_and_targets(
    config: ClassMetricConfig, outputs: jax.Array, targets: jax.Array, weights: Any
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Outputs of shape [n, classes] or [n], one per value; targets and weights of shape [n]."""
    if outputs.ndim == targets.ndim + 1 and outputs.shape[-1] == 1:
        outputs = outputs[..., 0]
    if outputs.shape[: targets.ndim] != targets.shape or outputs.ndim > targets.ndim + 1:
        raise ValueError(
            f"The outputs have shape {outputs.shape}, and the targets {targets.shape}. Pass scores of shape "
            "[…, classes], or predicted classes or scores of a positive class in the shape of the targets."
        )
    if jnp.issubdtype(targets.dtype, jnp.floating):
        if outputs.ndim > targets.ndim:
            raise TypeError(f"Targets must be integers, the index of each class, got {targets.dtype}.")
        targets = targets > 0.5  # binary classes, which many losses take as floats
    found = config.num_classes if outputs.ndim == targets.ndim else outputs.shape[-1]
    if config.num_classes not in (None, found):
        raise ValueError(f"`num_classes` is {config.num_classes}, but the outputs have {found} classes.")
    weights, flat = weights_of(weights, targets.shape).ravel(), targets.ravel().astype(jnp.int32)
    if config.ignore_class is not None:
        weights = jnp.where(flat == config.ignore_class, 0, weights)
    return outputs.reshape(flat.size, *outputs.shape[targets.ndim :]), flat, weights


def classified(config: ClassMetricConfig, outputs: jax.Array, targets: jax.Array, weights: Any) -> Classified:
    """Predicted and true classes, from scores or from predicted classes."""
    outputs, target, weights = scores_and_targets(config, outputs, targets, weights)
    if outputs.ndim == 2:
        predicted, found = outputs.argmax(-1), outputs.shape[-1]
    elif jnp.issubdtype(outputs.dtype, jnp.floating):
        predicted, found = outputs > (0 if config.from_logits else 0.5), config.num_classes or 2
    else:
        predicted, found = outputs, config.num_classes or (2 if outputs.dtype == bool else None)
    return Classified(predicted.astype(jnp.int32), target, weights, found)


def class_counts(of: Classified) -> jax.Array:
    """For every class, how often it is predicted correctly, how often predicted, and how often true: [3, classes]."""
    classes, weights = jnp.arange(of.classes), of.weights[:, None]
    predicted, true = of.predicted[:, None] == classes, of.target[:, None] == classes
    return jnp.stack([jnp.where(chosen, weights, 0).sum(0) for chosen in (predicted & true, predicted, true)])


@dataclass
class AccuracyConfig(ClassMetricConfig):
    """Configuration of `Accuracy`."""


@register
class Accuracy(MetricInterface):
    """The share of correct predictions.

    >>> Accuracy().value(np.array([[2.0, 1.0], [0.0, 3.0], [1.0, 0.0], [4.0, 0.0]]), np.array([0, 1, 1, 0]))
    0.75
    """

    config: AccuracyConfig

    def statistics(self, outputs: jax.Array, targets: jax.Array, weights: Any = None) -> jax.Array:
        of = classified(self.config, outputs, targets, weights)
        return jnp.stack([jnp.where(of.predicted == of.target, of.weights, 0).sum(), of.weights.sum()])

    def compute(self, statistics: np.ndarray) -> float:
        return float(ratio(*statistics))


@dataclass
class TopKAccuracyConfig(ClassMetricConfig):
    """Configuration of `TopKAccuracy`.

    Args:
        k: a prediction is correct if the target is among this many classes with the highest scores.
    """

    k: Annotated[int, AtLeast(1)] = 5


@register
class TopKAccuracy(MetricInterface):
    """The share of targets among the `k` classes with the highest scores; of equal scores, the first class is higher.

    >>> TopKAccuracy(k=2).value(np.array([[0.1, 0.5, 0.4], [0.7, 0.1, 0.2]]), np.array([2, 1]))
    0.5
    """

    config: TopKAccuracyConfig

    def statistics(self, outputs: jax.Array, targets: jax.Array, weights: Any = None) -> jax.Array:
        scores, target, weights = scores_and_targets(self.config, outputs, targets, weights)
        if scores.ndim == 1:
            raise ValueError(f"`TopKAccuracy` needs scores of shape […, classes], got {outputs.shape}.")
        classes = jnp.arange(scores.shape[-1])
        is_target = target[:, None] == classes
        own = jnp.where(is_target, scores, 0).sum(-1, keepdims=True)
        # not "higher than", which NaN is not
        is_before = ~(scores <= own) | ((scores == own) & (classes < target[:, None]))
        is_correct = (is_before.sum(-1) < self.config.k) & is_target.any(-1)
        return jnp.stack([jnp.where(is_correct, weights, 0).sum(), weights.sum()])

    def compute(self, statistics: np.ndarray) -> float:
        return float(ratio(*statistics))


@dataclass
class AveragedConfig(ClassMetricConfig):
    """The keys of metrics that are averaged over classes.

    Args:
        average: macro (mean over the classes that occur in targets or predictions), weighted (the same, weighted by the
            number of targets), micro (from the counts of all classes), binary (of class 1), none (an array).
    """

    average: Average = "macro"


class ClassScore(MetricInterface):
    """Base of metrics that are a quotient of counts of a class; 0 where there is nothing to count."""

    config: Any  # a subclass of `AveragedConfig`

    def statistics(self, outputs: jax.Array, targets: jax.Array, weights: Any = None) -> jax.Array:
        return class_counts(classified(self.config, outputs, targets, weights))

    def quotient(self, correct: Any, predicted: Any, true: Any) -> tuple[Any, Any]:
        """Numerator and denominator of the score, from counts."""
        raise NotImplementedError(f"{type(self).__name__} has no `quotient`.")

    def compute(self, statistics: np.ndarray) -> float | np.ndarray:
        average, (_, predicted, true) = self.config.average, statistics
        if average == "micro":
            return float(ratio(*self.quotient(*statistics.sum(1)), empty=0.0))
        scores = ratio(*self.quotient(*statistics), empty=0.0)
        if average == "none":
            return scores
        if average == "binary":
            return float(scores[1])
        weights = true if average == "weighted" else (predicted + true > 0).astype(np.float64)
        return float(ratio((scores * weights).sum(), weights.sum()))


@dataclass
class PrecisionConfig(AveragedConfig):
    """Configuration of `Precision`."""


@register
class Precision(ClassScore):
    """The share of the predictions of a class that are correct."""

    config: PrecisionConfig

    def quotient(self, correct: Any, predicted: Any, true: Any) -> tuple[Any, Any]:
        return correct, predicted


@dataclass
class RecallConfig(AveragedConfig):
    """Configuration of `Recall`."""


@register
class Recall(ClassScore):
    """The share of the targets of a class that are predicted."""

    config: RecallConfig

    def quotient(self, correct: Any, predicted: Any, true: Any) -> tuple[Any, Any]:
        return correct, true


@dataclass
class F1Config(AveragedConfig):
    """Configuration of `F1`."""


@register
class F1(ClassScore):
    """The harmonic mean of precision and recall of a class.

    >>> F1(num_classes=3, average="none").value(np.array([0, 1, 2, 2]), np.array([0, 1, 1, 2])).round(2).tolist()
    [1.0, 0.67, 0.67]
    """

    config: F1Config

    def quotient(self, correct: Any, predicted: Any, true: Any) -> tuple[Any, Any]:
        return 2 * correct, predicted + true


@dataclass
class DiceConfig(AveragedConfig):
    """Configuration of `Dice`."""


@register
class Dice(F1):
    """The Dice coefficient of a class, for segmentation: twice the overlap over the sum of both areas; equal to F1."""

    config: DiceConfig  # pyright: ignore[reportIncompatibleVariableOverride]


@dataclass
class IoUConfig(AveragedConfig):
    """Configuration of `IoU`."""


@register
class IoU(ClassScore):
    """Intersection over union of a class, the Jaccard index: for segmentation, with a class per pixel."""

    config: IoUConfig

    def quotient(self, correct: Any, predicted: Any, true: Any) -> tuple[Any, Any]:
        return correct, predicted + true - correct


@dataclass
class ConfusionMatrixMetricConfig(ClassMetricConfig):
    """Configuration of `ConfusionMatrix`.

    Args:
        normalize: divide by the number of targets of a class (true), of its predictions (pred), or of all (all); none:
            counts.
    """

    normalize: Literal["none", "true", "pred", "all"] = "none"


@register
class ConfusionMatrix(MetricInterface):
    """How often each class is predicted for each true class: [classes, classes], a row per true class.

    >>> ConfusionMatrix(num_classes=2).value(np.array([0, 1, 1]), np.array([0, 0, 1])).tolist()
    [[1.0, 1.0], [0.0, 1.0]]
    """

    config: ConfusionMatrixMetricConfig
    _AXES: ClassVar[dict[str, Any]] = {"true": 1, "pred": 0, "all": None}

    def statistics(self, outputs: jax.Array, targets: jax.Array, weights: Any = None) -> jax.Array:
        of = classified(self.config, outputs, targets, weights)
        classes = of.classes
        if jnp.issubdtype(of.weights.dtype, jnp.floating):
            # a matrix product adds in a fixed order, which a scatter on a GPU does not
            rows, columns = (x[:, None] == jnp.arange(classes) for x in (of.target, of.predicted))
            weighted = jnp.where(rows, of.weights[:, None], 0)
            return jnp.matmul(weighted.T, columns.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)
        is_class = (of.target >= 0) & (of.target < classes) & (of.predicted >= 0) & (of.predicted < classes)
        cells = jnp.where(is_class, of.target * classes + of.predicted, classes**2)
        return jnp.zeros(classes**2, jnp.int32).at[cells].add(of.weights, mode="drop").reshape(classes, classes)

    def compute(self, statistics: np.ndarray) -> np.ndarray:
        if self.config.normalize == "none":
            return statistics
        total = statistics.sum(self._AXES[self.config.normalize], keepdims=True)
        return ratio(statistics, total, empty=0.0)
