"""What metrics take, what they refuse, and what they are where nothing is defined."""

import math
import re
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sklearn.metrics

from jax_trainer import metrics
from jax_trainer.checkpoint.ranking import best_mode
from jax_trainer.config.settings import SettingsError
from jax_trainer.core import LogFreq, LogMode, as_metrics
from jax_trainer.metrics import (
    AUROC,
    ECE,
    F1,
    MSE,
    R2,
    Accuracy,
    AveragePrecision,
    ClassMetric,
    ConfusionMatrix,
    Dice,
    IoU,
    LogLoss,
    MetricInterface,
    TopKAccuracy,
)
from tests.rows import noted_row

sk: Any = sklearn.metrics  # its annotations are inferred from defaults

LABELS, PREDICTED = np.array([0, 1, 2, 2, 1]), np.array([0, 2, 2, 2, 1])
LOGITS = np.eye(3, dtype=np.float32)[PREDICTED]
ALL = [one for one in vars(metrics).values() if isinstance(one, type) and issubclass(one, MetricInterface)]
BASES = {"MetricInterface", "ClassMetric", "ClassScore", "CurveArea", "MeanError"}
OF_CLASSES = [one for one in ALL if issubclass(one, ClassMetric) and one.__name__ not in BASES]


def test_an_entry_has_the_options_of_the_metric():
    found = as_metrics({"f1": F1(log_mode="eval", log_freq="epoch")(LOGITS, LABELS)}, 5).by_name["f1"]
    assert (found.log_mode, found.log_freq) == (LogMode.EVAL, LogFreq.EPOCH)


def test_metrics_with_equal_keys_are_equal_so_that_a_loss_may_create_them():
    assert F1(average="micro") == F1(F1.config_class(average="micro"))
    assert hash(F1(average="micro")) == hash(F1(average="micro"))
    assert F1() != F1(average="micro")
    assert F1() != Dice()

    def traced() -> Any:
        return jax.tree.structure(as_metrics({"m": F1()(LOGITS, LABELS)}, 5))

    assert traced() == traced()


def test_metrics_have_no_gradient_and_do_not_change_that_of_the_loss():
    def loss(scale):
        return scale**2, LogLoss()(scale * LOGITS, LABELS)["value"]

    assert jax.grad(loss, has_aux=True)(3.0)[0] == 6.0
    assert jax.grad(lambda scale: LogLoss()(scale * LOGITS, LABELS)["value"][0])(3.0) == 0.0


def test_classes_may_be_scores_or_predicted():
    for outputs, targets in [
        (LOGITS, LABELS),
        (PREDICTED, LABELS),
        (LOGITS.reshape(5, 1, 3), LABELS.reshape(5, 1)),
        (LOGITS.astype(jnp.bfloat16), LABELS.astype(np.int8)),
    ]:
        with noted_row(outputs, targets):
            expected = sk.f1_score(LABELS, PREDICTED, average="macro")
            assert F1(num_classes=3).value(outputs, targets) == pytest.approx(expected)
            assert Accuracy().value(outputs, targets) == 0.8


def test_two_classes_may_be_one_score_above_a_threshold():
    scores, truth = np.array([0.2, 0.8, 0.6, -1.0], np.float32), np.array([0.0, 1.0, 0.0, 0.0], np.float32)
    assert Accuracy().value(scores, truth) == 0.5  # logits above 0
    assert Accuracy(from_logits=False).value(scores, truth) == 0.75  # probabilities above 0.5
    assert Accuracy().value(scores[:, None], truth) == 0.5
    assert F1(average="binary").value(scores > 0.5, truth == 1) == sk.f1_score([0, 1, 0, 0], [0, 1, 1, 0])


def test_the_accuracy_of_a_constant_model_is_the_share_of_its_class_also_for_one_hot_targets():
    assert Accuracy().value(np.zeros((100, 1000)) - 1, np.eye(1000)[:100]) == 0.01


def test_one_hot_targets_are_scored_as_classes():
    for kind in OF_CLASSES:
        with noted_row(kind):
            np.testing.assert_array_equal(kind().value(LOGITS, np.eye(3)[LABELS]), kind().value(LOGITS, LABELS))


def test_one_hot_targets_may_have_any_type_and_be_of_tokens():
    for dtype in [np.int32, np.uint8, bool, jnp.bfloat16]:
        with noted_row(dtype):
            targets = np.eye(3)[LABELS].astype(dtype)
            assert Accuracy().value(LOGITS, targets) == 0.8
            assert Accuracy().value(LOGITS[:, None], targets[:, None], LABELS != 1) == 1.0


