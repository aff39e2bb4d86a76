"""For tests of metrics in runs: a linear classifier that does not learn, so that all its steps belong together."""

from dataclasses import replace
from functools import cache
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import sklearn.metrics

from jax_trainer.adapters import function_program
from jax_trainer.core import Program, masked_mean, with_mask
from jax_trainer.datasets import ArrayLoader, SupervisedBatch
from jax_trainer.metrics import AUROC, F1, R2, ConfusionMatrix
from jax_trainer.testing import cross_entropy

sk: Any = sklearn.metrics  # its annotations are inferred from defaults

CLASSES, FEATURES, EXAMPLES = 9, 3, 45  # a confusion matrix of 81 elements is outside of the metric buffer
KERNEL = np.cos(np.arange(FEATURES * CLASSES)).reshape(FEATURES, CLASSES).astype(np.float32)


@cache
def examples() -> SupervisedBatch:
    rng = np.random.default_rng(1)
    inputs = rng.normal(size=(EXAMPLES, FEATURES)).astype(np.float32)
    targets = (inputs @ KERNEL + 0.7 * rng.normal(size=(EXAMPLES, CLASSES))).argmax(-1)
    return SupervisedBatch.of(inputs, targets.astype(np.int32))


def loader(batch_size: int, mask: Any = None) -> ArrayLoader:
    return ArrayLoader(replace(examples(), mask=mask), batch_size)


def masked_program(sizes: list[int] | None = None, **options: Any) -> Program:
    """A program whose loss and metrics respect the mask of a batch, and which declares it.

    Args:
        sizes: gets the size of every batch that the loss is traced with.
    """

    def loss(params: Any, batch: Any, *, rng: Any, train: bool) -> Any:
        if sizes is not None:
            sizes.append(len(batch.input))
        logits, target, mask = batch.input @ params, batch.target, batch.mask
        return masked_mean(cross_entropy(logits, target), mask), {
            "acc": masked_mean(logits.argmax(-1) == target, mask),
            "f1": F1()(logits, target, mask),
            "matrix": ConfusionMatrix()(logits, target, mask),
            "auroc": AUROC(log_mode="any")(logits, target, mask),
            "r2": R2()(logits[:, 0], target, mask),
        }

    program = function_program(lambda key, batch: jnp.asarray(KERNEL), loss, optax.sgd(0.0), **options)
    return program.with_info(add_mask=with_mask)


def assert_those_of_all(metrics: dict[str, Any], mask: Any = None) -> None:
    """The metrics are those that scikit-learn computes from all examples at once."""
    counted = slice(None) if mask is None else mask
    inputs, target = examples().input[counted], examples().target[counted]
    logits = inputs @ KERNEL
    predicted, powers = logits.argmax(-1), np.exp(logits)
    np.testing.assert_array_equal(metrics["matrix"], sk.confusion_matrix(target, predicted, labels=range(CLASSES)))
    assert metrics["f1"] == sk.f1_score(target, predicted, average="macro", zero_division=0)
    scores = powers / powers.sum(-1, keepdims=True)
    areas = [sk.roc_auc_score(target == number, scores[:, number]) for number in np.unique(target)]
    np.testing.assert_allclose(metrics["auroc"], np.mean(areas), rtol=1e-6)
    np.testing.assert_allclose(metrics["r2"], sk.r2_score(target, logits[:, 0]), rtol=1e-6)
    np.testing.assert_allclose(metrics["acc"], (predicted == target).mean(), rtol=1e-6)
