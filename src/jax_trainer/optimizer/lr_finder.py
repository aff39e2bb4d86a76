"""The learning rate finder: losses of steps whose learning rate grows exponentially, and what they suggest."""

import io
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jax_trainer.core import Batch, CompiledProgram, TrainState, copy_state
from jax_trainer.core.state import with_hyperparameters
from jax_trainer.core.wrappers import added_state, with_optimizer
from jax_trainer.diagnostics.optional_import import from_extra
from jax_trainer.optimizer.reported import FIXED, METRIC, SCALE, rates_in

WINDOW = 8  # losses are read from the device after so many steps
SMOOTHING = 0.9  # per step, of the loss that is compared with the best one
LEAST_STEPS = 20  # of a curve that can suggest anything
LEAST_DROP = 0.02  # of the loss at small rates: less is flat
EXPLODED = 0.5  # of the loss at small rates: what rises further above it has exploded
CLEAR_DROP = 4.0  # of the loss, in standard deviations of its noise: less is no descent


@dataclass(frozen=True)
class LRFindResult:
    """The losses of a sweep over learning rates, and the learning rate that they suggest.

    Args:
        rates: the learning rates, or, if `is_relative`, factors of the learning rate of the optimizer.
        losses: of the batches of these steps, before the update with that rate.
        smoothed: a local line through the losses.
        suggestion: the rate at which the loss falls most steeply; None: there is no such rate.
        reason: why this rate, or why none.
        is_relative: whether the learning rate of the optimizer is unknown, and `rates` are factors of it.
    """

    rates: np.ndarray
    losses: np.ndarray
    smoothed: np.ndarray
    suggestion: float | None
    reason: str
    is_relative: bool = False

    @property
    def curve(self) -> list[tuple[float, float]]:
        """Pairs of learning rate and loss."""
        return [(float(rate), float(loss)) for rate, loss in zip(self.rates, self.losses, strict=True)]

    @property
    def unit(self) -> str:
        """What `rates` are."""
        return "factor of the learning rate of the optimizer" if self.is_relative else "learning rate"

    def __str__(self) -> str:
        found = "no suggestion" if self.suggestion is None else f"{self.unit} {self.suggestion:.3g}"
        return f"{found}: {self.reason}"

    def data(self) -> dict[str, Any]:
        """The result as plain data."""
        finite = lambda values: [float(value) if math.isfinite(value) else None for value in values]
        return {
            "suggestion": self.suggestion,
            "reason": self.reason,
            "is_relative": self.is_relative,
            "rates": finite(self.rates),
            "losses": finite(self.losses),
        }

    def plot(self, path: str | Path | io.BytesIO | None = None) -> Any:
        """The curve as a matplotlib figure, also written to `path`; needs the extra `plots`."""
        with from_extra("plots"):
            from matplotlib.figure import Figure
        figure = Figure(figsize=(6, 4), layout="constrained")
        axes = figure.add_subplot(xscale="log", xlabel=self.unit, ylabel="loss", title=str(self).partition(":")[0])
        axes.plot(self.rates, self.losses, ".", color="0.7")
        axes.plot(self.rates, self.smoothed)
        if self.suggestion is not None:
            axes.axvline(self.suggestion, color="C1")
        if path is not None:
            figure.savefig(path)
        return figure

    def _repr_png_(self) -> bytes | None:
        """The curve, for notebooks."""
        drawn = io.BytesIO()
        try:
            self.plot(drawn)
        except ImportError:  # a notebook shows the text
            return None
        return drawn.getvalue()


def find_learning_rate(
    program: CompiledProgram,
    state: TrainState,
    batches: Iterable[Batch],
    *,
    min_lr: float = 1e-8,
    max_lr: float = 1.0,
    num_training: int = 100,
    early_stop_threshold: float | None = 4.0,
) -> LRFindResult:
    """Trains a copy of `state` with exponentially growing learning rates, and suggests one.

    The updates of the optimizer are scaled, so that it works with every optimizer and schedule. If its state does not
    have the learning rate, the rates are factors of it.

    Args:
        program: the program.
        state: the state, which stays as it is.
        batches: placed on the devices, as many as steps.
        min_lr, max_lr: the smallest and the largest rate.
        num_training: the number of steps.
        early_stop_threshold: end when the smoothed loss is this many times the best one; None: never. A loss that is
            not finite ends the sweep in any case.
    """
    if not 0 < min_lr < max_lr:
        raise ValueError(f"`min_lr` must be above 0 and below `max_lr`, got {min_lr} and {max_lr}.")
    if num_training < LEAST_STEPS:
        raise ValueError(f"`num_training` must be at least {LEAST_STEPS}, got {num_training}.")
    is_relative = METRIC not in rates_in(state)
    around = SCALE if is_relative else FIXED
    swept = program.transformed(around, lambda program: with_optimizer(program, around))
    rates = np.geomspace(min_lr, max_lr, num_training)
    state = added_state(around, copy_state(state))
    losses = _losses(swept, state, batches, rates, around.hyperparameter, early_stop_threshold)
    return suggested(rates[: len(losses)], np.asarray(losses), is_relative=is_relative)