NOT_ONE_HOT = {
    "labels": np.array([[1, 1, 0], [0, 0, 0], [0, 1, 0], [1, 0, 0], [0, 0, 1]]),
    "no class": np.array([[1, 0, 0], [0, 0, 0], [0, 1, 0], [1, 0, 0], [0, 0, 1]]),
    "probabilities": np.full((5, 3), 1 / 3, np.float32),
    "numbers": np.array([[2, 0, -1], [1, 0, 0], [0, 1, 0], [1, 0, 0], [0, 0, 1]]),
}


def test_targets_in_the_shape_of_scores_that_are_not_one_hot_are_refused():
    for targets in NOT_ONE_HOT.values():
        with noted_row(targets):
            with pytest.raises(ValueError, match=r"\(5, 3\).*\(5, 3\).*`multilabel=True`.*`targets.argmax\(-1\)`"):
                Accuracy().value(LOGITS, targets)
            kept = np.arange(5) > 2
            counted = np.where(kept[:, None], np.eye(3)[LABELS], targets)  # what is masked out may be anything
            assert Accuracy().value(LOGITS, counted, kept) == 1.0


def test_one_refused_batch_among_others_is_an_error_when_the_metric_is_computed():
    for kind in OF_CLASSES:
        with noted_row(kind):
            metric, right, wrong = kind(), np.eye(3)[LABELS], NOT_ONE_HOT["labels"].astype(float)
            statistics = jax.jit(metric.statistics)
            rows = [statistics(LOGITS, targets) for targets in (right, wrong, right)]
            with pytest.raises(ValueError, match=r"`multilabel=True`.*`targets.argmax\(-1\)`"):
                metric.compute(np.concatenate(rows) if metric.mode == "concat" else np.sum(rows, axis=0))


def test_float_targets_are_0_and_1_and_are_never_cut_at_a_half():
    for options, kind in product([{}, {"multilabel": True}], [Accuracy, F1, AUROC, LogLoss, ConfusionMatrix]):
        with noted_row(options, kind):
            scores, truth = np.array([0.2, -0.8, 0.4, -1.0]), np.array([0.0, 0.0, 1.0, 1.0])
            mixed, kept = np.array([0.3, 0.0, 1.0, 0.7]), np.array([False, True, True, False])
            if options:
                scores, truth, mixed, kept = (np.stack([one, one], 1) for one in (scores, truth, mixed, kept))
            metric = kind(**options)
            np.testing.assert_array_equal(metric.value(scores, truth), metric.value(scores, truth.astype(int)))
            with pytest.raises(ValueError, match=r"targets.*0 or 1.*`targets > 0\.5`"):
                metric.value(scores, mixed)
            with pytest.raises(ValueError, match="0 or 1"):
                metric.compute(np.asarray(metric.statistics(jnp.asarray(scores), jnp.asarray(mixed))))
            # what does not count may be anything
            np.testing.assert_array_equal(metric.value(scores, mixed, kept), metric.value(scores, truth, kept))


def test_a_nan_among_one_hot_targets_is_no_error():
    broken = np.where(np.arange(5)[:, None] == 0, np.nan, LOGITS)
    assert math.isnan(LogLoss().value(broken, np.eye(3)[LABELS]))
    assert math.isnan(AUROC().value(broken, np.eye(3)[LABELS]))
    never = np.where(np.eye(3)[LABELS] > 0, -np.inf, 0).astype(np.float32)
    assert LogLoss().value(never, np.eye(3)[LABELS]) == math.inf


def test_scores_of_single_values_have_a_last_axis_of_one():
    rng = np.random.default_rng(0)
    scores, truth = rng.normal(size=(2, 5, 6)), rng.integers(0, 2, (2, 5, 6))
    expected = sk.jaccard_score(truth.ravel(), scores.ravel() > 0)
    for targets in (truth, truth[..., None], truth.astype(np.float32)):
        assert IoU(average="binary").value(scores[..., None], targets) == pytest.approx(expected)
    assert IoU(average="binary", num_classes=2).value(scores > 0, truth) == pytest.approx(expected)


