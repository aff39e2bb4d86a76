"""Training, evaluation and prediction steps, from a loss function and an optimizer."""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import optax

from jax_trainer.core.extra_args import scale_updates
from jax_trainer.core.loss_shape import check_loss
from jax_trainer.core.metrics import Batch, Metrics, PyTree, as_metrics, batch_weight
from jax_trainer.core.precision import Precision, cast_floats, cast_like
from jax_trainer.core.returned import checked_loss
from jax_trainer.core.rng import stream
from jax_trainer.core.state import TrainState
from jax_trainer.core.tracing import gathered, like_params
from jax_trainer.core.user_frame import IN_UPDATE, noting, noting_definition

PARAMS_NORM, GRAD_NORM = "optimizer/params_global_norm", "optimizer/grad_global_norm"
LARGE = 2**14  # elements from which a dot product is faster


class StepReport(NamedTuple):
    """The metrics and gradients of one training step (gradients are dropped unless kept)."""

    metrics: Metrics
    grads: PyTree


class LossFn(Protocol):
    """The common signature to which adapters convert the user's loss."""

    def __call__(
        self, params: PyTree, model_state: PyTree, batch: Batch, rng: jax.Array, *, train: bool
    ) -> tuple[jax.Array, tuple[PyTree, Mapping[str, Any]]]:
        """Returns the loss, the model state after this batch, and further metrics.

        A loss with a parameter `step` receives the number of optimizer steps so far.
        """
        ...


class CastLossFn(Protocol):
    """A `LossFn` in a `Precision`, with its loss among its metrics."""

    def __call__(
        self, params: PyTree, model_state: PyTree, batch: Batch, rng: jax.Array, *, train: bool, step: jax.Array
    ) -> tuple[jax.Array, tuple[PyTree, Metrics]]:
        """Returns the loss, the model state after this batch, and all metrics."""
        ...


class PredictFn(Protocol):
    """The common signature to which adapters convert a model's forward pass."""

    def __call__(self, params: PyTree, model_state: PyTree, batch: Batch, rng: jax.Array) -> PyTree:
        """Returns the outputs of the model in evaluation mode."""
        ...


class GradFn(Protocol):
    """Computes the gradients of the loss on one batch, at once or in micro-batches."""

    def __call__(
        self, params: PyTree, model_state: PyTree, batch: Batch, rng: jax.Array, *, step: jax.Array
    ) -> tuple[tuple[jax.Array, tuple[PyTree, Metrics]], PyTree]:
        """Returns `(loss, (model_state, metrics)), grads`, as `jax.value_and_grad` does."""
        ...


TrainStep = Callable[[TrainState, Batch], tuple[TrainState, StepReport]]
EvalStep = Callable[[TrainState, Batch], Metrics]
PredictStep = Callable[[TrainState, Batch], PyTree]


def in_precision(loss_fn: LossFn, precision: Precision) -> CastLossFn:
    """`loss_fn` computed in `precision.compute`; its loss and metrics are cast to `precision.output`."""
    takes_step = "step" in inspect.signature(loss_fn).parameters

    def cast_loss(
        params: PyTree, model_state: PyTree, batch: Batch, rng: jax.Array, *, train: bool, step: jax.Array
    ) -> tuple[jax.Array, tuple[PyTree, Metrics]]:
        params, inputs = cast_floats((params, batch), precision.compute)
        params = gathered(params)  # after the cast: fewer bytes
        extra = {"step": step} if takes_step else {}
        with noting_definition(loss_fn):
            loss, (new_model_state, reported) = loss_fn(params, model_state, inputs, rng, train=train, **extra)
            loss = checked_loss(loss, "loss")
            check_loss(loss, {"batch": inputs})
            loss, reported = cast_floats((loss, dict(reported)), precision.output)
            # a loss that is a mean over tokens or pixels, not examples, may return itself as a sum with its `count`
            metrics = as_metrics({"loss": loss, **reported}, batch_weight(batch))
        # running statistics keep their dtype: in bf16 their small updates would be rounded away
        return loss, (cast_like(new_model_state, model_state), metrics)

    return cast_loss


