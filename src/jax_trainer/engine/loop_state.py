"""`LoopState`: the state of the training loop, which a checkpoint saves so that a resumed run is bit-identical."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from jax_trainer.core import LogMode, WindowAccumulator
from jax_trainer.datasets import Position
from jax_trainer.settings import AtLeast, checked, hints_of

_Seconds = Annotated[float, AtLeast(0)]


@dataclass(frozen=True, kw_only=True)
class LoopState:
    """The position in the data, and which ends of epochs and evaluations were already emitted.

    Args:
        position: the position in the data.
        has_ended: whether the `EpochEnd` of the epoch was emitted. An epoch that the end of the plan has cut off has
            ended, too; it continues at its position if the plan is extended.
        evaluated_step: the step of the last evaluation; None: there was none.
        seconds: training time so far, in seconds.
        epoch_seconds: training time of this epoch so far, without evaluations, in seconds.
        epoch_waited: how much of that was spent waiting for batches, in seconds.
        metrics_state: the accumulated metrics of the epoch so far.
        batch_size: examples per full batch, which makes `position` a number of examples; None: unknown.
    """

    position: Position = Position()
    has_ended: bool = True
    evaluated_step: Annotated[int, AtLeast(0)] | None = None
    seconds: _Seconds = 0.0
    epoch_seconds: _Seconds = 0.0
    epoch_waited: _Seconds = 0.0
    metrics_state: Mapping[str, object] = field(default_factory=dict)
    batch_size: int | None = None

    @classmethod
    def of(cls, at: "Position | LoopState", step: int) -> "LoopState":
        """`at` as a `LoopState` of a run after `step` steps; at a plain position, no evaluation is due."""
        if isinstance(at, LoopState):
            return at
        return cls(position=at, has_ended=not at.epoch_step, evaluated_step=step if at.epoch else None)

    @classmethod
    def from_data(cls, position: Position, data: Mapping[str, Any]) -> "LoopState":
        """Inverse of `to_data`, at this position; raises a `ValueError` for other data."""
        hints = {name: hint for name, hint in hints_of(cls).items() if name != "position"}
        checked(data, hints)
        WindowAccumulator(LogMode.TRAIN).load(data["metrics_state"])
        return cls(position=position, **data)

    def to_data(self) -> dict[str, Any]:
        """All fields but the position, as plain data."""
        return {name: value for name, value in vars(self).items() if name != "position"}

    def is_at(self, other: "LoopState | None") -> bool:
        """Whether `other` is the same point of a run: no step, epoch end or evaluation lies in between."""
        return other is not None and self.key == other.key

    @property
    def key(self) -> tuple[int, int, bool, int | None]:
        """Identifies this point of a run."""
        return self.position.epoch, self.position.epoch_step, self.has_ended, self.evaluated_step
