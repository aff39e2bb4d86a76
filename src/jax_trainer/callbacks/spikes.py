"""Spike detection: values far above their running average."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from jax_trainer.settings import checked, hints_of

NEW_LEVEL = 100  # after so many spikes in a row, the average restarts: the values have moved to another level
NEAR = 5  # steps within which a spike of one kind follows one of the other


@dataclass
class Level:
    """The exponential moving average of a quantity, without its spikes.

    A value is a spike if it exceeds `threshold` times the average of the values before, after `warmup` values. (If the
    average is negative, the same distance above it counts.) A non-finite value is always a spike.
    """

    decay: float
    threshold: float
    warmup: int
    total: float = 0.0  # weighted sum of the values
    weight: float = 0.0  # sum of the weights; tends to 1
    seen: int = 0
    in_a_row: int = 0

    @property
    def average(self) -> float:
        """The current average; 0 before the first value."""
        return self.total / self.weight if self.weight else 0.0

    def update(self, value: float) -> bool:
        """Adds `value` to the average unless it is a spike; returns whether it is."""
        if not math.isfinite(value):
            return True
        is_spike = self._is_far(value)
        self.in_a_row = self.in_a_row + 1 if is_spike else 0
        if self.in_a_row >= NEW_LEVEL:
            self.total = self.weight = 0.0
            self.seen = self.in_a_row = 0
        elif is_spike:
            return True
        self.total = self.decay * self.total + (1 - self.decay) * value
        self.weight = self.decay * self.weight + (1 - self.decay)
        self.seen += 1
        return False

    def _is_far(self, value: float) -> bool:
        return self.seen >= self.warmup and value > self.average + (self.threshold - 1) * abs(self.average)


@dataclass
class SpikeCounts:
    """Numbers of spikes, by kind.

    A step is `synchronous` if both quantities spike. A spike of one quantity alone, at most 5 steps after one of the
    other alone, counts as following it.
    """

    grad_norms: int = 0
    losses: int = 0
    synchronous: int = 0
    grad_before_loss: int = 0
    loss_before_grad: int = 0


@dataclass
class Spikes:
    """Counts the spikes of the gradient norm and the loss."""

    grad_norm: Level
    loss: Level
    counts: SpikeCounts = field(default_factory=SpikeCounts)
    last_grad_norm: int = -NEAR - 1  # step of the last spike of the norm alone
    last_loss: int = -NEAR - 1

    @classmethod
    def of(cls, decay: float, threshold: float, warmup: int) -> "Spikes":
        """The state before the first step."""
        return cls(Level(decay, threshold, warmup), Level(decay, threshold, warmup))

    def add(self, step: int, grad_norm: float, loss: float) -> tuple[bool, bool]:
        """Adds the values of a step; returns whether the norm and whether the loss was a spike."""
        found = self.grad_norm.update(grad_norm), self.loss.update(loss)
        counts = self.counts
        counts.grad_norms += found[0]
        counts.losses += found[1]
        match found:
            case True, True:
                counts.synchronous += 1
            case True, False:
                counts.loss_before_grad += step - self.last_loss <= NEAR
                self.last_grad_norm = step
            case False, True:
                counts.grad_before_loss += step - self.last_grad_norm <= NEAR
                self.last_loss = step
        return found

    def pop_counts(self) -> dict[str, int]:
        """Returns and resets the counts."""
        counts, self.counts = self.counts, SpikeCounts()
        return asdict(counts)

    def state_dict(self) -> dict[str, Any]:
        """The state as plain data."""
        return asdict(self)

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> "Spikes":
        """Restores the result of `state_dict`; a `ValueError` for other data."""
        parts = {"grad_norm": Level, "loss": Level, "counts": SpikeCounts}
        checked(state, {**hints_of(cls), **dict.fromkeys(parts, dict[str, object])})
        restored = {name: part(**checked(state[name], hints_of(part))) for name, part in parts.items()}
        return cls(**{**state, **restored})
