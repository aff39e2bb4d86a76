"""`fit` with metrics, masks and weights; evaluations are padded only where that cannot change a number."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import sklearn.metrics
from flax import nnx

from jax_trainer import SupervisedBatch, fit
from jax_trainer.core import compile_program
from jax_trainer.datasets import ArrayLoader
from jax_trainer.engine import evaluate
from jax_trainer.metrics import F1, Accuracy, ConfusionMatrix
from jax_trainer.styles.fit_program import fit_target
from jax_trainer.testing import cross_entropy

sk: Any = sklearn.metrics  # its annotations are inferred from defaults

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(21, 3)).astype(np.float32), RNG.integers(0, 4, 21).astype(np.int32)
METRICS = {"f1": F1(), "matrix": ConfusionMatrix()}


def model() -> nnx.Module:
    return nnx.Linear(3, 4, rngs=nnx.Rngs(0))


def per_example(logits, labels):
    return cross_entropy(logits, labels), {"hit": logits.argmax(-1) == labels}


def mean(logits, labels):
    return cross_entropy(logits, labels).mean()


def with_mean_metric(logits, labels):
    return cross_entropy(logits, labels), {"hit": (logits.argmax(-1) == labels).mean()}


def with_options(logits, labels):
    return cross_entropy(logits, labels), {"hits": {"value": (logits.argmax(-1) == labels).sum(), "mode": "sum"}}


def contrastive(logits, labels):
    return cross_entropy(logits @ logits.T, np.arange(len(labels)))


def on_model(model, batch):
    x, y = batch
    return cross_entropy(model(x), y).mean()


def evaluated(data: Any, *, loss_fn: Any = per_example, **options: Any) -> tuple[dict[str, Any], int]:
    """The metrics of an evaluation as `fit` does it, and how often it was compiled."""
    example = next(iter(data))
    parts: dict[str, Any] = {"eval_step": None, "optimizer": optax.sgd(0.1), "split_batch": None, "total_steps": 1}
    target = fit_target(model(), loss_fn=loss_fn, example=example, **{**parts, **options})
    program = compile_program(target.program, on_recompile="ignore")
    program.shapes(target.key, example)  # as `fit` does before it evaluates
    found = evaluate(program, program.init(target.key, example), {"val": data})["val"]
    return found, program.flat_eval_step.compilations  # type: ignore[attr-defined]


def test_metrics_of_fit_are_those_of_all_examples_and_can_select_the_best(tmp_path):
    result = fit(
        model(),
        (X, Y),
        (X[:13], Y[:13]),
        loss_fn=per_example,
        optimizer=optax.sgd(0.1),
        batch_size=7,
        num_epochs=2,
        metrics=METRICS,
        metric="f1",
        log_dir=tmp_path,
        progress=False,
        tensorboard=False,
    )
    predicted = result.predict(X, which="last").argmax(-1)
    assert result.history[2]["val/f1"] == sk.f1_score(Y[:13], predicted[:13], average="macro", zero_division=0)
    assert result.history[2]["val/hit"] == pytest.approx((predicted == Y)[:13].mean())
    assert result.history[1].keys() >= {"train/f1", "train/matrix", "val/matrix"}
    best = result.best
    assert best is not None
    assert best.metrics["val/f1"] == max(result.history[epoch]["val/f1"] for epoch in (1, 2))
    assert "F1(" in (result.folder / "config.yaml").read_text()


def test_a_ragged_last_batch_is_padded_with_the_same_numbers():
    loader, pairs = ArrayLoader((X, Y), 8), [(X[:8], Y[:8]), (X[8:16], Y[8:16]), (X[16:], Y[16:])]
    padded, compilations = evaluated(loader, metrics=METRICS)
    assert compilations == 1
    plain, twice = evaluated(loader, metrics=METRICS, loss_fn=with_options)
    assert twice == 2
    np.testing.assert_array_equal(padded["matrix"], plain["matrix"])
    assert padded["f1"] == plain["f1"]
    assert padded["loss"] == pytest.approx(plain["loss"], rel=1e-6)
    assert padded["hit"] * 21 == pytest.approx(plain["hits"], rel=1e-6)
    jax.tree.map(np.testing.assert_array_equal, evaluated(pairs, metrics=METRICS), (padded, 1))


def test_what_combines_the_examples_of_a_batch_is_never_padded(subtests):
    for case, options in zip(
        ["mean", "mean metric", "contrastive", "model", "eval_step"],
        [
            {"loss_fn": mean},
            {"loss_fn": with_mean_metric},
            {"loss_fn": contrastive},
            {"loss_fn": on_model},
            {"eval_step": lambda model, batch: (model(batch[0]).argmax(-1) == batch[1]).mean()},
        ],
        strict=True,
    ):
        with subtests.test(case=case):
            found, compilations = evaluated(ArrayLoader((X, Y), 8), **options)
            parts = [evaluated([(X[rows], Y[rows])], **options)[0] for rows in (slice(8), slice(8, 16), slice(16, 21))]
            assert compilations == 2
            means = {name: np.average([part[name] for part in parts], weights=[8, 8, 5]) for name in found}
            assert found == pytest.approx(means, rel=1e-6)


def test_a_mask_of_the_batch_weights_loss_and_metrics():
    weights = RNG.random(21, np.float32) * (np.arange(21) % 3 > 0)
    kept = weights > 0
    found, _ = evaluated(ArrayLoader(SupervisedBatch.of(X, Y, weights), 8), metrics=METRICS)
    logits: Any = np.asarray(model()(X))  # type: ignore[operator]
    predicted = logits.argmax(-1)[kept]
    expected = sk.f1_score(Y[kept], predicted, average="macro", sample_weight=weights[kept], zero_division=0)
    assert found["f1"] == pytest.approx(expected, rel=1e-6)
    losses = np.asarray(cross_entropy(logits, Y))
    assert found["loss"] == pytest.approx(np.average(losses, weights=weights), rel=1e-6)


def test_a_metric_that_includes_the_masked_examples_of_a_batch_is_refused(subtests):
    for loss_fn in [with_mean_metric, with_options]:
        with subtests.test(loss_fn=loss_fn):
            batch = SupervisedBatch.of(X, Y, np.ones(21, bool))
            with pytest.raises(ValueError, match=r"`mask`.*'hits?'.*`metrics`"):
                evaluated([batch], loss_fn=loss_fn)


def hits(outputs, targets):
    return outputs.argmax(-1) == targets


def accuracy(outputs, targets, scale=1.0):
    return scale * hits(outputs, targets).mean()


def weighted_hits(outputs, targets, mask):
    counted = jnp.ones(len(targets)) if mask is None else mask
    return (hits(outputs, targets) * counted).sum() / counted.sum()


FUNCTIONS = {"hits": hits, "acc": accuracy, "weighted": weighted_hits, "entry": lambda o, y: Accuracy()(o, y)}


def test_a_metric_may_be_a_function_of_outputs_and_targets(subtests):
    for name in FUNCTIONS:
        with subtests.test(name=name):
            found, compilations = evaluated(ArrayLoader((X, Y), 8), metrics={"own": FUNCTIONS[name]})
            logits: Any = np.asarray(model()(X))  # type: ignore[operator]
            assert found["own"] == pytest.approx((logits.argmax(-1) == Y).mean(), rel=1e-6)
            # a mask can only be respected by values per example, or by a function that gets it
            assert compilations == (1 if name in ("hits", "weighted") else 2)


def test_values_per_example_that_depend_on_others_are_not_padded():
    ranks = lambda outputs, targets: (outputs[:, :1] > outputs[:, 0]).sum(-1)
    found, compilations = evaluated(ArrayLoader((X, Y), 8), metrics={"own": ranks})
    assert (found["own"], compilations) == (pytest.approx((8 * 3.5 * 2 + 5 * 2) / 21, rel=1e-6), 2)


def test_a_metric_function_of_a_masked_batch_returns_values_per_example_or_takes_the_mask():
    mask = (np.arange(21) % 3 > 0).astype(np.float32)
    batch = SupervisedBatch.of(X, Y, mask)
    found, _ = evaluated([batch], metrics={"hits": hits, "weighted": weighted_hits})
    logits: Any = np.asarray(model()(X))  # type: ignore[operator]
    expected = np.average(logits.argmax(-1) == Y, weights=mask)
    assert (found["hits"], found["weighted"]) == pytest.approx((expected, expected), rel=1e-6)
    for name in ("acc", "entry"):
        with pytest.raises(ValueError, match=rf"`mask`.*'{name}'.*per example.*mask\)`"):
            evaluated([batch], metrics={name: FUNCTIONS[name]})


def test_one_hot_targets_are_scored_as_classes_and_several_labels_by_choice():
    def loss(logits, targets):
        return optax.sigmoid_binary_cross_entropy(logits, targets).mean(-1)

    rows, labels = np.eye(4, dtype=np.float32)[Y], RNG.integers(0, 2, (21, 4)).astype(np.float32)
    logits: Any = np.asarray(model()(X))  # type: ignore[operator]
    found, compilations = evaluated(ArrayLoader((X, rows), 8), loss_fn=loss, metrics={"acc": Accuracy(), **METRICS})
    assert (found["acc"], compilations) == (pytest.approx((logits.argmax(-1) == Y).mean()), 1)
    np.testing.assert_array_equal(found["matrix"], sk.confusion_matrix(Y, logits.argmax(-1), labels=range(4)))
    found, _ = evaluated(ArrayLoader((X, labels), 8), loss_fn=loss, metrics={"f1": F1(multilabel=True)})
    assert found["f1"] == pytest.approx(sk.f1_score(labels, logits > 0, average="macro"))
    with pytest.raises(ValueError, match=r"`multilabel=True`.*`targets.argmax\(-1\)`"):
        evaluated(ArrayLoader((X, labels), 8), loss_fn=loss, metrics={"f1": F1()})


def test_metrics_that_do_not_fit_are_refused(subtests):
    for metrics, match in [
        (["accuracy"], r"`metrics`.*dict.*\['accuracy'\]"),
        ({"f1": F1.config_class()}, "`metrics`.*dict"),
        ({"loss": F1()}, "'loss'"),
        ({"hit": Accuracy()}, "'hit'"),
        ({"f1": F1}, r"class F1.*`{'f1': F1\(\)}`"),
        ({"own": lambda outputs: 0.0}, r"metrics\['own'\].*`outputs`.*two.*outputs, targets, mask"),
        ({"own": lambda y_true, y_pred: 0.0}, r"metrics\['own'\].*Keras.*\(y_pred, y_true\)"),
    ]:
        with subtests.test(metrics=metrics, match=match), pytest.raises((TypeError, ValueError), match=match):
            evaluated([(X, Y)], metrics=metrics)


def test_a_loss_that_calls_the_model_returns_its_metrics_itself():
    with pytest.raises(TypeError, match=r"`metrics`.*loss_fn\(model, batch\)"):
        evaluated([(X, Y)], loss_fn=on_model, metrics=METRICS)
