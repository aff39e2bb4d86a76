"""Costs that must not grow with the length of a run: of a save, an epoch, a metric, and of the files on disk.

    PYTHONPATH=src python benchmarks/growth.py [--only saves] [--epochs 5000] [--json PATH]

* saves: a save of a small state into a folder in which 10, 100 and 500 checkpoints are kept.
* epochs: epochs per second of one tiny run with validation and checkpoints, by `fit` and by `TrainerModule`, around
  epoch 100, 1,000 and 5,000, and the function calls of an epoch after that, which do not depend on what else is
  running; the size of the last `checkpoint.json`, and the number of files in the run folder.
* metrics: 400 steps of a tiny training that reports 10, 200 and 2,000 metrics.

Each figure is wall time, and in brackets the CPU time of all threads, which depends less on what else is running. A
report, not a test.
"""

import argparse
import cProfile
import json
import logging
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

import jax_trainer as jt
from jax_trainer.callbacks import Callback, ModelCheckpointConfig
from jax_trainer.checkpoint.store import CheckpointStore
from jax_trainer.core.state import new_state
from jax_trainer.datasets import Position

KEPT, EPOCHS, METRICS, STEPS = (10, 100, 500), (100, 1000, 5000), (10, 200, 2000), 400
WINDOW = 40  # epochs, before and after the one named


def now() -> np.ndarray:
    """Wall time and CPU time, in seconds."""
    return np.array([time.perf_counter(), time.process_time()])


# --- saves


def saves(args: argparse.Namespace, folder: Path) -> Iterator[tuple[str, str]]:
    state = new_state({"kernel": jnp.ones((16, 16)), "bias": jnp.ones(16)}, {}, optax.adam(1e-3), jax.random.key(0))

    def at(step: int) -> Any:
        return state.replace(step=jnp.full_like(state.step, step))

    one = CheckpointStore(folder / "one", keep_latest=1)
    store_folder, steps = folder / "all", 0
    store_folder.mkdir()
    for kept in KEPT:
        while steps < kept:  # filled by renaming: saving them here would take long if it is slow
            steps += 1
            path = one.save(at(steps), Position(1, steps), {"val/loss": 1.0 / steps})
            os.rename(path, store_folder / path.name)
        store = CheckpointStore(store_folder, keep_latest=kept, monitor="val/loss")
        store.prepare(state)
        seconds = []
        for _ in range(8):
            steps += 1
            started = now()
            store.save(at(steps), Position(1, steps), {"val/loss": 1.0 / steps})
            seconds.append(now() - started)
        steps = max(store.steps())
        wall, cpu = np.median(seconds[1:], axis=0) * 1e3
        yield f"{kept} kept", f"{wall:.0f} ms ({cpu:.0f})"


# --- epochs


