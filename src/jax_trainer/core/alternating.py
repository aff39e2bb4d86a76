"""A step of several optimizers with several losses: each updates its own parameters, one after the other.

The gradient of a loss is that with respect to the parameters of its optimizer only; all others are constants. The next
optimizer sees the updated parameters, as in the usual training loop of a GAN.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jax_trainer.core.by_epoch import Count
from jax_trainer.core.extra_args import updated
from jax_trainer.core.metrics import BatchSize, Metrics, batch_weight
from jax_trainer.core.optimizers import AlternatingOptimizer, Optimizers, OptimizerStates, Split
from jax_trainer.core.precision import Precision
from jax_trainer.core.random import stream
from jax_trainer.core.schedule_free import with_averages
from jax_trainer.core.state import TrainState
from jax_trainer.core.steps import (
    LOSS_PREFIX,
    CastLossFn,
    GradFn,
    LossWeights,
    StepReport,
    accumulate,
    global_norm,
    grad_of,
    in_precision,
    norms_of,
    offered_to,
    only_model_state,
    total_loss,
    weighted_sum,
)
from jax_trainer.core.tracing import like_params
from jax_trainer.diagnostics.leaves import Batch, PyTree
from jax_trainer.diagnostics.user_frame import IN_UPDATE, attribute_to, noting

# the losses

# from a function that completes the parameters of one optimizer to all of the model: the gradients of the former
OwnGradients = Callable[[Callable[[PyTree], PyTree]], GradFn]


class AlternatingLosses(NamedTuple):
    """The loss of each optimizer, for training, and all of them together, for evaluation."""

    by_name: dict[str, CastLossFn]
    together: CastLossFn

    def gradients(self) -> dict[str, OwnGradients]:
        """The gradients of each loss with respect to the parameters of its optimizer."""

        def own(loss: CastLossFn, completed: Callable[[PyTree], PyTree]) -> GradFn:
            return grad_of(lambda params, *args, **more: loss(completed(params), *args, **more))

        return {name: partial(own, loss) for name, loss in self.by_name.items()}


def own_gradients(name: str, grad_fn: GradFn) -> OwnGradients:
    """The gradients of one optimizer, from a function that computes those of all parameters; the rest is dropped."""
    is_masked = lambda node: isinstance(node, optax.MaskedNode)

    def of(completed: Callable[[PyTree], PyTree]) -> GradFn:
        def own_grad_fn(params: PyTree, *args: Any, **more: Any) -> Any:
            (loss, (state, found)), grads = grad_fn(completed(params), *args, **more)
            named = {**found.by_name, f"{LOSS_PREFIX}{name}": found.by_name["loss"]}
            own = jax.tree.map(lambda one, grad: one if is_masked(one) else grad, params, grads, is_leaf=is_masked)
            return (loss, (state, found.replace(by_name=named))), own

        return own_grad_fn

    return of


def alternating_losses(
    loss_fn: Any, tx: Optimizers, precision: Precision, batch_size_of: BatchSize | None = None, *, per_optimizer: bool
) -> AlternatingLosses:
    """The losses of several optimizers, from one loss function.

    Args:
        loss_fn: a `LossFn`.
        batch_size_of: counts the examples of a batch; None: see `batch_weight`.
        per_optimizer: whether `loss_fn` has a parameter `optimizer`, the name of one, and returns the loss of that one;
            otherwise it returns all losses by name.
    """
    optimizers = tx.by_name
    if not per_optimizer:
        weights = {name: one.weights or {name: 1.0} for name, one in optimizers.items()}
        is_named = any(one.weights for one in optimizers.values())
        totals = partial(_totals, weights, is_named=is_named)
        cast = lambda *names: in_precision(loss_fn, precision, partial(totals, names), batch_size_of)
        return AlternatingLosses({name: cast(name) for name in optimizers}, cast(*optimizers))

    def own_total(name: str, losses: Any, step: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
        total, parts = total_loss(losses, optimizers[name].weights, step)
        own = {f"{LOSS_PREFIX}{name}/{part.removeprefix(LOSS_PREFIX)}": value for part, value in parts.items()}
        return total, {f"{LOSS_PREFIX}{name}": total, **own}

    own = {name: attribute_to(partial(loss_fn, optimizer=name), loss_fn) for name in optimizers}
    cast = lambda name: in_precision(own[name], precision, partial(own_total, name), batch_size_of)
    by_name = {name: cast(name) for name in optimizers}

    def together(params: PyTree, model_state: PyTree, batch: Batch, *args: Any, **more: Any) -> Any:
        found = [loss(params, model_state, batch, *args, **more)[1][1] for loss in by_name.values()]
        metrics = _merged(found, batch_weight(batch, batch_size_of))
        return metrics.by_name["loss"].value, (model_state, metrics)

    return AlternatingLosses(by_name, together)


def check_unscaled(precision: Precision, tx: Optimizers) -> None:
    """Raises if the precision needs a loss scale: several losses would need one each."""
    if precision.loss_scale is not None:
        raise ValueError(
            f"The precision is f16, which scales the loss, but there are the optimizers {tx.names}, each with its own "
            "loss. Use `bf16`, which has the range of float32."
        )


def _totals(
    weights: Mapping[str, LossWeights], names: Sequence[str], losses: Any, step: Any, *, is_named: bool
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The sum of what the optimizers `names` minimise, and its parts by the names of their metrics."""
    if not isinstance(losses, Mapping):
        if not is_named:
            return losses, {}  # which all of them minimise
        raise ValueError(
            f"The loss function returned one number, but there are the optimizers {', '.join(weights)}. Return a dict "
            "of losses by name, or give the loss function a parameter `optimizer`, the name of one of them."
        )
    used = dict.fromkeys(loss for one in weights.values() for loss in one)
    if used.keys() != losses.keys():
        uses = "; ".join(f"{name} uses {' and '.join(one)}" for name, one in weights.items())
        raise ValueError(
            f"The loss function returned the losses {', '.join(losses)}, but the optimizers use {', '.join(used)} "
            f"({uses}). Set `loss` or `losses` of an optimizer, or return other names."
        )
    totals = {name: weighted_sum(losses, weights[name], step) for name in names}
    own = {name: total for name, total in totals.items() if name not in losses}
    parts = {name: loss for name, loss in losses.items() if any(name in weights[one] for one in names)}
    named = {f"{LOSS_PREFIX}{name}": value for name, value in {**own, **parts}.items()}
    return sum(list(totals.values())[1:], start=totals[names[0]]), named


