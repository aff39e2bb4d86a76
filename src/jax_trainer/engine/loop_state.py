"""`LoopState`: where a run is, as its loop has to know it to go on as if nothing had happened."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from jax_trainer.core import LogMode, WindowAccumulator
from jax_trainer.datasets import Position
from jax_trainer.settings import AtLeast, checked, hints_of

_Seconds = Annotated[float, AtLeast(0)]


@dataclass(frozen=True, kw_only=True)
class LoopState:
    """Where a run stands: in the data, and among the ends of epochs and the evaluations.

    Args:
        position: in the data.
        has_ended: whether everybody was told that the epoch is over. One that the plan's end has cut off has ended,
            too, and goes on where it stands if the plan gets longer.
        evaluated_step: the step at which evaluations were last made; None: at none.
        seconds: that training took so far.
        epoch_seconds: that this epoch's training took so far, without evaluations.
        epoch_waited: for how many of them there was no batch.
        meter: what the epoch's metrics are folded into so far.
        batch_size: examples of a full batch, so that the position counts examples, too; None: it is not known.
    """

    position: Position = Position()
    has_ended: bool = True
    evaluated_step: Annotated[int, AtLeast(0)] | None = None
    seconds: _Seconds = 0.0
    epoch_seconds: _Seconds = 0.0
    epoch_waited: _Seconds = 0.0
    meter: Mapping[str, object] = field(default_factory=dict)
    batch_size: int | None = None

    @classmethod
    def of(cls, at: "Position | LoopState", step: int) -> "LoopState":
        """Where a run of `step` steps stands; of a position alone, everything that was due there is done."""
        if isinstance(at, LoopState):
            return at
        return cls(position=at, has_ended=not at.epoch_step, evaluated_step=step if at.epoch else None)

    @classmethod
    def from_data(cls, position: Position, data: Mapping[str, Any]) -> "LoopState":
        """What `to_data` gave, at this position; a `ValueError` for anything else."""
        hints = {name: hint for name, hint in hints_of(cls).items() if name != "position"}
        checked(data, hints)
        WindowAccumulator(LogMode.TRAIN).load(data["meter"])
        return cls(position=position, **data)

    def to_data(self) -> dict[str, Any]:
        """All but the position, as plain data."""
        return {name: value for name, value in vars(self).items() if name != "position"}

    def is_at(self, other: "LoopState | None") -> bool:
        """Whether `other` is the same place: nothing was finished in between."""
        return other is not None and self.place == other.place

    @property
    def place(self) -> tuple[int, int, bool, int | None]:
        """What tells it from other places of the same run."""
        return self.position.epoch, self.position.epoch_step, self.has_ended, self.evaluated_step
