"""Several optimizers in one step: each updates its own parameters by its own loss, one after the other.

The gradient of a loss is taken with respect to the parameters of its optimizer only; all others are constants. The next
optimizer sees the updated parameters, as in the usual training loop of a GAN.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jax_trainer.core.extra_args import by_signature, clipped, scale_updates
from jax_trainer.core.leaves import leaf_path, listed
from jax_trainer.core.losses import LOSS_PREFIX, LossWeights, check_weights, total_loss, weighted_sum
from jax_trainer.core.metrics import Batch, Metrics, PyTree, batch_weight
from jax_trainer.core.precision import Precision
from jax_trainer.core.returned import checked_int
from jax_trainer.core.rng import stream
from jax_trainer.core.state import TrainState
from jax_trainer.core.steps import (
    CastLossFn,
    LossFn,
    StepReport,
    accumulate,
    global_norm,
    grad_of,
    in_precision,
    norms_of,
    offered_to,
)
from jax_trainer.core.tracing import like_params
from jax_trainer.core.user_frame import IN_UPDATE, attribute_to, noting


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
    """

    tx: Any
    parameters: str | None = None
    every: int = 1
    steps: int = 1
    loss: str | None = None
    losses: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        checked_int("every", self.every, 1)
        checked_int("steps", self.steps, 1)
        if self.loss is not None and self.losses:
            raise ValueError(f"`loss` is {self.loss!r}, and `losses` is set as well. Leave out one of them.")

    def updates_in(self, total_steps: int | None) -> int | None:
        """The number of its updates in a run of `total_steps` steps; None if that is unknown."""
        return None if total_steps is None else total_steps // self.every * self.steps


class OptimizerStates(NamedTuple):
    """The state of each of several optimizers."""

    by_name: dict[str, PyTree]


class Optimizers(optax.GradientTransformationExtraArgs):
    """Several optimizers by name, which update different parameters one after the other; `init` makes their states.

    >>> both = Optimizers({"generator": optax.adam(2e-4), "discriminator": optax.adam(1e-4)})
    >>> list(both.init({"generator": {"w": jnp.ones(2)}, "discriminator": {"w": jnp.ones(3)}}).by_name)
    ['generator', 'discriminator']
    """

    by_name: dict[str, AlternatingOptimizer]

    def __new__(cls, optimizers: Mapping[str, Any]) -> "Optimizers":
        """Each is an optax optimizer, or an `AlternatingOptimizer`."""
        by_name = {name: _checked(name, one) for name, one in optimizers.items()}
        if not by_name:
            raise ValueError("No optimizers: the dict is empty. Pass at least one, by name.")

        def init(params: PyTree) -> OptimizerStates:
            split = Split(params, by_name)
            return OptimizerStates({name: one.tx.init(split.only(params, name)) for name, one in by_name.items()})

        self = super().__new__(cls, init, _no_common_update)
        self.by_name = by_name
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
    if one.losses:
        check_weights(one.losses)
    return replace(one, tx=by_signature(one.tx))


def _no_common_update(updates: PyTree, state: Any, params: PyTree | None = None, **extra: Any) -> Any:
    raise TypeError(
        "Several optimizers update different parameters by different losses, so there is no update of all with one set "
        "of gradients. Leave the training step to the trainer, or use one optimizer with `groups` in a custom step."
    )


def with_clipping(
    tx: optax.GradientTransformation, clip_norm: float | None
) -> optax.GradientTransformationExtraArgs | Optimizers:
    """`tx` with its extra arguments by signature, on clipped gradients; each of several optimizers clips its own."""
    if not isinstance(tx, Optimizers):
        tx = by_signature(tx)
        return tx if clip_norm is None else clipped(tx, clip_norm)
    if clip_norm is None:
        return tx
    return Optimizers({name: replace(one, tx=clipped(one.tx, clip_norm)) for name, one in tx.by_name.items()})


