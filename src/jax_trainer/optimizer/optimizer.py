"""Optimizers from their configuration: what one is, and `SGD`, `AdamW` and `Lamb`. `named` has all others of optax."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import jax.numpy as jnp
import optax
from compoconf import RegistrableConfigInterface, register, register_interface

from jax_trainer.core.extra_args import by_signature
from jax_trainer.optimizer.curves import constant
from jax_trainer.optimizer.elementary import ScheduleInterface
from jax_trainer.optimizer.groups import GroupConfig, Selection, grouped
from jax_trainer.optimizer.record import DEFAULT, recorded
from jax_trainer.optimizer.transforms import (
    GradientTransformInterface,
    WeightDecay,
    WeightDecayConfig,
    as_weight_decay,
)
from jax_trainer.settings import AtLeast, Below, IsRegex, Problem, Settings, SettingsError

Rate = float | optax.Schedule


@dataclass(frozen=True)
class IsFloatType:
    """Text that names a type of floating point numbers."""

    def allows(self, value: Any) -> bool:
        """Whether `value` is such a name."""
        try:
            return jnp.issubdtype(jnp.dtype(value), jnp.floating)
        except TypeError:
            return False

    @property
    def words(self) -> str:
        """What it asks for."""
        return "that names a float type, e.g. bfloat16"


@dataclass
class BaseOptimizerConfig(Settings):
    """The keys that every optimizer has.

    Args:
        learning_rate: a number or a schedule.
        transforms: what happens to gradients and updates, by any name, in the order written.
        log_learning_rate: kept for files that have it; the rate is always recorded in the optimizer's state.
        freeze: which parameters stay as they are and need no optimizer state, by their dotted path from its start.
        groups: parameters with a learning rate of their own, by the name under which that is reported.
    """

    learning_rate: Annotated[float, AtLeast(0)] | ScheduleInterface.cfgtype = 1e-3
    transforms: dict[str, GradientTransformInterface.cfgtype] = field(default_factory=dict)
    log_learning_rate: bool = True
    freeze: Annotated[str, IsRegex()] = ""
    groups: dict[str, GroupConfig] = field(default_factory=dict)

    def problems(self) -> Iterator[Problem]:
        """A group with the name of those in no group."""
        if DEFAULT in self.groups:
            yield "groups", f"{DEFAULT!r} is the name for parameters in no group. Give the group another name."


@register_interface
class OptimizerInterface(RegistrableConfigInterface):
    """An optimizer with its schedule, transforms, frozen parameters and groups, made from its configuration.

    Your own needs `transform`, and `decays` if some of its weight decay depends on the names of parameters.
    """

    config: Any  # the class of an optimizer's own configuration, which derives from `BaseOptimizerConfig`

    def __init__(self, config: Any) -> None:
        if type(self).build is OptimizerInterface.build and not isinstance(config, BaseOptimizerConfig):
            name = type(config).__name__
            raise TypeError(
                f"{type(self).__name__} needs the keys of `BaseOptimizerConfig`, which {name} lacks. Derive {name} "
                "from it, or write `build(self, total_steps)`."
            )
        self.config = config

    def transform(self, learning_rate: Rate) -> optax.GradientTransformation:
        """The optimizer alone, for parameters that share `learning_rate`, which is a number or a schedule."""
        raise NotImplementedError(f"{type(self).__name__} has no `transform`.")

    def decays(self) -> Mapping[str, WeightDecay]:
        """Its weight decay by parameter names, under the key that configures it."""
        return {}

    def build(self, total_steps: int | None = None) -> optax.GradientTransformationExtraArgs:
        """The whole optimizer for a run of `total_steps` updates (None: not known), for `learning_rate` to read."""
        rates = self._rates(total_steps)
        optimizers = {name: by_signature(self.transform(rate)) for name, rate in rates.items()}
        inner = grouped(
            Selection(self.config.freeze, {name: group.parameter_regex for name, group in self.config.groups.items()}),
            optimizers,
            before=self._chain(before_optimizer=True),
            after=self._chain(before_optimizer=False),
            check=self._check,
        )
        return recorded(inner, {name: _as_schedule(rate) for name, rate in rates.items()})

    def schedule(self, total_steps: int | None = None) -> optax.Schedule:
        """The learning rate of parameters in no group, as a function of the update count."""
        return _as_schedule(self._rate(self.config.learning_rate, "learning_rate", total_steps))

    def _rates(self, total_steps: int | None) -> dict[str, Rate]:
        base = self._rate(self.config.learning_rate, "learning_rate", total_steps)
        rates: dict[str, Rate] = {DEFAULT: base}
        for name, group in self.config.groups.items():
            if group.learning_rate_factor is not None:
                rates[name] = _scaled(base, group.learning_rate_factor)
            else:
                rates[name] = self._rate(group.learning_rate, f"groups.{name}.learning_rate", total_steps)
        return rates

    def _rate(self, given: Any, key: str, total_steps: int | None) -> Rate:
        if not isinstance(given, Settings):
            return float(given)
        try:
            return given.instantiate(ScheduleInterface).build(total_steps)
        except SettingsError as error:
            raise error.under(key) from error

    def _transforms(self) -> dict[str, GradientTransformInterface]:
        return {name: config.instantiate(GradientTransformInterface) for name, config in self.config.transforms.items()}

    def _chain(self, *, before_optimizer: bool) -> optax.GradientTransformationExtraArgs:
        parts = self._transforms().items()
        named = [(name, part.build()) for name, part in parts if part.config.before_optimizer == before_optimizer]
        return optax.with_extra_args_support(optax.named_chain(*named))

    def _check(self, trained: Sequence[str]) -> None:
        by_key = {f"transforms.{name}": part for name, part in self._transforms().items()}
        for key, part in {**by_key, **self.decays()}.items():
            try:
                part.check_paths(trained)
            except SettingsError as error:
                raise error.under(key) from error


def _as_schedule(rate: Rate) -> optax.Schedule:
    return rate if callable(rate) else constant(rate)


def _scaled(rate: Rate, factor: float) -> Rate:
    return (lambda count: rate(count) * factor) if callable(rate) else rate * factor


@dataclass
class SGDConfig(BaseOptimizerConfig):
    """How `SGD` steps.

    Args:
        momentum: which share of the last step is kept; null: none.
        nesterov: look ahead by the momentum.
        accumulator_dtype: the type in which the momentum is kept; null: that of the parameters.
    """

    momentum: Annotated[float, AtLeast(0), Below(1)] | None = None
    nesterov: bool = False
    accumulator_dtype: Annotated[str, IsFloatType()] | None = None


@register
class SGD(OptimizerInterface):
    """Stochastic gradient descent, with momentum if wanted."""

    config: SGDConfig

    def transform(self, learning_rate: Rate) -> optax.GradientTransformation:
        """optax's `sgd`."""
        config = self.config
        return optax.sgd(
            learning_rate, config.momentum, nesterov=config.nesterov, accumulator_dtype=config.accumulator_dtype
        )


