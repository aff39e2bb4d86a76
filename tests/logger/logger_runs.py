"""A short training that tests of loggers share, and what every logger should take."""

from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jax_trainer.callbacks import logger_observers
from jax_trainer.core import CompiledProgram, TrainState, compile_program
from jax_trainer.datasets import Data
from jax_trainer.engine import Every, Plan, run
from jax_trainer.logger import Logger, LoggerConfig
from jax_trainer.testing import linear_program, numbered_loader

PIXELS = np.arange(4 * 5 * 3, dtype=np.uint8).reshape(4, 5, 3)
PARAMS = {"optimizer": {"lr": 0.1, "betas": [0.9, 0.99]}, "model": {"act_fn": "gelu", "bias": True}, "nothing": None}
FLAT = {"optimizer.lr": 0.1, "optimizer.betas.0": 0.9, "optimizer.betas.1": 0.99, "model.act_fn": "gelu"}
FLAT = {**FLAT, "model.bias": True, "nothing": None}


@cache
def _program() -> CompiledProgram:
    return compile_program(linear_program(), on_recompile="ignore")


def train_two_epochs(logger: Logger) -> TrainState:
    """Two epochs of four steps with a validation after each; the logger stays open."""
    program, loader = _program(), numbered_loader(128)
    data, plan = Data(loader, {"val": numbered_loader(64)}), Plan(max_epochs=2, eval_every=Every(epochs=1))
    return run(program, program.init(jax.random.key(0), next(iter(loader))), data, plan, logger_observers(logger))


def a_figure() -> Any:
    """A figure of 60 x 40 points."""
    figure = import_module("matplotlib.figure").Figure(figsize=(0.6, 0.4), dpi=100)
    figure.add_subplot().plot([1, 2, 3])
    return figure


def image_in(file: Path) -> np.ndarray:
    """The pixels of an image file."""
    with import_module("PIL.Image").open(file) as image:
        return np.asarray(image)


def log_everything(logger: Logger) -> None:
    """One entry of every kind, and rows for every x-axis."""
    logger.write(50, {"epoch": 1, "train/loss_step": 0.5})
    logger.write(70, {"epoch": 1, "val/loss": 0.25})
    logger.log_scalar("mine/value", 0.125, step=7)
    logger.log_image("val/example", PIXELS, step=1)
    logger.log_figure("val/curve", a_figure(), step=1)
    logger.log_histogram("param/kernel", np.linspace(0, 3, 300).reshape(3, 100), step=2)
    logger.log_text("notes", "a <b> & c", step=3)
    logger.log_hparams(PARAMS, {"test/acc": 0.75})
    logger.save_metrics("val_epoch_0001", {"val/loss": 0.25})


def logger_with(folder: Path, *tools: Any, **options: Any) -> Logger:
    """A logger of these tools that takes every second step."""
    return Logger(LoggerConfig(log_steps_every=2, tool_config=list(tools)), folder, **options)
