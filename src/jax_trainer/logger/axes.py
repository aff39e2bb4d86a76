"""The x-axis of metrics: where an entry of the log lies, in steps, epochs, examples, tokens or seconds."""

import time
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple

Axis = Literal["step", "epoch", "examples", "tokens", "seconds"]
MOST_STEPS = 20_000  # whose counts are kept: entries may be logged some steps late


class Coordinates(NamedTuple):
    """Where an entry lies: its step, and its place on every other axis that some metric uses."""

    step: int
    others: Mapping[str, float]
    axes: "XAxis"

    def on(self, axis: str) -> float | None:
        """The place on `axis`; None if it is unknown."""
        return self.step if axis == "step" else self.others.get(axis)

    def grouped(self, values: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """The metrics of a row by axis."""
        if self.axes.common is not None:
            yield self.axes.common, values
            return
        groups: dict[str, dict[str, Any]] = {}
        for name, value in values.items():
            groups.setdefault(self.axes.of(name), {})[name] = value
        yield from groups.items()


class XAxis:
    """The axis of every metric, and how far the run is on each axis.

    Examples and tokens are counted when the metrics of their steps have arrived, some steps late: an entry of a later
    step has to wait. Seconds are those of training, without the time between two starts of a run.

    Args:
        config: the axis of all metrics, or axes by pattern: the first one that matches a name counts, else "step".
    """

    def __init__(self, config: Axis | Mapping[str, Axis]) -> None:
        patterns: dict[str, Axis] = {"*": config} if isinstance(config, str) else {**config}
        self._patterns = [*patterns.items(), ("*", "step")]
        reached = next(index for index, (pattern, _) in enumerate(self._patterns) if pattern == "*") + 1
        self.used = tuple(dict.fromkeys(axis for _, axis in self._patterns[:reached]))
        self.common = self.used[0] if len(self.used) == 1 else None  # the axis of all metrics, if they share one
        self.columns = tuple(axis for axis in self.used if axis != "step")
        self._known: dict[str, Axis] = {}
        self._epoch: int | None = None
        self._counts: dict[int, tuple[int, int]] = {0: (0, 0)}  # examples and tokens after a step, by ascending step
        self._started: float | None = None  # when training began in this process
        self._earlier = 0.0  # seconds of the run before that

    def of(self, name: str) -> Axis:
        """The axis of the metric `name`."""
        if name not in self._known:
            self._known[name] = next(axis for pattern, axis in self._patterns if fnmatchcase(name, pattern))
        return self._known[name]

    def count(self, step: int, epoch: int, examples: Sequence[int] = (), tokens: Sequence[int] = ()) -> None:
        """Called at the start, and as the run proceeds: the totals after each of the steps up to `step`."""
        if "tokens" in self.used and any(examples) and not any(tokens):
            raise ValueError(
                "`x_axis: tokens` needs batches with token ids: integers [batch, time] that the model looks up in an "
                "embedding, or predicts. This model has none; use `x_axis: examples`."
            )
        self._started = time.monotonic() if self._started is None else self._started
        self._epoch = epoch
        self._counts.update(
            zip(range(step - len(examples) + 1, step + 1), zip(examples, tokens, strict=True), strict=True)
        )
        for old in [*self._counts][: -MOST_STEPS // 2] if len(self._counts) > MOST_STEPS else ():
            del self._counts[old]

    def rewind(self, step: int, seconds: float) -> None:
        """Continues from a checkpoint, after `step` steps and `seconds`."""
        self._counts = {at: counts for at, counts in self._counts.items() if at <= step}
        self._earlier = seconds
        self._started = None if self._started is None else time.monotonic()

    def at(self, step: int, given: Mapping[str, float], *, late: bool = False) -> Coordinates | None:
        """Where an entry of `step` lies; None if that is to be counted.

        Args:
            given: the row, which may have its own place on an axis.
            late: nothing more will be counted: the last count holds.
        """
        if not self.columns:
            return Coordinates(step, {}, self)
        others = {axis: given[axis] if axis in given else self._place(axis, step, late) for axis in self.columns}
        if any(place is None for place in others.values()):
            return None
        return Coordinates(step, others, self)  # type: ignore[arg-type] - none is None

    def _place(self, axis: str, step: int, late: bool) -> float | None:
        if axis == "seconds":
            return self._earlier + (0.0 if self._started is None else time.monotonic() - self._started)
        if axis == "epoch":
            if self._epoch is None and step:
                raise _unknown(axis, step)
            return self._epoch or 0
        if step not in self._counts:
            last = next(reversed(self._counts), 0)
            if not late and step > last and self._started is not None:
                return None
            if not late or last not in self._counts:
                raise _unknown(axis, step)
            step = last
        return self._counts[step][axis == "tokens"]


def _unknown(axis: str, step: int) -> ValueError:
    return ValueError(
        f"`x_axis: {axis}` needs the {axis} at step {step}, which the run has not counted. Log them with the values, "
        f"as {axis!r}."
    )
