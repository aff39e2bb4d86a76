"""The text of a progress bar: the main metrics, and pieces that fit the width of a screen."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any

import numpy as np

from jax_trainer.core import LogMetricMode

SHOWN = 4  # metrics of a dataset in a line; more do not fit
RATE = "optimizer/lr"  # shown if it is a step metric
WIDTH, NARROWEST = 24, 4  # of the bar
_STATISTICS = tuple(f"_{mode.value}" for mode in LogMetricMode)


def fitted(
    pieces: Sequence[tuple[str, int]], width: int, share: float | None = None, ticks: tuple[str, str] = ("#", "-")
) -> str:
    """The pieces in order, with a bar for `share` after the first; those of the lowest rank are left out if needed.

    >>> fitted([("epoch 1", 9), ("3/4", 9), ("loss 0.5", 8), ("step 3", 1)], 31, 0.75)
    'epoch 1 ######--- 3/4  loss 0.5'
    """
    kept = list(pieces)
    room = 0 if share is None else NARROWEST  # the bar is worth more than what is left out first

    def is_too_long() -> bool:
        return sum(len(text) + 2 for text, _ in kept) - 2 + room > width

    for lowest in sorted({rank for _, rank in pieces} - {9}):
        room = 0 if lowest > 2 else room
        for place in reversed([place for place, (_, rank) in enumerate(kept) if rank == lowest]):
            if is_too_long():
                del kept[place]
    first, *rest = ["  ".join(text for text, _ in kept)] if share is None else [text for text, _ in kept]
    text = "  ".join(rest)
    free = min(WIDTH, width - len(first) - len(text) - 2)
    if share is None or free < NARROWEST:
        return "  ".join(filter(None, (first, text)))
    filled = int(free * share)
    return f"{first} {ticks[0] * filled}{ticks[1] * (free - filled)} {text}"


def metric_texts(metrics: Mapping[str, Any], digits: int = 4) -> list[str]:
    """The main metrics as text, the loss first, and the learning rate.

    >>> metric_texts({"acc": 0.98765, "loss": 0.123456, "acc_std": 0.1, "optimizer/lr": 3e-4})
    ['loss 0.1235', 'acc 0.9877', 'lr 0.0003']
    """
    first = islice(_main(metrics), SHOWN)
    rate = [f"lr {metrics[RATE]:.3g}"] if RATE in metrics else []
    return [*(f"{name} {metrics[name]:.{digits}g}" for name in first), *rate]


def _main(metrics: Mapping[str, Any]) -> Iterator[str]:
    """The names of scalars, the loss first; without those with a prefix and other statistics, such as "acc_std"."""

    def is_scalar(name: str) -> bool:
        return name in metrics and np.ndim(metrics[name]) == 0

    for name in chain(("loss",), (one for one in metrics if one != "loss")):
        others = (name.removesuffix(end) for end in _STATISTICS if name.endswith(end))
        if "/" not in name and is_scalar(name) and not any(map(is_scalar, others)):
            yield name
