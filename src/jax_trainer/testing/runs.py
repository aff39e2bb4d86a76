"""Numbered data, a recorder of events, a short run, and fault injection."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np

from jax_trainer.core import Program, TrainState, compile_program
from jax_trainer.core.failpoints import arm
from jax_trainer.datasets import ArrayLoader, Data
from jax_trainer.engine import EpochEnd, EvalEnd, Event, Plan, StepEnd, StepMetrics, run
from jax_trainer.testing.models import CLASSES, FEATURES


def numbered_data(examples: int = 1003, seed: int = 0) -> dict[str, np.ndarray]:
    """Learnable examples with distinct ids: `x` [n, features], `y` [n] classes, `id` [n]."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(examples, FEATURES)).astype(np.float32)
    y = (x @ rng.normal(size=(FEATURES, CLASSES))).argmax(-1).astype(np.int32)
    return {"x": x, "y": y, "id": np.arange(examples, dtype=np.int32)}


def numbered_loader(
    examples: int = 1003, batch_size: int = 32, *, shuffle: bool = True, drop_last: bool = False, seed: int = 42
) -> ArrayLoader:
    """`numbered_data` in batches; 1003 examples in batches of 32 leave a smaller last one."""
    return ArrayLoader(numbered_data(examples), batch_size, shuffle=shuffle, drop_last=drop_last, seed=seed)


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


def short_run(program: Program, steps: int = 5, seed: int = 0) -> tuple[TrainState, EventRecorder]:
    """Trains `program` on numbered data. Returns the last state and the recorded events."""
    loader, seen = numbered_loader(), EventRecorder()
    compiled = compile_program(program, on_recompile="ignore")
    state = compiled.init(jax.random.key(seed), next(iter(loader)))
    return run(compiled, state, Data(loader), Plan(max_steps=steps), [seen]), seen


@contextmanager
def fault(spec: str) -> Iterator[None]:
    """Arms one failpoint inside the block: `with fault("step:raise:3"): …` fails at the third step.

    `jax_trainer.core.failpoints` has the format and the actions.
    """
    arm(spec)
    try:
        yield
    finally:
        arm(None)
