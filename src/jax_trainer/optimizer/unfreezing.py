"""Parameters that begin to train during a run: `with_unfreezing`.

Which of them train is a number in the state, so nothing is compiled again when some are unfrozen. The optimizer of
parameters that are unfrozen later counts from there: bias corrections of their moments are those of a new optimizer.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jax_trainer.config.settings import SettingsError
from jax_trainer.core import Program, PyTree, TrainState
from jax_trainer.core.extra_args import Around
from jax_trainer.core.state import hyperparameters_in
from jax_trainer.core.wrappers import with_frozen_stats, with_optimizer
from jax_trainer.diagnostics.leaves import parameter_paths
from jax_trainer.optimizer.transforms import is_match, listed, require_match

UNFREEZE_EPOCH = "unfreeze_epoch"  # the hyperparameter: parameters of this number of complete epochs, or fewer, train


def with_unfreezing(program: Program, schedule: Mapping[int, str], *, train_bn: bool = False) -> Program:
    """`program` that trains some parameters from the beginning, and others later.

    The hyperparameter `unfreeze_epoch`, 0 at first, is set by an `Edit`. A parameter trains if it is at least the
    number of complete epochs of the first expression that matches it. Others get no update, their moments in the
    optimizer state stay as they are, and they do not count in the clipped norm. What no expression matches never
    trains.

    Args:
        program: the program.
        schedule: regular expressions of parameters by the number of complete epochs after which they train, from 0 on;
            matched from the start of the dotted path.
        train_bn: update the running statistics of frozen BatchNorms, too.
    """

    def trains(state: TrainState) -> dict[str, jax.Array]:
        paths, epoch = parameter_paths(state.params), hyperparameters_in(state)[UNFREEZE_EPOCH][0]
        return {path: epoch >= start for path, start in zip(paths, unfrozen_at(schedule, paths), strict=True)}

    never_trains = lambda path: not any(is_match(regex, path) for regex in schedule.values())
    around = Around("with_unfreezing", lambda tx: _unfreezing(tx, schedule), hyperparameter=UNFREEZE_EPOCH)
    unfreezing = with_optimizer(program, around).with_info(never_trains=never_trains)
    return unfreezing if train_bn else with_frozen_stats(unfreezing, trains)


class _Unfreezing(NamedTuple):
    """The epoch, counters of the optimizer for parameters that are unfrozen later, by epoch, and its state."""

    hyperparams: dict[str, jax.Array]
    counters: dict[str, list[jax.Array]]
    inner: PyTree


def _unfreezing(tx: Any, schedule: Mapping[int, str]) -> optax.GradientTransformationExtraArgs:
    """`tx` of the parameters that train."""

    def init(params: PyTree) -> _Unfreezing:
        starts, inner = unfrozen_at(schedule, parameter_paths(params)), tx.init(params)
        later = sorted({int(start) for start in starts if 0 < start < math.inf})
        known = _Counters(params, inner).read(inner)
        counters = {str(start): jax.tree.map(jnp.copy, known) for start in later} if known else {}
        return _Unfreezing({UNFREEZE_EPOCH: jnp.float32(0)}, counters, inner)

    def update(updates: PyTree, state: Any, params: PyTree = None, **extra: Any) -> tuple[PyTree, _Unfreezing]:
        starts, split = unfrozen_at(schedule, parameter_paths(params)), _Counters(params, state.inner)
        trains = {start: state.hyperparams[UNFREEZE_EPOCH] >= start for start in starts}
        kept = jax.tree.unflatten(jax.tree.structure(params), [trains[start] for start in starts])
        grads = jax.tree.map(lambda keep, grad: jnp.where(keep, grad, jnp.zeros_like(grad)), kept, updates)
        counters = {0: split.read(state.inner)}
        counters |= {int(start): found for start, found in state.counters.items()}
        done = {
            start: tx.update(grads, split.replaced(state.inner, own), params, **extra)
            for start, own in counters.items()
        }
        of_leaf = [start if start in done else 0 for start in starts]
        updates = _merged({start: updates for start, (updates, _) in done.items()}, of_leaf)
        # -0.0: x + -0.0 is x for every x, but -0.0 + 0.0 is 0.0
        updates = jax.tree.map(lambda keep, one: jnp.where(keep, one, jnp.full_like(one, -0.0)), kept, updates)
        after = {start: found for start, (_, found) in done.items()}
        inner = split.merged(state.inner, after, of_leaf, [trains[start] for start in starts])
        later = {
            str(start): jax.tree.map(
                lambda new, old, start=start: jnp.where(trains[start], new, old), split.read(after[start]), own
            )
            for start, own in counters.items()
            if start
        }
        return updates, _Unfreezing(state.hyperparams, later, inner)

    return optax.GradientTransformationExtraArgs(init, update)


def unfrozen_at(schedule: Mapping[int, str], paths: Sequence[str]) -> list[float]:
    """The number of complete epochs after which each parameter trains; infinite: never.

    Raises for an expression that matches nothing, or only what an earlier one matches.

    >>> unfrozen_at({0: "head", 3: ".*"}, ["encoder.kernel", "head.kernel"])
    [3, 0]
    """
    starts: list[float] = [math.inf] * len(paths)
    for start, regex in sorted(schedule.items()):
        key = f"schedule.{start}"
        require_match(key, regex, paths)
        found = [index for index, path in enumerate(paths) if is_match(regex, path) and starts[index] > start]
        if not found:
            text = f"`{key}` {regex!r} matches no parameter that is still frozen then. Remove it; parameters: "
            raise SettingsError([(key, f"{text}{listed(paths)}.")])
        for index in found:
            starts[index] = start
    return starts


def _merged(trees: Mapping[int, PyTree], of_leaf: Sequence[float]) -> PyTree:
    """The tree whose leaf i is that of the tree `of_leaf[i]`."""
    structure = jax.tree.structure(trees[0])
    leaves = {start: jax.tree.leaves(tree) for start, tree in trees.items()}
    return structure.unflatten(leaves[int(start)][index] for index, start in enumerate(of_leaf))


class _Counters:
    """Which leaves of an optimizer state belong to a parameter, and which count for the moments of parameters.

    A leaf belongs to the parameter whose path its own ends with (`0.mu.dense.kernel`). A counter is beside such leaves
    (`0.count`); others, such as the count of a learning rate schedule, are beside none.
    """

    def __init__(self, params: PyTree, opt_state: PyTree) -> None:
        numbers = {path: number for number, path in enumerate(parameter_paths(params))}
        paths = [path.split(".") for path in parameter_paths(opt_state)]
        self.owners: list[int | None] = []  # the number of the parameter of each leaf
        beside: set[str] = set()
        for parts in paths:
            ends = (start for start in range(1, len(parts)) if ".".join(parts[start:]) in numbers)
            start = next(ends, None)
            self.owners.append(None if start is None else numbers[".".join(parts[start:])])
            beside |= set() if start is None else {".".join(parts[: start - 1])}
        is_counter = [
            owner is None and ".".join(parts[:-1]) in beside for owner, parts in zip(self.owners, paths, strict=True)
        ]
        self._counters = [index for index, found in enumerate(is_counter) if found]

    def read(self, opt_state: PyTree) -> list[jax.Array]:
        """The counters of an optimizer state."""
        leaves = jax.tree.leaves(opt_state)
        return [leaves[index] for index in self._counters]

    def replaced(self, opt_state: PyTree, counters: Sequence[jax.Array]) -> PyTree:
        """An optimizer state with these counters."""
        leaves, structure = jax.tree.flatten(opt_state)
        for index, counter in zip(self._counters, counters, strict=True):
            leaves[index] = counter
        return structure.unflatten(leaves)

    def merged(
        self, before: PyTree, after: Mapping[int, PyTree], of_leaf: Sequence[float], trains: Sequence[jax.Array]
    ) -> PyTree:
        """The state after an update: leaves of parameters that train are new, those of frozen ones as before."""
        leaves = {start: jax.tree.leaves(tree) for start, tree in after.items()}

        def leaf(index: int, old: jax.Array) -> jax.Array:
            owner = self.owners[index]
            if owner is None:
                return leaves[0][index]
            return jnp.where(trains[owner], leaves[int(of_leaf[owner])][index], old)

        old_leaves, structure = jax.tree.flatten(before)
        return structure.unflatten(leaf(index, old) for index, old in enumerate(old_leaves))
