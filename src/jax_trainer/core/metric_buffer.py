"""The metric buffer: the metrics of the last steps, packed into one small device array.

Every scalar metric is a 32-bit word (or two) of one row; a step appends its row and drops the oldest. So steps pass on
one array whatever they report, nothing waits for the device, and the host reads many steps with one transfer. Values
are bitcast, not rounded: integers are exact. The last word of a row counts the rows, which numbers the batches of an
evaluation. Metrics that are large or have no fixed shape (CONCAT) are not in the buffer but returned step by step.

`MetricReader` reads windows of the buffer on the host, with a lag; `metric_accumulator.py` aggregates them.
"""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain, groupby
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_trainer.core.metrics import Compute, LogFreq, LogMetricMode, LogMode, Metric, Metrics

LARGEST_IN_BUFFER = 64  # elements of one metric; a confusion matrix of 8 classes still fits
WINDOW_SECONDS = 1.0  # target interval between windows of slow steps


class Column(NamedTuple):
    """One metric over consecutive steps: `values[i]` and `weights[i]` belong to step i."""

    mode: LogMetricMode
    log_freq: LogFreq
    log_mode: LogMode
    values: Any  # an array [steps, ...], or a list of arrays for CONCAT
    weights: np.ndarray
    compute: Compute | None = None  # of what is reported, from the aggregated value


Columns = dict[str, Column]


class Field(NamedTuple):
    """The words of one array in a row, with its shape and dtype."""

    start: int
    stop: int
    shape: tuple[int, ...]
    dtype: np.dtype

    def read(self, rows: np.ndarray) -> np.ndarray:
        """The values of this field in `rows`, as float64 (integers are exact up to 2^53)."""
        words = np.ascontiguousarray(rows[:, self.start : self.stop])
        return words.view(self.dtype).reshape(len(rows), *self.shape).astype(np.float64)


