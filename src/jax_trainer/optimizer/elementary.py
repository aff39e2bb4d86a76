"""Learning rates that change in one way: what a schedule is, and five of them, each with its configuration.

A schedule is built with the number of optimizer updates of the run. It fills in the length that was left out, and
must agree with one that was given. What it reads is the optimizer's own count of updates, from 0.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import optax
from compoconf import RegistrableConfigInterface, register, register_interface

from jax_trainer.optimizer import curves
from jax_trainer.settings import Above, AtLeast, Problem, Settings, SettingsError


def agrees(a: float, b: float) -> bool:
    """Whether two learning rates are the same for all purposes."""
    return math.isclose(a, b, rel_tol=1e-5, abs_tol=1e-12)


@dataclass
class BaseScheduleConfig(Settings):
    """The keys that every schedule has.

    Args:
        init_value: the rate at the first update.
        end_value: the rate at the end. It follows from the other keys: it can be left out, and must agree if given.
        steps: for how many optimizer updates; left out: as many as the run makes.
    """

    init_value: Annotated[float, AtLeast(0)] = 1e-3
    end_value: Annotated[float, AtLeast(0)] | None = None
    steps: Annotated[int, AtLeast(1)] | None = None

    @property
    def last_value(self) -> float | None:
        """The rate at the end, as it follows from the other keys; None: it does not."""
        return None

    def problems(self) -> Iterator[Problem]:
        """An `end_value` that the other keys contradict."""
        last = self.last_value
        if last is not None and self.end_value is not None and not agrees(self.end_value, last):
            text = f"`end_value` is {self.end_value:g}, but the other keys end at {last:g}. "
            yield "end_value", text + "Leave `end_value` out, or make them agree."


@register_interface
class ScheduleInterface(RegistrableConfigInterface):
    """A learning rate as a function of the update count, made from its configuration."""

    config: Any  # the class of a schedule's own configuration, which derives from `BaseScheduleConfig`
    length_key = "steps"  # what to change where the length is wrong and `steps` was left out

    def __init__(self, config: BaseScheduleConfig) -> None:
        self.config = config

    @property
    def length(self) -> int | None:
        """For how many updates it was made; None: for as many as there are."""
        return self.config.steps

    def build(self, total_steps: int | None = None) -> optax.Schedule:
        """The schedule for a run of `total_steps` optimizer updates, if that is known."""
        length = self.length
        if total_steps is not None and total_steps < 1:
            raise ValueError(f"`total_steps` must be at least 1, got {total_steps}. Use None if it is not known.")
        if length is not None and total_steps is not None and length != total_steps:
            text = f"The schedule lasts {length} updates, but the run makes {total_steps}. "
            text += "Make them agree, or leave a length out, which then follows the run."
            raise SettingsError([(self.length_key if self.config.steps is None else "steps", text)])
        return self.curve(total_steps if length is None else length)

    def curve(self, steps: int | None) -> optax.Schedule:
        """The schedule over `steps` updates; None: nobody knows how many there will be."""
        raise NotImplementedError(f"{type(self).__name__} has no `curve`.")


def known(steps: int | None) -> int:
    """`steps`, or an error that asks for them."""
    if steps is None:
        text = "How many updates the run makes is not known here, so the schedule has no length. Give its `steps`, or "
        text += "the run a length (`train_epochs` or `max_steps`)."
        raise SettingsError([("steps", text)])
    return steps


@dataclass
class ConstantScheduleConfig(BaseScheduleConfig):
    """One rate for all updates: `init_value`."""

    @property
    def last_value(self) -> float:
        """The one rate."""
        return self.init_value


@register
class ConstantSchedule(ScheduleInterface):
    """The same rate at every update. Needs no length."""

    config: ConstantScheduleConfig

    def curve(self, steps: int | None) -> optax.Schedule:
        """A flat line."""
        return curves.constant(self.config.init_value)


@dataclass
class CosineScheduleConfig(BaseScheduleConfig):
    """From `init_value` to `init_value` × `decay_factor` along a cosine.

    Args:
        decay_factor: which share of `init_value` is left at the end.
        exponent: the power that the wave is raised to; above 1 falls faster at first.
    """

    decay_factor: Annotated[float, AtLeast(0)] = 0.1
    exponent: Annotated[float, Above(0)] = 1.0

    @property
    def last_value(self) -> float:
        """What is left at the end."""
        return self.init_value * self.decay_factor


@register
class CosineSchedule(ScheduleInterface):
    """Falls along half a cosine wave, slowly at both ends."""

    config: CosineScheduleConfig

    def curve(self, steps: int | None) -> optax.Schedule:
        """Half a wave."""
        return curves.cosine(self.config.init_value, self.config.last_value, known(steps), self.config.exponent)


@dataclass
class LinearScheduleConfig(BaseScheduleConfig):
    """From `init_value` to `end_value` in a straight line.

    Args:
        end_value: the rate at the end.
    """

    end_value: Annotated[float, AtLeast(0)] = 1e-3  # pyright: ignore[reportIncompatibleVariableOverride]


@register
class LinearSchedule(ScheduleInterface):
    """Goes from one rate to another in a straight line."""

    config: LinearScheduleConfig

    def curve(self, steps: int | None) -> optax.Schedule:
        """A straight line."""
        return curves.linear(self.config.init_value, self.config.end_value, known(steps))


@dataclass
class ExponentialScheduleConfig(BaseScheduleConfig):
    """From `init_value` to `init_value` × `decay_rate`, by the same factor at every update.

    Args:
        decay_rate: which share of `init_value` is left at the end.
    """

    decay_rate: Annotated[float, Above(0)] = 0.1

    @property
    def last_value(self) -> float:
        """What is left at the end."""
        return self.init_value * self.decay_rate


@register
class ExponentialSchedule(ScheduleInterface):
    """Falls by the same factor at every update."""

    config: ExponentialScheduleConfig

    def curve(self, steps: int | None) -> optax.Schedule:
        """An exponential."""
        return curves.exponential(self.config.init_value, self.config.decay_rate, known(steps))


@dataclass
class WarmupCosineDecayScheduleConfig(BaseScheduleConfig):
    """Up from `init_value` to `peak_value` in a straight line, then down to `decay_factor` × `peak_value`.

    `steps` is the way up and the way down together. What is left out follows from the others and from the run.

    Args:
        init_value: the rate at the first update.
        peak_value: the rate after the warmup.
        decay_factor: which share of `peak_value` is left at the end.
        warmup_steps: how many updates the way up takes.
        decay_steps: how many the way down takes.
        exponent: the power that the wave is raised to; above 1 falls faster at first.
    """

    init_value: Annotated[float, AtLeast(0)] = 0.0
    peak_value: Annotated[float, AtLeast(0)] = 1e-3
    decay_factor: Annotated[float, AtLeast(0)] = 0.1
    warmup_steps: Annotated[int, AtLeast(1)] | None = None
    decay_steps: Annotated[int, AtLeast(1)] | None = None
    exponent: Annotated[float, Above(0)] = 1.0

    @property
    def last_value(self) -> float:
        """What is left at the end."""
        return self.peak_value * self.decay_factor

    def problems(self) -> Iterator[Problem]:
        """Lengths that do not add up."""
        yield from super().problems()
        whole, warmup, decay = self.steps, self.warmup_steps, self.decay_steps
        if warmup is None and (whole is None or decay is None):
            yield "warmup_steps", "`warmup_steps` is needed. Without a warmup, use `CosineSchedule`."
        part, key = (warmup, "warmup_steps") if warmup is not None else (decay, "decay_steps")
        if whole is not None and part is not None and part >= whole:
            yield key, f"`{key}` is {part} of `steps` {whole}, which leaves nothing for the rest. It must be smaller."
        elif whole is not None and warmup is not None and decay is not None and warmup + decay != whole:
            text = f"`steps` is {whole}, but `warmup_steps` {warmup} + `decay_steps` {decay} is {warmup + decay}. "
            yield "steps", text + "Leave one of them out, or make them agree."


@register
class WarmupCosineDecaySchedule(ScheduleInterface):
    """Warms up in a straight line, then falls along half a cosine wave."""

    config: WarmupCosineDecayScheduleConfig
    length_key = "decay_steps"

    @property
    def length(self) -> int | None:
        """Both ways together."""
        config = self.config
        if config.steps is None and config.warmup_steps is not None and config.decay_steps is not None:
            return config.warmup_steps + config.decay_steps
        return config.steps

    def curve(self, steps: int | None) -> optax.Schedule:
        """The way up, then the way down."""
        config, steps = self.config, known(steps)
        warmup = config.warmup_steps if config.warmup_steps is not None else steps - (config.decay_steps or 0)
        if warmup >= steps:
            text = f"`warmup_steps` is {warmup}, but the run makes only {steps} updates. It must be smaller."
            raise SettingsError([("warmup_steps", text)])
        up = curves.linear(config.init_value, config.peak_value, warmup)
        down = curves.cosine(config.peak_value, config.last_value, steps - warmup, config.exponent)
        return optax.join_schedules([up, down], [warmup])


ElementaryScheduleConfig = (
    ConstantScheduleConfig
    | CosineScheduleConfig
    | LinearScheduleConfig
    | ExponentialScheduleConfig
    | WarmupCosineDecayScheduleConfig
)
