"""Train a generative adversarial network on 8×8 handwritten digits: two optimizers, two losses, no custom step.

    python examples/gan_digits.py            # the same command again resumes a run that was killed, bit for bit
    jax-trainer train digits_gan

Each step updates the discriminator, then the generator, each with its own optimizer and the gradient of its own loss.
Afterwards a classifier looks at 1,000 samples, and a picture of some of them is written to the run folder.
"""
# Expected: at least 70 % of the samples recognised with more than 90 % confidence, and the rarest digit at least 4 % of
# them, after about a minute on two CPU cores. (Measured: 83.5 % and 7.5 %.)

import argparse
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from rich.console import Console

from jax_trainer import ArrayLoader, LoggerConfig, TrainerModule, fit, load_digits
from jax_trainer.callbacks import ModelCheckpoint
from jax_trainer.callbacks.sampling import grid
from jax_trainer.logger.values import png_of

LATENT = 64


class GAN(nnx.Module):
    """A generator, [batch, latent] → [batch, 8, 8, 1], and a discriminator, [batch, 8, 8, 1] → [batch]."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        flat, square = lambda x: x.reshape(len(x), -1), lambda x: x.reshape(len(x), 2, 2, 64)
        slope = lambda x: nnx.leaky_relu(x, 0.2)
        self.generator = nnx.Sequential(
            *(nnx.Linear(LATENT, 256, rngs=rngs), square, nnx.BatchNorm(64, rngs=rngs), nnx.relu),
            *(nnx.ConvTranspose(64, 32, (4, 4), 2, rngs=rngs), nnx.BatchNorm(32, rngs=rngs), nnx.relu),
            *(nnx.ConvTranspose(32, 1, (4, 4), 2, rngs=rngs), nnx.tanh),
        )
        self.discriminator = nnx.Sequential(
            *(nnx.Conv(1, 32, (4, 4), 2, rngs=rngs), slope, nnx.Conv(32, 64, (4, 4), 2, rngs=rngs), slope, flat),
            *(nnx.Linear(256, 1, rngs=rngs), lambda x: x[:, 0]),
        )

    def __call__(self, images: jax.Array) -> jax.Array:
        return self.discriminator(images)


class GANTrainer(TrainerModule):
    """The losses of both networks, by the names of their optimizers."""

    def batch_to_input(self, batch: Any) -> Any:
        return batch

    def loss_function(self, model: Any, batch: Any, train: bool, rng: jax.Array) -> Any:  # type: ignore[override]
        noise = jax.random.normal(rng, (len(batch), LATENT))
        real, fake = model.discriminator(batch), model.discriminator(model.generator(noise))
        slopes = jax.grad(lambda images: model.discriminator(images).sum())(batch)
        penalty = 0.15 * (slopes**2).sum((1, 2, 3))  # R1: keeps the discriminator from being too sure
        losses = {
            "generator": jax.nn.softplus(-fake),
            "discriminator": jax.nn.softplus(-real) + jax.nn.softplus(fake) + penalty,
        }
        return {name: loss.mean() for name, loss in losses.items()}, {"fooled": (fake > 0).mean()}


def train_gan(images: np.ndarray, epochs: int, out: Path) -> GANTrainer:
    """Trains on images from -1 to 1; a run that was killed is resumed."""
    loader = ArrayLoader(images, 64, shuffle=True, drop_last=True, seed=0)
    rate = optax.cosine_decay_schedule(4e-3, epochs * len(loader), 0.02)
    trainer = GANTrainer(
        model=GAN,
        optimizer={name: optax.adam(rate, b1=0.0) for name in ("discriminator", "generator")},
        exmp_input=images[:64],
        train_epochs=epochs,
        ema=0.99,
        logger=LoggerConfig(log_dir=str(out)),
        callbacks=[ModelCheckpoint(monitor="train/loss", every_n_epochs=10)],
    )
    trainer.train_model(loader, resume="auto")
    return trainer


def classifier_of(images: np.ndarray, labels: np.ndarray, out: Path) -> Any:
    """A network that recognises digits."""
    layers = [nnx.Conv(1, 32, (3, 3), strides=2, rngs=nnx.Rngs(0)), nnx.relu, lambda x: x.reshape(len(x), -1)]
    model = nnx.Sequential(
        *layers, nnx.Linear(512, 128, rngs=nnx.Rngs(1)), nnx.relu, nnx.Linear(128, 10, rngs=nnx.Rngs(2))
    )
    loss = optax.softmax_cross_entropy_with_integer_labels
    options: dict[str, Any] = {"progress": False, "tensorboard": False, "save": False, "log_dir": out}
    return fit(model, (images, labels), loss_fn=loss, optimizer=optax.adam(1e-3), num_epochs=30, **options).model


def main() -> dict[str, float]:
    """Reads the command line, trains, and shows how many samples are recognised."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=200)
    parser.add_argument("--out", type=Path, default=Path("runs"))
    args = parser.parse_args()
    digits = load_digits()["train"]
    images = (digits["image"][..., None] / 8 - 1).astype(np.float32)
    trainer = train_gan(images, args.epochs, args.out)
    samples = trainer.bind_model(which="last").generator(jax.random.normal(jax.random.key(0), (1000, LATENT)))
    guesses = np.asarray(jax.nn.softmax(classifier_of(images, digits["label"], args.out)(samples)))
    is_clear = guesses.max(1) > 0.9
    shares = np.bincount(guesses.argmax(1)[is_clear], minlength=10) / max(1, is_clear.sum())
    assert trainer.folder is not None
    picture = trainer.folder.path / "samples.png"
    picture.write_bytes(png_of((127.5 * (grid(np.asarray(samples[:100]), 10) + 1)).clip(0, 255).astype(np.uint8)))
    text = f"{is_clear.mean():.1%} of 1,000 samples are recognised, the rarest digit is {shares.min():.1%} of them"
    Console().print(f"{text}: {picture}", soft_wrap=True)
    return {"recognised": float(is_clear.mean()), "rarest": float(shares.min())}


if __name__ == "__main__":
    main()
