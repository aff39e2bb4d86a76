"""Training, evaluation and prediction steps, from a loss function and an optimizer: precision, gradients in
micro-batches, update.
"""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jax_trainer.core.by_epoch import Count, schedule_of
from jax_trainer.core.extra_args import updated
from jax_trainer.core.metrics import BatchSize, Metrics, as_metrics, batch_weight, merge_micro
from jax_trainer.core.precision import Precision, cast_floats, cast_like
from jax_trainer.core.random import stream
from jax_trainer.core.state import TrainState, with_averages
from jax_trainer.core.tracing import current, gathered, like_params, split_rows
from jax_trainer.diagnostics.leaves import Batch, PyTree, leaf_path, leaves_by_path
from jax_trainer.diagnostics.returned import check_loss, checked_losses
from jax_trainer.diagnostics.user_frame import IN_UPDATE, noting, noting_definition
from jax_trainer.sharding.placement import resized

PARAMS_NORM, GRAD_NORM = "optimizer/params_global_norm", "optimizer/grad_global_norm"
LARGE = 2**14  # elements from which a dot product is faster


class StepReport(NamedTuple):
    """The metrics and gradients of one training step (gradients are dropped unless kept)."""

    metrics: Metrics
    grads: PyTree


class Written(NamedTuple):
    """The model state after a loss, with the parameters that it has written to, by path: the update starts from these.

    A loss of an nnx model may do so, and Flax keeps what it writes.
    """

    model_state: PyTree
    params: Mapping[str, jax.Array]

    def in_place_of(self, params: PyTree) -> PyTree:
        """`params` with those that were written."""
        if other := sorted(self.params.keys() - leaves_by_path(params).keys()):
            raise TypeError(f"The loss writes to the parameter `{other[0]}`, which is frozen. Leave that out.")
        return jax.tree_util.tree_map_with_path(lambda path, leaf: self.params.get(leaf_path(path), leaf), params)

    def like(self, params: PyTree, model_state: PyTree) -> PyTree:
        """It, in the dtypes of a state; raises if the precision of the computation would round parameters."""
        own, kept = leaves_by_path(params), cast_like(self.model_state, model_state)
        rounded = next((path for path, leaf in self.params.items() if leaf.dtype != own.get(path, leaf).dtype), None)
        if rounded is None:
            return Written(kept, self.params)
        raise TypeError(
            f"The loss writes to the parameter `{rounded}`, which is computed in {self.params[rounded].dtype} and kept "
            f'in {own[rounded].dtype}: it would be rounded. Write to it in a custom step or an `Edit`, or use "f32".'
        )


def only_model_state(model_state: PyTree, where: str) -> PyTree:
    """`model_state`; raises if parameters were written, which is not possible there."""
    if isinstance(model_state, Written):
        raise TypeError(
            f"The loss writes to the parameter `{next(iter(model_state.params))}`, which is not possible {where}. "
            "Write to it in a custom step or an `Edit`."
        )
    return model_state


class LossFn(Protocol):
    """The common signature to which adapters convert the user's loss."""

    def __call__(
        self, params: PyTree, model_state: PyTree, batch: Batch, rng: jax.Array, *, train: bool
    ) -> tuple[Any, tuple[PyTree, Mapping[str, Any]]]:
        """Returns the loss (or several, by name), the model state after this batch (or `Written`), and further metrics.

        A loss with a parameter `step` receives the number of optimizer steps so far.
        """
        ...


