"""The metric buffer: the metrics of the last steps, packed into one small device array.

Every scalar metric is a 32-bit word (or two) of one row; a step appends its row and drops the oldest. So steps pass on
one array whatever they report, nothing waits for the device, and the host reads many steps with one transfer. Values
are bitcast, not rounded: integers are exact. The last word of a row counts the rows, which numbers the batches of an
evaluation. Metrics that are large or have no fixed shape (CONCAT) are not in the buffer but returned step by step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_trainer.core.metric_accumulator import Column, Columns
from jax_trainer.core.metrics import LogMetricMode, Metric, Metrics

LARGEST_IN_BUFFER = 64  # elements of one metric; a confusion matrix of 8 classes still fits


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
        return {
            name: Column(
                metric.mode,
                metric.log_freq,
                metric.log_mode,
                metric.value.read(rows) if metric.value else self._loose(name, metric.mode, loose),
                default if metric.weight is None else metric.weight.read(rows),
            )
            for name, metric in self.metrics.items()
        }

    @staticmethod
    def _loose(name: str, mode: LogMetricMode, loose: Sequence[dict[str, np.ndarray]]) -> Any:
        values = [step[name] for step in loose]
        return values if mode is LogMetricMode.CONCAT else np.stack(values).astype(np.float64)


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
                "same names, shapes and options for every batch."
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
