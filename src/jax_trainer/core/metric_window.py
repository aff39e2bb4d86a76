"""Reads windows of the metric buffer on the host, with a lag, and aggregates them."""

import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, groupby
from typing import Any, NamedTuple

import jax
import numpy as np

from jax_trainer.core.metric_accumulator import Columns, MetricAccumulator, reported_in
from jax_trainer.core.metric_buffer import MetricBuffer, MetricBufferFormat
from jax_trainer.core.metrics import LogFreq, LogMode

FOLD_AFTER = 4096  # steps after which rows are aggregated
WINDOW_SECONDS = 1.0  # target interval between windows of slow steps
FOLD_BYTES = (
    64 * 2**20
)  # bytes outside the buffer after which rows are aggregated, so that large arrays do not accumulate


@dataclass(frozen=True)
class MetricWindow:
    """The metrics of the steps `first` to `last`; rows are decoded on access."""

    first: int
    format: MetricBufferFormat
    words: np.ndarray  # a row per step
    off_buffer: tuple[dict[str, np.ndarray], ...] = ()  # per step, metrics that are not in the buffer

    @property
    def last(self) -> int:
        """The last step."""
        return self.first + len(self.words) - 1

    @cached_property
    def columns(self) -> Columns:
        """The values and weights by metric."""
        return self.format.read(self.words, self.off_buffer)

    def values_of(self, name: str) -> Any:
        """The values of one metric, without decoding the others."""
        field = self.format.metrics[name].value
        return self.columns[name].values if field is None else field.read(self.words)

    def split(self, after: int) -> tuple["MetricWindow", "MetricWindow"]:
        """The steps up to and including `after`, and the later ones."""
        cut = max(0, after + 1 - self.first)
        head = replace(self, words=self.words[:cut], off_buffer=self.off_buffer[:cut])
        return head, replace(self, first=self.first + cut, words=self.words[cut:], off_buffer=self.off_buffer[cut:])


class WindowAccumulator:
    """A `MetricAccumulator` over windows, of the metrics reported in `phase` at any of `freqs`.

    Windows are collected and decoded together: decoding many rows costs hardly more than decoding one.
    """

    def __init__(self, phase: LogMode, freqs: Iterable[LogFreq] = LogFreq) -> None:
        self._phase, self._freqs, self._accumulator = phase, tuple(freqs), MetricAccumulator()
        self._rows: list[MetricWindow] = []
        self._steps = self._bytes = 0

    def add(self, rows: MetricWindow) -> None:
        """Adds the steps of a window."""
        self._rows.append(rows)
        self._steps += len(rows.words)
        self._bytes += sum(array.nbytes for step in rows.off_buffer for array in step.values())
        if self._steps >= FOLD_AFTER or self._bytes >= FOLD_BYTES:
            self._fold()

    def compute(self) -> dict[str, Any]:
        """One value per metric; resets."""
        self._fold()
        return self._accumulator.compute()

    def state(self) -> dict[str, Any]:
        """The steps since the last reset as serialisable data."""
        self._fold()  # bit-identical to folding later
        return self._accumulator.state()

    def load(self, state: Mapping[str, Any]) -> None:
        """Restores the result of `state`."""
        self._rows, self._steps, self._bytes = [], 0, 0
        self._accumulator.load(state)

    def _fold(self) -> None:
        rows, self._rows, self._steps, self._bytes = self._rows, [], 0, 0
        if rows:
            columns = rows[0].columns  # decoded once for all observers
            if len(rows) > 1:
                words = np.concatenate([part.words for part in rows])
                columns = rows[0].format.read(words, list(chain.from_iterable(part.off_buffer for part in rows)))
            self._accumulator.add(reported_in(columns, self._phase, freqs=self._freqs))


class _Window(NamedTuple):
    first: int
    last: int
    buffer: jax.Array
    off_buffer: list[Any]
    dispatched: int