def test_single_labels_may_be_masked_or_ignored():
    for dtype in [np.int32, np.float32]:
        with noted_row(dtype):
            rng = np.random.default_rng(0)
            scores, truth = rng.normal(size=(40, 3)), rng.integers(0, 2, (40, 3)).astype(dtype)
            known = rng.random((40, 3)) < 0.7
            partly, columns = np.where(known, truth, -1), range(3)
            for kind, score in (
                (F1, lambda y, s: sk.f1_score(y, s > 0)),
                (AUROC, sk.roc_auc_score),
                (AveragePrecision, sk.average_precision_score),
            ):
                expected = np.mean([score(truth[known[:, n], n], scores[known[:, n], n]) for n in columns])
                assert kind(multilabel=True).value(scores, truth, known) == pytest.approx(expected)
                assert kind(multilabel=True, ignore_class=-1).value(scores, partly) == pytest.approx(expected)
            assert F1(multilabel=True).value(scores > 0, truth, known) == F1(multilabel=True).value(
                scores, truth, known
            )


def test_pixels_of_an_ignored_class_are_left_out():
    rng = np.random.default_rng(0)
    target, predicted = rng.integers(0, 4, (2, 5, 5)), rng.integers(0, 3, (2, 5, 5))
    kept = target != 3
    expected = sk.jaccard_score(target[kept], predicted[kept], average="macro")
    assert IoU(num_classes=4, ignore_class=3).value(predicted, target) == pytest.approx(expected)
    assert IoU(num_classes=4).value(predicted, target, kept) == pytest.approx(expected)


def test_a_weight_may_be_of_an_example_or_of_a_value():
    outputs, targets = np.zeros((2, 3), np.float32), np.array([[1.0, 1, 1], [3, 3, 6]], np.float32)
    assert MSE().value(outputs, targets, np.array([1, 0])) == 1.0
    assert MSE().value(outputs, targets, np.array([[0, 0, 0], [1, 1, 0]])) == 9.0
    with pytest.raises(ValueError, match=r"`mask`.*\(3,\).*\(2, 3\)"):
        MSE().value(outputs, targets, np.ones(3))


def test_counts_of_a_mask_stay_integers():
    assert ConfusionMatrix()(LOGITS, LABELS)["value"].dtype == jnp.int32
    assert F1()(LOGITS, LABELS, np.ones(5, bool))["value"].dtype == jnp.int32
    assert F1()(LOGITS, LABELS, np.ones(5, np.float32))["value"].dtype == jnp.float32


def test_targets_that_are_no_class_are_in_no_cell_and_never_correct():
    for weights in [None, np.ones(5, np.float32)]:
        with noted_row(weights):
            strange = np.array([0, -1, 3, 2, 1])
            matrix = ConfusionMatrix().value(LOGITS, strange, weights)
            assert matrix.tolist() == [[1, 0, 0], [0, 1, 0], [0, 0, 1]]
            assert (
                Accuracy().value(LOGITS, strange, weights) == TopKAccuracy(k=3).value(LOGITS, strange, weights) == 0.6
            )
            assert math.isnan(LogLoss().value(LOGITS, strange, weights))


def test_a_score_that_is_nan_is_never_correct_and_makes_an_area_nan():
    broken = np.where(np.arange(5)[:, None] == 0, np.nan, LOGITS)
    assert (TopKAccuracy(k=2).value(LOGITS, LABELS), TopKAccuracy(k=2).value(broken, LABELS)) == (0.8, 0.6)
    assert math.isnan(AUROC().value(broken, LABELS))
    assert math.isnan(AveragePrecision().value(broken, LABELS))


def test_r2_of_constant_targets_is_1_or_0():
    for offset, (error, expected) in product([0.7, 1e6], [(0.0, 1.0), (0.5, 0.0)]):
        with noted_row(offset, error, expected):
            target, statistics = np.full(333, offset, np.float32), jax.jit(R2().statistics)
            for seed in range(6):  # means are rounded in some
                weights = np.random.default_rng(seed).random((9, 333), np.float32)
                rows = np.concatenate([statistics(target + np.float32(error), target, one) for one in weights])
                assert R2().compute(rows) == expected
                weights = np.random.default_rng(seed).random(2000, np.float32)  # of many batches
                rows = np.stack([weights, np.full_like(weights, offset), *np.zeros((2, 2000)), weights * error], axis=1)
                assert R2().compute(rows[..., None]) == expected


