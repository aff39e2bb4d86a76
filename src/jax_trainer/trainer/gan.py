"""Generative adversarial networks: a generator and a discriminator, each with its own optimizer."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
from compoconf import register

from jax_trainer.config.settings import AtLeast
from jax_trainer.core import PyTree, TrainState, compiled_function, masked_mean
from jax_trainer.core.precision import Precision, cast_floats
from jax_trainer.runs import Weights
from jax_trainer.trainer.trainer import TrainerConfig, TrainerModule


@dataclass
class GANTrainerConfig(TrainerConfig):
    """How a generative adversarial network is trained.

    Args:
        adversarial_loss: logistic (non-saturating), or hinge.
        r1: strength of the R1 penalty on the gradients of the discriminator at real data; 0: none.
    """

    adversarial_loss: Literal["logistic", "hinge"] = "logistic"
    r1: Annotated[float, AtLeast(0)] = 0.0


@register
class GANTrainer(TrainerModule):
    """Trains a model with a `generator` of noise, a `discriminator` of data, and `latent`, the size of the noise.

    It needs the optimizers `generator` and `discriminator`. The losses of a GAN do not rank its weights, so samples are
    drawn with the last ones. The data is the input of a batch; override `batch_to_input` for other batches.
    """

    config: GANTrainerConfig  # pyright: ignore[reportIncompatibleVariableOverride]

    def batch_to_input(self, batch: Any) -> jax.Array:
        """The data of a batch: [batch, …]."""
        return batch.input

    def loss_function(  # pyright: ignore[reportIncompatibleMethodOverride]  # called by parameter name
        self, model: Any, batch: Any, train: bool, rng: jax.Array
    ) -> tuple[dict[str, jax.Array], dict[str, Any]]:
        real, mask = self.batch_to_input(batch), getattr(batch, "mask", None)
        noise = jax.random.normal(rng, (len(real), model.latent), real.dtype)
        on_real, on_fake = model.discriminator(real), model.discriminator(model.generator(noise))
        if self.config.adversarial_loss == "hinge":
            generator, of_real, of_fake = -on_fake, jax.nn.relu(1 - on_real), jax.nn.relu(1 + on_fake)
        else:
            generator, of_real, of_fake = (jax.nn.softplus(x) for x in (-on_fake, -on_real, on_fake))
        discriminator = of_real + of_fake
        if self.config.r1 and train:
            slope = jax.grad(lambda data: model.discriminator(data).sum())(real)
            discriminator += self.config.r1 / 2 * (slope**2).reshape(len(real), -1).sum(1)
        is_right = {"real_accuracy": on_real > 0, "fake_accuracy": on_fake < 0}
        losses = {"generator": generator, "discriminator": discriminator}
        means = lambda values: {name: masked_mean(value, mask) for name, value in values.items()}
        return means(losses), means(is_right)

    def sample(
        self,
        key: jax.Array | int,
        labels: Any = None,
        *,
        count: int | None = None,
        steps: None = None,
        guidance: None = None,
        state: TrainState | None = None,
        which: Weights | None = None,
    ) -> jax.Array:
        """Draws samples, [count, …], with the weights of evaluations; compiled once per count.

        Args:
            key: a random key, or a seed.
            labels: only their number is used.
            count: number of samples; default: the number of labels.
            steps, guidance: not used.
            state: use the weights of this state, such as `self.state` in a callback.
            which: "best" or "latest"; None: "last".
        """
        key = jax.random.key(key) if isinstance(key, int) else key
        count = count if labels is None else len(labels)
        if count is None:
            raise ValueError("The number of samples is not set: pass `count`.")
        used = self._weights_of(which or "last") if state is None else self._weights_of(which, state)
        network = cast_floats(self._model.network(used), Precision.named(self.config.precision).compute)
        return compiled_function(_generated)(network, jax.random.normal(key, (count, network.latent)))


def _generated(model: PyTree, noise: jax.Array) -> jax.Array:
    return model.generator(noise).astype(jnp.float32)