def _merged(found: Sequence[Metrics], weight: Any) -> Metrics:
    """The metrics of several losses: `loss` is the sum; any other is that of the first that reports it."""
    merged = {name: one for metrics in reversed(found) for name, one in metrics.by_name.items()}
    loss = sum((one.by_name["loss"].value for one in found[1:]), start=found[0].by_name["loss"].value)
    weights = [one.by_name["loss"].weight for one in found]
    # a step in which no optimizer updates has no loss
    own = None if any(one is None for one in weights) else jnp.max(jnp.stack([jnp.asarray(one) for one in weights]))
    return Metrics({**merged, "loss": merged["loss"].replace(value=loss, weight=own)}, weight)


# the step


class Turn(NamedTuple):
    """The result of one optimizer's updates in a step: its parameters and state, the model state, metrics, gradients.

    The metrics and gradients are those of the last update.
    """

    params: PyTree
    model_state: PyTree
    opt_state: PyTree
    metrics: Metrics | None = None
    grads: PyTree = None


class AlternatingStep:
    """A step of several optimizers, in their order: gradients of its own loss for its own parameters, then its update.

    Args:
        gradients: computes the gradients of each optimizer, see `OwnGradients`.
        tx: the optimizers.
        micro_batches: number of micro-batches of gradient accumulation; or several, by the number of complete epochs.
        log_norms: log the norms of gradients, of each optimizer and of all, and of parameters.
        batch_size_of: counts the examples of a batch; None: see `batch_weight`.
    """

    __name__ = "train_step"  # as JAX shows it

    def __init__(
        self,
        gradients: Mapping[str, OwnGradients],
        tx: Optimizers,
        *,
        micro_batches: Count = 1,
        log_norms: bool = True,
        batch_size_of: BatchSize | None = None,
    ) -> None:
        self._gradients, self._tx, self._micro_batches, self._log_norms = gradients, tx, micro_batches, log_norms
        self._batch_size_of = batch_size_of

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, StepReport]:
        """The state after the step, its metrics and gradients (zero for an optimizer that did not update)."""
        split, rng = Split(state.params, self._tx.by_name), jax.random.fold_in(stream(state.key, "train"), state.step)
        params, model_state, grads = state.params, state.model_state, state.params
        states, metrics = dict(state.opt_state.by_name), {}
        for name, one in self._tx.by_name.items():
            start = Turn(split.only(params, name), model_state, states[name])
            update = partial(self._update, name, split, params, state, batch)
            turn = _turn_of(one, update, start, stream(rng, name), state.step)
            params, grads = (split.joined(own, all, name) for own, all in ((turn.params, params), (turn.grads, grads)))
            model_state, states[name], metrics[name] = turn.model_state, turn.opt_state, turn.metrics
        # of a metric that several report, that of an optimizer which updates at every step
        order = sorted(metrics, key=lambda name: self._tx.by_name[name].every > 1)
        found = _merged([metrics[name] for name in order], batch_weight(batch, self._batch_size_of))
        if self._log_norms:
            found = found.adding(**norms_of(grads, params))
        opt_state = OptimizerStates(states)
        new = state.replace(step=state.step + 1, params=params, model_state=model_state, opt_state=opt_state)
        return with_averages(new), StepReport(found, grads)

    def _update(
        self, name: str, split: Split, others: PyTree, state: TrainState, batch: Batch, before: Turn, key: jax.Array
    ) -> Turn:
        """One update of the optimizer `name`; `others` has the parameters of all others."""
        grad_fn = self._gradients[name](lambda own: split.joined(own, others, name))
        grad_fn = accumulate(grad_fn, self._micro_batches)
        at = partial(grad_fn, model_state=before.model_state, batch=batch, rng=key, step=state.step)
        (_, (model_state, metrics)), grads = at(before.params)
        model_state = only_model_state(model_state, "with several optimizers")
        grads = lax.optimization_barrier(like_params(grads))
        with noting(IN_UPDATE):
            tx, offered = self._tx.by_name[name].tx, offered_to(metrics, grads, at)
            own = state.replace(params=before.params, opt_state=before.opt_state)
            params, opt_state, _ = updated(tx, grads, own, offered, is_one_of_several=True)
        if self._log_norms:
            norm = {"value": global_norm(grads), "log_mode": "train"}
            metrics = metrics.adding(**{f"optimizer/{name}/grad_global_norm": norm})
        return Turn(params, model_state, opt_state, metrics, grads)


