"""Metrics for losses and evaluations: traced, weighted, and exact over batches, devices and processes.

A metric is called in the loss with outputs, targets and the mask of a batch. It returns statistics, which are
aggregated like every other value of a step, and computed on the host when they are reported.
"""

from jax_trainer.metrics.classification import (
    F1,
    Accuracy,
    ClassMetric,
    ClassMetricConfig,
    ConfusionMatrix,
    Dice,
    IoU,
    Precision,
    Recall,
    TopKAccuracy,
)
from jax_trainer.metrics.metric import MetricConfig, MetricInterface, ratio, weighted_sum, weights_of
from jax_trainer.metrics.regression import MAE, MSE, R2, RMSE
from jax_trainer.metrics.scores import AUROC, ECE, AveragePrecision, LogLoss, Perplexity

__all__ = [
    "AUROC",
    "ECE",
    "F1",
    "MAE",
    "MSE",
    "R2",
    "RMSE",
    "Accuracy",
    "AveragePrecision",
    "ClassMetric",
    "ClassMetricConfig",
    "ConfusionMatrix",
    "Dice",
    "IoU",
    "LogLoss",
    "MetricConfig",
    "MetricInterface",
    "Perplexity",
    "Precision",
    "Recall",
    "TopKAccuracy",
    "ratio",
    "weighted_sum",
    "weights_of",
]
