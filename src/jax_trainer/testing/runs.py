"""A short run, for tests of its results."""

import jax

from jax_trainer.core import Program, TrainState, compile_program
from jax_trainer.datasets import Data
from jax_trainer.engine import Plan, run
from jax_trainer.testing.data import numbered_loader
from jax_trainer.testing.observers import EventRecorder


def short_run(program: Program, steps: int = 5, seed: int = 0) -> tuple[TrainState, EventRecorder]:
    """Trains `program` on numbered data. Returns the last state and the recorded events."""
    loader, seen = numbered_loader(), EventRecorder()
    compiled = compile_program(program, on_recompile="ignore")
    state = compiled.init(jax.random.key(seed), next(iter(loader)))
    return run(compiled, state, Data(loader), Plan(max_steps=steps), [seen]), seen
