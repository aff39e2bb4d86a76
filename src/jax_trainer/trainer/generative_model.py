"""Generative models: from noise to data, by any of the objectives."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import optax
from compoconf import register
from flax import nnx

from jax_trainer.core import PyTree, TrainState, masked_mean
from jax_trainer.core.precision import Precision, cast_floats
from jax_trainer.generative import ConsistencyDistillationConfig, FlowMatchingConfig, Objective, distilled
from jax_trainer.runs import Weights
from jax_trainer.settings import Problem, SettingsError
from jax_trainer.trainer.arguments import Module
from jax_trainer.trainer.trainer import TrainerConfig, TrainerModule


@dataclass
class GenerativeTrainerConfig(TrainerConfig):
    """How a generative model is trained.

    Args:
        objective: what the network learns, and how samples are drawn from it.
        conditional: tell the network the label of each example; false leaves labels out.
        teacher: the folder of the run whose model is distilled, for ConsistencyDistillation.
    """

    objective: Objective.cfgtype = field(default_factory=FlowMatchingConfig)
    conditional: bool = True
    teacher: str | None = None

    def problems(self) -> Iterator[Problem]:
        """A teacher where none is needed, and none where one is."""
        yield from super().problems()
        distils = isinstance(self.objective, ConsistencyDistillationConfig)
        if distils and self.teacher is None:
            yield "teacher", "ConsistencyDistillation learns from a trained model: set `teacher` to its run's folder."
        if not distils and self.teacher is not None:
            yield "teacher", f"{self.objective.class_name} needs no `teacher`; ConsistencyDistillation does."


@register
class GenerativeTrainer(TrainerModule):
    """Trains a network `(x, t, condition) → like x` that makes data out of noise, and draws samples from it.

    Data is the input of a batch and the condition its label; override `batch_to_data` and `batch_to_condition` for
    batches of another kind.
    """

    config: GenerativeTrainerConfig  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._planned_steps: int | None = None
        self._teacher = _teacher_of(self.config, self.exmp_input, self.dataset)

    @cached_property
    def objective(self) -> Objective:
        """What the network learns."""
        return self.config.objective.instantiate(Objective)

    def batch_to_data(self, batch: Any) -> jax.Array:
        """What the model is to make: [batch, …]."""
        return batch.input

    def batch_to_condition(self, batch: Any) -> jax.Array | None:
        """What the model is told about each example: labels, [batch]."""
        return batch.target

    def batch_to_input(self, batch: Any) -> Any:
        """What the network is called with, at time 0."""
        x = self.batch_to_data(batch)
        return x, jnp.zeros(len(x), jnp.float32), self._condition(batch)

    def build_model(self, inputs: Any, rngs: nnx.Rngs) -> Module:
        """The network, which finds its sizes in the data; one that is distilled has its teacher beside it.

        A student like its teacher begins with the teacher's weights.
        """
        network: Any = super().build_model(inputs[0] if isinstance(inputs, tuple) else inputs, rngs)
        if self.config.teacher is None:
            return network
        return distilled(self._teacher if are_alike(network, self._teacher) else network, self._teacher)

    def init_optimizer(
        self, num_epochs: int | None = None, num_train_steps_per_epoch: int | None = None
    ) -> optax.GradientTransformation:
        """The optimizer of a run of this length, which the objective is told, too."""
        self._planned_steps = self._total_steps(num_epochs, num_train_steps_per_epoch)
        return super().init_optimizer(num_epochs, num_train_steps_per_epoch)

    def loss_function(  # pyright: ignore[reportIncompatibleMethodOverride]  # it asks for more, and gets it
        self, model: Any, batch: Any, train: bool, rng: jax.Array, step: jax.Array
    ) -> tuple[jax.Array, dict[str, Any]]:
        """The objective's loss of an nnx network."""
        return self._loss(model, batch, rng, self._progress(step, train)), {}

    def loss_function_linen(
        self, params: PyTree, state: Any, batch: Any, rng: jax.Array, train: bool = True
    ) -> tuple[jax.Array, tuple[PyTree, dict[str, Any]]]:
        """The objective's loss of a linen network, which must have nothing but parameters."""
        if state.mutable_variables:
            raise TypeError(
                f"This network has {', '.join(state.mutable_variables)} besides its parameters, and an objective calls "
                "it several times in a step: nobody could say which of them counts. Use LayerNorm or GroupNorm instead "
                "of BatchNorm, or a network of nnx."
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
        """New data, [count, …], as the weights that are judged make it. Compiled once for each count.

        Args:
            key: a random key, or a seed.
            labels: what to make, one per sample; None: anything.
            count: how many samples; with labels, as many as there are.
            steps: of the sampler; None: as many as the objective has.
            guidance: how much the labels count; None: the objective's own.
            state: another state, whose weights are used: in a callback, `self.state`.
            which: "best" or "last"; None: the best validated weights of the run that has just ended, if there are some,
                and the present ones otherwise.
        """
        key = jax.random.key(key) if isinstance(key, int) else key
        condition = None if labels is None else jnp.asarray(labels, jnp.int32)
        count = count if condition is None else len(condition)
        if count is None:
            raise ValueError("How many samples? Pass `labels`, one for each, or `count`.")
        shape = (count, *self.batch_to_data(self._transformed_example()).shape[1:])
        network = self._network(self._weights(which, state))
        return self.objective.sample(key, network, shape, condition, steps=steps, guidance=guidance)

    def bind_model(
        self, state: TrainState | None = None, *, which: Weights | None = None, transforms: bool = False
    ) -> Any:
        """The network with weights, to call. It works on noisy data, transformed already, so that there is no other."""
        if transforms:
            raise ValueError("`transforms=True`: the network is called with noisy data, which is transformed already.")
        return super().bind_model(state, which=which, transforms=False)

    def _network(self, state: TrainState) -> Any:
        """What is sampled from, computing as it was trained."""
        precision = Precision.named(self.config.precision)
        if self.model_mode == "nnx":
            return cast_floats(self._bound(state), precision.compute)
        params = cast_floats(state.extra.get("ema", state.params), precision.compute)
        return jax.tree_util.Partial(self._linen_network, {"params": params, **state.model_state})

    def _linen_network(self, variables: PyTree, x: jax.Array, t: jax.Array, condition: jax.Array | None) -> jax.Array:
        return self.model.apply(variables, x, t, condition)

    def _loss(self, network: Any, batch: Any, rng: jax.Array, progress: jax.Array | None) -> jax.Array:
        x, condition = self.batch_to_data(batch), self._condition(batch)
        losses = self.objective.loss(rng, network, x, condition, progress=progress)
        return masked_mean(losses, getattr(batch, "mask", None))

    def _condition(self, batch: Any) -> jax.Array | None:
        return self.batch_to_condition(batch) if self.config.conditional else None

    def _progress(self, step: jax.Array, train: bool) -> jax.Array | None:
        """The share of training that is over; evaluations are all judged as at its end."""
        return step / self._planned_steps if train and self._planned_steps else None


def are_alike(module: nnx.Module, other: nnx.Module) -> bool:
    """Whether two modules have parameters of the same names and shapes, whatever modes they are in."""
    one, two = (nnx.to_pure_dict(nnx.state(each, nnx.Param)) for each in (module, other))
    return jax.tree.map(jnp.shape, one) == jax.tree.map(jnp.shape, two)


def _teacher_of(config: GenerativeTrainerConfig, example: Any, dataset: Any) -> Any:
    """The trained model that is distilled."""
    if config.teacher is None:
        return None
    try:
        return GenerativeTrainer.load_from_checkpoint(config.teacher, example, dataset=dataset).bind_model()
    except FileNotFoundError as error:
        raise SettingsError([("trainer.teacher", str(error))]) from error
