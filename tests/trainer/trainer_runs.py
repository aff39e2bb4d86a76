"""For tests of the trainer: short runs of both flavours, a callback that ends them, and what they wrote."""

import json
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from compoconf import register
from flax import linen as nn
from flax import nnx

from jax_trainer.adapters import BaseModelConfig, BaseModelLinen, BaseModelNNX
from jax_trainer.callbacks import Callback, CallbackConfig, LearningRateMonitorConfig, ModelCheckpointConfig
from jax_trainer.core import TrainState, copy_state
from jax_trainer.datasets import ArrayLoader
from jax_trainer.datasets.examples import DigitsConfig, DigitsDataset
from jax_trainer.engine import StepEnd, StopTraining
from jax_trainer.logger import LoggerConfig
from jax_trainer.models import SimpleClassifierConfig, SimpleClassifierLinenConfig
from jax_trainer.optimizer import SGDConfig, WarmupCosineDecayScheduleConfig
from jax_trainer.testing import cross_entropy, numbered_data, numbered_loader
from jax_trainer.trainer import (
    ImgClassifierTrainer,
    ImgClassifierTrainerConfig,
    TrainerConfig,
    TrainerModule,
    TrainResults,
)

STEPS, EPOCHS = 4, 4  # steps per epoch, and epochs of a run on digits
MODELS = {"nnx": SimpleClassifierConfig, "linen": SimpleClassifierLinenConfig}


def waves(key: Any, shape: tuple[int, ...], dtype: Any = jnp.float32, **_: Any) -> jax.Array:
    """Initial weights that are not zero and draw no random numbers, which would have to be compiled."""
    return jnp.asarray(np.cos(np.arange(np.prod(shape))).reshape(shape), dtype)


@dataclass
class LinearConfig(BaseModelConfig):
    """A linear classifier: in a sixth of the time of `SimpleClassifier` compiled; for where the model is not tested."""

    num_classes: int = 4