class Split:
    """Which optimizer updates which parameter. Leaves of others become `optax.MaskedNode`, which has no arrays."""

    def __init__(self, params: PyTree, by_name: Mapping[str, AlternatingOptimizer]) -> None:
        paths = [leaf_path(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
        self.labels, self._structure = _labels(paths, by_name), jax.tree.structure(params)

    def only(self, tree: PyTree, name: str) -> PyTree:
        """`tree` with the leaves of one optimizer."""
        leaves = zip(self.labels, self._structure.flatten_up_to(tree), strict=True)
        return self._structure.unflatten(leaf if label == name else optax.MaskedNode() for label, leaf in leaves)

    def joined(self, own: PyTree, others: PyTree, name: str) -> PyTree:
        """`others` with the leaves of one optimizer replaced by its `own`."""
        leaves = zip(self.labels, *map(self._structure.flatten_up_to, (own, others)), strict=True)
        return self._structure.unflatten(mine if label == name else other for label, mine, other in leaves)


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


# the losses of the optimizers


class AlternatingLosses(NamedTuple):
    """The loss of each optimizer, for training, and all of them together, for evaluation."""

    by_name: dict[str, CastLossFn]
    together: CastLossFn


def alternating_losses(
    loss_fn: LossFn, tx: Optimizers, precision: Precision, *, per_optimizer: bool
) -> AlternatingLosses:
    """The losses of several optimizers, from one loss function.

    Args:
        per_optimizer: whether `loss_fn` has a parameter `optimizer`, the name of one, and returns the loss of that one;
            otherwise it returns all losses by name.
    """
    optimizers = tx.by_name
    if not per_optimizer:
        weights = {name: one.losses or {one.loss or name: 1.0} for name, one in optimizers.items()}
        cast = lambda *names: in_precision(loss_fn, precision, partial(_totals, weights, names))
        return AlternatingLosses({name: cast(name) for name in optimizers}, cast(*optimizers))

    def own_total(name: str, losses: Any, step: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
        one = optimizers[name]
        weights = one.losses or (None if one.loss is None else {one.loss: 1.0})
        total, parts = total_loss(losses, weights, step)
        own = {f"{LOSS_PREFIX}{name}/{part.removeprefix(LOSS_PREFIX)}": value for part, value in parts.items()}
        return total, {f"{LOSS_PREFIX}{name}": total, **own}

    def cast_for(name: str) -> CastLossFn:
        own: Any = attribute_to(partial(loss_fn, optimizer=name), loss_fn)
        return in_precision(own, precision, partial(own_total, name))

    by_name = {name: cast_for(name) for name in optimizers}

    def together(params: PyTree, model_state: PyTree, batch: Batch, rng: jax.Array, **more: Any) -> Any:
        found = [loss(params, model_state, batch, rng, **more)[1][1] for loss in by_name.values()]
        metrics = _merged(found, batch)
        return metrics.by_name["loss"].value, (model_state, metrics)

    return AlternatingLosses(by_name, together)


def _totals(
    weights: Mapping[str, LossWeights], names: Sequence[str], losses: Any, step: Any
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The sum of what the optimizers `names` minimise, and its parts by the names of their metrics."""
    if not isinstance(losses, Mapping):
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


def _merged(found: Sequence[Metrics], batch: Batch) -> Metrics:
    """The metrics of several losses: `loss` is the sum; any other is that of the first that reports it."""
    weight = batch_weight(batch)
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
        losses: the loss of each optimizer.
        tx: the optimizers.
        micro_batches: number of micro-batches of gradient accumulation.
        log_norms: log the norms of gradients, of each optimizer and of all, and of parameters.
    """

    __name__ = "train_step"  # as JAX shows it

    def __init__(
        self, losses: Mapping[str, CastLossFn], tx: Optimizers, *, micro_batches: int = 1, log_norms: bool = True
    ) -> None:
        self._losses, self._tx, self._micro_batches, self._log_norms = losses, tx, micro_batches, log_norms

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, StepReport]:
        """The state after the step, its metrics and gradients (zero for an optimizer that did not update)."""
        split, rng = Split(state.params, self._tx.by_name), jax.random.fold_in(stream(state.key, "train"), state.step)
        params, model_state, grads = state.params, state.model_state, state.params
        states, metrics = dict(state.opt_state.by_name), {}
        for name, one in self._tx.by_name.items():
            start = Turn(split.only(params, name), model_state, states[name])
            update = partial(self._update, name, split, params, state, batch)
            turn = _taken(one, update, start, stream(rng, name), state.step)
            params, grads = (split.joined(own, all, name) for own, all in ((turn.params, params), (turn.grads, grads)))
            model_state, states[name], metrics[name] = turn.model_state, turn.opt_state, turn.metrics
        # of a metric that several report, that of an optimizer which updates at every step
        order = sorted(metrics, key=lambda name: self._tx.by_name[name].every > 1)
        found = _merged([metrics[name] for name in order], batch)
        if self._log_norms:
            found = found.adding(**norms_of(grads, params))
        opt_state = OptimizerStates(states)
        new = state.replace(step=state.step + 1, params=params, model_state=model_state, opt_state=opt_state)
        return new, StepReport(found, grads)

    def _update(
        self, name: str, split: Split, others: PyTree, state: TrainState, batch: Batch, before: Turn, key: jax.Array
    ) -> Turn:
        """One update of the optimizer `name`; `others` has the parameters of all others."""

        def loss_at(own: PyTree, model_state: PyTree, batch: Batch, rng: jax.Array, **more: Any) -> Any:
            return self._losses[name](split.joined(own, others, name), model_state, batch, rng, **more)

        grad_fn = accumulate(grad_of(loss_at), self._micro_batches)
        at = partial(grad_fn, model_state=before.model_state, batch=batch, rng=key, step=state.step)
        (_, (model_state, metrics)), grads = at(before.params)
        grads = lax.optimization_barrier(like_params(grads))
        with noting(IN_UPDATE):
            extra = offered_to(metrics, grads, at)
            tx = self._tx.by_name[name].tx
            updates, opt_state = tx.update(grads, before.opt_state, before.params, **extra)
            params = optax.apply_updates(before.params, scale_updates(updates, state.extra))
        if self._log_norms:
            norm = {"value": global_norm(grads), "log_mode": "train"}
            metrics = metrics.adding(**{f"optimizer/{name}/grad_global_norm": norm})
        return Turn(params, model_state, opt_state, metrics, grads)


def _taken(one: AlternatingOptimizer, update: Any, start: Turn, rng: jax.Array, step: jax.Array) -> Turn:
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
        assert new.metrics is not None
        return new._replace(metrics=_weighted(new.metrics))

    shapes = jax.eval_shape(due, start)
    nothing = lambda tree: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), tree)

    def skipped(turn: Turn) -> Turn:
        return turn._replace(metrics=nothing(shapes.metrics), grads=nothing(shapes.grads))

    return lax.cond((step + 1) % one.every == 0, due, skipped, start)


def _weighted(metrics: Metrics) -> Metrics:
    """`metrics`, each with its own weight, which a step without an update sets to 0."""
    by_name = {name: one.replace(weight=jnp.asarray(metrics.weight_of(name))) for name, one in metrics.by_name.items()}
    return Metrics(by_name, jnp.asarray(metrics.weight))
