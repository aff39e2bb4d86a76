"""For tests of callbacks: short runs that share one compiled program per flavour, and a store that only remembers."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path

import jax

from jax_trainer.core import CompiledProgram, TrainState, compile_program, step_of
from jax_trainer.datasets import Data, Position
from jax_trainer.engine import Every, Plan, run
from jax_trainer.optimizer import AdamW, AdamWConfig, LinearScheduleConfig
from jax_trainer.testing import numbered_data, numbered_loader, tiny_program

STEPS = 4  # per epoch
TOTAL, FIRST_RATE = 16, 0.01  # the learning rate falls to 0 in a straight line
EXAMPLE = {name: array[:32] for name, array in numbered_data().items()}


@cache
def program_of(flavour: str) -> CompiledProgram:
    schedule = LinearScheduleConfig(init_value=FIRST_RATE, end_value=0.0, steps=TOTAL)
    tx = AdamW(AdamWConfig(learning_rate=schedule)).build(TOTAL)
    return compile_program(tiny_program(flavour, tx), on_recompile="ignore")


def fit(*observers: object, flavour: str = "linen", plan: Plan | None = None, evals: dict | None = None) -> TrainState:
    program = program_of(flavour)
    data = Data(numbered_loader(32 * STEPS), {"val": numbered_loader(64)} if evals is None else evals)
    plan = plan or Plan(max_epochs=2, eval_every=Every(epochs=1))
    return run(program, program.init(jax.random.key(0), EXAMPLE), data, plan, observers)  # type: ignore[arg-type]


class Saves:
    """Keeps what it was asked to save: step, position, metrics."""

    def __init__(self) -> None:
        self.kept: list[tuple[int, Position, dict[str, float]]] = []

    def save(self, state: TrainState, position: Position, metrics: Mapping[str, float]) -> Path:
        self.kept.append((step_of(state), position, dict(metrics)))
        return Path()
