"""Several optimizers by name: which parameters each of them updates, and a step of several losses.

In it, each optimizer updates its own parameters, one after the other. The gradient of a loss is that with respect to
the parameters of its optimizer only; all others are constants. The next optimizer sees the updated parameters, as in
the usual training loop of a GAN.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jax_trainer.core.by_epoch import Count
from jax_trainer.core.extra_args import Freezes, Split, by_signature, clipped, freezes_of, freezing, updated
from jax_trainer.core.metrics import BatchSize, Metrics, batch_weight
from jax_trainer.core.precision import Precision
from jax_trainer.core.random import stream
from jax_trainer.core.state import TrainState, with_averages
from jax_trainer.core.steps import (
    LOSS_PREFIX,
    CastLossFn,
    GradFn,
    LossWeights,
    StepReport,
    TrainStep,
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
from jax_trainer.diagnostics.leaves import Batch, PyTree, listed, parameter_paths
from jax_trainer.diagnostics.returned import checked_int
from jax_trainer.diagnostics.user_frame import IN_UPDATE, attribute_to, noting


@dataclass(frozen=True)
class AlternatingOptimizer:
    """One of several optimizers: which parameters it updates, by which loss, and how often.

    Args:
        tx: an optax optimizer, or an optimizer's configuration.
        parameters: regular expression of its parameters, matched from the start of their dotted path; None: those of
            the module with the name of the optimizer.
        every: update at every n-th step; at all other steps its parameters and its state do not change.
        steps: number of updates in such a step, on the same batch with different random keys.
        loss: name of its loss among those that the loss function returns; None: the name of the optimizer.
        losses: instead of `loss`: weights of several losses by name, numbers or functions of the step.
        joint: whether all optimizers update at once, by one gradient of one loss; the same for all of them. None: if
            they have one loss.
    """

    tx: Any
    parameters: str | None = None
    every: int = 1
    steps: int = 1
    loss: str | None = None
    losses: Mapping[str, Any] | None = None
    joint: bool | None = None

    def __post_init__(self) -> None:
        checked_int("every", self.every, 1)
        checked_int("steps", self.steps, 1)
        if self.loss is not None and self.losses:
            raise ValueError(f"`loss` is {self.loss!r}, and `losses` is set as well. Leave out one of them.")

    @property
    def weights(self) -> Mapping[str, Any] | None:
        """The weights of its losses by name; None: it names none."""
        return self.losses or (None if self.loss is None else {self.loss: 1.0})


class OptimizerStates(NamedTuple):
    """The state of each of several optimizers."""

    by_name: dict[str, PyTree]


class Optimizers(optax.GradientTransformationExtraArgs):
    """Several optimizers by name, which update different parameters: at once, or each by a loss of its own.

    Args:
        optimizers: optax optimizers, or objects of `AlternatingOptimizer`.
        clips: maximum norms of gradients, see `clipped`: of all that are updated at once.

    Attributes:
        by_name: the optimizers.
        weights: the weights of the losses that are minimised, if all optimizers have the same; None: they name none.
        joint: whether all update at once, by one gradient; None: if the loss function returns one number.

    >>> import jax.numpy as jnp
    >>> both = Optimizers({"generator": optax.adam(2e-4), "discriminator": optax.adam(1e-4)})
    >>> list(both.init({"generator": {"w": jnp.ones(2)}, "discriminator": {"w": jnp.ones(3)}}).by_name)
    ['generator', 'discriminator']
    """

    by_name: dict[str, AlternatingOptimizer]
    weights: Mapping[str, Any] | None
    joint: bool | None

    def __new__(cls, optimizers: Mapping[str, Any], *clips: float | None) -> "Optimizers":
        by_name = {name: _checked(name, one) for name, one in optimizers.items()}
        if not by_name:
            raise ValueError("No optimizers: the dict is empty. Pass at least one, by name.")

        def init(params: PyTree) -> OptimizerStates:
            split = split_of(params, by_name)
            return OptimizerStates({name: one.tx.init(split.only(params, name)) for name, one in by_name.items()})

        def update(updates: PyTree, state: Any, params: PyTree | None = None, **extra: Any) -> tuple[PyTree, Any]:
            if joint is False:
                raise TypeError(
                    "Several optimizers update different parameters by different losses, so there is no update of all "
                    "with one set of gradients. Leave the training step to the trainer, or set `joint` if they have "
                    "one loss."
                )
            split, states = split_of(updates, by_name), {}
            for name, one in by_name.items():
                own = split.only(updates, name), state.by_name[name], split.only(params, name)
                new, states[name] = one.tx.update(*own, **split.restricted(extra, params, name))
                updates = split.joined(new, updates, name)
            return updates, OptimizerStates(states)

        joint = _joint(by_name)
        found = [freezes for one in by_name.values() if (freezes := freezes_of(one.tx)) is not None]
        frozen = lambda path: any(one.parameters(path) for one in found)
        freezes = Freezes(frozen, lambda path: any(one.statistics(path) for one in found)) if found else None
        at_once = clipped(optax.GradientTransformationExtraArgs(init, update), *(clips or (None, None)))
        self = super().__new__(cls, init, freezing(at_once.update, freezes))
        self.by_name = {
            name: replace(one, tx=clipped(one.tx, *clips)) if clips else one for name, one in by_name.items()
        }
        self.weights, self.joint = next(iter(by_name.values())).weights, joint
        return self

    @property
    def names(self) -> str:
        """The names of the optimizers, for a message."""
        return ", ".join(self.by_name)


def _checked(name: Any, one: Any) -> AlternatingOptimizer:
    one = one if isinstance(one, AlternatingOptimizer) else AlternatingOptimizer(one)
    if not isinstance(name, str) or not name or "/" in name:
        raise ValueError(f"The name of an optimizer must be text without '/', got {name!r}.")
    if not isinstance(one.tx, optax.GradientTransformation) or isinstance(one.tx, Optimizers):
        raise TypeError(
            f"The optimizer {name!r} must be an optax optimizer, such as `optax.adam(1e-3)`, got a "
            f"{type(one.tx).__name__}."
        )
    return replace(one, tx=by_signature(one.tx))


def _joint(by_name: Mapping[str, AlternatingOptimizer]) -> bool | None:
    asked = {one.joint for one in by_name.values()}
    if len(asked) > 1:
        values = ", ".join(f"{name}: {one.joint}" for name, one in by_name.items())
        raise ValueError(f"`joint` differs between the optimizers ({values}). All update at once, or none.")
    weights = [one.weights for one in by_name.values()]
    own = [name for name, one in by_name.items() if (one.every, one.steps) != (1, 1) or one.weights != weights[0]]
    if True in asked and own:
        raise ValueError(
            f"`joint` is set, but the optimizer {own[0]!r} has `every`, `steps` or a loss of its own. Leave out one of "
            "them."
        )
    return False if own or False in asked else True if True in asked or weights[0] is not None else None


def with_clipping(tx: optax.GradientTransformation, norm: float | None, adaptive: float | None) -> Any:
    """`tx` with its extra arguments by signature, on clipped gradients; optimizers with own losses clip their own."""
    if not isinstance(tx, Optimizers):
        return clipped(by_signature(tx), norm, adaptive)
    return tx if norm is adaptive is None else Optimizers(tx.by_name, norm, adaptive)


def split_of(params: PyTree, by_name: Mapping[str, AlternatingOptimizer]) -> Split:
    """Which optimizer updates which parameter."""
    return Split(params, _labels(parameter_paths(params), by_name))


def _labels(paths: Sequence[str], by_name: Mapping[str, AlternatingOptimizer]) -> list[str]:
    """The optimizer of every parameter; raises if it has none or several, or an optimizer has none."""
    regexes = {
        name: rf"{re.escape(name)}(\.|$)" if one.parameters is None else one.parameters for name, one in by_name.items()
    }
    owners = {path: [name for name, regex in regexes.items() if re.match(regex, path)] for path in paths}
    described = " and ".join(f"{name} ({regex!r})" for name, regex in regexes.items())
    if lone := [path for path, found in owners.items() if not found]:
        raise ValueError(
            f"These parameters have no optimizer: {listed(lone)}. The optimizers have {described}. Change `parameters` "
            "of one of them, which is matched from the start of the path; `freeze` of it excludes what is not trained."
        )
    if shared := [path for path, found in owners.items() if len(found) > 1]:
        raise ValueError(
            f"These parameters have several optimizers: {listed(shared)}. The optimizers have {described}. Change "
            "`parameters` so that only one of them matches each."
        )
    labels = [found[0] for found in owners.values()]
    if idle := [name for name in by_name if name not in labels]:
        raise ValueError(
            f"`parameters` of the optimizer {idle[0]!r} ({regexes[idle[0]]!r}) matches no parameter of: "
            f"{listed(paths)}. It is matched from the start of the path."
        )
    return labels


# the losses

# from a function that completes the parameters of one optimizer to all of the model: the gradients of the former
OwnGradients = Callable[[Callable[[PyTree], PyTree]], GradFn]


def gradients_of(losses: Mapping[str, CastLossFn]) -> dict[str, OwnGradients]:
    """The gradients of each loss with respect to the parameters of its optimizer."""

    def own(loss: CastLossFn, completed: Callable[[PyTree], PyTree]) -> GradFn:
        return grad_of(lambda params, *args, **more: loss(completed(params), *args, **more))

    return {name: partial(own, loss) for name, loss in losses.items()}


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
) -> tuple[dict[str, CastLossFn], CastLossFn]:
    """The loss of each of several optimizers, for training, and all together, for evaluation; from one loss function.

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
        return {name: cast(name) for name in optimizers}, cast(*optimizers)

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

    return by_name, together


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