def _turn_of(one: AlternatingOptimizer, update: Any, start: Turn, rng: jax.Array, step: jax.Array) -> Turn:
    """The turn of an optimizer in this step: `one.steps` updates, or none."""

    def following(turn: Turn, number: Any) -> tuple[Turn, Metrics]:
        new = update(turn, jax.random.fold_in(rng, number))
        return new._replace(metrics=None), new.metrics

    def updated(turn: Turn) -> Turn:
        if one.steps == 1:
            return update(turn, jax.random.fold_in(rng, 0))
        turn = turn._replace(grads=jax.tree.map(jnp.zeros_like, turn.params))
        turn, metrics = lax.scan(following, turn, jnp.arange(one.steps))
        return turn._replace(metrics=jax.tree.map(lambda all: all[-1], metrics))

    if one.every == 1:
        return updated(start)

    def due(turn: Turn) -> Turn:
        new = updated(turn)
        metrics: Any = new.metrics  # each with its own weight, which a step without an update sets to 0
        own = {name: one.replace(weight=jnp.asarray(metrics.weight_of(name))) for name, one in metrics.by_name.items()}
        return new._replace(metrics=Metrics(own, jnp.asarray(metrics.weight)))

    shapes = jax.eval_shape(due, start)
    nothing = lambda tree: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), tree)

    def skipped(turn: Turn) -> Turn:
        return turn._replace(metrics=nothing(shapes.metrics), grads=nothing(shapes.grads))

    return lax.cond((step + 1) % one.every == 0, due, skipped, start)
