"""The cost of a step in `TrainerModule` with loggers and callbacks, compared with a hand-written loop.

    PYTHONPATH=src python benchmarks/trainer_overhead.py [--rounds 5]

All train the same MLP with Adam on the same arrays. The first epoch of every run, which compiles, is not counted; the
result is the median of the others. Runs alternate; a ratio is the median over rounds of the ratio within a round. A
report, not a test.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from mlp import LinenMlp

import jax_trainer as jt
from jax_trainer.callbacks import (
    DisableGCConfig,
    EarlyStoppingConfig,
    GradientSpikeMonitorConfig,
    ModelCheckpointConfig,
    ThroughputMonitorConfig,
)
from jax_trainer.engine import EpochEnd
from jax_trainer.logger import TensorboardConfig

SIZES = {"tiny": ((64, 32, 32, 10), 32, 1000), "medium": ((784, 256, 256, 10), 128, 200)}
EPOCHS = 6
TX = optax.adam(1e-3)


class Epochs(jt.Callback):
    """Records the training seconds of every epoch."""

    def reset(self) -> None:
        self.seconds: list[float] = []

    def on_training_epoch_end(self, train_metrics: dict[str, Any], epoch: int) -> None:
        assert isinstance(self.event, EpochEnd)
        self.seconds.append(self.event.seconds)


class Classifier(jt.TrainerModule):
    def batch_to_input(self, batch: Any) -> Any:
        return batch[0]

    def loss_function_linen(self, params: Any, state: Any, batch: Any, rng: Any, train: bool = True) -> Any:
        logits, mutable = self.model_linen_apply(params, state, batch[0], rng, train=train)
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch[1]).mean()
        return loss, (mutable, {"acc": (logits.argmax(-1) == batch[1]).mean()})


def by_hand(sizes: tuple[int, ...], loader: jt.ArrayLoader) -> float:
    model = LinenMlp(sizes)
    params = model.init(jax.random.key(0), next(loader.epoch(1))[0])
    opt_state = TX.init(params)

    def loss_fn(params: Any, x: Any, y: Any) -> Any:
        logits = model.apply(params, x)
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()
        return loss, (logits.argmax(-1) == y).mean()

    @jax.jit(donate_argnums=(0, 1))
    def step(params: Any, opt_state: Any, x: Any, y: Any) -> Any:
        (loss, acc), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, x, y)
        updates, opt_state = TX.update(grads, opt_state)
        params = optax.apply_updates(params, updates)
        return params, opt_state, (loss, acc, optax.global_norm(grads), optax.global_norm(params))

    seconds = []
    for epoch in range(1, EPOCHS + 1):
        started = time.perf_counter()
        for x, y in loader.epoch(epoch):
            params, opt_state, _ = step(params, opt_state, x, y)
        jax.block_until_ready(params)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[1:])


def trainer(sizes: tuple[int, ...], loader: jt.ArrayLoader, **settings: Any) -> float:
    epochs = Epochs()
    with tempfile.TemporaryDirectory() as folder:
        logger = jt.LoggerConfig(log_dir=folder, **settings.pop("logger", {}))
        options = {"train_epochs": EPOCHS, "enable_progress_bar": False, "logger": logger, **settings}
        callbacks = [epochs, *options.pop("callbacks", ())]
        example = next(loader.epoch(1))
        made = Classifier(model=LinenMlp(sizes), optimizer=TX, exmp_input=example, callbacks=callbacks, **options)
        made.train_model(loader)
    return statistics.median(epochs.seconds[1:])


def full(sizes: tuple[int, ...], loader: jt.ArrayLoader) -> float:
    callbacks = [
        EarlyStoppingConfig(monitor="train/loss", check_on_train_epoch_end=True, patience=99),
        GradientSpikeMonitorConfig(log_to_disk=True),
        ThroughputMonitorConfig(),
        DisableGCConfig(),
        ModelCheckpointConfig(every_n_epochs=100),
    ]
    tool = {"tool_config": TensorboardConfig()}
    return trainer(sizes, loader, callbacks=callbacks, logger=tool, detect_nans=True)


VARIANTS: dict[str, Callable[..., float]] = {
    "loop by hand": by_hand,
    "trainer": trainer,
    "trainer, 25 steps per call": lambda sizes, loader: trainer(sizes, loader, steps_per_call=25),
    "trainer, TensorBoard, 5 callbacks, NaN guard": full,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    for name, (sizes, batch_size, batches) in SIZES.items():
        rng = np.random.default_rng(0)
        x = rng.standard_normal((batch_size * batches, sizes[0]), np.float32)
        y = rng.integers(sizes[-1], size=len(x), dtype=np.int32)
        loader = jt.ArrayLoader((x, y), batch_size, shuffle=True, drop_last=True)
        rounds = [{kind: run(sizes, loader) for kind, run in VARIANTS.items()} for _ in range(args.rounds)]
        print(f"{name} ({jax.devices()[0].device_kind}), µs per step, ratio to the loop by hand")
        for kind in VARIANTS:
            micro = statistics.median(one[kind] for one in rounds) / batches * 1e6
            ratio = statistics.median(one[kind] / one["loop by hand"] for one in rounds)
            print(f"  {kind:<46}{micro:>9.0f}{ratio:>8.2f}")


if __name__ == "__main__":
    main()