def alternating_step(
    gradients: Mapping[str, OwnGradients],
    tx: Optimizers,
    precision: Precision,
    *,
    micro_batches: Count = 1,
    log_norms: bool = True,
    batch_size_of: BatchSize | None = None,
) -> TrainStep:
    """A step of several optimizers, in their order: gradients of its own loss for its own parameters, then its update.

    The gradients that it reports are zero for an optimizer that did not update.

    Args:
        gradients: computes the gradients of each optimizer, see `OwnGradients`.
        tx: the optimizers.
        precision: that of the computation.
        micro_batches: number of micro-batches of gradient accumulation; or several, by the number of complete epochs.
        log_norms: log the norms of gradients, of each optimizer and of all, and of parameters.
        batch_size_of: counts the examples of a batch; None: see `batch_weight`.
    """
    if precision.loss_scale is not None:  # several losses would need one each
        raise ValueError(
            f"The precision is f16, which scales the loss, but there are the optimizers {tx.names}, each with its own "
            "loss. Use `bf16`, which has the range of float32."
        )

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, StepReport]:
        split, rng = split_of(state.params, tx.by_name), jax.random.fold_in(stream(state.key, "train"), state.step)
        params, model_state, grads = state.params, state.model_state, state.params
        states, metrics = dict(state.opt_state.by_name), {}
        for name, one in tx.by_name.items():
            start = Turn(split.only(params, name), model_state, states[name])
            turn = _turn_of(
                one, partial(update, name, split, params, state, batch), start, stream(rng, name), state.step
            )
            params, grads = (split.joined(own, all, name) for own, all in ((turn.params, params), (turn.grads, grads)))
            model_state, states[name], metrics[name] = turn.model_state, turn.opt_state, turn.metrics
        # of a metric that several report, that of an optimizer which updates at every step
        order = sorted(metrics, key=lambda name: tx.by_name[name].every > 1)
        found = _merged([metrics[name] for name in order], batch_weight(batch, batch_size_of))
        if log_norms:
            found = found.adding(**norms_of(grads, params))
        opt_state = OptimizerStates(states)
        new = state.replace(step=state.step + 1, params=params, model_state=model_state, opt_state=opt_state)
        return with_averages(new), StepReport(found, grads)

    def update(
        name: str, split: Split, others: PyTree, state: TrainState, batch: Batch, before: Turn, key: jax.Array
    ) -> Turn:
        """One update of the optimizer `name`; `others` has the parameters of all others."""
        grad_fn = accumulate(gradients[name](lambda own: split.joined(own, others, name)), micro_batches)
        at = partial(grad_fn, model_state=before.model_state, batch=batch, rng=key, step=state.step)
        (_, (model_state, metrics)), grads = at(before.params)
        model_state = only_model_state(model_state, "with several optimizers")
        grads = lax.optimization_barrier(like_params(grads))
        with noting(IN_UPDATE):
            own = state.replace(params=before.params, opt_state=before.opt_state)
            offered = offered_to(metrics, grads, at)
            params, opt_state, _ = updated(tx.by_name[name].tx, grads, own, offered, is_one_of_several=True)
        if log_norms:
            norm = {"value": global_norm(grads), "log_mode": "train"}
            metrics = metrics.adding(**{f"optimizer/{name}/grad_global_norm": norm})
        return Turn(params, model_state, opt_state, metrics, grads)

    return train_step


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
