"""The text of a progress bar: the main metrics, rates and times, and pieces that fit the width of a screen."""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any

import numpy as np

from jax_trainer.core import LogMetricMode

SHOWN = 4  # metrics of a dataset in a line; more do not fit
RATE = "optimizer/lr"  # shown if it is a step metric
WIDTH, NARROWEST = 24, 4  # of the bar
WINDOW = 60.0  # seconds over which a rate is measured
_STATISTICS = tuple(f"_{mode.value}" for mode in LogMetricMode)


def fitted(
    pieces: Sequence[tuple[str, int]], width: int, share: float | None = None, ticks: tuple[str, str] = ("#", "-")
) -> str:
    """The pieces in order, with a bar for `share` after the first; those of the lowest rank are left out if needed.

    >>> fitted([("epoch 1", 9), ("3/4", 9), ("loss 0.5", 8), ("step 3", 1)], 31, 0.75)
    'epoch 1 ######--- 3/4  loss 0.5'
    """
    kept = list(pieces)
    while len(kept) > 1:
        lowest = min(rank for _, rank in kept)
        room = 0 if share is None or lowest > 2 else NARROWEST  # the bar is worth more than what is left out first
        if lowest == 9 or sum(len(text) + 2 for text, _ in kept) - 2 + room <= width:
            break
        del kept[max(place for place, (_, rank) in enumerate(kept) if rank == lowest)]
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


class Pace:
    """Steps per second over the last minute, without pauses.

    >>> pace = Pace()
    >>> pace.count(1, now=30.0)  # after the first step, which compiles
    >>> pace.count(5, now=32.0)
    >>> pace.pause(now=32.0)
    >>> pace.resume(now=100.0)
    >>> pace.count(9, now=102.0)
    >>> pace.rate
    2.0
    """

    def __init__(self) -> None:
        self._points: deque[tuple[float, int]] = deque()  # seconds without pauses, and steps
        self._paused, self._since = 0.0, 0.0  # seconds so far, and since when, if it is paused

    def count(self, steps: int, now: float) -> None:
        """Notes that so many steps are done. The first call starts the measurement."""
        at = now - self._paused
        if not self._points or steps > self._points[-1][1]:
            self._points.append((at, steps))
        while len(self._points) > 2 and self._points[1][0] <= at - WINDOW:
            self._points.popleft()

    def pause(self, now: float) -> None:
        """Excludes the time from now on."""
        self._since = self._since or now

    def resume(self, now: float) -> None:
        """Ends the pause."""
        self._paused += now - self._since if self._since else 0.0
        self._since = 0.0

    @property
    def rate(self) -> float:
        """Steps per second; 0 if it is not known yet."""
        if len(self._points) < 2:
            return 0.0
        (start, before), (end, done) = self._points[0], self._points[-1]
        return (done - before) / (end - start) if end > start else 0.0


def clock(seconds: float) -> str:
    """Seconds as minutes and hours.

    >>> clock(75), clock(3675), clock(200_000)
    ('1:15', '1:01:15', '2 d 7:33:20')
    """
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    text = f"{hours}:{minutes:02}:{seconds:02}" if hours or days else f"{minutes}:{seconds:02}"
    return f"{days} d {text}" if days else text


def speed(rate: float, unit: str = "step") -> str:
    """A rate as text: so many per second, or the seconds of each if they are slow.

    >>> speed(2124.4), speed(2.124), speed(0.25), speed(0.25, "batch")
    ('2,124/s', '2.12/s', '4 s/step', '4 s/batch')
    """
    if rate < 1:
        return f"{1 / rate:.3g} s/{unit}"
    return f"{rate:.3g}/s" if rate < 100 else f"{rate:,.0f}/s"
