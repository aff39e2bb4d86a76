"""Generative models, trained with any of the objectives."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
from compoconf import register

from jax_trainer.config.settings import AtLeast, Problem, errors_of
from jax_trainer.core import PyTree, TrainState, compiled_function, masked_mean
from jax_trainer.core.precision import Precision, cast_floats
from jax_trainer.models.generative import ConsistencyDistillationConfig, FlowMatchingConfig, Objective, distilled
from jax_trainer.models.generative.networks import are_alike
from jax_trainer.runs import Weights
from jax_trainer.trainer.trainer import TrainerConfig, TrainerModule


@dataclass
class GenerativeTrainerConfig(TrainerConfig):
    """How a generative model is trained.

    Args:
        objective: the training objective and sampler.
        conditional: condition the network on the label of each example.
        teacher: run folder of the model to distil, for ConsistencyDistillation.
    """

    objective: Objective.cfgtype = field(default_factory=FlowMatchingConfig)
    conditional: bool = True
    teacher: str | None = None

    def problems(self) -> Iterator[Problem]:
        """Yields a missing or superfluous `teacher`."""
        yield from super().problems()
        distils = isinstance(self.objective, ConsistencyDistillationConfig)
        if distils and self.teacher is None:
            yield "teacher", "ConsistencyDistillation needs a trained model: set `teacher` to its run folder."
        if not distils and self.teacher is not None:
            yield (
                "teacher",
                f"{self.objective.class_name} has no `teacher`; only ConsistencyDistillation does. Leave it out.",
            )


@register
class GenerativeTrainer(TrainerModule):
    """Trains a network `(x, t, condition) → shape of x` that generates data from noise, and samples from it.

    The data is the input of a batch, and the condition its label; override `batch_to_data` and `batch_to_condition` for
    other batches.
    """

    config: GenerativeTrainerConfig  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._teacher = _teacher_of(self.config, self.exmp_input, self.dataset)

    @cached_property
    def objective(self) -> Objective:
        """The training objective."""
        return self.config.objective.instantiate(Objective)

    def batch_to_data(self, batch: Any) -> jax.Array:
        """The data of a batch: [batch, …]."""
        return batch.input

    def batch_to_condition(self, batch: Any) -> jax.Array | None:
        """The conditioning of each example: labels, [batch]."""
        return batch.target

    def batch_to_input(self, batch: Any) -> Any:
        """The network inputs at time 0."""
        x = self.batch_to_data(batch)
        return x, jnp.zeros(x.shape[0], jnp.float32), self._condition(batch)

    def build_model(self, inputs: Any, rngs: Any) -> Any:
        """Builds the network, with sizes inferred from the data; for distillation, together with its teacher.

        A student with the architecture of its teacher starts from the teacher's weights.
        """
        network: Any = super().build_model(inputs[0] if isinstance(inputs, tuple) else inputs, rngs)
        if self.config.teacher is None:
            return network
        return distilled(self._teacher if are_alike(network, self._teacher) else network, self._teacher)

    def loss_function(  # pyright: ignore[reportIncompatibleMethodOverride]  # called by parameter name
        self, model: Any, batch: Any, train: bool, rng: jax.Array, step: jax.Array
    ) -> tuple[jax.Array, dict[str, Any]]:
        return self._loss(model, batch, rng, self._progress(step, train)), {}

    def loss_function_linen(
        self, params: PyTree, state: Any, batch: Any, rng: jax.Array, train: bool = True
    ) -> tuple[jax.Array, tuple[PyTree, dict[str, Any]]]:
        """The loss of a linen network, which must have no other variables than parameters."""
        if state.mutable_variables:
            raise TypeError(
                f"The network has the collections {', '.join(state.mutable_variables)}, but an objective calls it "
                "several times per step, so their update is ambiguous. Use LayerNorm or GroupNorm instead of "
                "BatchNorm, or an nnx network."
            )

        def network(x: jax.Array, t: jax.Array, condition: jax.Array | None) -> jax.Array:
            return self.model_linen_apply(params, state, (x, t, condition), rng, train=train)[0]

        return self._loss(network, batch, rng, self._progress(state.step, train)), (None, {})

    def sample(
        self,
        key: jax.Array | int,
        labels: Any = None,
        *,
        count: int | None = None,
        steps: int | None = None,
        guidance: float | None = None,
        state: TrainState | None = None,
        which: Weights | None = None,
    ) -> jax.Array:
        """Draws samples, [count, …], with the weights used for evaluation. Compiled once per count.

        Args:
            key: a random key, or a seed.
            labels: one per sample; None: unconditional.
            count: number of samples; default: the number of labels.
            steps: sampler steps; None: the objective's default.
            guidance: guidance scale; None: the objective's default.
            state: use the weights of this state, such as `self.state` in a callback.
            which: "best" or "latest"; None: the best validated weights of the last run; without any, the current ones.
        """
        key = jax.random.key(key) if isinstance(key, int) else key
        condition = None if labels is None else jnp.asarray(labels, jnp.int32)
        count = count if condition is None else len(condition)
        if count is None:
            raise ValueError("The number of samples is not set: pass `count`, or `labels`, one per sample.")
        shape = (count, *self.batch_to_data(self._transformed_example()).shape[1:])
        network = self._network(self._weights_of(which, state))
        return self.objective.sample(key, network, shape, condition, steps=steps, guidance=guidance)

    def bind_model(
        self, state: TrainState | None = None, *, which: Weights | None = None, transforms: bool = False
    ) -> Any:
        """The network with weights. It takes noisy data, which is already transformed."""
        if transforms:
            raise ValueError(
                "`transforms=True` is not available: the network takes noisy data, which is already transformed."
            )
        return super().bind_model(state, which=which, transforms=False)

    def _network(self, state: TrainState) -> Any:
        """The network to sample from, in the precision of the training."""
        return cast_floats(self._model.network(state), Precision.named(self.config.precision).compute)

    def _loss(self, network: Any, batch: Any, rng: jax.Array, progress: jax.Array | None) -> jax.Array:
        x, condition = self.batch_to_data(batch), self._condition(batch)
        losses = self.objective.loss(rng, network, x, condition, progress=progress)
        return masked_mean(losses, getattr(batch, "mask", None))

    def _condition(self, batch: Any) -> jax.Array | None:
        return self.batch_to_condition(batch) if self.config.conditional else None

    def _progress(self, step: jax.Array, train: bool) -> jax.Array | None:
        """The completed fraction of training; None (its end) in evaluation."""
        total_steps = self._builder.total_steps()
        return step / total_steps if train and total_steps else None


def _teacher_of(config: GenerativeTrainerConfig, example: Any, dataset: Any) -> Any:
    """The trained model to distil."""
    if config.teacher is None:
        return None
    with errors_of("trainer.teacher", FileNotFoundError):
        return GenerativeTrainer.load_from_checkpoint(config.teacher, example, dataset=dataset).bind_model()


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
