"""Several optimizers by name: which parameters each of them updates, and their states."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import optax

from jax_trainer.core.extra_args import Freezes, by_signature, clipped, freezes_of, freezing, restricted
from jax_trainer.diagnostics.leaves import PyTree, leaf_path, listed
from jax_trainer.diagnostics.returned import checked_int


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

    def updates_in(self, total_steps: int | None) -> int | None:
        """The number of its updates in a run of `total_steps` steps; None if that is unknown."""
        return None if total_steps is None else total_steps // self.every * self.steps


class OptimizerStates(NamedTuple):
    """The state of each of several optimizers."""

    by_name: dict[str, PyTree]


class Optimizers(optax.GradientTransformationExtraArgs):
    """Several optimizers by name, which update different parameters: at once, or each by a loss of its own.

    Args:
        optimizers: optax optimizers, or `AlternatingOptimizer`s.
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
            split = Split(params, by_name)
            return OptimizerStates({name: one.tx.init(split.only(params, name)) for name, one in by_name.items()})

        def update(updates: PyTree, state: Any, params: PyTree | None = None, **extra: Any) -> tuple[PyTree, Any]:
            if joint is False:
                raise TypeError(
                    "Several optimizers update different parameters by different losses, so there is no update of all "
                    "with one set of gradients. Leave the training step to the trainer, or set `joint` if they have "
                    "one loss."
                )
            split, states = Split(updates, by_name), {}
            for name, one in by_name.items():
                only, completed = partial(split.only, name=name), partial(split.joined, others=params, name=name)
                own = only(updates), state.by_name[name], None if params is None else only(params)
                new, states[name] = one.tx.update(*own, **{**extra, **restricted(extra, only, completed)})
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
