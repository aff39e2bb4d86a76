"""Schedules one after the other."""

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
    """Schedules one after the other. At most one has no length of its own: it gets what is left of the run.

    Args:
        init_value: the rate at the first update: that of the first part. It can be left out, and must agree if given.
        end_value: the rate at the end: that of the last part. It can be left out, and must agree if given.
        steps: for how many optimizer updates all parts are together; left out: as many as the run makes.
        schedules: the parts by name, in the order in which they follow each other.
        check_continuity: refuse parts that do not start where the one before them ended.
    """

    init_value: Annotated[float, AtLeast(0)] | None = None  # pyright: ignore[reportIncompatibleVariableOverride]
    schedules: dict[str, ScheduleInterface.cfgtype] = field(default_factory=dict)
    check_continuity: bool = True

    def problems(self) -> Iterator[Problem]:
        """No parts, or lengths that cannot be."""
        lengths = self.lengths()
        open_ones = [name for name, length in lengths.items() if length is None]
        given = sum(length or 0 for length in lengths.values())
        if not lengths:
            yield "schedules", "`schedules` is empty. Give at least one part."
        elif len(open_ones) > 1:
            names = " and ".join(open_ones)
            yield "schedules", f"Only one part can be without a length, but {names} are. Give others their `steps`."
        elif self.steps is not None and not open_ones and given != self.steps:
            text = f"`steps` is {self.steps}, but the parts last {given} updates together. "
            yield "steps", text + "Leave `steps` out, or make them agree."

    def lengths(self) -> dict[str, int | None]:
        """For how many updates each part was made; None: for what is left."""
        return {name: part.instantiate(ScheduleInterface).length for name, part in self.schedules.items()}


@register
class ConcatSchedule(ScheduleInterface):
    """Other schedules, one after the other."""

    config: ConcatScheduleConfig
    length_key = "schedules"

    @property
    def length(self) -> int | None:
        """All parts together."""
        lengths = list(self.config.lengths().values())
        return self.config.steps if None in lengths else sum(length or 0 for length in lengths)

    def curve(self, steps: int | None) -> optax.Schedule:
        """The parts, each counting from its own start."""
        lengths = self._fitted(self.config.lengths(), steps)
        parts = {name: self._part(name, length) for name, length in lengths.items()}
        # only the last part may go on for ever, and where it ends is nobody's start
        boundaries = list(accumulate(length or 0 for length in list(lengths.values())[:-1]))
        self._check_values(parts, [length or 0 for length in lengths.values()])
        return optax.join_schedules(list(parts.values()), boundaries)

    def _fitted(self, lengths: Mapping[str, int | None], steps: int | None) -> dict[str, int | None]:
        """`lengths`, in which the part without one has got what is left."""
        given = sum(length or 0 for length in lengths.values())
        rest = None if steps is None else steps - given
        for position, (name, length) in enumerate(lengths.items(), start=1):
            if length is None and rest is None and position < len(lengths):
                text = f"How many updates {name!r} lasts is not known, and others follow. Give its `steps`."
                raise SettingsError([(f"schedules.{name}.steps", text)])
            if length is None and rest is not None and rest < 1:
                text = f"Nothing is left for {name!r}: the other parts last {given} updates, and there are {steps}."
                raise SettingsError([(f"schedules.{name}", f"{text} Make them shorter, or train for longer.")])
        return {name: rest if length is None else length for name, length in lengths.items()}

    def _part(self, name: str, length: int | None) -> optax.Schedule:
        try:
            return self.config.schedules[name].instantiate(ScheduleInterface).build(length)
        except SettingsError as error:
            raise error.under(f"schedules.{name}") from error

    def _check_values(self, parts: Mapping[str, optax.Schedule], lengths: Sequence[int]) -> None:
        with jax.ensure_compile_time_eval():  # a program may be built while something is traced
            starts = [float(jnp.asarray(part(0))) for part in parts.values()]
            ends = [float(jnp.asarray(part(length))) for part, length in zip(parts.values(), lengths, strict=True)]
        for (before, after), end, start in zip(pairwise(parts), ends, starts[1:], strict=False):
            if self.config.check_continuity and not agrees(end, start):
                text = f"{before!r} ends at {end:g}, but {after!r} starts at {start:g}. "
                text += "Make them agree, or allow the jump with `check_continuity: false`."
                raise SettingsError([(f"schedules.{after}", text)])
        for key, given, found in (
            ("init_value", self.config.init_value, starts[0]),
            ("end_value", self.config.end_value, ends[-1]),
        ):
            if given is not None and not agrees(given, found):
                text = f"`{key}` is {given:g}, but it follows from the parts, and there it is {found:g}. "
                raise SettingsError([(key, text + f"Leave `{key}` out, or make them agree.")])
