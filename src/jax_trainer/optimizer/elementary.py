"""The schedule interface, and five elementary learning rate schedules, each with its configuration.

A schedule is built for the number of optimizer updates of the run, which is its length if `steps` is not set, and must
equal `steps` otherwise. It is a function of the optimizer's update count, from 0.
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
    """Whether two learning rates are equal up to rounding."""
    return math.isclose(a, b, rel_tol=1e-5, abs_tol=1e-12)


@dataclass
class BaseScheduleConfig(Settings):
    """The keys of every schedule.

    Args:
        init_value: learning rate at the first update.
        end_value: learning rate at the end. Optional: it follows from the other keys, and must agree with them.
        steps: length in optimizer updates; null: that of the run.
    """

    init_value: Annotated[float, AtLeast(0)] = 1e-3
    end_value: Annotated[float, AtLeast(0)] | None = None
    steps: Annotated[int, AtLeast(1)] | None = None

    @property
    def last_value(self) -> float | None:
        """The learning rate at the end, computed from the other keys; None if they do not determine it."""
        return None

    def problems(self) -> Iterator[Problem]:
        """Reports an `end_value` that contradicts the other keys."""
        last = self.last_value
        if last is not None and self.end_value is not None and not agrees(self.end_value, last):
            text = f"`end_value` is {self.end_value:g}, but the other keys end at {last:g}. "
            yield "end_value", text + "Remove `end_value`, or make them agree."


@register_interface
class ScheduleInterface(RegistrableConfigInterface):
    """A learning rate schedule, built from its configuration."""

    config: Any  # a subclass of `BaseScheduleConfig`
    length_key = "steps"  # the key to name in an error about the length if `steps` is not set

    def __init__(self, config: BaseScheduleConfig) -> None:
        self.config = config

    @property
    def length(self) -> int | None:
        """Length in updates; None: that of the run."""
        return self.config.steps

    def build(self, total_steps: int | None = None) -> optax.Schedule:
        """The schedule for a run of `total_steps` optimizer updates; None if unknown."""
        length = self.length
        if total_steps is not None and total_steps < 1:
            raise ValueError(f"`total_steps` must be at least 1, got {total_steps}. Use None if it is unknown.")
        if length is not None and total_steps is not None and length != total_steps:
            text = f"The schedule has {length} updates, but the run has {total_steps}. "
            text += "Make them agree, or remove a length, which then follows from the run."
            raise SettingsError([(self.length_key if self.config.steps is None else "steps", text)])
        return self.curve(total_steps if length is None else length)

    def curve(self, steps: int | None) -> optax.Schedule:
        """The schedule over `steps` updates; None if their number is unknown."""
        raise NotImplementedError(f"{type(self).__name__} has no `curve`.")


def known(steps: int | None) -> int:
    """`steps`; raises if it is None."""
    if steps is None:
        text = "The number of updates of the run is unknown, so the schedule has no length. Set its `steps`, or the "
        text += "length of the run (`train_epochs` or `max_steps`)."
        raise SettingsError([("steps", text)])
    return steps


@dataclass
class ConstantScheduleConfig(BaseScheduleConfig):
    """Configuration of `ConstantSchedule`: the learning rate is `init_value`."""

    @property
    def last_value(self) -> float:
        return self.init_value


@register
class ConstantSchedule(ScheduleInterface):
    """A constant learning rate. Needs no length."""

    config: ConstantScheduleConfig

    def curve(self, steps: int | None) -> optax.Schedule:
        return curves.constant(self.config.init_value)


@dataclass
class CosineScheduleConfig(BaseScheduleConfig):
    """Configuration of `CosineSchedule`: from `init_value` to `init_value` × `decay_factor`.

    Args:
        decay_factor: final learning rate as a fraction of `init_value`.
        exponent: exponent of the cosine decay; values above 1 decay faster at first.
    """

    decay_factor: Annotated[float, AtLeast(0)] = 0.1
    exponent: Annotated[float, Above(0)] = 1.0

    @property
    def last_value(self) -> float:
        return self.init_value * self.decay_factor


@register
class CosineSchedule(ScheduleInterface):
    """Cosine decay."""

    config: CosineScheduleConfig

    def curve(self, steps: int | None) -> optax.Schedule:
        return curves.cosine(self.config.init_value, self.config.last_value, known(steps), self.config.exponent)


@dataclass
class LinearScheduleConfig(BaseScheduleConfig):
    """Configuration of `LinearSchedule`: from `init_value` to `end_value`.

    Args:
        end_value: learning rate at the end.
    """

    end_value: Annotated[float, AtLeast(0)] = 1e-3  # pyright: ignore[reportIncompatibleVariableOverride]


@register
class LinearSchedule(ScheduleInterface):
    """Linear interpolation between two learning rates."""

    config: LinearScheduleConfig

    def curve(self, steps: int | None) -> optax.Schedule:
        return curves.linear(self.config.init_value, self.config.end_value, known(steps))


@dataclass
class ExponentialScheduleConfig(BaseScheduleConfig):
    """Configuration of `ExponentialSchedule`: from `init_value` to `init_value` × `decay_rate`.

    Args:
        decay_rate: final learning rate as a fraction of `init_value`.
    """

    decay_rate: Annotated[float, Above(0)] = 0.1

    @property
    def last_value(self) -> float:
        return self.init_value * self.decay_rate


@register
class ExponentialSchedule(ScheduleInterface):
    """Exponential decay."""

    config: ExponentialScheduleConfig

    def curve(self, steps: int | None) -> optax.Schedule:
        return curves.exponential(self.config.init_value, self.config.decay_rate, known(steps))


@dataclass
class WarmupCosineDecayScheduleConfig(BaseScheduleConfig):
    """Configuration of `WarmupCosineDecaySchedule`.

    `steps` is `warmup_steps` + `decay_steps`. Omitted lengths follow from the others and from the run.

    Args:
        init_value: learning rate at the first update.
        peak_value: learning rate after the warmup.
        decay_factor: final learning rate as a fraction of `peak_value`.
        warmup_steps: updates of the linear warmup.
        decay_steps: updates of the cosine decay.
        exponent: exponent of the cosine decay; values above 1 decay faster at first.
    """

    init_value: Annotated[float, AtLeast(0)] = 0.0
    peak_value: Annotated[float, AtLeast(0)] = 1e-3
    decay_factor: Annotated[float, AtLeast(0)] = 0.1
    warmup_steps: Annotated[int, AtLeast(1)] | None = None
    decay_steps: Annotated[int, AtLeast(1)] | None = None
    exponent: Annotated[float, Above(0)] = 1.0

    @property
    def last_value(self) -> float:
        return self.peak_value * self.decay_factor

    def problems(self) -> Iterator[Problem]:
        """Reports lengths that do not add up."""
        yield from super().problems()
        total, warmup, decay = self.steps, self.warmup_steps, self.decay_steps
        if warmup is None and (total is None or decay is None):
            yield "warmup_steps", "`warmup_steps` is needed. Without a warmup, use `CosineSchedule`."
        part, key = (warmup, "warmup_steps") if warmup is not None else (decay, "decay_steps")
        if total is not None and part is not None and part >= total:
            yield key, f"`{key}` is {part}, but must be smaller than `steps`, {total}."
        elif total is not None and warmup is not None and decay is not None and warmup + decay != total:
            text = f"`steps` is {total}, but `warmup_steps` {warmup} + `decay_steps` {decay} is {warmup + decay}. "
            yield "steps", text + "Remove one of them, or make them agree."


@register
class WarmupCosineDecaySchedule(ScheduleInterface):
    """Linear warmup followed by cosine decay."""

    config: WarmupCosineDecayScheduleConfig
    length_key = "decay_steps"

    @property
    def length(self) -> int | None:
        config = self.config
        if config.steps is None and config.warmup_steps is not None and config.decay_steps is not None:
            return config.warmup_steps + config.decay_steps
        return config.steps

    def curve(self, steps: int | None) -> optax.Schedule:
        config, steps = self.config, known(steps)
        warmup = config.warmup_steps if config.warmup_steps is not None else steps - (config.decay_steps or 0)
        if warmup >= steps:
            text = f"`warmup_steps` is {warmup}, but the run has only {steps} updates. It must be smaller."
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