class MetricReader:
    """Reads a metric buffer in windows that end at multiples of `every` steps, `lag` dispatches after their end.

    By then the device has written them, so that reading does not block.

    Args:
        fmt: format of the buffer.
        every: maximum number of steps of a window.
        lag: dispatches between the end of a window and reading it.
        adapts: start with windows of one step and adapt their size to about one window per second. Not for several
            processes, which must read at the same steps whatever their clocks show.
    """

    def __init__(self, fmt: MetricBufferFormat, every: int, lag: int, *, adapts: bool = False) -> None:
        self._format, self._every, self._lag = fmt, every, lag
        self._adapts, self._size, self._read_at, self._read_to = adapts, 1 if adapts else every, 0.0, 0
        self._closed: deque[_Window] = deque()
        self._buffer: jax.Array | None = None
        self._off_buffer: list[Any] = []
        self._first = self._last = self._closes_at = self._dispatched = 0

    def record(self, buffer: MetricBuffer, off_buffer: Any, step: int, steps: int, *, stacked: bool) -> None:
        """Records a dispatch of `steps` rows; the last one is that of `step`."""
        if self._buffer is None:
            self._first = step - steps + 1
            multiple = -(-self._first // self._every) * self._every
            self._closes_at = min(multiple, self._first + self._size - 1)
        self._buffer, self._last = buffer.rows, step
        self._dispatched += 1
        if self._format.off_buffer:
            self._off_buffer.append((off_buffer, steps if stacked else None))
        if step >= self._closes_at:
            self._close()

    @property
    def has_ready(self) -> bool:
        """Whether a window ended at least `lag` dispatches ago."""
        return bool(self._closed) and self._dispatched - self._closed[0].dispatched >= self._lag

    def ready(self) -> Iterator[MetricWindow]:
        """The windows that ended at least `lag` dispatches ago."""
        while self.has_ready:
            yield self._read(self._closed.popleft())

    def flush(self) -> Iterator[MetricWindow]:
        """All remaining windows; waits for the device."""
        if self._buffer is not None:
            self._close()
        windows = [*self._closed]
        self._closed.clear()
        for _, parts in groupby(windows, lambda window: -(-window.first // self._every)):
            first, *more = map(self._read, parts)
            words = np.concatenate([first.words, *(rows.words for rows in more)]) if more else first.words
            yield replace(
                first, words=words, off_buffer=tuple(chain(first.off_buffer, *(rows.off_buffer for rows in more)))
            )

    def _close(self) -> None:
        assert self._buffer is not None
        with jax.transfer_guard_device_to_host("allow"):  # explicit, though JAX counts it as implicit
            self._buffer.copy_to_host_async()
        self._closed.append(_Window(self._first, self._last, self._buffer, self._off_buffer, self._dispatched))
        self._buffer, self._off_buffer = None, []

    def _read(self, window: _Window) -> MetricWindow:
        with jax.transfer_guard_device_to_host("allow"):  # `device_get` takes three times as long
            # a copy: on the CPU, a view would keep the whole buffer alive
            words = np.asarray(window.buffer)[window.first - window.last - 1 :].copy()
        if self._adapts:
            self._adapt(window.last)
        off_buffer = (_unstack(jax.device_get(block), steps) for block, steps in window.off_buffer)
        return MetricWindow(window.first, self._format, words, tuple(chain.from_iterable(off_buffer)))

    def _adapt(self, step: int) -> None:
        """Sets the size of the next window from the duration of the steps since the last one."""
        now, steps = time.perf_counter(), step - self._read_to
        wanted = WINDOW_SECONDS * steps / max(now - self._read_at, 1e-9) if self._read_at else self._every
        self._size = max(1, min(2 * self._size, self._every, int(wanted)))
        self._read_at, self._read_to = now, step


def _unstack(block: dict[str, np.ndarray], steps: int | None) -> list[dict[str, np.ndarray]]:
    return [block] if steps is None else [{k: v[i] for k, v in block.items()} for i in range(steps)]
