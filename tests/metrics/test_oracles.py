"""Every metric agrees with scikit-learn on all examples together, however they are split into batches.

A batch has eight rows, of which any number count: so that each group of metrics is compiled once per kind of weights.
"""

import warnings
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
import sklearn.metrics
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_trainer import metrics as ours
from jax_trainer.core import LogFreq, LogMode, as_metrics
from jax_trainer.core.metric_accumulator import WindowAccumulator
from jax_trainer.core.metric_buffer import Column

sk: Any = sklearn.metrics  # its annotations are inferred from defaults

CLASSES, ROWS = 4, 8
Draw = Callable[[np.random.Generator, int], np.ndarray]


class Examples(NamedTuple):
    """Outputs, targets and weights; `weights` None: all count alike."""

    outputs: np.ndarray
    targets: np.ndarray
    weights: np.ndarray | None

    def counted(self) -> "Examples":
        """Those that count, as scikit-learn gets them."""
        if self.weights is None:
            return self
        kept = self.weights > 0
        weights = None if self.weights.dtype == bool else self.weights[kept].astype(np.float64)
        return Examples(self.outputs[kept], self.targets[kept], weights)


Oracle = Callable[[Examples], Any]
Group = Mapping[str, tuple[ours.MetricInterface, Oracle]]


@cache
def entries_of(group: str) -> Callable[..., Any]:
    """All metrics of a group in one compiled function."""

    def entries(outputs: Any, targets: Any, weights: Any) -> Any:
        found = {name: metric(outputs, targets, weights) for name, (metric, _) in GROUPS[group].metrics.items()}
        return as_metrics(found, ROWS)

    return jax.jit(entries)


def results(group: str, examples: Examples) -> dict[str, Any]:
    """What a run reports: each batch is a step."""
    accumulator, one = WindowAccumulator(), np.ones(1)
    for start in range(0, len(examples.targets), ROWS):
        rows = [None if part is None else part[start : start + ROWS] for part in examples]
        metrics = entries_of(group)(*rows).by_name
        columns = {
            name: Column(m.mode, LogFreq.ANY, LogMode.ANY, np.asarray(m.value)[None], one, m.compute)
            for name, m in metrics.items()
        }
        accumulator.add_columns(columns)
    return accumulator.compute()


@st.composite
def examples_of(draw: Any, outputs: Draw, targets: Draw) -> Examples:
    count = ROWS * draw(st.integers(1, 4))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    kind, share = draw(st.sampled_from(["all", "mask", "weights"])), draw(st.sampled_from([0.2, 0.5, 0.9]))
    made = Examples(outputs(rng, count), targets(rng, count), None)
    if kind == "all":
        return made
    mask = rng.random(count) < share
    mask[rng.integers(count)] = True
    weights = mask if kind == "mask" else (mask * rng.uniform(0.1, 3, count)).astype(np.float32)
    made.outputs[~mask] = np.nan  # what is masked out may be anything
    made.targets[~mask] = -1
    return made._replace(weights=weights)


# the data; few different values, so that scores are often equal


def logits(rng: np.random.Generator, count: int) -> np.ndarray:
    return (rng.integers(-4, 5, (count, CLASSES)) / 2).astype(np.float32)