def test_r2_of_large_targets_does_not_cancel():
    rng = np.random.default_rng(0)
    target = (1e6 + rng.normal(size=200)).astype(np.float32)
    outputs = (target + 0.5 * rng.normal(size=200)).astype(np.float32)
    rows = [jax.jit(R2().statistics)(outputs[at : at + 50], target[at : at + 50]) for at in range(0, 200, 50)]
    expected = sk.r2_score(target.astype(np.float64), outputs.astype(np.float64))
    assert R2().compute(np.concatenate(rows)) == pytest.approx(expected, rel=1e-6)


def test_ece_of_a_calibrated_model_is_0_and_of_a_sure_and_wrong_one_1():
    assert ECE(from_logits=False).value(np.array([0.75, 0.75, 0.75, 0.75]), np.array([1, 1, 1, 0])) == 0.0
    assert ECE(from_logits=False).value(np.array([1.0, 0.0]), np.array([0, 1])) == 1.0


def test_without_anything_that_counts_the_result_is_nan():
    nothing = np.zeros(5, bool)
    for metric in (Accuracy(), F1(), LogLoss(), ECE(), AUROC(), AveragePrecision()):
        assert math.isnan(metric.value(LOGITS, LABELS, nothing)), metric
    assert math.isnan(R2().value(LABELS, LABELS, nothing))


WRONG = {
    "shapes": (lambda: F1().value(LOGITS, LABELS[:4]), r"\(5, 3\).*\(4,\)"),
    "classes": (lambda: F1(num_classes=4).value(LOGITS, LABELS), "`num_classes` is 4.*3"),
    "unknown classes": (lambda: F1().value(PREDICTED, LABELS), "`num_classes`"),
    "no scores": (lambda: TopKAccuracy().value(PREDICTED, LABELS), r"`TopKAccuracy`.*\(5,\)"),
    "wide outputs": (lambda: MSE().value(np.zeros((5, 1)), np.zeros(5)), r"\(5, 1\).*\(5,\).*squeeze"),
    "labels": (lambda: F1(multilabel=True).value(LOGITS, LABELS), r"\(5, 3\).*\(5,\).*`multilabel=True`.*labels"),
    "one label": (lambda: F1(multilabel=True).value(LOGITS[:, 0], LABELS), r"\(5,\).*`multilabel=True`.*labels"),
    "predicted labels": (lambda: F1().value(LOGITS > 0, LOGITS), r"\(5, 3\).*bool.*`num_classes`.*`multilabel=True`"),
    "predicted tokens": (lambda: Accuracy().value(LABELS[None], LABELS[None]), r"\(1, 5\).*int32.*`num_classes`"),
    "numbers of labels": (lambda: F1(multilabel=True, num_classes=2).value(LOGITS, LOGITS), "`num_classes` is 2.*3"),
    "value scores": (lambda: F1(num_classes=2).value(LOGITS, LOGITS), r"`num_classes` is 2.*3.*`outputs\[..., None\]`"),
    "top labels": (lambda: TopKAccuracy(multilabel=True), "`TopKAccuracy`.*`multilabel`"),
    "average of labels": (lambda: F1(multilabel=True, average="binary"), "`average`.*binary.*`multilabel`"),
    "float targets": (lambda: F1().value(LOGITS, np.zeros(5, np.float32)), "integers.*float32"),
}


def test_what_does_not_fit_is_refused_by_name():
    for name in WRONG:
        with noted_row(name):
            call, match = WRONG[name]
            with pytest.raises((ValueError, TypeError), match=match):
                call()


def test_an_unknown_key_gets_a_suggestion_and_an_invalid_value_its_choices():
    with pytest.raises(TypeError, match=r"avg.*`average`|average"):
        F1(averag="macro")
    with pytest.raises(SettingsError, match=r"`average`.*micro.*'mean'"):
        F1(average="mean")
    with pytest.raises(TypeError, match="either `config` or keywords.*average"):
        F1(F1.config_class(), average="micro")


def test_the_direction_of_every_metric_is_known_by_its_name():
    for kind in [one for one in ALL if one.__name__ not in BASES]:
        with noted_row(kind):
            if kind is ConfusionMatrix:  # no number
                continue
            lower = kind.__name__ in ("ECE", "LogLoss", "MAE", "MSE", "Perplexity", "RMSE")
            snake = re.sub(r"(?<=[a-z])(?=[A-Z][a-z])", "_", kind.__name__).lower()
            for name in (kind.__name__, snake, f"{snake}_macro"):
                assert best_mode("auto", f"val/{name}") == ("min" if lower else "max"), name
