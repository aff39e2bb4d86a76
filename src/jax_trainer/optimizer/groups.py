"""Parameters that are treated differently: frozen ones, and groups with a learning rate of their own.

Clipping by a global norm sees all trained parameters at once, whatever their group; frozen ones do not count. Each
group then has an optimizer of its own, which sees nothing else.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jax_trainer.core import PyTree
from jax_trainer.optimizer.elementary import ScheduleInterface
from jax_trainer.optimizer.record import DEFAULT
from jax_trainer.optimizer.selection import is_match, listed, parameter_paths, require_match
from jax_trainer.settings import AtLeast, IsRegex, Problem, Settings, SettingsError


@dataclass
class GroupConfig(Settings):
    """Parameters with a learning rate of their own.

    Args:
        parameter_regex: which parameters, by their dotted path from its start.
        learning_rate: their rate: a number or a schedule.
        learning_rate_factor: instead: by how much the optimizer's own rate is multiplied for them.
    """

    parameter_regex: Annotated[str, IsRegex()]
    learning_rate: Annotated[float, AtLeast(0)] | ScheduleInterface.cfgtype | None = None
    learning_rate_factor: Annotated[float, AtLeast(0)] | None = None

    def problems(self) -> Iterator[Problem]:
        """No parameters, or no rate, or two."""
        if not self.parameter_regex:
            yield "parameter_regex", "`parameter_regex` is empty. Say which parameters the group is about."
        if (self.learning_rate is None) == (self.learning_rate_factor is None):
            both = "both are given" if self.learning_rate is not None else "none is given"
            yield "learning_rate", f"A group has a `learning_rate` or a `learning_rate_factor`, but {both}. Give one."


@dataclass(frozen=True)
class Selection:
    """Which parameters are frozen, and which belong to which group."""

    freeze: str = ""
    groups: Mapping[str, str] | None = None  # by name, the expression

    def labels(self, paths: Sequence[str]) -> list[str | None]:
        """The group of every parameter: `default` for those in none, None for frozen ones."""
        return [self._label(path) for path in paths]

    def _label(self, path: str) -> str | None:
        if is_match(self.freeze, path):
            return None
        return next((name for name, regex in (self.groups or {}).items() if is_match(regex, path)), DEFAULT)

    def trained(self, paths: Sequence[str]) -> list[str]:
        """The parameters that are not frozen; refuses expressions that match nothing, everything, or too much."""
        if self.freeze:
            require_match("freeze", self.freeze, paths)
        trained = [path for path in paths if not is_match(self.freeze, path)]
        if paths and not trained:
            text = f"`freeze` {self.freeze!r} matches every parameter, which leaves nothing to train: {listed(paths)}."
            raise SettingsError([("freeze", f"{text} Freeze fewer.")])
        for name, regex in (self.groups or {}).items():
            try:
                require_match("parameter_regex", regex, trained, among="trained parameter")
            except SettingsError as error:
                raise error.under(f"groups.{name}") from error
        for path in trained:
            self._refuse_two_groups(path)
        return trained

    def _refuse_two_groups(self, path: str) -> None:
        mine = [name for name, regex in (self.groups or {}).items() if is_match(regex, path)]
        if len(mine) > 1:
            text = f"The parameter {path} is in the groups {' and '.join(map(repr, mine))}. Let only one match it."
            raise SettingsError([(f"groups.{mine[1]}.parameter_regex", text)])


OF_PARAMETERS = ("grad", "value_fn", "grad_fn")  # what a step offers that is of all parameters together


class Parts(NamedTuple):
    """The states of what happens before, in and after the optimizers, of which there is one per group."""

    before: PyTree
    optimizers: dict[str, PyTree]
    after: PyTree


class _Split:
    """The leaves of a tree by label. What is not asked for is an `optax.MaskedNode`, which holds no arrays."""

    def __init__(self, tree: PyTree, selection: Selection) -> None:
        self.labels = selection.labels(parameter_paths(tree))
        self._structure = jax.tree.structure(tree)

    def only(self, tree: PyTree, keep: Callable[[str | None], bool]) -> PyTree:
        """`tree` with the leaves whose label is kept; None stays None."""
        if tree is None:
            return None
        leaves = zip(self.labels, self._structure.flatten_up_to(tree), strict=True)
        return self.filled(leaf if keep(label) else optax.MaskedNode() for label, leaf in leaves)

    def trained(self, tree: PyTree) -> PyTree:
        """`tree` without frozen leaves."""
        return self.only(tree, lambda label: label is not None)

    def group(self, tree: PyTree, name: str) -> PyTree:
        """`tree` with the leaves of one group."""
        return self.only(tree, lambda label: label == name)

    def offered(self, extra: Mapping[str, Any], params: PyTree, name: str) -> dict[str, Any]:
        """What of `extra` is of all parameters, as it is of one group while the others stay."""

        def with_group(tree: PyTree) -> PyTree:
            leaves = zip(self.labels, *map(self._structure.flatten_up_to, (params, tree)), strict=True)
            return self.filled(mine if label == name else other for label, other, mine in leaves)

        kinds: dict[str, Callable[[Any], Any]] = {
            "grad": lambda grad: self.group(grad, name),
            "value_fn": lambda value_fn: lambda tree: value_fn(with_group(tree)),
            "grad_fn": lambda grad_fn: lambda tree, *more: self.group(grad_fn(with_group(tree), *more), name),
        }
        return {kind: kinds[kind](extra[kind]) for kind in OF_PARAMETERS if kind in extra}

    def joined(self, groups: Mapping[str, PyTree]) -> PyTree:
        """One tree out of those of the groups."""
        leaves = {name: self._structure.flatten_up_to(tree) for name, tree in groups.items()}
        nothing = optax.MaskedNode()
        return self.filled(
            nothing if label is None else leaves[label][index] for index, label in enumerate(self.labels)
        )

    def rates(self, by_name: Mapping[str, jax.Array]) -> PyTree:
        """The learning rate of every trained parameter."""
        return self.filled(optax.MaskedNode() if label is None else by_name[label] for label in self.labels)

    def whole(self, updates: PyTree, grads: PyTree) -> PyTree:
        """`updates`, with one that changes nothing for every frozen parameter."""
        leaves = zip(self.labels, *map(self._structure.flatten_up_to, (updates, grads)), strict=True)
        # minus zero: adding it leaves every number as it is, and adding zero would turn minus zero into zero
        return self.filled(jnp.full_like(grad, -0.0) if label is None else leaf for label, leaf, grad in leaves)

    def filled(self, leaves: Any) -> PyTree:
        """The tree with these leaves."""
        return self._structure.unflatten(leaves)


def grouped(
    selection: Selection,
    optimizers: Mapping[str, optax.GradientTransformationExtraArgs],
    *,
    before: optax.GradientTransformationExtraArgs,
    after: optax.GradientTransformationExtraArgs,
    check: Callable[[Sequence[str]], None] = lambda trained: None,
) -> optax.GradientTransformationExtraArgs:
    """`before`, then the optimizer of each group, then `after`; told the `learning_rates` of the groups by name.

    Args:
        check: looks at the paths of trained parameters before the first update, and raises what is wrong with them.
    """

    def init(params: PyTree) -> Parts:
        check(selection.trained(parameter_paths(params)))
        split = _Split(params, selection)
        trained = split.trained(params)
        states = {
            name: optimizer.init(split.group(params, name))
            for name, optimizer in optimizers.items()
            if name in split.labels
        }
        return Parts(before.init(trained), states, after.init(trained))

    def update(
        updates: PyTree,
        state: Any,
        params: PyTree | None = None,
        *,
        learning_rates: Mapping[str, jax.Array] = MappingProxyType({}),
        **extra: Any,
    ) -> tuple[PyTree, Parts]:
        split = _Split(updates, selection)
        grads, weights, rates = split.trained(updates), split.trained(params), split.rates(learning_rates)
        shared = {name: value for name, value in extra.items() if name not in OF_PARAMETERS}
        changes, before_state = before.update(grads, state.before, weights, learning_rates=rates, **shared)
        done = {
            name: optimizers[name].update(
                *(split.group(changes, name), inner, split.group(weights, name)),
                **{**shared, **split.offered(extra, params, name)},
            )
            for name, inner in state.optimizers.items()
        }
        changes = split.joined({name: change for name, (change, _) in done.items()})
        changes, after_state = after.update(changes, state.after, weights, learning_rates=rates, **shared)
        states = {name: inner for name, (_, inner) in done.items()}
        return split.whole(changes, updates), Parts(before_state, states, after_state)

    return optax.GradientTransformationExtraArgs(init, update)
