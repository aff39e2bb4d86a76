"""The optimizer interface, and the optimizers with keys of their own. `named` has the other optimizers of optax."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from inspect import Parameter, signature
from typing import Annotated, Any, ClassVar, Literal

import jax.numpy as jnp
import optax
from compoconf import RegistrableConfigInterface, register, register_interface
from optax import contrib

from jax_trainer.config.settings import Above, AtLeast, AtMost, Below, IsRegex, Problem, Settings, errors_of
from jax_trainer.core.extra_args import Freezes, by_signature, freezing
from jax_trainer.diagnostics.returned import class_of
from jax_trainer.optimizer.groups import GroupConfig, Selection, recorded
from jax_trainer.optimizer.reported import DEFAULT
from jax_trainer.optimizer.scheduler import ScheduleInterface
from jax_trainer.optimizer.transforms import (
    GradientTransformInterface,
    WeightDecay,
    WeightDecayConfig,
    as_weight_decay,
    is_match,
)

Decay = Annotated[float, AtLeast(0), Below(1)]  # decay rate of a moment
Rate = float | optax.Schedule
Factory = Callable[..., optax.GradientTransformation]

# names of arguments of optax; Polyak SGD estimates its step size, and `scaling` is a factor for it
RATES, DECAYS, MASKS = (
    ("learning_rate", "scaling"),
    ("weight_decay", "weight_decay_rate"),
    ("mask", "weight_decay_mask"),
)


@dataclass(frozen=True)
class IsFloatType:
    """Constraint: the name of a floating-point dtype."""

    def allows(self, value: Any) -> bool:
        """Whether `value` names a floating-point dtype."""
        try:
            return jnp.issubdtype(jnp.dtype(value), jnp.floating)
        except TypeError:
            return False

    @property
    def description(self) -> str:
        """The constraint as text, for messages."""
        return "that names a float type, e.g. bfloat16"


@dataclass
class BaseOptimizerConfig(Settings):
    """The keys of every optimizer.

    Args:
        learning_rate: a number or a schedule.
        transforms: gradient transforms by name, applied in this order.
        log_learning_rate: has no effect; the learning rate is always recorded in the optimizer state.
        freeze: regular expression of frozen parameters, matched from the start of the dotted path. A BatchNorm all of
            whose parameters are frozen keeps its running statistics, too.
        train_bn: update the running statistics of frozen BatchNorms.
        groups: parameter groups with their own learning rate or weight decay; the names are those of the logged rates.
    """

    learning_rate: Annotated[float, AtLeast(0)] | ScheduleInterface.cfgtype = 1e-3
    transforms: dict[str, GradientTransformInterface.cfgtype] = field(default_factory=dict)
    log_learning_rate: bool = True
    freeze: Annotated[str, IsRegex()] = ""
    train_bn: bool = False
    groups: dict[str, GroupConfig] = field(default_factory=dict)

    def problems(self) -> Iterator[Problem]:
        """Reports a group with the reserved name, and a weight decay that the optimizer does not have."""
        if DEFAULT in self.groups:
            yield "groups", f"{DEFAULT!r} is reserved for parameters in no group. Rename the group."
        for name, group in self.groups.items():
            if group.weight_decay is not None and not any(hasattr(self, key) for key in DECAYS):
                text = "The optimizer has no weight decay. Use the transform `WeightDecay`, or another optimizer."
                yield f"groups.{name}.weight_decay", text


@register_interface
class OptimizerInterface(RegistrableConfigInterface):
    """An optimizer with its schedule, transforms, frozen parameters and groups, built from its configuration.

    A custom optimizer implements `transform`, and `decays` if its weight decay depends on parameter names.
    """

    config: Any  # a subclass of `BaseOptimizerConfig`

    def __init__(self, config: Any) -> None:
        if type(self).build is OptimizerInterface.build and not isinstance(config, BaseOptimizerConfig):
            name = type(config).__name__
            raise TypeError(
                f"{type(self).__name__} needs the keys of `BaseOptimizerConfig`, which {name} lacks. Make {name} a "
                "subclass of it, or implement `build(self, total_steps)`."
            )
        self.config = config

    def transform(self, learning_rate: Rate) -> optax.GradientTransformation:
        """The optax optimizer for parameters with this `learning_rate`, a number or a schedule."""
        raise NotImplementedError(f"{type(self).__name__} has no `transform`.")

    def decays(self) -> Mapping[str, WeightDecay]:
        """The weight decays that depend on parameter names, by configuration key."""
        return {}

    def build(self, total_steps: int | None = None) -> optax.GradientTransformationExtraArgs:
        """The complete optimizer for a run of `total_steps` updates; None if unknown. See `learning_rate`."""
        rates = self._rates(total_steps)
        optimizers = {name: by_signature(self._for_group(name).transform(rate)) for name, rate in rates.items()}
        made = recorded(
            self._selection,
            optimizers,
            {name: _as_schedule(rate) for name, rate in rates.items()},
            before=self._chain(before_optimizer=True),
            after=self._chain(before_optimizer=False),
            check=self._check,
        )
        freezing(made.update, self.freezes)
        return made

    @property
    def freezes(self) -> Freezes | None:
        """What is frozen; None: nothing."""
        frozen = lambda path: is_match(self.config.freeze, path)
        kept = (lambda path: False) if self.config.train_bn else frozen
        return Freezes(frozen, kept) if self.config.freeze else None

    def schedule(self, total_steps: int | None = None) -> optax.Schedule:
        """The learning rate of parameters in no group, as a function of the update count."""
        return _as_schedule(self._rate(self.config.learning_rate, "learning_rate", total_steps))

    def _rates(self, total_steps: int | None) -> dict[str, Rate]:
        base = self._rate(self.config.learning_rate, "learning_rate", total_steps)
        rates: dict[str, Rate] = {DEFAULT: base}
        for name, group in self.config.groups.items():
            if group.learning_rate is not None:
                rates[name] = self._rate(group.learning_rate, f"groups.{name}.learning_rate", total_steps)
            else:
                factor = group.learning_rate_factor
                rates[name] = base if factor is None else _scaled(base, factor)
        return rates

    @property
    def _selection(self) -> Selection:
        return Selection(self.config.freeze, {name: one.parameter_regex for name, one in self.config.groups.items()})

    def _for_group(self, name: str) -> "OptimizerInterface":
        """This optimizer with the weight decay of a group."""
        group = self.config.groups.get(name)
        if group is None or group.weight_decay is None:
            return self
        key = next(key for key in DECAYS if hasattr(self.config, key))
        with errors_of(f"groups.{name}"):
            return type(self)(replace(self.config, **{key: group.weight_decay}))

    def _rate(self, value: Any, key: str, total_steps: int | None) -> Rate:
        if not isinstance(value, Settings):
            return float(value)
        with errors_of(key):
            return value.instantiate(ScheduleInterface).build(total_steps)

    def _transforms(self) -> dict[str, GradientTransformInterface]:
        return {name: config.instantiate(GradientTransformInterface) for name, config in self.config.transforms.items()}

    def _chain(self, *, before_optimizer: bool) -> optax.GradientTransformationExtraArgs:
        parts = self._transforms().items()
        named = [(name, part.build()) for name, part in parts if part.config.before_optimizer == before_optimizer]
        return optax.with_extra_args_support(optax.named_chain(*named))

    def _check(self, trained: Sequence[str]) -> None:
        labels = self._selection.labels(trained)
        own = [name for name, group in self.config.groups.items() if group.weight_decay is not None]
        parts = [(f"transforms.{name}", part, trained) for name, part in self._transforms().items()]
        others = [path for path, label in zip(trained, labels, strict=True) if label not in own]
        parts += [(key, decay, others) for key, decay in self.decays().items()]
        for name in own:
            paths = [path for path, label in zip(trained, labels, strict=True) if label == name]
            decays = self._for_group(name).decays().values()
            parts += [(f"groups.{name}.weight_decay", decay, paths) for decay in decays]
        for key, part, paths in parts:
            with errors_of(key):
                part.check_paths(paths)


def _as_schedule(rate: Rate) -> optax.Schedule:
    return rate if callable(rate) else optax.constant_schedule(rate)


def _scaled(rate: Rate, factor: float) -> Rate:
    return (lambda count: rate(count) * factor) if callable(rate) else rate * factor


class OptaxOptimizer(OptimizerInterface):
    """An optimizer of optax, called with those keys of its configuration that are its arguments."""

    factory: ClassVar[Factory]

    @property
    def _mask(self) -> str:
        return argument_of(self.factory, MASKS)

    def decays(self) -> Mapping[str, WeightDecay]:
        key = argument_of(self.factory, DECAYS) if self._mask else ""
        return {key: as_weight_decay(getattr(self.config, key))} if key else {}

    def transform(self, learning_rate: Rate) -> optax.GradientTransformation:
        known = {name: value for name, value in vars(self.config).items() if name in arguments_of(self.factory)}
        known = {name: tuple(value) if isinstance(value, list) else value for name, value in known.items()}
        for key, decay in self.decays().items():
            # null is not 0: it omits the decay from the chain
            known[key] = None if known[key] is None else decay.config.value
            known[self._mask] = decay.mask
        return self.factory(**{**known, argument_of(self.factory, RATES): learning_rate})


@cache
def arguments_of(factory: Factory) -> Mapping[str, Parameter]:
    """The parameters of a function of optax, by name."""
    return signature(factory, eval_str=True).parameters


def argument_of(factory: Factory, names: Sequence[str]) -> str:
    """The one of `names` that is an argument of a function of optax; else empty."""
    return next((name for name in names if name in arguments_of(factory)), "")


@dataclass
class SGDConfig(BaseOptimizerConfig):
    """Configuration of `SGD`.

    Args:
        momentum: decay rate of the momentum; null: no momentum.
        nesterov: use Nesterov momentum.
        accumulator_dtype: dtype of the momentum accumulator; null: that of the parameters.
    """

    momentum: Decay | None = None
    nesterov: bool = False
    accumulator_dtype: Annotated[str, IsFloatType()] | None = None


@register
class SGD(OptaxOptimizer):
    """Stochastic gradient descent, optionally with momentum."""

    config: SGDConfig
    factory = staticmethod(optax.sgd)


@dataclass
class _MomentsConfig(BaseOptimizerConfig):
    """Keys of optimizers with first and second moments and weight decay.

    Args:
        b1: decay rate of the first moment.
        b2: decay rate of the second moment.
        eps: added to the denominator, outside of the square root, for numerical stability.
        eps_root: added to the denominator, inside of the square root, for numerical stability.
        weight_decay: strength of the weight decay of kernels and weights; or a section that also selects parameters.
    """

    b1: Decay = 0.9
    b2: Decay = 0.999
    eps: Annotated[float, AtLeast(0)] = 1e-8
    eps_root: Annotated[float, AtLeast(0)] = 0.0
    weight_decay: Annotated[float, AtLeast(0)] | WeightDecayConfig = field(default_factory=WeightDecayConfig)


@dataclass
class AdamWConfig(_MomentsConfig):
    """Configuration of `AdamW`.

    Args:
        nesterov: use Nesterov momentum.
        mu_dtype: dtype of the first moment accumulator; null: that of the parameters.
    """

    nesterov: bool = False
    mu_dtype: Annotated[str, IsFloatType()] | None = None


@register
class AdamW(OptaxOptimizer):
    """Adam with decoupled weight decay: learning rate × `weight_decay` × parameter is subtracted."""

    config: AdamWConfig
    factory = staticmethod(optax.adamw)


@dataclass
class LambConfig(_MomentsConfig):
    """Configuration of `Lamb`."""

    eps: Annotated[float, AtLeast(0)] = 1e-6


@register
class Lamb(OptaxOptimizer):
    """Adam with a layer-wise trust ratio, for large batches.

    The trust ratio scales every parameter, also those without weight decay.
    """

    config: LambConfig
    factory = staticmethod(optax.lamb)


@dataclass
class LBFGSConfig(BaseOptimizerConfig):
    """Configuration of `LBFGS`.

    Args:
        learning_rate: a factor for the direction in which the line search looks: a number or a schedule.
        memory_size: number of past updates from which the inverse Hessian is approximated.
        scale_init_precond: scale the initial approximation by the last gradients.
        max_linesearch_steps: maximum number of evaluations of the loss and its gradient per update.
        initial_guess_strategy: the first step size of a line search: one (1), or keep (that of the last one).
    """

    learning_rate: Annotated[float, AtLeast(0)] | ScheduleInterface.cfgtype = 1.0
    memory_size: Annotated[int, AtLeast(1)] = 10
    scale_init_precond: bool = True
    max_linesearch_steps: Annotated[int, AtLeast(1)] = 20
    initial_guess_strategy: Literal["one", "keep"] = "one"


@register
class LBFGS(OptimizerInterface):
    """L-BFGS with a zoom line search, for losses without noise: every batch must be the whole data set."""

    config: LBFGSConfig

    def transform(self, learning_rate: Rate) -> optax.GradientTransformation:
        config = self.config
        guess = config.initial_guess_strategy
        linesearch = optax.scale_by_zoom_linesearch(config.max_linesearch_steps, initial_guess_strategy=guess)
        return optax.lbfgs(learning_rate, config.memory_size, config.scale_init_precond, linesearch)


@dataclass
class _ScheduleFreeConfig(BaseOptimizerConfig):
    """Keys of schedule-free optimizers.

    Args:
        learning_rate: a number, or a schedule with a warmup: no decay is needed.
        b1: weight of the average in the parameters at which gradients are computed.
        weight_decay: strength of the weight decay of all parameters.
        weight_lr_power: exponent of the learning rate in the weights of the average.
        state_dtype: dtype of the sequence that is averaged; null: that of the parameters.
    """

    b1: Annotated[float, Above(0), AtMost(1)] = 0.9
    weight_decay: Annotated[float, AtLeast(0)] = 0.0
    weight_lr_power: Annotated[float, AtLeast(0)] = 2.0
    state_dtype: Annotated[str, IsFloatType()] | None = None


@dataclass
class ScheduleFreeAdamWConfig(_ScheduleFreeConfig):
    """Configuration of `ScheduleFreeAdamW`.

    Args:
        b2: decay rate of the second moment.
        eps: added to the denominator for numerical stability.
    """

    learning_rate: Annotated[float, AtLeast(0)] | ScheduleInterface.cfgtype = 2.5e-3
    b2: Decay = 0.999
    eps: Annotated[float, AtLeast(0)] = 1e-8


@register
class ScheduleFreeAdamW(OptaxOptimizer):
    """AdamW without a schedule: evaluation uses an average of the weights, which replaces a decay of the rate."""

    config: ScheduleFreeAdamWConfig
    factory = staticmethod(contrib.schedule_free_adamw)


@dataclass
class ScheduleFreeSGDConfig(_ScheduleFreeConfig):
    """Configuration of `ScheduleFreeSGD`."""

    learning_rate: Annotated[float, AtLeast(0)] | ScheduleInterface.cfgtype = 1.0


@register
class ScheduleFreeSGD(OptaxOptimizer):
    """SGD without a schedule: evaluation uses an average of the weights, which replaces a decay of the rate."""

    config: ScheduleFreeSGDConfig
    factory = staticmethod(contrib.schedule_free_sgd)


def checked_optimizer(optimizer: Any, or_else: str = "") -> optax.GradientTransformation:
    """`optimizer`, if it is an optax optimizer; `or_else` names accepted alternatives.

    >>> checked_optimizer(optax.adam)
    Traceback (most recent call last):
    TypeError: `optimizer` must be an optax optimizer, got the function `adam`. Call it: `optax.adam(1e-3)`.
    """
    if isinstance(optimizer, optax.MultiSteps):
        return optimizer.gradient_transformation()
    if isinstance(optimizer, optax.GradientTransformation):
        return optimizer
    raise TypeError(f"`optimizer` must be an optax optimizer{or_else}, got {_kind(optimizer)}. {_hint(optimizer)}")


def _kind(optimizer: Any) -> str:
    if isinstance(optimizer, type):
        return f"the class {class_of(optimizer)}"
    if hasattr(optimizer, "__name__"):
        return f"the function `{optimizer.__name__}`"
    return "None" if optimizer is None else f"{optimizer!r} of class {class_of(optimizer)}"


def _hint(optimizer: Any) -> str:
    if isinstance(optimizer, str) and callable(getattr(optax, optimizer, None)):
        return f"Pass `optax.{optimizer}(1e-3)`."
    if isinstance(optimizer, float):
        return f"Pass `optax.adam({optimizer})`."
    if isinstance(optimizer, list | tuple):
        return "Pass `optax.chain(…)`, which applies them in order."
    if callable(optimizer) and optimizer is getattr(optax, getattr(optimizer, "__name__", ""), None):
        return f"Call it: `optax.{optimizer.__name__}(1e-3)`."
    return "Pass `optax.adam(1e-3)`, or `optax.adam(schedule)`."