class Mlp(nn.Module):
    """A tiny classifier."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        return nn.Dense(2)(nn.relu(nn.Dense(8)(x)))


class Clock(Callback):
    """Records when epochs end, and counts the function calls of the epochs after each window."""

    def reset(self) -> None:
        self.ends: list[np.ndarray] = []
        self.calls: dict[int, float] = {}
        self._profile = cProfile.Profile()

    def on_validation_epoch_end(self, eval_metrics: dict[str, Any], epoch: int) -> None:
        if epoch - 2 * WINDOW in EPOCHS:
            self._profile.disable()
            calls = sum(entry.callcount for entry in self._profile.getstats())  # pyright: ignore[reportAttributeAccessIssue]
            self.calls[epoch - 2 * WINDOW] = calls / WINDOW
        self.ends.append(now())
        if epoch - WINDOW in EPOCHS:
            self._profile = cProfile.Profile()
            self._profile.enable()


class Classifier(jt.TrainerModule):
    def batch_to_input(self, batch: Any) -> Any:
        return batch[0]

    def loss_function_linen(self, params: Any, state: Any, batch: Any, rng: Any, train: bool = True) -> Any:
        logits, mutable = self.model_linen_apply(params, state, batch[0], rng, train=train)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[1]).mean(), (mutable, {})


def by_fit(folder: Path, epochs: int, arrays: Any, clock: Clock) -> None:
    loss = lambda logits, labels: optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
    options: dict[str, Any] = {"log_dir": folder, "progress": False, "callbacks": [clock], "batch_size": 32}
    jt.fit(Mlp(), arrays, arrays, loss_fn=loss, num_epochs=epochs, optimizer=optax.adam(1e-3), **options)


def by_trainer(folder: Path, epochs: int, arrays: Any, clock: Clock) -> None:
    loader = jt.ArrayLoader(arrays, 32, shuffle=True)
    trainer = Classifier(
        model=Mlp(),
        optimizer=optax.adam(1e-3),
        exmp_input=next(loader.epoch(1)),
        callbacks=[clock, ModelCheckpointConfig()],
        train_epochs=epochs,
        enable_progress_bar=False,
        logger=jt.LoggerConfig(log_dir=str(folder)),
    )
    trainer.train_model(loader, loader)


def epochs(args: argparse.Namespace, folder: Path) -> Iterator[tuple[str, str]]:
    rng = np.random.default_rng(0)
    arrays = rng.standard_normal((64, 4), np.float32), rng.integers(2, size=64, dtype=np.int32)
    for name, run in (("fit", by_fit), ("TrainerModule", by_trainer)):
        clock = Clock()
        run(folder / name, args.epochs + 2 * WINDOW, arrays, clock)
        for epoch in (one for one in EPOCHS if one <= args.epochs):
            first, last = clock.ends[epoch - WINDOW], clock.ends[min(epoch + WINDOW, len(clock.ends) - 1)]
            wall, cpu = (2 * WINDOW) / (last - first)
            calls = f"{clock.calls[epoch]:.0f} calls of Python functions an epoch"
            yield f"{name}, epoch {epoch}", f"{wall:.0f} epochs/s ({cpu:.0f}), {calls}"
        files = [path for path in (folder / name).rglob("*") if path.is_file()]
        records = [path.stat().st_size for path in files if path.name == "checkpoint.json"]
        yield f"{name}, checkpoint.json", f"{max(records) / 1e3:.1f} kB"
        yield f"{name}, files of the run", str(len(files))


# --- metrics


def metrics(args: argparse.Namespace, folder: Path) -> Iterator[tuple[str, str]]:
    rng = np.random.default_rng(0)
    arrays = rng.standard_normal((32 * STEPS, 4), np.float32), rng.integers(2, size=32 * STEPS, dtype=np.int32)
    for number in METRICS:

        def loss(logits: Any, labels: Any, number: int = number) -> Any:
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
            return losses.mean(), {f"m{index}": losses[0] + index for index in range(number)}

        options: dict[str, Any] = {"log_dir": folder / str(number), "progress": False, "batch_size": 32}
        seconds = []
        for epoch_count in (1, 3):  # the difference is two epochs without compilation and start
            started = now()
            jt.fit(Mlp(), arrays, loss_fn=loss, num_epochs=epoch_count, optimizer=optax.adam(1e-3), **options)
            seconds.append(now() - started)
        wall, cpu = (seconds[1] - seconds[0]) / 2
        yield f"{STEPS} steps, {number} metrics", f"{wall:.2f} s ({cpu:.2f})"


PARTS = {"saves": saves, "epochs": epochs, "metrics": metrics}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=PARTS, default=None)
    parser.add_argument("--epochs", type=int, default=5000, help="length of the run of `epochs`")
    parser.add_argument("--json", type=Path, default=None, help="also write the figures to this file")
    args = parser.parse_args()
    logging.getLogger("jax_trainer").setLevel(logging.ERROR)
    found: dict[str, Any] = {}
    for name, part in PARTS.items():
        if args.only in (None, name):
            with tempfile.TemporaryDirectory() as folder:
                for what, value in part(args, Path(folder)):
                    found[f"{name}: {what}"] = value
                    print(f"| {name} | {what} | {value} |", flush=True)
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