class MetricBufferFormat(NamedTuple):
    """The fields of all metrics in a row."""

    metrics: dict[str, Metric]  # with Fields instead of arrays; static options are kept
    default_weight: Field
    off_buffer: tuple[str, ...]
    width: int

    @classmethod
    def of(cls, metrics: Metrics) -> "MetricBufferFormat":
        """The format of `metrics` (arrays, tracers or shapes)."""
        position = 0

        def field(array: Any) -> Field:
            nonlocal position
            dtype = np.dtype(_buffer_dtype(array.dtype))
            start, position = position, position + int(np.prod(array.shape)) * max(dtype.itemsize // 4, 1)
            return Field(start, position, tuple(array.shape), dtype)

        default_weight = field(_array_like(metrics.weight))
        placed = {
            name: metric.replace(
                value=field(metric.value) if _fits(metric) else None,
                weight=None if metric.weight is None else field(_array_like(metric.weight)),
            )
            for name, metric in metrics.by_name.items()
        }
        off_buffer = tuple(name for name, metric in metrics.by_name.items() if not _fits(metric))
        return cls(placed, default_weight, off_buffer, position + 1)

    def __hash__(self) -> int:
        return hash((self.width, self.off_buffer, *self.metrics))

    def blank(self, length: int) -> "MetricBuffer":
        """An empty buffer for the last `length` steps, on the host."""
        return MetricBuffer(np.zeros((length, self.width), np.uint32), self)

    def read(self, rows: np.ndarray, loose: Sequence[dict[str, np.ndarray]]) -> Columns:
        """The columns of consecutive steps, from their rows."""
        default = self.default_weight.read(rows)

        def values(name: str, metric: Metric) -> Any:
            if metric.value is not None:
                return metric.value.read(rows)
            found = [step[name] for step in loose]
            return found if metric.mode is LogMetricMode.CONCAT else np.stack(found).astype(np.float64)

        return {
            name: Column(
                metric.mode,
                metric.log_freq,
                metric.log_mode,
                values(name, metric),
                default if metric.weight is None else metric.weight.read(rows),
                metric.compute,
            )
            for name, metric in self.metrics.items()
        }


@partial(jax.tree_util.register_dataclass, data_fields=("rows",), meta_fields=("format",))
@dataclass(slots=True)
class MetricBuffer:
    """The metrics of the last steps: an array of rows, and their format, which is static."""

    rows: Any
    format: MetricBufferFormat

    def append(self, metrics: Metrics) -> "tuple[MetricBuffer, dict[str, jax.Array]]":
        """The buffer with one more step, and the metrics that do not fit into it."""
        row, loose = self._row(metrics, self.rows_written + 1)
        # a select, not a concatenation, into which the compiler would fuse the reductions of the row (5 % of a step)
        is_last = jnp.arange(len(self.rows))[:, None] == len(self.rows) - 1
        return MetricBuffer(jnp.where(is_last, row, jnp.roll(self.rows, -1, axis=0)), self.format), loose

    def shifted(self, steps: Any) -> "MetricBuffer":
        """The buffer with space for the rows of `steps` steps at its end, for `write`."""
        return MetricBuffer(jnp.roll(self.rows, -steps, axis=0), self.format)

    def write(self, metrics: Metrics, at: Any, number: Any) -> "tuple[MetricBuffer, dict[str, jax.Array]]":
        """As `append`, with the row at index `at` and its `number`: a loop writes it without copying the buffer."""
        row, loose = self._row(metrics, number)
        return MetricBuffer(lax.dynamic_update_index_in_dim(self.rows, row, at, 0), self.format), loose

    def _row(self, metrics: Metrics, number: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
        found = MetricBufferFormat.of(metrics)
        if found != self.format:
            raise ValueError(
                f"The metrics changed between batches, from {_describe(self.format)} to {_describe(found)}. Return the "
                "same names, shapes and options for every batch; define the function of a `compute` outside of the "
                "loss."
            )
        words = [_words(metrics.weight)]
        for metric in metrics.by_name.values():
            words += [_words(metric.value)] if _fits(metric) else []
            words += [] if metric.weight is None else [_words(metric.weight)]
        loose = {name: jnp.asarray(metrics.by_name[name].value) for name in found.off_buffer}
        return jnp.concatenate([*words, jnp.reshape(number, 1)]), loose

    @property
    def rows_written(self) -> jax.Array:
        """The number of rows written so far, which is the number of the current batch."""
        return self.rows[-1, -1]


def _fits(metric: Metric) -> bool:
    return metric.mode is not LogMetricMode.CONCAT and np.prod(metric.value.shape) <= LARGEST_IN_BUFFER


def _array_like(weight: Any) -> Any:
    return weight if hasattr(weight, "dtype") else jnp.asarray(weight)


def _buffer_dtype(dtype: Any) -> Any:
    if dtype.itemsize == 8:
        return dtype
    if jnp.issubdtype(dtype, jnp.floating):
        return jnp.float32
    return jnp.int32 if jnp.issubdtype(dtype, jnp.signedinteger) else jnp.uint32


def _words(value: Any) -> jax.Array:
    array = jnp.asarray(value)
    array = array.astype(_buffer_dtype(array.dtype))
    return lax.bitcast_convert_type(array, jnp.uint32).ravel()


def _describe(fmt: MetricBufferFormat) -> str:
    return ", ".join(
        f"{name} ({metric.value.dtype}{list(metric.value.shape)})" if metric.value else f"{name} ({metric.mode.value})"
        for name, metric in fmt.metrics.items()
    )


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

    @cached_property
    def examples(self) -> np.ndarray:
        """The number of examples of each step."""
        return np.rint(self.format.default_weight.read(self.words)).astype(np.int64)

    def values_of(self, name: str) -> Any:
        """The values of one metric, without decoding the others."""
        field = self.format.metrics[name].value
        return self.columns[name].values if field is None else field.read(self.words)

    def split(self, after: int) -> tuple["MetricWindow", "MetricWindow"]:
        """The steps up to and including `after`, and the later ones."""
        cut = max(0, after + 1 - self.first)
        head = replace(self, words=self.words[:cut], off_buffer=self.off_buffer[:cut])
        return head, replace(self, first=self.first + cut, words=self.words[cut:], off_buffer=self.off_buffer[cut:])


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
        off_buffer: list[dict[str, np.ndarray]] = []
        for block, steps in window.off_buffer:
            found = jax.device_get(block)
            off_buffer += [found] if steps is None else [{k: v[i] for k, v in found.items()} for i in range(steps)]
        return MetricWindow(window.first, self._format, words, tuple(off_buffer))

    def _adapt(self, step: int) -> None:
        """Sets the size of the next window from the duration of the steps since the last one."""
        now, steps = time.perf_counter(), step - self._read_to
        wanted = WINDOW_SECONDS * steps / max(now - self._read_at, 1e-9) if self._read_at else self._every
        self._size = max(1, min(2 * self._size, self._every, int(wanted)))
        self._read_at, self._read_to = now, step
