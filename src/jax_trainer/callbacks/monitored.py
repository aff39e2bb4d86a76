"""The metric that a callback goes by: its value, and whether a small one is good or a large one."""

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

Mode = Literal["min", "max", "auto"]


def best_mode(mode: Mode, monitor: str) -> Literal["min", "max"]:
    """`mode`, with "auto" decided by the metric's name: large is good for names with "acc", "f1" or "auc".

    >>> best_mode("auto", "val/acc"), best_mode("auto", "val/loss")
    ('max', 'min')
    """
    if mode != "auto":
        return mode
    name = monitor.rpartition("/")[2].lower()
    return "max" if any(word in name for word in ("acc", "f1", "auc")) and "loss" not in name else "min"


def monitored(metrics: Mapping[str, Any], monitor: str) -> float:
    """The value of the metric called `monitor`, which must be one of `metrics` and a number."""
    if monitor not in metrics:
        raise ValueError(f"No metric {monitor!r} to monitor. There are: {', '.join(sorted(metrics)) or 'none'}.")
    if shape := np.shape(metrics[monitor]):
        raise ValueError(f"`monitor: {monitor}` must name a number, and this is an array of shape {shape}.")
    return float(metrics[monitor])