Reported = tuple[Any, tuple[PyTree, Mapping[str, Any]]]  # what a `LossFn` returns
Found = tuple[jax.Array, tuple[PyTree, Metrics]]  # the loss, the model state after the batch, and all metrics
# a `LossFn` in a `Precision`, with its loss among its metrics: (params, model_state, batch, rng, *, train, step)
CastLossFn = Callable[..., Found]
# the outputs of the model in evaluation mode: (params, model_state, batch, rng)
PredictFn = Callable[[PyTree, PyTree, Batch, jax.Array], PyTree]
# the gradients of the loss on a batch, as `jax.value_and_grad` returns them: (params, model_state, batch, rng, *, step)
GradFn = Callable[..., tuple[Found, PyTree]]
TrainStep = Callable[[TrainState, Batch], tuple[TrainState, StepReport]]
TotalLoss = Callable[[Any, Any], tuple[jax.Array, Mapping[str, Any]]]  # (losses, step) -> (loss, metrics of its parts)
# metrics, from the states before and after a step, and what that reports
MetricsOf = Callable[[TrainState, TrainState, StepReport], Mapping[str, Any]]
EvalStep = Callable[[TrainState, Batch], Metrics]
PredictStep = Callable[[TrainState, Batch], PyTree]


def in_precision(
    loss_fn: LossFn,
    precision: Precision,
    total: TotalLoss = lambda losses, step: total_loss(losses, None, step),
    batch_size_of: BatchSize | None = None,
) -> CastLossFn:
    """`loss_fn` computed in `precision.compute`; its loss and metrics are cast to `precision.output`.

    Args:
        total: what is minimised of the losses that `loss_fn` returns, and the metrics of its parts.
        batch_size_of: counts the examples of a batch, by which its metrics are weighted; None: see `batch_weight`.
    """
    takes_step = "step" in inspect.signature(loss_fn).parameters

    def cast_loss(params: PyTree, model_state: PyTree, batch: Batch, rng: Any, *, train: bool, step: Any) -> Found:
        given, (params, inputs) = params, cast_floats((params, batch), precision.compute)
        params = gathered(params)  # after the cast: fewer bytes
        extra = {"step": step} if takes_step else {}
        with noting_definition(loss_fn):
            loss, (new_model_state, reported) = loss_fn(params, model_state, inputs, rng, train=train, **extra)
            loss = checked_losses(loss, "loss")
            check_loss(loss, {"batch": inputs})
            check_reported(loss, reported)
            loss, reported = cast_floats((loss, dict(reported)), precision.output)
            loss, parts = total(loss, step)
            # a loss that is a mean over tokens or pixels, not examples, may return itself as a sum with its `count`
            metrics = as_metrics({"loss": loss, **parts, **reported}, batch_weight(batch, batch_size_of))
        if isinstance(new_model_state, Written):
            return loss, (new_model_state.like(given, model_state), metrics)
        # running statistics keep their dtype: in bf16 their small updates would be rounded away
        return loss, (cast_like(new_model_state, model_state), metrics)

    return cast_loss


def check_reported(loss: Any, reported: Mapping[str, Any]) -> None:
    """Refuses a metric `loss` that is another number than the loss; its sum with a `count` is the loss itself."""
    entry = reported.get("loss")
    other = entry.get("value") if isinstance(entry, Mapping) and "count" not in entry else entry
    if other is not None and other is not loss and not isinstance(other, Mapping):
        raise ValueError(
            "The loss function returns a metric `loss` besides the loss, and what is logged and monitored as `loss` is "
            "the loss. Give the metric another name."
        )


def grad_of(loss_fn: CastLossFn) -> GradFn:
    """The gradient of `loss_fn` in training with respect to the parameters."""
    return jax.value_and_grad(partial(loss_fn, train=True), has_aux=True)


