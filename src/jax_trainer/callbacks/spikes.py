"""What a spike is: a value far above what was usual lately."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from jax_trainer.settings import checked, hints_of

NEW_LEVEL = 100  # so many spikes in a row are none: the values have moved to another level, and stay there
NEAR = 5  # steps within which one kind of spike is said to follow the other


@dataclass
class Level:
    """What is usual for a quantity: an exponential moving average of its values, spikes left out.

    A value is a spike if it lies above `threshold` times the average of those before it, once there were `warmup` of
    them. (Where the average is negative, the same distance above it counts.) One that is not finite always is.
    """

    decay: float
    threshold: float
    warmup: int
    total: float = 0.0  # of the values, each weighed by how long ago it was
    weight: float = 0.0  # of all of them; 1 in the long run
    seen: int = 0
    in_a_row: int = 0

    @property
    def average(self) -> float:
        """What is usual now; 0 before there was anything."""
        return self.total / self.weight if self.weight else 0.0

    def takes(self, value: float) -> bool:
        """Takes `value` in; whether it was a spike, which leaves the average as it was."""
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
    """How many spikes there were, by kind.

    A step is `synchronous` where both quantities spike. A spike of one that is alone, at most 5 steps after a lone one
    of the other, has come after it.
    """

    grad_norms: int = 0
    losses: int = 0
    synchronous: int = 0
    grad_before_loss: int = 0
    loss_before_grad: int = 0


@dataclass
class Spikes:
    """Follows the gradients' norm and the loss, step by step, and counts their spikes."""

    grad_norm: Level
    loss: Level
    counts: SpikeCounts = field(default_factory=SpikeCounts)
    last_grad_norm: int = -NEAR - 1  # the step of the last one that was alone
    last_loss: int = -NEAR - 1

    @classmethod
    def of(cls, decay: float, threshold: float, warmup: int) -> "Spikes":
        """Before the first step."""
        return cls(Level(decay, threshold, warmup), Level(decay, threshold, warmup))

    def add(self, step: int, grad_norm: float, loss: float) -> tuple[bool, bool]:
        """Takes in the numbers of a step; whether the norm was a spike, and whether the loss was."""
        found = self.grad_norm.takes(grad_norm), self.loss.takes(loss)
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

    def taken_counts(self) -> dict[str, int]:
        """The counts since this was asked last."""
        counts, self.counts = self.counts, SpikeCounts()
        return asdict(counts)

    def state_dict(self) -> dict[str, Any]:
        """All of it, as plain data."""
        return asdict(self)

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> "Spikes":
        """What `state_dict` gave; a `ValueError` for anything else."""
        parts = {"grad_norm": Level, "loss": Level, "counts": SpikeCounts}
        checked(state, {**hints_of(cls), **dict.fromkeys(parts, dict[str, object])})
        made = {name: part(**checked(state[name], hints_of(part))) for name, part in parts.items()}
        return cls(**{**state, **made})
