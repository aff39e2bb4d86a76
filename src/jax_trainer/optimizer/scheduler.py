"""Learning rate schedules, each with its configuration.

A schedule is built for the number of optimizer updates of the run, which is its length if `steps` is not set, and must
equal `steps` otherwise. It is a function of the optimizer's update count, from 0: one of optax, but exact at both ends.
It keeps its last value afterwards.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import optax
from compoconf import RegistrableConfigInterface, register, register_interface
from jax.typing import ArrayLike

from jax_trainer.config.settings import Above, AtLeast, Problem, Settings, SettingsError, errors_of


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


def _exact_ends(curve: optax.Schedule, start: float, end: float, steps: int) -> optax.Schedule:
    """`curve` in float32, which is `start` at the first update, and `end` from `steps` updates on.

    Both ends are selected, not computed: neither optax's formulas nor a GPU's n / n and cosine of pi are always exact.
    """

    def schedule(count: ArrayLike) -> jax.Array:
        count = jnp.asarray(count)
        return jnp.where(count <= 0, start, jnp.where(count >= steps, end, curve(count))).astype(jnp.float32)

    return schedule


def _known(steps: int | None) -> int:
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
        return optax.constant_schedule(self.config.init_value)


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
        config = self.config
        return cosine(config.init_value, config.decay_factor, _known(steps), config.exponent)


def cosine(start: float, factor: float, steps: int, exponent: float = 1.0) -> optax.Schedule:
    """Cosine decay from `start` to `start` × `factor`, raised to `exponent`."""
    curve = optax.cosine_decay_schedule(start, steps, factor, exponent)
    return _exact_ends(curve, start, start * factor, steps)


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
        return linear(self.config.init_value, self.config.end_value, _known(steps))


def linear(start: float, end: float, steps: int) -> optax.Schedule:
    """Linear interpolation.

    >>> [float(linear(0.0, 1.0, 4)(count)) for count in (0, 1, 4, 5)]
    [0.0, 0.25, 1.0, 1.0]
    """
    return _exact_ends(optax.linear_schedule(start, end, steps), start, end, steps)


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
        config, steps = self.config, _known(steps)
        curve = optax.exponential_decay(config.init_value, steps, config.decay_rate)
        return _exact_ends(curve, config.init_value, config.last_value, steps)


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
        config, steps = self.config, _known(steps)
        warmup = config.warmup_steps if config.warmup_steps is not None else steps - (config.decay_steps or 0)
        if warmup >= steps:
            text = f"`warmup_steps` is {warmup}, but the run has only {steps} updates. It must be smaller."
            raise SettingsError([("warmup_steps", text)])
        up = linear(config.init_value, config.peak_value, warmup)
        down = cosine(config.peak_value, config.decay_factor, steps - warmup, config.exponent)
        return optax.join_schedules([up, down], [warmup])


ElementaryScheduleConfig = (
    ConstantScheduleConfig
    | CosineScheduleConfig
    | LinearScheduleConfig
    | ExponentialScheduleConfig
    | WarmupCosineDecayScheduleConfig
)


@dataclass
class ConcatScheduleConfig(BaseScheduleConfig):
    """Configuration of `ConcatSchedule`. At most one part may have no length: it gets the rest of the run.

    Args:
        init_value: learning rate at the first update. Optional: must agree with the first part.
        end_value: learning rate at the end. Optional: must agree with the last part.
        steps: length of all parts together, in optimizer updates; null: that of the run.
        schedules: the parts by name, in order.
        check_continuity: raise an error if a part does not start at the end value of the previous one.
    """

    init_value: Annotated[float, AtLeast(0)] | None = None  # pyright: ignore[reportIncompatibleVariableOverride]
    schedules: dict[str, ScheduleInterface.cfgtype] = field(default_factory=dict)
    check_continuity: bool = True

    def problems(self) -> Iterator[Problem]:
        """Reports missing parts, and lengths that do not add up."""
        lengths = self.lengths()
        open_ones = [name for name, length in lengths.items() if length is None]
        known = sum(length or 0 for length in lengths.values())
        if not lengths:
            yield "schedules", "`schedules` is empty. Add at least one part."
        elif len(open_ones) > 1:
            names = " and ".join(open_ones)
            yield "schedules", f"Only one part may have no length, but {names} have none. Set their `steps`."
        elif self.steps is not None and not open_ones and known != self.steps:
            text = f"`steps` is {self.steps}, but the parts have {known} updates together. "
            yield "steps", text + "Remove `steps`, or make them agree."

    def lengths(self) -> dict[str, int | None]:
        """Length of each part in updates; None: the rest of the run."""
        return {name: part.instantiate(ScheduleInterface).length for name, part in self.schedules.items()}


@register
class ConcatSchedule(ScheduleInterface):
    """Schedules joined one after the other."""

    config: ConcatScheduleConfig
    length_key = "schedules"

    @property
    def length(self) -> int | None:
        lengths = list(self.config.lengths().values())
        return self.config.steps if None in lengths else sum(length or 0 for length in lengths)

    def curve(self, steps: int | None) -> optax.Schedule:
        lengths = self._fitted(self.config.lengths(), steps)
        parts = {name: self._part(name, length) for name, length in lengths.items()}
        # only the last part may have no end
        boundaries = list(accumulate(length or 0 for length in list(lengths.values())[:-1]))
        self._check_values(parts, [length or 0 for length in lengths.values()])
        return optax.join_schedules(list(parts.values()), boundaries)

    def _fitted(self, lengths: Mapping[str, int | None], steps: int | None) -> dict[str, int | None]:
        """`lengths`, with the rest of the run for the part without a length."""
        known = sum(length or 0 for length in lengths.values())
        rest = None if steps is None else steps - known
        for position, (name, length) in enumerate(lengths.items(), start=1):
            if length is None and rest is None and position < len(lengths):
                text = f"The length of {name!r} is unknown, and other parts follow. Set its `steps`."
                raise SettingsError([(f"schedules.{name}.steps", text)])
            if length is None and rest is not None and rest < 1:
                text = f"No updates are left for {name!r}: the other parts have {known} of {steps} updates."
                raise SettingsError([(f"schedules.{name}", f"{text} Make them shorter, or train longer.")])
        return {name: rest if length is None else length for name, length in lengths.items()}

    def _part(self, name: str, length: int | None) -> optax.Schedule:
        with errors_of(f"schedules.{name}"):
            return self.config.schedules[name].instantiate(ScheduleInterface).build(length)

    def _check_values(self, parts: Mapping[str, optax.Schedule], lengths: Sequence[int]) -> None:
        with jax.ensure_compile_time_eval():  # the schedule may be built during tracing
            starts = [float(jnp.asarray(part(0))) for part in parts.values()]
            ends = [float(jnp.asarray(part(length))) for part, length in zip(parts.values(), lengths, strict=True)]
        for (before, after), end, start in zip(pairwise(parts), ends, starts[1:], strict=False):
            if self.config.check_continuity and not agrees(end, start):
                text = f"{before!r} ends at {end:g}, but {after!r} starts at {start:g}. "
                text += "Make them agree, or allow the jump with `check_continuity: false`."
                raise SettingsError([(f"schedules.{after}", text)])
        for key, expected, found in (
            ("init_value", self.config.init_value, starts[0]),
            ("end_value", self.config.end_value, ends[-1]),
        ):
            if expected is not None and not agrees(expected, found):
                text = f"`{key}` is {expected:g}, but the parts have {found:g}. "
                raise SettingsError([(key, text + f"Remove `{key}`, or make them agree.")])


def loss_weights(weights: Mapping[str, Any] | None, total_steps: int | None) -> dict[str, Any] | None:
    """The weights of named losses with every configuration of a schedule built for a run of `total_steps` steps.

    Numbers and functions of the step are returned as they are; None or no weights: None. Of a run of unknown length, a
    schedule is built when it is used: predictions of a loaded model need no losses.
    """
    return {name: _weight(name, one, total_steps) for name, one in weights.items()} if weights else None


def _weight(name: str, weight: Any, total_steps: int | None) -> Any:
    if not isinstance(weight, BaseScheduleConfig):
        return weight

    def build() -> optax.Schedule:
        with errors_of(f"losses.{name}"):
            return weight.instantiate(ScheduleInterface).build(total_steps)

    return (lambda step: build()(step)) if total_steps is None else build()