def accumulate(grad_fn: GradFn, micro_batches: Count) -> GradFn:
    """`grad_fn` evaluated on micro-batches: the same gradients with less memory.

    Each micro-batch is weighted by its number of examples (or by the loss's own `count`), so a smaller last one is
    weighted correctly. Their number is static in a traced step; one that changes is that of `tracing`.
    """
    schedule = schedule_of(micro_batches)
    if schedule is None and micro_batches < 1:  # type: ignore[operator]
        raise ValueError(f"`micro_batches` must be at least 1, got {micro_batches}.")
    if micro_batches == 1:
        return grad_fn

    def accumulated(params: PyTree, model_state: PyTree, batch: Batch, rng: Any, *, step: Any) -> tuple[Found, PyTree]:
        count: Any = micro_batches if schedule is None else current().micro_batches or schedule[0]
        if count == 1:
            return grad_fn(params, model_state, batch, rng, step=step)
        length = _length(batch)
        micro = -(-length // count)
        full = length // micro  # micro-batches of full size

        def add(carry: tuple[PyTree, Any, PyTree], part: tuple[jax.Array, Batch]) -> tuple[Any, Metrics]:
            total, weight, model_state = carry
            index, rows = part
            rows = resized(rows, _length(rows))
            key = jax.random.fold_in(rng, index)
            (_, (model_state, metrics)), grads = grad_fn(params, model_state, rows, key, step=step)
            model_state = only_model_state(model_state, "with `accumulate`")
            examples = jnp.asarray(metrics.weight_of("loss"), jnp.float32)
            # select, never multiply by 0: the mean over no examples is nan, and so are its gradients
            total = jax.tree.map(
                lambda t, g: jnp.where(examples > 0, t + examples * g.astype(t.dtype), t), total, like_params(grads)
            )
            return (total, weight + examples, model_state), metrics

        zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.promote_types(p.dtype, jnp.float32)), params)
        carry = (like_params(zeros), jnp.zeros((), jnp.float32), model_state)
        even = full * micro
        parts = jax.tree.map(lambda x: x[:even].reshape(full, micro, *x.shape[1:]), batch)
        parts = split_rows(parts, axis=1)  # sliced from a batch sharded by rows, each would be on a few devices only
        carry, stacked = lax.scan(add, carry, (jnp.arange(full), parts))
        rest = None
        if even < length:
            carry, rest = add(carry, (jnp.asarray(full), jax.tree.map(lambda x: x[even:], batch)))
        total, weight, model_state = carry
        counted = jnp.where(weight > 0, weight, 1)
        grads = cast_like(jax.tree.map(lambda t: t / counted, total), params)
        metrics = merge_micro(stacked, rest)
        return (metrics.by_name["loss"].value, (model_state, metrics)), grads

    return accumulated


def _length(batch: Batch) -> int:
    shapes = [jnp.shape(x) for x in jax.tree.leaves(batch)]
    lengths = {shape[0] if shape else -1 for shape in shapes}
    if len(lengths) != 1 or -1 in lengths:
        raise ValueError(
            "Gradient accumulation splits every array of the batch along its first axis, "
            f"but their shapes are {shapes}. Give all arrays the same first axis."
        )
    return lengths.pop()


def update_step(grad_fn: GradFn, tx: optax.GradientTransformationExtraArgs, *, log_norms: bool = True) -> TrainStep:
    """A step of one optimizer update: the gradients of a batch, the update, and the metrics of both.

    Args:
        grad_fn: computes the gradients.
        tx: the optimizer. For its extra arguments (`value=`, …) see `by_signature`.
        log_norms: log the norms of gradients and parameters.
    """

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, StepReport]:
        rng = jax.random.fold_in(stream(state.key, "train"), state.step)
        (_, (model_state, metrics)), grads = grad_fn(state.params, state.model_state, batch, rng, step=state.step)
        if isinstance(model_state, Written):
            state, model_state = state.replace(params=model_state.in_place_of(state.params)), model_state.model_state
        # without it, on a GPU, gradient statistics change the fusion of the update, and its last bits
        grads = lax.optimization_barrier(like_params(grads))
        at = lambda params: grad_fn(params, state.model_state, batch, rng, step=state.step)
        with noting(IN_UPDATE):
            params, opt_state, extra = updated(tx, grads, state, offered_to(metrics, grads, at))
        if log_norms:
            metrics = metrics.adding(**norms_of(grads, params))
        changes = {"params": params, "model_state": model_state, "opt_state": opt_state, "extra": extra}
        return with_averages(state.replace(step=state.step + 1, **changes)), StepReport(metrics, grads)

    return train_step