def labels(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.integers(0, rng.integers(1, CLASSES + 1), count)  # some classes may not occur


def probabilities(rng: np.random.Generator, count: int) -> np.ndarray:
    return softmax(logits(rng, count)).astype(np.float32)


def binary_logits(rng: np.random.Generator, count: int) -> np.ndarray:
    return (rng.integers(-6, 7, count) / 3).astype(np.float32)


def binary_labels(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.integers(0, 2, count)


def one_hot(rng: np.random.Generator, count: int) -> np.ndarray:
    return np.eye(CLASSES, dtype=np.float32)[labels(rng, count)]


def several_labels(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.integers(0, 2, (count, CLASSES)) * (rng.random(CLASSES) < 0.8)  # some labels may not occur


def numbers(rng: np.random.Generator, count: int) -> np.ndarray:
    return (1000 + rng.normal(size=(count, 2))).astype(np.float32)


# the oracles


def softmax(values: np.ndarray) -> np.ndarray:
    powers = np.exp(values.astype(np.float64) - values.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def sigmoid(values: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-values.astype(np.float64)))


def by_class(score: Callable[..., Any], **options: Any) -> Oracle:
    return lambda e: score(e.targets, e.outputs.argmax(-1), sample_weight=e.weights, **options)


def by_sign(score: Callable[..., Any], **options: Any) -> Oracle:
    return lambda e: score(e.targets, e.outputs > 0, sample_weight=e.weights, **options)


def by_score(score: Callable[..., Any], **options: Any) -> Oracle:
    return lambda e: score(e.targets, e.outputs, sample_weight=e.weights, **options)


def top_k(k: int) -> Oracle:
    # scikit-learn prefers the last of equal scores, `jax.lax.top_k` the first: so with the classes reversed
    return lambda e: sk.top_k_accuracy_score(
        CLASSES - 1 - e.targets, e.outputs[:, ::-1], k=k, labels=range(CLASSES), sample_weight=e.weights
    )


def log_loss(e: Examples) -> float:
    return sk.log_loss(e.targets, softmax(e.outputs), labels=range(CLASSES), sample_weight=e.weights)


def ece(e: Examples, bins: int = 5) -> float:
    """The definition, bin by bin."""
    confidences, is_correct = softmax(e.outputs).max(-1), e.outputs.argmax(-1) == e.targets
    weights, total = np.ones(len(e.targets)) if e.weights is None else e.weights, 0.0
    for number in range(bins):
        chosen = (confidences > number / bins) & (confidences <= (number + 1) / bins)
        total += abs((weights * (is_correct - confidences))[chosen].sum())
    return total / weights.sum()


def one_vs_rest(score: Callable[..., float], average: str, *, needs_others: bool) -> Oracle:
    """The mean over the classes for which the score is defined."""

    def oracle(e: Examples) -> float:
        scores, counts = e.outputs, [(e.targets == number) for number in range(CLASSES)]
        of_class = [np.ones(len(e.targets)) @ one if e.weights is None else e.weights @ one for one in counts]
        defined = [number for number, one in enumerate(counts) if one.any() and not (needs_others and one.all())]
        if not defined:
            return np.nan
        areas = [score(counts[number], scores[:, number], sample_weight=e.weights) for number in defined]
        return np.average(areas, weights=None if average == "macro" else [of_class[number] for number in defined])

    return oracle


def two_sided(score: Callable[..., float], *, needs_others: bool) -> Oracle:
    """The score, or NaN where it is not defined."""

    def oracle(e: Examples) -> float:
        defined = e.targets.any() and not (needs_others and e.targets.all())
        return score(e.targets, e.outputs, sample_weight=e.weights) if defined else np.nan

    return oracle


def by_value(oracle: Oracle) -> Oracle:
    """The score of all labels, each as an example of two classes with the logits 0 and its own."""

    def of_labels(e: Examples) -> Any:
        weights = None if e.weights is None else e.weights.repeat(CLASSES)
        scores = np.stack([np.zeros(e.outputs.size, np.float32), e.outputs.ravel()], axis=1)
        return oracle(Examples(scores, e.targets.ravel(), weights))

    return of_labels


def by_label(score: Callable[..., float], average: str, *, needs_others: bool) -> Oracle:
    """The mean over the labels for which the score is defined."""

    def oracle(e: Examples) -> float:
        score_of = two_sided(score, needs_others=needs_others)
        areas = [score_of(Examples(e.outputs[:, n], e.targets[:, n], e.weights)) for n in range(CLASSES)]
        weights = np.average(e.targets, axis=0, weights=e.weights) if average == "weighted" else np.ones(CLASSES)
        defined = ~np.isnan(areas)
        return np.average(np.array(areas)[defined], weights=weights[defined]) if defined.any() else np.nan

    return oracle


AVERAGES = ("micro", "macro", "weighted")
SCORES = (
    (ours.Precision, sk.precision_score),
    (ours.Recall, sk.recall_score),
    (ours.F1, sk.f1_score),
    (ours.Dice, sk.f1_score),
    (ours.IoU, sk.jaccard_score),
)
AREAS = ((ours.AUROC, sk.roc_auc_score, True), (ours.AveragePrecision, sk.average_precision_score, False))
EACH: dict[str, Any] = {"labels": range(CLASSES)}
CLASSIFIED: Group = {
    "accuracy": (ours.Accuracy(), by_class(sk.accuracy_score)),
    "top 2": (ours.TopKAccuracy(k=2), top_k(2)),
    "confusion": (ours.ConfusionMatrix(), by_class(sk.confusion_matrix, **EACH)),
    **{
        f"confusion {norm}": (
            ours.ConfusionMatrix(normalize=norm),
            by_class(sk.confusion_matrix, normalize=norm, **EACH),
        )
        for norm in ("true", "pred", "all")
    },
    **{
        f"{kind.__name__} {average}": (kind(average=average), by_class(score, average=average, zero_division=0))
        for kind, score in SCORES
        for average in AVERAGES
    },
    "F1 of each": (ours.F1(average="none"), by_class(sk.f1_score, average=None, zero_division=0, **EACH)),
    "log-loss": (ours.LogLoss(), log_loss),
    "perplexity": (ours.Perplexity(), lambda e: np.exp(log_loss(e))),
    "ECE": (ours.ECE(num_bins=5), ece),
}
# of probabilities: those of softmax are equal or not by rounding, which differs between float32 and float64
CURVES: Group = {
    f"{kind.__name__} {average}": (
        kind(average=average, from_logits=False),
        one_vs_rest(score, average, needs_others=needs_others),
    )
    for kind, score, needs_others in AREAS
    for average in ("macro", "weighted")
}
LABELS: Group = {
    "accuracy": (ours.Accuracy(multilabel=True), by_value(by_class(sk.accuracy_score))),
    "log-loss": (
        ours.LogLoss(multilabel=True),
        by_value(lambda e: sk.log_loss(e.targets, softmax(e.outputs), labels=[0, 1], sample_weight=e.weights)),
    ),
    "ECE": (ours.ECE(multilabel=True, num_bins=5), by_value(ece)),
    "confusion": (ours.ConfusionMatrix(multilabel=True), by_sign(sk.multilabel_confusion_matrix)),
    **{
        f"{kind.__name__} {average}": (
            kind(multilabel=True, average=average),
            by_sign(score, average=None if average == "none" else average, zero_division=0),
        )
        for kind, score in SCORES
        for average in (*AVERAGES, "none")
    },
    **{
        f"{kind.__name__} {average}": (
            kind(multilabel=True, average=average),
            by_label(score, average, needs_others=needs_others),
        )
        for kind, score, needs_others in AREAS
        for average in ("macro", "weighted")
    },
}
BINARY: Group = {
    "accuracy": (ours.Accuracy(), by_sign(sk.accuracy_score)),
    "F1": (ours.F1(average="binary"), by_sign(sk.f1_score, zero_division=0)),
    "log-loss": (
        ours.LogLoss(),
        lambda e: sk.log_loss(e.targets, sigmoid(e.outputs), labels=[0, 1], sample_weight=e.weights),
    ),
    "AUROC": (ours.AUROC(), two_sided(sk.roc_auc_score, needs_others=True)),
    "average precision": (ours.AveragePrecision(), two_sided(sk.average_precision_score, needs_others=False)),
}
PROBABILITIES: Group = {
    "accuracy": (
        ours.Accuracy(from_logits=False),
        lambda e: sk.accuracy_score(e.targets, e.outputs > 0.5, sample_weight=e.weights),
    ),
    "log-loss": (ours.LogLoss(from_logits=False), by_score(sk.log_loss, labels=[0, 1])),
}
REGRESSION: Group = {
    "MSE": (ours.MSE(), by_score(sk.mean_squared_error)),
    "RMSE": (ours.RMSE(), lambda e: sk.mean_squared_error(e.targets, e.outputs, sample_weight=e.weights) ** 0.5),
    "MAE": (ours.MAE(), by_score(sk.mean_absolute_error)),
    "R2": (ours.R2(), lambda e: sk.r2_score(e.targets.astype(np.float64), e.outputs, sample_weight=e.weights)),
}


class Kind(NamedTuple):
    """A group of metrics, and the data that it is tested on."""

    metrics: Group
    outputs: Draw
    targets: Draw
    seen: Callable[[np.ndarray], np.ndarray] = lambda targets: targets  # as oracles take them


GROUPS = {
    "classes": Kind(CLASSIFIED, logits, labels),
    "curves": Kind(CURVES, probabilities, labels),
    "two classes": Kind(BINARY, binary_logits, binary_labels),
    "probabilities": Kind(
        PROBABILITIES, lambda rng, n: sigmoid(binary_logits(rng, n)).astype(np.float32), binary_labels
    ),
    "labels": Kind(LABELS, logits, several_labels),
    "one-hot classes": Kind(CLASSIFIED, logits, one_hot, lambda targets: targets.argmax(-1)),
    "one-hot curves": Kind(CURVES, probabilities, one_hot, lambda targets: targets.argmax(-1)),
    "numbers": Kind(REGRESSION, numbers, numbers),
}


@pytest.mark.parametrize("group", GROUPS)
@settings(deadline=None, max_examples=25)
@given(data=st.data())
def test_metrics_agree_with_scikit_learn_for_all_splits_masks_and_weights(group, data):
    kind = GROUPS[group]
    examples = data.draw(examples_of(kind.outputs, kind.targets))
    found, counted = results(group, examples), examples.counted()
    counted = counted._replace(targets=kind.seen(counted.targets))
    if group == "numbers" and len(counted.targets) < 2:
        return  # R2 is not defined
    for name, (_, oracle) in kind.metrics.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about classes that do not occur
            expected = oracle(counted)
        np.testing.assert_allclose(found[name], expected, rtol=2e-6, atol=1e-6, err_msg=name)