@dataclass
class _MomentsConfig(BaseOptimizerConfig):
    """What optimizers have in common that remember gradients and their squares, and let weights decay.

    Args:
        b1: how long gradients are remembered.
        b2: how long their squares are.
        eps: keeps from dividing by nothing; outside the root.
        eps_root: the same inside the root.
        weight_decay: the strength for kernels and weights; or a section that also says which parameters.
    """

    b1: Annotated[float, AtLeast(0), Below(1)] = 0.9
    b2: Annotated[float, AtLeast(0), Below(1)] = 0.999
    eps: Annotated[float, AtLeast(0)] = 1e-8
    eps_root: Annotated[float, AtLeast(0)] = 0.0
    weight_decay: Annotated[float, AtLeast(0)] | WeightDecayConfig = field(default_factory=WeightDecayConfig)


class _WithDecay(OptimizerInterface):
    """An optimizer that has a `weight_decay` of its own."""

    def decays(self) -> Mapping[str, WeightDecay]:
        """Its `weight_decay`."""
        return {"weight_decay": as_weight_decay(self.config.weight_decay)}


@dataclass
class AdamWConfig(_MomentsConfig):
    """How `AdamW` steps.

    Args:
        nesterov: look ahead by the momentum.
        mu_dtype: the type in which the momentum is kept; null: that of the parameters.
    """

    nesterov: bool = False
    mu_dtype: Annotated[str, IsFloatType()] | None = None


@register
class AdamW(_WithDecay):
    """Adam with decoupled weight decay: learning rate × `weight_decay` × parameter is subtracted."""

    config: AdamWConfig

    def transform(self, learning_rate: Rate) -> optax.GradientTransformation:
        """optax's `adamw`."""
        config, decay = self.config, self.decays()["weight_decay"]
        return optax.adamw(
            learning_rate,
            *(config.b1, config.b2, config.eps, config.eps_root, config.mu_dtype),
            weight_decay=decay.config.value,
            mask=decay.mask,
            nesterov=config.nesterov,
        )


@dataclass
class LambConfig(_MomentsConfig):
    """How `Lamb` steps."""

    eps: Annotated[float, AtLeast(0)] = 1e-6


@register
class Lamb(_WithDecay):
    """Adam whose step is scaled, parameter by parameter, to the parameter's norm; for large batches.

    Every parameter is scaled, also those that do not decay.
    """

    config: LambConfig

    def transform(self, learning_rate: Rate) -> optax.GradientTransformation:
        """optax's `lamb`."""
        config, decay = self.config, self.decays()["weight_decay"]
        return optax.lamb(
            learning_rate,
            *(config.b1, config.b2, config.eps, config.eps_root),
            weight_decay=decay.config.value,
            mask=decay.mask,
        )