def offered_to(metrics: Metrics, grads: PyTree, at: Callable[[PyTree], Any]) -> dict[str, Any]:
    """The extra arguments that an optimizer may use: see `by_signature`. `at` computes gradients of the step."""

    def gradients_at(params: PyTree) -> tuple[jax.Array, PyTree]:
        (_, (_, metrics)), grads = at(params)
        return metrics.by_name["loss"].value, like_params(grads)

    return {
        "value": metrics.by_name["loss"].value,
        "grad": grads,
        "value_fn": lambda params: gradients_at(params)[0],
        "grad_fn": lambda params, *_: gradients_at(params)[1],
    }


def reporting(step: TrainStep, metrics_of: MetricsOf) -> TrainStep:
    """`step` that also reports the metrics that `metrics_of(before, after, report)` returns."""

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, StepReport]:
        new, report = step(state, batch)
        return new, report._replace(metrics=report.metrics.adding(**metrics_of(state, new, report)))

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
        return lax.dot_general(leaf.conj(), leaf, ((axes, axes), ((), ()))).real

    return jnp.sqrt(sum(map(square, jax.tree.leaves(tree)), start=jnp.zeros(())))


def norms_of(grads: PyTree, params: PyTree) -> dict[str, Any]:
    """The metrics of the global norms of gradients and parameters."""
    grad_norm = global_norm(grads)
    return {
        GRAD_NORM: {"value": grad_norm, "log_mode": "train"},
        "optimizer/grad_global_norm_max": {"value": grad_norm, "mode": "max", "log_freq": "epoch", "log_mode": "train"},
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


# named losses: a loss function may return several by name; their weighted sum is minimised

LossWeight = float | Callable[[Any], Any]  # a number, or a function of the step
LossWeights = Mapping[str, LossWeight]
LOSS_PREFIX = "loss/"  # of the metrics of named losses


def total_loss(losses: Any, weights: LossWeights | None, step: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The weighted sum of named losses, and each of them by the name of its metric; one loss is returned as it is.

    Args:
        losses: what a loss function returned: one number, or several by name.
        weights: one for each name; None: all are 1.
        step: the number of optimizer steps so far, the argument of weights that are functions.

    >>> total, parts = total_loss({"ce": jnp.array(2.0), "aux": jnp.array(4.0)}, {"ce": 1.0, "aux": 0.5}, step=0)
    >>> float(total), list(parts)
    (4.0, ['loss/ce', 'loss/aux'])
    """
    if not isinstance(losses, Mapping):
        if weights is not None:
            raise ValueError(
                f"`losses` has weights for {', '.join(weights)}, but the loss function returned one number. Return a "
                "dict of losses with these names, or leave out `losses`."
            )
        return losses, {}
    weights = dict.fromkeys(losses, 1.0) if weights is None else weights
    if weights.keys() != losses.keys():
        raise ValueError(
            f"The loss function returned the losses {', '.join(losses)}, but `losses` has weights for "
            f"{', '.join(weights)}. Give every loss a weight, and every weight a loss."
        )
    return weighted_sum(losses, weights, step), {f"{LOSS_PREFIX}{name}": loss for name, loss in losses.items()}


def weighted_sum(losses: Mapping[str, jax.Array], weights: LossWeights, step: Any) -> jax.Array:
    """The sum of those `losses` that have a weight, each times its weight; a constant weight of 0 costs nothing."""
    terms = [
        loss * jnp.asarray(weight(step), loss.dtype) if callable(weight := weights[name]) else loss * weight
        for name, loss in losses.items()
        if weights.get(name, 0) != 0
    ]
    return sum(terms[1:], start=terms[0]) if terms else jnp.zeros((), next(iter(losses.values())).dtype)
