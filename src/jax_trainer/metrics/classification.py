"""Metrics of predicted classes: accuracy, precision, recall, F1, IoU and Dice, and the confusion matrix.

Their statistics are counts, which are exact for masks and in any order of the batches; float weights are summed in
float32 within a step, and in float64 over steps.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from compoconf import register

from jax_trainer.config.settings import AtLeast, Problem
from jax_trainer.metrics.metric import MetricConfig, MetricInterface, compiled_statistics, ratio, weights_of

Average = Literal["micro", "macro", "weighted", "binary", "none"]


@dataclass
class ClassMetricConfig(MetricConfig):
    """The keys of metrics of classes.

    Args:
        num_classes: number of classes, or of labels; null: that of the outputs, or of the trainer.
        ignore_class: targets of this class are left out; null: none.
        from_logits: outputs without an axis of classes are logits of the positive class, which is predicted above 0;
            false: they are probabilities, and it is predicted above 0.5.
        multilabel: an example has several labels, each 0 or 1: outputs and targets of shape [batch, labels].
    """

    num_classes: Annotated[int, AtLeast(2)] | None = None
    ignore_class: int | None = None
    from_logits: bool = True
    multilabel: bool = False


class Examples(NamedTuple):
    """Outputs of shape [n, classes] or [n], one per value, with targets and weights of shape [n].

    `num_classes` None: not known. `labels`: with `multilabel`, their number; each is a value, those of an example in a
    row. `is_refused`: whether targets that were read as one-hot, or as 0 and 1, are not; None: they are integers.
    """

    outputs: jax.Array
    target: jax.Array
    weights: jax.Array
    num_classes: int | None
    labels: int | None = None
    is_refused: jax.Array | None = None

    @property
    def classes(self) -> int:
        """The number of classes; an error if it is not known."""
        if self.num_classes is None:
            raise ValueError("`num_classes` is not set, and the outputs are predicted classes, not scores. Set it.")
        return self.num_classes


def examples_of(config: ClassMetricConfig, outputs: jax.Array, targets: jax.Array, weights: Any) -> Examples:
    """The values of a batch. Shapes and dtypes decide how targets are read: a trace has no values."""
    shapes = f"The outputs have shape {outputs.shape}, and the targets {targets.shape}."
    is_class, labels = None, None
    if config.multilabel:
        if outputs.shape != targets.shape or outputs.ndim < 2:
            raise ValueError(f"{shapes} With `multilabel=True`, both must have the shape [batch, labels].")
        labels = outputs.shape[-1]
    elif outputs.ndim == targets.ndim + 1 and outputs.shape[-1] == 1:
        outputs = outputs[..., 0]
    elif outputs.ndim > 1 and outputs.shape == targets.shape and outputs.shape[-1] > 1:
        if jnp.issubdtype(outputs.dtype, jnp.floating):
            is_one = targets == 1
            is_class, targets = (is_one | (targets == 0)).all(-1) & (is_one.sum(-1) == 1), is_one.argmax(-1)
        elif config.num_classes is None:
            raise ValueError(
                f"{shapes} Outputs of type {outputs.dtype} are predictions, of a class per value or of several labels. "
                "Set `num_classes`, or `multilabel=True`; for one-hot targets, pass scores."
            )
    if outputs.shape[: targets.ndim] != targets.shape or outputs.ndim > targets.ndim + 1:
        raise ValueError(
            f"{shapes} Pass scores of shape […, classes], or predicted classes or scores of a positive class in the "
            "shape of the targets."
        )
    found = outputs.shape[-1] if labels or outputs.ndim > targets.ndim else config.num_classes
    if config.num_classes not in (None, found):
        raise ValueError(
            f"{shapes} `num_classes` is {config.num_classes}, but the outputs have {found} classes. Make them equal; "
            "for one score per value, pass `outputs[..., None]`."
        )
    weights = weights_of(weights, targets.shape)
    if config.ignore_class is not None:
        weights = jnp.where(targets == config.ignore_class, 0, weights)
    if jnp.issubdtype(targets.dtype, jnp.floating):
        if outputs.ndim > targets.ndim:
            raise TypeError(f"Targets must be integers, the index of each class, got {targets.dtype}.")
        # binary classes, which many losses take as floats
        is_class, targets = (targets == 0) | (targets == 1), targets == 1
    is_refused = None if is_class is None else (~is_class & (weights > 0)).any()
    outputs = outputs.reshape(targets.size, *outputs.shape[targets.ndim :])
    return Examples(outputs, targets.ravel().astype(jnp.int32), weights.ravel(), found, labels, is_refused)


def check_classes(statistics: np.ndarray, shapes: str = " in the shape of the outputs") -> None:
    """Raises if targets that were read as one-hot, or as 0 and 1, are not, as `ClassMetric.statistics` reports it."""
    if np.isneginf(statistics[..., -1]).any():
        raise ValueError(
            f"The targets{shapes} are not one-hot, or of one output per example not all 0 or 1. If an example has "
            "several labels, or none, set `multilabel=True`. If it has one class, pass class indices, "
            "`targets.argmax(-1)`. If each value is a prediction of its own, pass `outputs[..., None]`. If they are "
            "probabilities, choose where to cut: `targets > 0.5`."
        )


class ClassMetric(MetricInterface):
    """Base of metrics of classes and labels: reads the targets, and refuses those that can be read in several ways.

    Targets in the shape of scores are read as one-hot, and floats as 0 and 1. A trace has no values to verify that, so
    the statistics of other targets are minus infinity, which no sum changes, and `compute` refuses it.
    """

    config: Any
    config_class = ClassMetricConfig
    needs_scores: ClassVar[bool] = False  # predicted classes are not enough

    def value(self, outputs: Any, targets: Any, weights: Any = None) -> Any:
        statistics = compiled_statistics(self, outputs, targets, weights)
        check_classes(statistics, f" of shape {np.shape(targets)}, with outputs of shape {np.shape(outputs)},")
        return self.compute(statistics)

    def statistics(self, outputs: jax.Array, targets: jax.Array, weights: Any = None) -> jax.Array:
        of = examples_of(self.config, outputs.astype(jnp.float32) if self.needs_scores else outputs, targets, weights)
        statistics = self.statistics_of(of)
        if of.is_refused is None:
            return statistics
        return jnp.where(of.is_refused, -jnp.inf, statistics.astype(jnp.float32))

    def compute(self, statistics: np.ndarray) -> float | np.ndarray:
        check_classes(statistics)
        return self.result_of(statistics)

    def statistics_of(self, of: Examples) -> jax.Array:
        """The statistics of the values of a batch; in the last column, never minus infinity."""
        raise NotImplementedError(f"{type(self).__name__} has no `statistics_of`.")

    def result_of(self, statistics: np.ndarray) -> float | np.ndarray:
        """The result of aggregated statistics: if it is not overridden, the quotient of two."""
        return float(ratio(*statistics))


def classified(config: ClassMetricConfig, of: Examples) -> Examples:
    """`of` with predicted classes as outputs, from scores or from predicted classes."""
    if of.outputs.ndim == 2:
        predicted, found = of.outputs.argmax(-1), of.num_classes
    elif jnp.issubdtype(of.outputs.dtype, jnp.floating):
        predicted, found = of.outputs > (0 if config.from_logits else 0.5), of.num_classes or 2
    else:
        predicted, found = of.outputs, of.num_classes or (2 if of.outputs.dtype == bool else None)
    return of._replace(outputs=predicted.astype(jnp.int32), num_classes=found)


def class_counts(of: Examples) -> jax.Array:
    """For every class or label, how often it is predicted correctly, predicted, and true: [3, classes]."""
    if of.labels:
        predicted, true, weights = (x.reshape(-1, of.labels) for x in (of.outputs == 1, of.target == 1, of.weights))
    else:
        classes, weights = jnp.arange(of.classes), of.weights[:, None]
        predicted, true = of.outputs[:, None] == classes, of.target[:, None] == classes
    return jnp.stack([jnp.where(chosen, weights, 0).sum(0) for chosen in (predicted & true, predicted, true)])


@register
class Accuracy(ClassMetric):
    """The share of correct predictions; with `multilabel`, of all labels.

    >>> Accuracy().value(np.array([[2.0, 1.0], [0.0, 3.0], [1.0, 0.0], [4.0, 0.0]]), np.array([0, 1, 1, 0]))
    0.75
    """

    def statistics_of(self, of: Examples) -> jax.Array:
        is_correct = classified(self.config, of).outputs == of.target
        return jnp.stack([jnp.where(is_correct, of.weights, 0).sum(), of.weights.sum()])


@dataclass
class TopKAccuracyConfig(ClassMetricConfig):
    """Configuration of `TopKAccuracy`.

    Args:
        k: a prediction is correct if the target is among this many classes with the highest scores.
    """

    k: Annotated[int, AtLeast(1)] = 5

    def problems(self) -> Iterator[Problem]:
        """Yields `multilabel`."""
        if self.multilabel:
            yield "multilabel", "`TopKAccuracy` needs one class per example, and `multilabel` is true. Leave it out."


@register
class TopKAccuracy(ClassMetric):
    """The share of targets among the `k` classes with the highest scores; of equal scores, the first class is higher.

    >>> TopKAccuracy(k=2).value(np.array([[0.1, 0.5, 0.4], [0.7, 0.1, 0.2]]), np.array([2, 1]))
    0.5
    """

    config: TopKAccuracyConfig
    needs_scores: ClassVar[bool] = True

    def statistics_of(self, of: Examples) -> jax.Array:
        scores, target, weights = of[:3]
        if scores.ndim == 1:
            raise ValueError(f"`TopKAccuracy` needs scores of shape […, classes], got {scores.shape}.")
        classes = jnp.arange(scores.shape[-1])
        is_target = target[:, None] == classes
        own = jnp.where(is_target, scores, 0).sum(-1, keepdims=True)
        # not "higher than", which NaN is not
        is_before = ~(scores <= own) | ((scores == own) & (classes < target[:, None]))
        is_correct = (is_before.sum(-1) < self.config.k) & is_target.any(-1)
        return jnp.stack([jnp.where(is_correct, weights, 0).sum(), weights.sum()])


@dataclass
class AveragedConfig(ClassMetricConfig):
    """The keys of metrics that are averaged over classes.

    Args:
        average: macro (mean over the classes that occur in targets or predictions, and over all labels), weighted (the
            same, weighted by the number of targets), micro (from the counts of all classes), binary (of class 1), none
            (an array).
    """

    average: Average = "macro"

    def problems(self) -> Iterator[Problem]:
        """Yields an average that labels do not have."""
        if self.multilabel and self.average == "binary":
            yield "average", "`average` is binary, and `multilabel` is true. Use micro, macro, weighted or none."


class ClassScore(ClassMetric):
    """Base of metrics that are a quotient of counts of a class; 0 where there is nothing to count."""

    config_class = AveragedConfig

    def statistics_of(self, of: Examples) -> jax.Array:
        return class_counts(classified(self.config, of))

    def quotient(self, correct: Any, predicted: Any, true: Any) -> tuple[Any, Any]:
        """Numerator and denominator of the score, from counts."""
        raise NotImplementedError(f"{type(self).__name__} has no `quotient`.")

    def result_of(self, statistics: np.ndarray) -> float | np.ndarray:
        average, (_, predicted, true), multilabel = self.config.average, statistics, self.config.multilabel
        if average == "micro":
            return float(ratio(*self.quotient(*statistics.sum(1)), empty=0.0))
        scores = ratio(*self.quotient(*statistics), empty=0.0)
        if average == "none":
            return scores
        if average == "binary":
            return float(scores[1])
        weights = true if average == "weighted" else ((predicted + true > 0) | multilabel).astype(np.float64)
        return float(ratio((scores * weights).sum(), weights.sum(), empty=0.0 if multilabel else np.nan))


@register
class Precision(ClassScore):
    """The share of the predictions of a class that are correct."""

    def quotient(self, correct: Any, predicted: Any, true: Any) -> tuple[Any, Any]:
        return correct, predicted


@register
class Recall(ClassScore):
    """The share of the targets of a class that are predicted."""

    def quotient(self, correct: Any, predicted: Any, true: Any) -> tuple[Any, Any]:
        return correct, true


@register
class F1(ClassScore):
    """The harmonic mean of precision and recall of a class.

    >>> F1(num_classes=3, average="none").value(np.array([0, 1, 2, 2]), np.array([0, 1, 1, 2])).round(2).tolist()
    [1.0, 0.67, 0.67]
    """

    def quotient(self, correct: Any, predicted: Any, true: Any) -> tuple[Any, Any]:
        return 2 * correct, predicted + true


@register
class Dice(F1):
    """The Dice coefficient of a class, for segmentation: twice the overlap over the sum of both areas; equal to F1."""


@register
class IoU(ClassScore):
    """Intersection over union of a class, the Jaccard index: for segmentation, with a class per pixel."""

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
class ConfusionMatrix(ClassMetric):
    """How often each class is predicted for each true class: [classes, classes], a row per true class.

    With `multilabel`, one matrix per label, [labels, 2, 2].

    >>> ConfusionMatrix(num_classes=2).value(np.array([0, 1, 1]), np.array([0, 0, 1])).tolist()
    [[1.0, 1.0], [0.0, 1.0]]
    """

    config: ConfusionMatrixMetricConfig
    _AXES: ClassVar[dict[str, Any]] = {"true": -1, "pred": -2, "all": (-2, -1)}

    def statistics_of(self, of: Examples) -> jax.Array:
        of = classified(self.config, of)
        if of.labels:
            predicted, true, weights = (x.reshape(-1, of.labels) for x in of[:3])
            chosen = [(true == row) & (predicted == column) for row in (0, 1) for column in (0, 1)]
            cells = [jnp.where(one, weights, 0).sum(0) for one in chosen]
            return jnp.stack(cells, axis=-1).reshape(of.labels, 2, 2)
        classes = of.classes
        if jnp.issubdtype(of.weights.dtype, jnp.floating):
            # a matrix product adds in a fixed order, which a scatter on a GPU does not
            rows, columns = (x[:, None] == jnp.arange(classes) for x in (of.target, of.outputs))
            weighted = jnp.where(rows, of.weights[:, None], 0)
            return jnp.matmul(weighted.T, columns.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)
        is_class = (of.target >= 0) & (of.target < classes) & (of.outputs >= 0) & (of.outputs < classes)
        cells = jnp.where(is_class, of.target * classes + of.outputs, classes**2)
        return jnp.zeros(classes**2, jnp.int32).at[cells].add(of.weights, mode="drop").reshape(classes, classes)

    def result_of(self, statistics: np.ndarray) -> np.ndarray:
        if self.config.normalize == "none":
            return statistics
        total = statistics.sum(self._AXES[self.config.normalize], keepdims=True)
        return ratio(statistics, total, empty=0.0)
