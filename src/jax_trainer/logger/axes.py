"""The x-axis of metrics: where an entry of the log lies, in steps, epochs, examples, tokens or seconds."""

import time
from collections.abc import Mapping, Sequence
from typing import Literal

Axis = Literal["step", "epoch", "examples", "tokens", "seconds"]
MOST_STEPS = 20_000  # whose counts are kept: entries may be logged some steps late


class XAxis:
    """The x-axis of metrics, and how far the run is on it.

    Examples and tokens are counted when the metrics of their steps have arrived, some steps late: an entry of a later
    step has to wait. Seconds are those of training, without the time between two starts of a run.
    """

    def __init__(self, name: Axis) -> None:
        self.name: Axis = name
        self._epoch: int | None = None
        self._counts: dict[int, tuple[int, int]] = {0: (0, 0)}  # examples and tokens after a step, by ascending step
        self._started: float | None = None  # when training began in this process
        self._earlier = 0.0  # seconds of the run before that

    def count(self, step: int, epoch: int, examples: Sequence[int] = (), tokens: Sequence[int] = ()) -> None:
        """Called at the start, and as the run proceeds: the totals after each of the steps up to `step`."""
        if self.name == "tokens" and any(examples) and not any(tokens):
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

    def at(self, step: int, given: Mapping[str, float], *, late: bool = False) -> float | None:
        """Where an entry of `step` lies; None if that is to be counted.

        Args:
            given: the row, which may have its own place on the axis.
            late: nothing more will be counted: the last count holds.
        """
        if self.name == "step" or self.name in given:
            return step if self.name == "step" else given[self.name]
        if self.name == "seconds":
            return self._earlier + (0.0 if self._started is None else time.monotonic() - self._started)
        if self.name == "epoch":
            if self._epoch is None and step:
                raise self._unknown(step)
            return self._epoch or 0
        if step not in self._counts:
            last = next(reversed(self._counts), 0)
            if not late and step > last and self._started is not None:
                return None
            if not late or last not in self._counts:
                raise self._unknown(step)
            step = last
        return self._counts[step][self.name == "tokens"]

    def _unknown(self, step: int) -> ValueError:
        return ValueError(
            f"`x_axis: {self.name}` needs the {self.name} at step {step}, which the run has not counted. Log them with "
            f"the values, as {self.name!r}."
        )