def grad_of(loss_fn: CastLossFn) -> GradFn:
    """The gradient of `loss_fn` in training with respect to the parameters."""
    return jax.value_and_grad(partial(loss_fn, train=True), has_aux=True)


def make_train_step(grad_fn: GradFn, tx: optax.GradientTransformationExtraArgs, *, log_norms: bool = True) -> TrainStep:
    """A step of one optimizer update. For extra arguments of the optimizer (`value=`, …) see `by_signature`."""

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, StepReport]:
        rng = jax.random.fold_in(stream(state.key, "train"), state.step)
        (_, (model_state, metrics)), grads = grad_fn(state.params, state.model_state, batch, rng, step=state.step)
        # without it, on a GPU, gradient statistics change the fusion of the update, and its last bits
        grads = jax.lax.optimization_barrier(like_params(grads))

        def gradients_at(params: PyTree) -> tuple[jax.Array, PyTree]:
            (_, (_, metrics)), grads = grad_fn(params, state.model_state, batch, rng, step=state.step)
            return metrics.by_name["loss"].value, like_params(grads)

        offered: dict[str, Any] = {
            "value": metrics.by_name["loss"].value,
            "grad": grads,
            "value_fn": lambda params: gradients_at(params)[0],
            "grad_fn": lambda params, *_: gradients_at(params)[1],
        }
        with noting(IN_UPDATE):
            updates, opt_state = tx.update(grads, state.opt_state, state.params, **offered)
            params = optax.apply_updates(state.params, scale_updates(updates, state.extra))
        if log_norms:
            metrics = metrics.adding(**_norms(grads, params))
        state = state.replace(step=state.step + 1, params=params, model_state=model_state, opt_state=opt_state)
        return state, StepReport(metrics, grads)

    return train_step


def global_norm(tree: PyTree) -> jax.Array:
    """The L2 norm of all elements of `tree`, in float32 or higher precision."""

    def square(leaf: jax.Array) -> jax.Array:
        leaf = leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32))
        if leaf.size < LARGE:
            return (jnp.abs(leaf) ** 2).sum()
        # a dot product uses all cores; a sum of squares runs on one, which takes 8 % of a step on a CPU.
        # over all dimensions at once: flattening would gather a leaf that is sharded along a later one
        axes = tuple(range(leaf.ndim))
        return jax.lax.dot_general(leaf.conj(), leaf, ((axes, axes), ((), ()))).real

    return jnp.sqrt(sum(map(square, jax.tree.leaves(tree)), start=jnp.zeros(())))


def _norms(grads: PyTree, params: PyTree) -> dict[str, Any]:
    grad_norm = global_norm(grads)
    return {
        GRAD_NORM: {"value": grad_norm, "log_mode": "train"},
        "optimizer/grad_global_norm_max": {
            "value": grad_norm,
            "mode": "max",
            "log_freq": "epoch",
            "log_mode": "train",
        },
        PARAMS_NORM: {"value": global_norm(params), "log_mode": "train"},
    }


def make_eval_step(loss_fn: CastLossFn) -> EvalStep:
    """A step that evaluates a state on one batch with the key `state.rng`; callers fold in the number of the batch."""

    def eval_step(state: TrainState, batch: Batch) -> Metrics:
        rng = stream(state.key, "eval")
        return loss_fn(state.params, state.model_state, batch, rng, train=False, step=state.step)[1][1]

    return eval_step


def make_predict_step(predict_fn: PredictFn, precision: Precision) -> PredictStep:
    """A step that computes the model's outputs, with the precision and random keys of an evaluation."""

    def predict_step(state: TrainState, batch: Batch) -> PyTree:
        params, batch = cast_floats((state.params, batch), precision.compute)
        outputs = predict_fn(params, state.model_state, batch, stream(state.key, "eval"))
        return cast_floats(outputs, precision.output)

    return predict_step
