"""CIFAR-10 to 94 % in seconds: a small network with a whitening layer, after airbench94 (Jordan, arXiv:2404.00498).

    jax-trainer train cifar10_speedrun examples/cifar10_speedrun.py
    python examples/cifar10_speedrun.py --seeds 20      # accuracy and time of many trainings in one process

The network, the label smoothing, the averaging of weights and the views of the test are here; everything else is
configuration: data on the device, augmentation inside the step, bf16, one dispatch per epoch.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from compoconf import register
from flax import nnx
from rich.console import Console

from jax_trainer.adapters import BaseModelConfig, BaseModelNNX
from jax_trainer.core.state import TrainState
from jax_trainer.datasets.transforms import random_crop
from jax_trainer.trainer import ImgClassifierTrainer, ImgClassifierTrainerConfig, build, load_experiment

CONFIG = Path(__file__).resolve().parent.parent / "src/jax_trainer/configs" / "cifar10_speedrun.yaml"


@dataclass
class SpeedNetConfig(BaseModelConfig):
    """Configuration of `SpeedNet`.

    Args:
        widths: channels of the three blocks.
        num_classes: number of classes.
        scale: factor of the logits.
    """

    widths: tuple[int, ...] = (64, 256, 256)
    num_classes: int = 10
    scale: float = 1 / 9


@register
class SpeedNet(BaseModelNNX):
    """A whitening layer, three blocks of two convolutions, and a linear head: [batch, 32, 32, 3] → [batch, classes]."""

    config: SpeedNetConfig

    def __init__(self, config: SpeedNetConfig, *, exmp_input: Any, rngs: nnx.Rngs) -> None:
        self.config = config
        channels = exmp_input.shape[-1]
        filters = 2 * 4 * channels  # of 2 × 2 patches; each with both signs
        self.whiten = nnx.Conv(channels, filters, (2, 2), padding="VALID", rngs=rngs)
        inputs = (filters, *config.widths[:-1])
        self.blocks = nnx.List(Block(*sizes, rngs=rngs) for sizes in zip(inputs, config.widths, strict=True))
        small = nnx.initializers.variance_scaling(1 / 3, "fan_in", "uniform")
        self.head = nnx.Linear(config.widths[-1], config.num_classes, use_bias=False, kernel_init=small, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        x = nnx.gelu(self.whiten(images))
        for block in self.blocks:
            x = block(x)
        return self.head(x.max((1, 2))) * self.config.scale


class Block(nnx.Module):
    """Two convolutions with BatchNorm and a pooling by two: [batch, h, w, inputs] → [batch, h/2, w/2, outputs]."""

    def __init__(self, inputs: int, outputs: int, *, rngs: nnx.Rngs) -> None:
        conv = {"use_bias": False, "kernel_init": partial_identity, "rngs": rngs}
        norm = {"momentum": 0.6, "epsilon": 1e-12, "use_scale": False, "rngs": rngs}
        self.conv1, self.norm1 = nnx.Conv(inputs, outputs, (3, 3), **conv), nnx.BatchNorm(outputs, **norm)
        self.conv2, self.norm2 = nnx.Conv(outputs, outputs, (3, 3), **conv), nnx.BatchNorm(outputs, **norm)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = max_pool(self.conv1(x))
        x = nnx.gelu(self.norm1(x).astype(x.dtype))
        x = self.conv2(x)
        return nnx.gelu(self.norm2(x).astype(x.dtype))


def max_pool(x: jax.Array) -> jax.Array:
    """The maximum of 2 × 2 pixels; an odd row or column is left out."""
    count, height, width, channels = x.shape
    rows, columns = height // 2, width // 2
    x = x[:, : 2 * rows, : 2 * columns].reshape(count, rows, 2, columns, 2, channels)
    return x.max((2, 4))


def partial_identity(key: jax.Array, shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
    """The first outputs of a convolution are its inputs; the others are random."""
    rows, columns, inputs, outputs = shape
    kernel = nnx.initializers.variance_scaling(1 / 3, "fan_in", "uniform")(key, shape, dtype)
    known = min(inputs, outputs)
    identity = jnp.zeros((rows, columns, inputs, known), dtype)
    identity = identity.at[rows // 2, columns // 2].set(jnp.eye(inputs, known, dtype=dtype))
    return kernel.at[..., :known].set(identity)


def whitening(images: np.ndarray, eps: float = 5e-4) -> np.ndarray:
    """Filters [2, 2, c, 8 c] that make the 2 × 2 patches of normalised images uncorrelated, each with both signs."""
    patches = np.lib.stride_tricks.sliding_window_view(images, (2, 2), axis=(1, 2))  # [n, 31, 31, c, 2, 2]
    flat = patches.transpose(0, 1, 2, 4, 5, 3).reshape(-1, 4 * images.shape[-1])
    values, vectors = np.linalg.eigh(flat.T @ flat / len(flat))
    filters = vectors / np.sqrt(values + eps)
    return np.concatenate([filters, -filters], 1).reshape(2, 2, images.shape[-1], -1)


def lookahead(tx: optax.GradientTransformation, steps: int, every: int = 5) -> optax.GradientTransformation:
    """Every few steps the parameters become an average of themselves that remembers more and more; at the end, it."""

    def init(params: Any) -> Any:
        return {"inner": tx.init(params), "slow": params, "count": jnp.zeros((), jnp.int32)}

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        updates, inner = tx.update(updates, state["inner"], params)
        count = state["count"] + 1
        is_last = count == steps
        is_due = is_last | (count % every == 0)
        decay = jnp.where(is_last, 1.0, 0.95**every * (count / steps) ** 3)
        mixed = jax.tree.map(
            lambda slow, param, change: jnp.where(is_due, decay * slow + (1 - decay) * (param + change), slow),
            *(state["slow"], params, updates),
        )
        updates = jax.tree.map(
            lambda slow, param, change: jnp.where(is_due, slow - param, change), mixed, params, updates
        )
        return updates, {"inner": inner, "slow": mixed, "count": count}

    return optax.GradientTransformation(init, update)


@dataclass
class SpeedrunTrainerConfig(ImgClassifierTrainerConfig):
    """How `SpeedNet` is trained.

    Args:
        label_smoothing: share of the target that all classes have in common.
        shift: maximum shift of training images in pixels.
    """

    label_smoothing: float = 0.2
    shift: int = 2


@register
class SpeedrunTrainer(ImgClassifierTrainer):
    """Trains `SpeedNet` with label smoothing, flips that alternate, and a test on six views of every image."""

    config: SpeedrunTrainerConfig  # pyright: ignore[reportIncompatibleVariableOverride]

    def init_model(self, exmp_input: Any) -> TrainState:
        """The initial state, with the whitening filters of the first 5,000 images."""
        state = super().init_model(exmp_input)
        assert self.dataset is not None
        first = exmp_input.replace(input=jnp.asarray(self.dataset.train.input[:5000]))
        images = self.dataset.transforms.apply(jax.random.key(0), first, train=False).input
        filters = jnp.asarray(whitening(np.asarray(images)))
        return state.replace(params={**state.params, "whiten": {**state.params["whiten"], "kernel": filters}})

    def init_optimizer(
        self, num_epochs: int | None = None, num_train_steps_per_epoch: int | None = None
    ) -> optax.GradientTransformation:
        self.steps_per_epoch = num_train_steps_per_epoch
        steps = self.config.total_steps(num_epochs, num_train_steps_per_epoch)
        assert steps is not None
        return lookahead(super().init_optimizer(num_epochs, num_train_steps_per_epoch), steps)

    def create_training_function(self) -> Any:
        """The default step on augmented images: an image is mirrored in every other epoch, and shifted at random."""
        step = super().create_training_function()

        def augmented_step(state: Any, batch: Any) -> Any:
            starts = (batch.input > 0).sum((1, 2, 3)) % 2  # differs between images, but not between epochs
            is_mirrored = (starts + state.step // self.steps_per_epoch) % 2 == 1
            images = jnp.where(is_mirrored[:, None, None, None], batch.input[:, :, ::-1], batch.input)
            return step(state, batch.replace(input=random_crop(self.config.shift)(state.key, images)))

        return augmented_step

    def loss_of(self, logits: jax.Array, target: jax.Array) -> jax.Array:
        """The loss of every example: cross entropy with label smoothing."""
        soft = optax.smooth_labels(jax.nn.one_hot(target, logits.shape[-1]), self.config.label_smoothing)
        return super().loss_of(logits, soft)

    def loss_function(self, model: Any, batch: Any, train: bool = True) -> tuple[jax.Array, dict[str, Any]]:
        apply = lambda images: self.model_apply(model, images, train=train)
        logits = apply(batch.input) if train else on_views(apply, batch.input)
        return self.evaluated(logits, batch, train)


def on_views(apply: Callable[[jax.Array], jax.Array], images: jax.Array) -> jax.Array:
    """The weighted mean of the logits of an image, of two that are shifted by a pixel, and of their mirror images."""
    height, width = images.shape[1:3]
    padded = jnp.pad(images, ((0, 0), (1, 1), (1, 1), (0, 0)), "reflect")
    shifted = [padded[:, start : start + height, start : start + width] for start in (0, 2)]
    logits = [apply(view) + apply(view[:, :, ::-1]) for view in (images, *shifted)]
    return (2 * logits[0] + logits[1] + logits[2]) / 8


class TimedTrainer(SpeedrunTrainer):
    """Measures the seconds of the training and of the test, each until the device is done."""

    def on_training_epoch_start(self, epoch_idx: int) -> None:
        if epoch_idx == 1:
            jax.block_until_ready(self.state.params)
            self.started = time.perf_counter()

    def on_test_epoch_start(self, epoch_idx: int) -> None:
        jax.block_until_ready(self.state.params)
        self.trained = time.perf_counter()

    def on_test_epoch_end(self, test_metrics: dict[str, Any], epoch_idx: int) -> None:
        self.seconds = {"train": self.trained - self.started, "test": time.perf_counter() - self.trained}


def main() -> None:
    """Trains with several seeds after one that compiles, and prints accuracy and seconds."""
    parser = argparse.ArgumentParser(description="CIFAR-10 to 94 %, several times in one process.")
    parser.add_argument("--seeds", type=int, default=20, help="trainings that count (default: 20)")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="such as trainer.train_epochs=12")
    args = parser.parse_args()
    show = Console(highlight=False).print
    rows = []
    for seed in range(args.seeds + 1):
        trainer = build(load_experiment(CONFIG, [*args.overrides, f"seed={seed}"]).value, kind=TimedTrainer)
        data, started = trainer.dataset, time.perf_counter()
        results = trainer.train_model(data.train_loader, test_loader=data.test_loader, quiet=True)
        row = {"seed": seed, "acc": float(results["test"]["test/acc"]), **trainer.seconds}
        rows.append({**row, "all": time.perf_counter() - started})
        show("  ".join(f"{name} {value:.4g}" for name, value in rows[-1].items()), "" if seed else "(compiles)")
    for name in ("acc", "train", "test", "all"):
        values = [row[name] for row in rows[1:]]
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        show(f"{name}: mean {statistics.mean(values):.4f}, deviation {spread:.4f}, min {min(values):.4f}")
    if args.json:
        args.json.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
