"""Parameters that begin to train during a run: `with_unfreezing`.

Which of them train is a number in the state, so nothing is compiled again when some are unfrozen. The optimizer of
parameters that are unfrozen later counts from there: bias corrections of their moments are those of a new optimizer.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_trainer.config.settings import SettingsError
from jax_trainer.core import Program, PyTree, TrainState
from jax_trainer.core.extra_args import HYPERPARAMS, Update
from jax_trainer.core.wrappers import with_frozen_stats, with_initial
from jax_trainer.diagnostics.leaves import leaf_path, parameter_paths
from jax_trainer.optimizer.reported import with_hyperparameter, with_update
from jax_trainer.optimizer.transforms import is_match, listed, require_match

UNFREEZE_EPOCH = "unfreeze_epoch"  # the hyperparameter: parameters of this number of complete epochs, or fewer, train
COUNTERS = "unfreeze"  # in `extra`: counters of the optimizer for parameters that are unfrozen later, by epoch


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

    def add_counters(state: TrainState) -> TrainState:
        starts = unfrozen_at(schedule, parameter_paths(state.params))
        later = sorted({int(start) for start in starts if 0 < start < math.inf})
        known = _Counters(state.params, state.opt_state).read(state.opt_state)
        counters = {str(start): jax.tree.map(jnp.copy, known) for start in later} if known else {}
        return state.replace(extra={**state.extra, COUNTERS: counters})

    def of_trained(
        update: Update, grads: PyTree, state: TrainState, offered: Mapping[str, Any]
    ) -> tuple[PyTree, PyTree, dict[str, PyTree]]:
        starts = unfrozen_at(schedule, parameter_paths(state.params))
        epoch, split = state.extra[HYPERPARAMS][UNFREEZE_EPOCH], _Counters(state.params, state.opt_state)
        trains = {start: epoch >= start for start in starts}
        kept = jax.tree.unflatten(jax.tree.structure(state.params), [trains[start] for start in starts])
        grads = jax.tree.map(lambda keep, grad: jnp.where(keep, grad, jnp.zeros_like(grad)), kept, grads)
        counters = {0: split.read(state.opt_state)}
        counters |= {int(start): found for start, found in state.extra[COUNTERS].items()}
        done = {
            start: update(grads, state.replace(opt_state=split.replaced(state.opt_state, own)), offered)[:2]
            for start, own in counters.items()
        }
        of_leaf = [start if start in done else 0 for start in starts]
        updates = _merged({start: updates for start, (updates, _) in done.items()}, of_leaf)
        # -0.0: x + -0.0 is x for every x, but -0.0 + 0.0 is 0.0
        updates = jax.tree.map(lambda keep, one: jnp.where(keep, one, jnp.full_like(one, -0.0)), kept, updates)
        after = {start: found for start, (_, found) in done.items()}
        opt_state = split.merged(state.opt_state, after, of_leaf, [trains[start] for start in starts])
        later = {
            str(start): jax.tree.map(
                lambda new, old, start=start: jnp.where(trains[start], new, old), split.read(after[start]), own
            )
            for start, own in counters.items()
            if start
        }
        return updates, opt_state, {**state.extra, COUNTERS: later}

    def trains(state: TrainState) -> dict[str, jax.Array]:
        paths, epoch = parameter_paths(state.params), state.extra[HYPERPARAMS][UNFREEZE_EPOCH]
        return {path: epoch >= start for path, start in zip(paths, unfrozen_at(schedule, paths), strict=True)}

    never_trains = lambda path: not any(is_match(regex, path) for regex in schedule.values())
    refusal = (
        "Parameters cannot be unfrozen: the training step updates them itself. Use "
        "`state.apply_gradients(grads=grads)` in it."
    )
    unfreezing = with_initial(add_counters, with_hyperparameter(program, UNFREEZE_EPOCH, 0.0))
    unfreezing = with_update(unfreezing, of_trained, refusal).with_info(never_trains=never_trains)
    return unfreezing if train_bn else with_frozen_stats(unfreezing, trains)


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
        paths = [leaf_path(path).split(".") for path, _ in jax.tree_util.tree_leaves_with_path(opt_state)]
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
