"""Frozen parameters, and parameter groups with their own learning rate and weight decay.

Clipping by the global norm includes all trained parameters, whatever their group, and no frozen ones. Each group then
has its own optimizer, which sees only its parameters.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jax_trainer.config.settings import AtLeast, IsRegex, Problem, Settings, SettingsError, errors_of
from jax_trainer.core import PyTree
from jax_trainer.core.extra_args import PARAMETER_ARGS, Split
from jax_trainer.diagnostics.leaves import listed, parameter_paths
from jax_trainer.optimizer.reported import DEFAULT, Recorded
from jax_trainer.optimizer.scheduler import ScheduleInterface
from jax_trainer.optimizer.transforms import WeightDecayConfig, is_match, require_match


@dataclass
class GroupConfig(Settings):
    """A parameter group with its own learning rate or weight decay; what is not set is that of the optimizer.

    Args:
        parameter_regex: regular expression, matched from the start of the dotted path of a parameter.
        learning_rate: a number or a schedule.
        learning_rate_factor: alternatively, a factor for the learning rate of the optimizer.
        weight_decay: instead of that of the optimizer: a number for kernels and weights, or a section that selects.
    """

    parameter_regex: Annotated[str, IsRegex()]
    learning_rate: Annotated[float, AtLeast(0)] | ScheduleInterface.cfgtype | None = None
    learning_rate_factor: Annotated[float, AtLeast(0)] | None = None
    weight_decay: Annotated[float, AtLeast(0)] | WeightDecayConfig | None = None

    def problems(self) -> Iterator[Problem]:
        """Reports missing parameters, an ambiguous learning rate, and a group without anything of its own."""
        if not self.parameter_regex:
            yield "parameter_regex", "`parameter_regex` is empty. Set it to the parameters of the group."
        if self.learning_rate is not None and self.learning_rate_factor is not None:
            yield "learning_rate", "`learning_rate` and `learning_rate_factor` are both set. Set one."
        if self.learning_rate is None and self.learning_rate_factor is None and self.weight_decay is None:
            text = "A group needs a `learning_rate`, a `learning_rate_factor` or a `weight_decay`, but none is set."
            yield "learning_rate", f"{text} Set one."


@dataclass(frozen=True)
class Selection:
    """The frozen parameters, and the parameters of each group."""

    freeze: str = ""
    groups: Mapping[str, str] | None = None  # regular expressions by name

    def labels(self, paths: Sequence[str]) -> list[str | None]:
        """The group of every parameter: `default` for those in none, None for frozen ones."""
        groups = (self.groups or {}).items()
        own = {path: next((name for name, regex in groups if is_match(regex, path)), DEFAULT) for path in paths}
        return [None if is_match(self.freeze, path) else own[path] for path in paths]

    def split(self, params: PyTree) -> Split:
        """All parameters by their group."""
        return Split(params, self.labels(parameter_paths(params)))

    def trained(self, paths: Sequence[str]) -> list[str]:
        """The parameters that are not frozen; raises for expressions that match nothing, everything, or overlap."""
        if self.freeze:
            require_match("freeze", self.freeze, paths)
        trained = [path for path in paths if not is_match(self.freeze, path)]
        if paths and not trained:
            text = f"`freeze` {self.freeze!r} matches every parameter, so none is trained: {listed(paths)}."
            raise SettingsError([("freeze", f"{text} Freeze fewer.")])
        for name, regex in (self.groups or {}).items():
            with errors_of(f"groups.{name}"):
                require_match("parameter_regex", regex, trained, among="trained parameter")
        for path in trained:
            matching = [name for name, regex in (self.groups or {}).items() if is_match(regex, path)]
            if len(matching) > 1:
                names = " and ".join(map(repr, matching))
                text = f"The parameter {path} is in the groups {names}. Make only one match it."
                raise SettingsError([(f"groups.{matching[1]}.parameter_regex", text)])
        return trained


class Parts(NamedTuple):
    """The states of the transforms before and after the optimizers, and of the optimizer of each group."""

    before: PyTree
    optimizers: dict[str, PyTree]
    after: PyTree


def recorded(
    selection: Selection,
    optimizers: Mapping[str, optax.GradientTransformationExtraArgs],
    schedules: Mapping[str, optax.Schedule],
    *,
    before: optax.GradientTransformationExtraArgs,
    after: optax.GradientTransformationExtraArgs,
    check: Callable[[Sequence[str]], None] = lambda trained: None,
) -> optax.GradientTransformationExtraArgs:
    """Chains `before`, the optimizer of each group, and `after`, with a state that records the learning rates.

    The count is incremented once per optimizer update, regardless of micro-batches and skipped steps, and is saved
    with the state.

    Args:
        selection: the frozen parameters, and those of each group.
        optimizers: that of each group.
        schedules: the learning rate of each group.
        before: transforms of gradients; their `update` takes `learning_rates`, one for each parameter.
        after: transforms of updates, in the same way.
        check: called by `init` with the paths of the trained parameters.
    """

    def rates_at(count: jax.Array) -> dict[str, jax.Array]:
        return {name: jnp.asarray(schedule(count), jnp.float32) for name, schedule in schedules.items()}

    def init(params: PyTree) -> Recorded:
        check(selection.trained(parameter_paths(params)))
        split, count = selection.split(params), jnp.zeros((), jnp.int32)
        trained, used = split.only(params), {name: tx for name, tx in optimizers.items() if name in split.labels}
        states = {name: tx.init(split.only(params, name)) for name, tx in used.items()}
        return Recorded(count, rates_at(count), Parts(before.init(trained), states, after.init(trained)))

    def update(updates: PyTree, state: Any, params: PyTree | None = None, **extra: Any) -> tuple[PyTree, Recorded]:
        split, by_name, inner = selection.split(updates), rates_at(state.updates), state.inner
        grads, weights = split.only(updates), split.only(params)
        shared = {name: value for name, value in extra.items() if name not in PARAMETER_ARGS}
        shared["learning_rates"] = split.filled(lambda label: optax.MaskedNode() if label is None else by_name[label])
        changes, before_state = before.update(grads, inner.before, weights, **shared)
        own, states = changes, {}
        for name, one in inner.optimizers.items():
            arguments = split.only(changes, name), one, split.only(weights, name)
            change, states[name] = optimizers[name].update(*arguments, **split.restricted(extra, params, name))
            own = split.joined(change, own, name)
        own, after_state = after.update(own, inner.after, weights, **shared)
        # -0.0: x + -0.0 is x for every x, but -0.0 + 0.0 is 0.0
        frozen = lambda label, change, grad: jnp.full_like(grad, -0.0) if label is None else change
        count = jnp.asarray(optax.safe_increment(state.updates))
        return split.filled(frozen, own, updates), Recorded(count, by_name, Parts(before_state, states, after_state))

    return optax.GradientTransformationExtraArgs(init, update)
