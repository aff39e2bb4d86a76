"""An observer that records events."""

from typing import Any

from jax_trainer.engine import EpochEnd, EvalEnd, Event, StepEnd, StepMetrics


class EventRecorder:
    """Records the order of events and all their metrics, but no states, which are donated."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int, int]] = []  # name, step, epoch
        self.chunks: list[int] = []
        self.steps: dict[int, dict[str, float]] = {}  # metrics of every single step
        self.epochs: dict[int, dict[str, Any]] = {}
        self.evals: list[tuple[int, str, dict[str, Any]]] = []  # step, set, metrics

    @property
    def names(self) -> list[str]:
        """The names of the events, in order."""
        return [name for name, _, _ in self.events]

    def handle(self, event: Event) -> None:
        """Records `event`."""
        self.events.append((type(event).__name__, event.step, event.epoch))
        match event:
            case StepEnd():
                self.chunks.append(event.steps)
            case StepMetrics():
                for index, step in enumerate(range(event.rows.first, event.rows.last + 1)):
                    self.steps[step] = {name: column.values[index] for name, column in event.rows.columns.items()}
            case EpochEnd():
                self.epochs[event.epoch] = event.metrics
            case EvalEnd():
                self.evals.append((event.step, event.name, event.metrics))
