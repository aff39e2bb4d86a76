"""For tests of callbacks: short runs that share one compiled program per flavour, and a store that only remembers."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jax_trainer.adapters import function_program, linen_program
from jax_trainer.callbacks import Callback, RunContext
from jax_trainer.checkpoint.errors import SaveError
from jax_trainer.core import CompiledProgram, TrainState, compile_program, step_of, with_finite_guard, with_layer_norms
from jax_trainer.core.wrappers import with_weight_average
from jax_trainer.datasets import ArrayLoader, Data, Position
from jax_trainer.engine import EvalRoundEnd, Event, Every, Plan, run
from jax_trainer.logger import Logger, LoggerConfig
from jax_trainer.optimizer import SGD, LinearScheduleConfig, SGDConfig
from jax_trainer.optimizer.reported import with_learning_rate_scale
from jax_trainer.optimizer.unfreezing import with_unfreezing
from jax_trainer.testing import (
    TinyLinen,
    cross_entropy,
    linear_program,
    numbered_data,
    numbered_loader,
    tiny_program,
)
from jax_trainer.testing.models import CLASSES

STEPS = 4  # per epoch
TOTAL, FIRST_RATE = 16, 0.01  # the learning rate falls to 0 in a straight line
EXAMPLE = {name: array[:32] for name, array in numbered_data().items()}


def _tx() -> optax.GradientTransformation:
    schedule = LinearScheduleConfig(init_value=FIRST_RATE, end_value=0.0, steps=TOTAL)
    return SGD(SGDConfig(learning_rate=schedule)).build(TOTAL)


@cache
def program_of(flavour: str) -> CompiledProgram:
    """Of a linear model without an interface ("functions"), or of the tiny model in linen or nnx."""
    program = linear_program(_tx()) if flavour == "functions" else tiny_program(flavour, _tx())
    return compile_program(program, on_recompile="ignore")


def _evaluated(logits: Any, batch: Any) -> tuple[Any, dict[str, Any]]:
    loss = cross_entropy(logits, batch["y"]).mean()
    pairs = jax.nn.one_hot(batch["y"], CLASSES).T @ jax.nn.one_hot(logits.argmax(-1), CLASSES)
    return loss, {"conf_matrix": {"value": pairs, "mode": "sum", "log_mode": "eval"}}


def _linen_loss(params: Any, state: Any, batch: Any, rng: Any, train: bool) -> Any:
    logits, mutable = state.apply(params, batch["x"], train=train)
    loss, metrics = _evaluated(logits, batch)
    return loss, (mutable, metrics)


@cache
def matrix_program() -> CompiledProgram:
    """Of the tiny model, with all that callbacks need; evaluations report a confusion matrix besides."""
    program = linen_program(TinyLinen(), _linen_loss, _tx(), to_input=lambda batch: batch["x"])
    program = with_layer_norms(with_learning_rate_scale(program))
    program = with_weight_average(with_unfreezing(program, {0: ".*"}))  # for those that average and unfreeze
    return compile_program(program, on_recompile="ignore")


@cache
def scripted_program(*, log_norms: bool = True, guarded: bool = False) -> CompiledProgram:
    """A program whose steps report the loss and the gradient norm that their batches say."""
    program = function_program(
        init=lambda key, batch: jnp.zeros(()),
        loss=lambda params, batch, *, rng, train: batch["loss"].mean() + params * batch["norm"].mean(),
        tx=optax.sgd(0.0),
        log_norms=log_norms,
    )
    return compile_program(with_finite_guard(program) if guarded else program, on_recompile="ignore")


def scripted(losses: Sequence[float], norms: Sequence[float] | None = None, batch_size: int = 1) -> ArrayLoader:
    """Batches for `scripted_program`."""
    norms = losses if norms is None else norms
    return ArrayLoader({"loss": np.array(losses, np.float32), "norm": np.array(norms, np.float32)}, batch_size)


def fit(
    *observers: object,
    flavour: str = "functions",
    plan: Plan | None = None,
    evals: dict | None = None,
    program: CompiledProgram | None = None,
    train: Any = None,
    state: TrainState | None = None,
    at: Position = Position(),
) -> TrainState:
    program = program or program_of(flavour)
    train = numbered_loader(32 * STEPS) if train is None else train
    data = Data(train, {"val": numbered_loader(64)} if evals is None else evals)
    plan = plan or Plan(max_epochs=2, eval_every=Every(epochs=1))
    if state is None:
        state = program.init(jax.random.key(0), next(iter(train)))
    return run(program, state, data, plan, observers, at)  # type: ignore[arg-type]


class Saves:
    """Records what it was asked to save: step, position, metrics, and what callbacks know."""

    def __init__(self) -> None:
        self.kept: list[tuple[int, Position, dict[str, float]]] = []
        self.callbacks: list[Any] = []
        self.runs: list[Any] = []
        self.failures: list[SaveError] = []  # one for each save that is to fail
        self.asked: list[str] = []
        self.coalesced: list[int] = []  # the steps that may be skipped

    def prepare(self, state: TrainState) -> None:
        self.asked.append("prepare")

    def save(
        self,
        state: TrainState,
        position: Position,
        metrics: Mapping[str, float],
        *,
        callbacks: Mapping[str, Any] | None = None,
        run: Any = None,
        wait: bool = True,
        coalesce: bool = False,
    ) -> Path:
        assert not wait
        self.coalesced += [step_of(state)] if coalesce else []
        self.kept.append((step_of(state), position, dict(metrics)))
        self.callbacks.append(json.loads(json.dumps(callbacks, allow_nan=False)))
        self.runs.append(run() if callable(run) else run)
        return Path()

    def check(self) -> None:
        if self.kept and self.failures:
            raise self.failures.pop(0)

    def wait(self) -> None:
        self.check()

    def best(self) -> None:
        return None

    def completed(self) -> None:
        self.asked.append("completed")
        self.check()


class NotingLogger(Logger):
    """A logger that also remembers which figures it was given."""

    def __init__(self, folder: Path) -> None:
        super().__init__(LoggerConfig(), folder)
        self.figures: list[tuple[str, int]] = []

    def log_figure(self, name: str, figure: Any, step: int) -> None:
        self.figures.append((name, step))
        super().log_figure(name, figure, step)


@contextmanager
def run_in(folder: Path, **options: Any) -> Iterator[RunContext]:
    """A run in `folder` with a logger of its own, which is closed afterwards."""
    folder.mkdir(exist_ok=True)
    logger = NotingLogger(folder)
    try:
        yield RunContext(folder, logger, checkpoints=Saves(), **options)  # type: ignore[arg-type]
    finally:
        logger.close("completed")


def rows(run: RunContext) -> list[dict[str, Any]]:
    """What was logged."""
    assert run.logger.flush()
    return [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]


def evaluated(callback: Callback, metrics: Mapping[str, Any], *, step: int, epoch: int = 1, name: str = "val") -> None:
    """Sends `callback` the end of an evaluation."""
    callback.handle(EvalRoundEnd(step, epoch, None, {name: dict(metrics)}))  # type: ignore[arg-type]


def send_event(callback: Callback, kind: type[Event], step: int, epoch: int, *fields: Any) -> None:
    """Sends `callback` an event without a state."""
    callback.handle(kind(step, epoch, None, *fields))  # type: ignore[arg-type]
