"""Runs jobs in this process, for cases that need no child process."""

from pathlib import Path
from typing import Any

import numpy as np

from jax_trainer.callbacks import Callback, CallbackConfig
from jax_trainer.datasets import ArrayLoader
from jax_trainer.engine import StepEnd
from jax_trainer.testing import digest, numbered_data
from tests.scorecard.job import BATCH, Job, Options, data_of, trainer_for

PLAIN = {"save_every": 0, "val_every": 0, "val_epochs": 0, "test": 0, "extras": "bare", "resume": "no"}


def options_for(folder: Path, **changes: Any) -> Options:
    """A short job that only trains, with `changes`."""
    return Options(out=str(folder), **{"steps": 40, "flavour": "nnx", **PLAIN, **changes})


def run_job(options: Options, train: Any = None, evals: Any = None, **more: Any) -> Job:
    """Runs the job, by default on its own data; returns the trainer."""
    trainer = trainer_for(options, **more)
    default, sets, tests = data_of(options)
    evaluated = evals if evals is not None else sets if options.val_every or options.val_epochs else None
    resume: Any = {"auto": "auto", "no": False, "yes": True}.get(options.resume, options.resume)
    trainer.train_model(default if train is None else train, evaluated, tests if options.test else None, resume=resume)
    return trainer


def batches(count: int, size: int = BATCH) -> list[dict[str, np.ndarray]]:
    """`count` batches."""
    loader = ArrayLoader(numbered_data(count * size), size)
    return list(loader.epoch(1))


class Digests(Callback):
    """Records a digest of every part of the state after each step."""

    config: CallbackConfig

    def __init__(self) -> None:
        self.at: dict[int, dict[str, str]] = {}
        super().__init__()

    def on_step_end(self, event: StepEnd) -> None:
        state = self.state
        parts = {name: getattr(state, name) for name in ("params", "model_state", "opt_state", "rng")}
        self.at[event.step] = {
            name: digest(part) for name, part in {**parts, "ema": state.extra.get("ema", {})}.items()
        }
