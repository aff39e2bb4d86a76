"""Generative models, trained with any of the objectives."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from compoconf import register

from jax_trainer.config.settings import Problem, errors_of
from jax_trainer.core import PyTree, TrainState, masked_mean
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
