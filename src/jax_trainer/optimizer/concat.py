"""`ConcatSchedule`: schedules joined one after the other."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Annotated

import jax
import jax.numpy as jnp
import optax
from compoconf import register

from jax_trainer.optimizer.elementary import BaseScheduleConfig, ScheduleInterface, agrees
from jax_trainer.settings import AtLeast, Problem, SettingsError


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
        try:
            return self.config.schedules[name].instantiate(ScheduleInterface).build(length)
        except SettingsError as error:
            raise error.under(f"schedules.{name}") from error

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
