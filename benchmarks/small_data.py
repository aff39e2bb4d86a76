"""Small data: 100 epochs of 20 steps on a small table, with ten seeds in one process.

    PYTHONPATH=src python benchmarks/small_data.py [--trainings 10] [--epochs 100] [--only fit] [--json PATH]

A hand-written loop (one `jax.jit` step and one evaluation per epoch, the losses fetched once per epoch,
nothing written) against `fit` with its defaults, `fit(save=False)`, and a `TrainerModule` with `ModelCheckpoint`; same
MLP, Adam, arrays and batch size. The variants alternate, seed by seed. Each training creates its own model, optimizer
and loss. `start` is the time to the end of the first epoch minus that of a later one, `end` the time after the last
epoch. The first training of each variant compiles and imports, the others should not. A report, not a test.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from flax import linen as nn

import jax_trainer as jt
from jax_trainer.callbacks import Callback, ModelCheckpointConfig

SIZES, BATCH_SIZE, STEPS, EXAMPLES = (
    (16, 64, 64, 1),
    32,
    20,
    160,
)  # layer sizes; examples per batch; steps per epoch; examples of the evaluation
LIMIT, START = 1.5, 1.0  # times the hand-written loop, plus seconds


class Mlp(nn.Module):
    """An MLP for tabular data."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        for size in SIZES[1:-1]:
            x = nn.relu(nn.Dense(size)(x))
        return nn.Dense(SIZES[-1])(x)[:, 0]


class Measurement(NamedTuple):
    """Seconds of one training, and its final loss."""

    start: float
    epoch: float
    end: float
    total: float
    loss: float

    @classmethod
    def of(cls, started: float, ends: list[float], loss: float) -> "Measurement":
        """From the time of the start and of the end of each epoch."""
        now = time.perf_counter()
        epoch = statistics.median(np.diff(ends)) if len(ends) > 1 else 0.0
        return cls(ends[0] - started - epoch, epoch, now - ends[-1], now - started, loss)


class Clock(Callback):
    """Records the times of epoch ends."""

    def reset(self) -> None:
        self.ends: list[float] = []

    def on_validation_epoch_end(self, eval_metrics: dict[str, Any], epoch: int) -> None:
        self.ends.append(time.perf_counter())


def squared_error(outputs: Any, targets: Any) -> jax.Array:
    """Mean squared_error error."""
    return ((outputs - targets) ** 2).mean()