@register
class Linear(BaseModelNNX):
    """[batch, …] → [batch, num_classes]."""

    config: LinearConfig

    def __init__(self, config: LinearConfig, *, exmp_input: Any, rngs: nnx.Rngs) -> None:
        width = int(np.prod(exmp_input.shape[1:]))
        self.out = nnx.Linear(width, config.num_classes, kernel_init=waves, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.out(x.reshape(len(x), -1))


@dataclass
class LinearLinenConfig(LinearConfig):
    """`LinearConfig` for linen."""


@register
class LinearLinen(BaseModelLinen):
    """[batch, …] → [batch, num_classes]."""

    config: LinearLinenConfig

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        return nn.Dense(self.config.num_classes, kernel_init=waves, name="out")(x.reshape(len(x), -1))


LINEAR = {"nnx": LinearConfig, "linen": LinearLinenConfig}
SGD = SGDConfig(learning_rate=0.1)


@dataclass
class WatcherConfig(CallbackConfig):
    """When to end the run.

    Args:
        stop_after: the epoch that is the last, with its validation if it has one; 0: none.
        interrupt_at: the step of a simulated Ctrl-C; 0: none.
    """

    stop_after: int = 0
    interrupt_at: int = 0


@register
class Watcher(Callback):
    """Keeps the steps per dispatch, and a copy of every evaluated state; may end the run."""

    config: WatcherConfig
    last: ClassVar[Any]

    def __init__(self, config: WatcherConfig, run: Any) -> None:
        super().__init__(config, run)
        Watcher.last = self
        self.evaluated: dict[int, TrainState] = {}
        self.chunks: list[int] = []
        self.tested: list[dict[str, Any]] = []

    def on_step_end(self, event: StepEnd) -> None:
        self.chunks.append(event.steps)
        if event.step == self.config.interrupt_at:
            signal.raise_signal(signal.SIGINT)

    def on_training_epoch_end(self, train_metrics: dict[str, Any], epoch: int) -> None:
        if epoch == self.config.stop_after and not self.run.validates:
            raise StopTraining

    def on_validation_epoch_end(self, eval_metrics: dict[str, Any], epoch: int) -> None:
        self.evaluated[self.event.step] = copy_state(self.state)
        if epoch == self.config.stop_after:
            raise StopTraining

    def on_test_epoch_end(self, test_metrics: dict[str, Any], epoch: int) -> None:
        self.tested.append(test_metrics)


@cache
def digits() -> DigitsDataset:
    return DigitsDataset(DigitsConfig(global_batch_size=64, limit_train_size=64 * STEPS))


def callbacks(**watcher: Any) -> dict[str, Any]:
    """The worst state counts as the best, which so is not the last."""
    saver = ModelCheckpointConfig(monitor="val/loss", mode="max")
    return {"saver": saver, "rate": LearningRateMonitorConfig(), "watcher": WatcherConfig(**watcher)}


def settings(folder: Path, **changes: Any) -> dict[str, Any]:
    logger = LoggerConfig(log_dir=str(folder), log_steps_every=2)
    return {"train_epochs": EPOCHS, "enable_progress_bar": False, "logger": logger, **changes}


def trainer_for(flavour: str, folder: Path, *, run_folder: Any = None, hidden: bool = False, **changes: Any) -> Any:
    """A trainer on digits whose learning rate changes with every step; a hidden layer with BatchNorm if `hidden`."""
    data, config = digits(), ImgClassifierTrainerConfig(**settings(folder, **changes))
    rate = WarmupCosineDecayScheduleConfig(peak_value=0.1, warmup_steps=2)
    model = MODELS[flavour](c_hid=8) if hidden else LINEAR[flavour](num_classes=10)
    example = next(iter(data.train_loader))
    optimizer = SGDConfig(learning_rate=rate, momentum=0.9)
    return ImgClassifierTrainer(config, model, optimizer, example, dataset=data, folder=run_folder)


def train(trainer: TrainerModule, **options: Any) -> dict[Any, Any]:
    data = digits()
    return trainer.train_model(data.train_loader, data.val_loader, data.test_loader, **options)


class Plain(TrainerModule):
    """An unregistered trainer on dicts of arrays."""

    def batch_to_input(self, batch: Any) -> Any:
        return batch["x"]

    def loss_function(self, model: Any, batch: Any, train: bool = True) -> Any:
        return self._evaluate(self.model_apply(model, batch["x"], train=train), batch)

    def loss_function_linen(self, params: Any, state: Any, batch: Any, rng: jax.Array, train: bool = True) -> Any:
        logits, mutable = self.model_linen_apply(params, state, batch["x"], rng, train=train)
        loss, metrics = self._evaluate(logits, batch)
        return loss, (mutable, metrics)

    def _evaluate(self, logits: jax.Array, batch: Any) -> Any:
        losses = cross_entropy(logits, batch["y"])
        return losses.mean(), {"acc": (logits.argmax(-1) == batch["y"]).mean()}


def plain_for(
    flavour: str,
    folder: Path,
    *,
    kind: type[Any] = Plain,
    hidden: bool = False,
    optimizer: Any = None,
    mesh: Any = None,
    given: Any = (),
    **changes: Any,
) -> Any:
    """A trainer on numbered data, 4 batches of 32, at a constant learning rate: any length is the same program.

    The model is linear and starts with the same weights always, or has a hidden layer with BatchNorm if `hidden`.
    """
    config = TrainerConfig(**settings(folder, **{"train_epochs": 1, **changes}))
    model = MODELS[flavour](c_hid=8, num_classes=4) if hidden else LINEAR[flavour](num_classes=4)
    return kind(config, model, optimizer or SGD, EXAMPLE, mesh, callbacks=given)


NUMBERS = numbered_data(32 * STEPS)
EXAMPLE = {name: array[:32] for name, array in NUMBERS.items()}


def first_examples(count: int) -> ArrayLoader:
    """An evaluation set."""
    return ArrayLoader({name: array[:count] for name, array in NUMBERS.items()}, 32)


def train_plain(trainer: TrainerModule, **options: Any) -> TrainResults:
    return trainer.train_model(numbered_loader(32 * STEPS), first_examples(64), **options)


def rows(trainer: TrainerModule) -> list[dict[str, Any]]:
    """What the run wrote, without how long it took."""
    assert trainer.folder is not None
    parsed = [json.loads(line) for line in trainer.folder.metrics_file.read_text().splitlines()]
    parsed = [row for row in parsed if "hparams" not in row]  # they say where the run is
    return [
        {name: value for name, value in row.items() if "/time" not in name and "throughput/" not in name}
        for row in parsed
    ]


def values(trainer: TrainerModule, name: str) -> Iterator[float]:
    """What the run wrote under `name`."""
    return (row[name] for row in rows(trainer) if name in row)