def _losses(
    program: CompiledProgram,
    state: TrainState,
    batches: Iterable[Batch],
    rates: np.ndarray,
    name: str,
    threshold: float | None,
) -> list[float]:
    """The loss of each step, up to one that diverges."""
    buffer, losses = None, list[float]()
    for index, (rate, batch) in enumerate(zip(rates, batches, strict=False)):
        state = with_hyperparameters(state, {name: rate})
        buffer = program.train_buffer(state, batch, WINDOW) if buffer is None else buffer
        state, buffer, _ = program.train_step(state, buffer, batch)
        if (index + 1) % WINDOW == 0 or index + 1 == len(rates):
            unread = index + 1 - len(losses)
            rows = np.asarray(buffer.rows)[-unread:]
            losses += buffer.format.read(rows, [])["loss"].values.tolist()
            if (end := diverged_at(losses, threshold)) is not None:
                return losses[:end]
    return losses


def diverged_at(losses: list[float], threshold: float | None) -> int | None:
    """The number of losses before they diverge; None if they do not."""
    mean = best = math.nan
    for index, loss in enumerate(losses):
        if not math.isfinite(loss):
            return index
        mean = loss if index == 0 else SMOOTHING * mean + (1 - SMOOTHING) * loss
        best = mean if index == 0 else min(best, mean)
        if threshold is not None and mean - best > (threshold - 1) * max(abs(best), losses[0] - best, 1e-12):
            return index
    return None


def suggested(rates: np.ndarray, losses: np.ndarray, *, is_relative: bool = False) -> LRFindResult:
    """What a curve of finite losses at exponentially growing rates suggests: where it falls most steeply.

    A line is fitted around every point. The suggestion is the point with the steepest one before the lowest loss, if
    the loss falls clearly more than its noise.
    """
    count = len(losses)
    half = max(3, count // 12)
    smoothed, slopes = _lines(np.log(rates), losses, half)

    def result(reason: str, suggestion: float | None = None) -> LRFindResult:
        return LRFindResult(rates, losses, smoothed, suggestion, reason, is_relative)

    if count < LEAST_STEPS:
        return result(f"the loss diverged after {count} steps: lower `min_lr`")
    end = _rises_at(smoothed, half)  # a loss that explodes may fall again, which means nothing
    lowest = int(np.argmin(smoothed[:end]))
    highest = float(np.max(smoothed[: lowest + 1]))
    drop, spread = highest - float(smoothed[lowest]), max(abs(highest), float(np.ptp(smoothed[: lowest + 1])))
    if drop < LEAST_DROP * spread:
        flat = "the loss does not fall at any rate" if lowest else "the loss rises from the smallest rate on"
        return result(f"{flat}: sweep a wider range (`min_lr`, `max_lr`), or check the model and the loss")
    # of second differences: neither the level nor the slope of the curve counts as noise
    noise = np.diff(losses[: lowest + half], 2).std() / math.sqrt(6)
    if drop < CLEAR_DROP * noise:
        return result("the losses are too noisy: use larger batches, or more steps (`num_training`)")
    complete = slice(half, max(half + 1, min(lowest + 1, count - half)))  # points with neighbours on both sides
    steepest = half + int(np.argmin(slopes[complete]))
    more = "; it still falls at the largest rate: raise `max_lr`" if lowest == count - 1 else ""
    return result(f"the loss falls most steeply there{more}", float(rates[steepest]))


def _rises_at(smoothed: np.ndarray, half: int) -> int:
    """Where the losses rise well above those at the smallest rates; their number, if nowhere."""
    first = smoothed[: 2 * half + 1]
    level = float(np.max(first))
    above = np.flatnonzero(smoothed > level + EXPLODED * max(abs(level), float(np.ptp(first))))
    return int(above[0]) if len(above) else len(smoothed)


def _lines(x: np.ndarray, y: np.ndarray, half: int) -> tuple[np.ndarray, np.ndarray]:
    """The value and the slope of a line fitted around every point."""
    values, slopes = np.array(y, float), np.zeros(len(x))
    for index in range(len(x)):
        near = slice(max(0, index - half), index + half + 1)
        if len(x[near]) > 1:
            slopes[index], offset = np.polyfit(x[near] - x[index], y[near], 1)
            values[index] = offset
    return values, slopes