def data() -> tuple[tuple[np.ndarray, np.ndarray], ...]:
    """A table for training and one for evaluation."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((BATCH_SIZE * STEPS + EXAMPLES, SIZES[0]), np.float32)
    y = np.sin(x[:, 0]) + x[:, 1] * x[:, 2]
    return (x[EXAMPLES:], y[EXAMPLES:]), (x[:EXAMPLES], y[:EXAMPLES])


@jax.jit
def hand_init(key: jax.Array, x: Any) -> Any:
    """The parameters and the optimizer state."""
    params = Mlp().init(key, x)
    return params, optax.adam(1e-3).init(params)


@jax.jit(donate_argnums=0)
def hand_step(state: Any, x: Any, y: Any) -> Any:
    """One step."""
    params, opt_state = state
    loss, grads = jax.value_and_grad(lambda params: squared_error(Mlp().apply(params, x), y))(params)
    updates, opt_state = optax.adam(1e-3).update(grads, opt_state)
    return (optax.apply_updates(params, updates), opt_state), loss


@jax.jit
def hand_loss(state: Any, x: Any, y: Any) -> Any:
    """The loss of an evaluation."""
    return squared_error(Mlp().apply(state[0], x), y)


def by_hand(seed: int, epochs: int) -> Measurement:
    """One dispatch per step."""
    (x, y), (test_x, test_y) = data()
    started, ends, found, order = time.perf_counter(), [], 0.0, np.random.default_rng(seed)
    state = hand_init(jax.random.key(seed), x[:BATCH_SIZE])
    for _ in range(epochs):
        rows, losses = order.permutation(len(x)).reshape(STEPS, BATCH_SIZE), []
        for row in rows:
            state, loss = hand_step(state, x[row], y[row])
            losses.append(loss)
        np.mean(jax.device_get(losses))
        parts = [hand_loss(state, test_x[i : i + 32], test_y[i : i + 32]) for i in range(0, EXAMPLES, BATCH_SIZE)]
        found = float(np.mean(jax.device_get(parts)))
        ends.append(time.perf_counter())
    return Measurement.of(started, ends, found)


def run_fit(seed: int, epochs: int, **options: Any) -> Measurement:
    """`fit` with its defaults and `options`."""
    clock = Clock()
    train, test = data()
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        result = jt.fit(
            Mlp(),
            train,
            test,
            loss_fn=lambda outputs, targets: squared_error(outputs, targets),
            optimizer=optax.adam(1e-3),
            num_epochs=epochs,
            seed=seed,
            callbacks=[clock],
            log_dir=folder,
            **options,
        )
        return Measurement.of(started, clock.ends, result.history[epochs]["val/loss"])


class Regression(jt.TrainerModule):
    """A `TrainerModule` for the same model."""

    def batch_to_input(self, batch: Any) -> Any:
        return batch[0]

    def loss_function_linen(self, params: Any, state: Any, batch: Any, rng: Any, train: bool = True) -> Any:
        outputs, mutable = self.model_linen_apply(params, state, batch[0], rng, train=train)
        return squared_error(outputs, batch[1]), (mutable, {})


def run_trainer(seed: int, epochs: int) -> Measurement:
    """`TrainerModule` with `ModelCheckpoint`."""
    clock = Clock()
    train, test = data()
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        loader = jt.ArrayLoader(train, BATCH_SIZE, shuffle=True, seed=seed)
        trainer = Regression(
            model=Mlp(),
            optimizer=optax.adam(1e-3),
            exmp_input=next(loader.epoch(1)),
            callbacks=[clock, ModelCheckpointConfig(monitor="val/loss", mode="min")],
            train_epochs=epochs,
            seed=seed,
            logger=jt.LoggerConfig(log_dir=folder),
        )
        trainer.train_model(loader, jt.ArrayLoader(test, BATCH_SIZE))
        return Measurement.of(started, clock.ends, float("nan"))


VARIANTS: dict[str, Callable[[int, int], Measurement]] = {
    "by hand": by_hand,
    "fit": run_fit,
    "fit, save=False": lambda seed, epochs: run_fit(seed, epochs, save=False),
    "TrainerModule": run_trainer,
}


def main() -> None:
    """Measures, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trainings", type=int, default=10)
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--only", nargs="*", default=list(VARIANTS), help="these variants, and the hand-written loop")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    jax.block_until_ready(jax.numpy.zeros(1) + 1)  # initializes the backend
    names = [name for name in VARIANTS if name in ("by hand", *args.only)]
    found: dict[str, list[Measurement]] = {name: [] for name in names}
    for seed in range(args.trainings):
        for name in names:
            found[name].append(VARIANTS[name](seed, args.epochs))
    hand = found["by hand"]
    print(f"\n| {args.epochs} epochs of {STEPS} | first, s | start | ms per epoch | end | limit | later, s | start |")
    print("|---|---|---|---|---|---|---|---|")
    for name, runs in found.items():
        first, later = runs[0], runs[1:] or runs
        limit = LIMIT * hand[0].total + START
        total, start = (statistics.median(getattr(run, part) for run in later) for part in ("total", "start"))
        ratio = statistics.median(run.total / by.total for run, by in zip(later, hand[1:] or hand, strict=True))
        parts = [f"{number:.2f}" for number in (first.total, first.start, 1e3 * first.epoch, first.end, limit)]
        print(f"| {name} | {' | '.join(parts)} | {total:.2f} ({ratio:.2f} x) | {start:.2f} |")
    if args.json:
        args.json.write_text(json.dumps({name: [run._asdict() for run in runs] for name, runs in found.items()}))


if __name__ == "__main__":
    main()
