"""The expected metrics of the data, computed by numpy in float64."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from tests.scorecard.job import BATCH

MODES = ("x_mean", "x_sum", "x_max", "x_min", "x_std", "weighted")
TOLERANCE = 1e-6


def oracle_of(data: Mapping[str, np.ndarray]) -> dict[str, float]:
    """The metrics of these examples, in batches with a ragged last one."""
    x, y = data["x"].astype(np.float64), data["y"]
    starts = range(0, len(x), BATCH)
    sizes = np.array([len(x[start : start + BATCH]) for start in starts], np.float64)
    means = np.array([x[start : start + BATCH].mean() for start in starts])
    mean = (means * sizes).sum() / sizes.sum()
    return {
        "x_mean": x.mean(),
        "x_sum": x.sum(),
        "x_max": x.max(),
        "x_min": x.min(),
        "x_std": float(np.sqrt((sizes * (means - mean) ** 2).sum() / sizes.sum())),
        "weighted": float((x[:, 0] * y).sum() / y.sum()),
    }


def metric_problems(found: Mapping[str, Any], expected: Mapping[str, float], phase: str) -> list[str]:
    """The metrics that differ from the expected ones."""
    problems = []
    for name in MODES:
        value = float(found[f"{phase}/{name}_epoch" if phase == "train" else f"{phase}/{name}"])
        # a float32 step value of size 1 is off by up to 1e-7; sums of 32 such values by what that adds up to
        allowed = TOLERANCE * max(1.0, abs(expected[name])) * (32 if name == "x_sum" else 1)
        if not abs(value - expected[name]) <= allowed:
            problems.append(f"{phase}/{name} is {value!r} instead of {expected[name]!r}")
    return problems
