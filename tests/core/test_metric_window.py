import weakref
from collections.abc import Iterator
from functools import cache
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_trainer.adapters import function_program
from jax_trainer.core import (
    LogMetricMode,
    LogMode,
    MetricReader,
    Metrics,
    MetricWindow,
    WindowAccumulator,
    as_metrics,
    compile_program,
)
from jax_trainer.core.metric_accumulator import FOLD_AFTER
from jax_trainer.core.metric_buffer import LARGEST_IN_BUFFER, MetricBufferFormat
from jax_trainer.testing import assert_close


def numbered_rows(steps: int, first: int = 1) -> MetricWindow:
    def metrics(step: int) -> Metrics:
        return as_metrics({"mean": step, "concat": {"value": step, "mode": "concat"}}, 10 * step)

    fmt = MetricBufferFormat.of(metrics(1))
    buffer, off_buffer = fmt.blank(steps), []
    for step in range(first, first + steps):
        buffer, loose = buffer.append(metrics(step))
        off_buffer.append(jax.device_get(loose))
    return MetricWindow(first, fmt, np.asarray(buffer.rows), tuple(off_buffer))


def test_rows_split_after_a_step():
    for after in range(4, 9):
        head, tail = numbered_rows(4, first=5).split(after)
        assert (head.first, head.last) == (5, after), after
        assert (tail.first, tail.last) == (after + 1, 8), after
        for part in (head, tail):
            steps = list(range(part.first, part.last + 1))
            assert list(part.columns["mean"].values) == steps, after
            assert list(part.columns["mean"].weights) == [10 * step for step in steps], after
            assert list(part.columns["concat"].values) == steps, after


class Writer:
    """Writes steps whose metrics are the step number, and reads ready windows after every dispatch."""

    def __init__(self, every: int, lag: int, length: int = 16, adapts: bool = False) -> None:
        metrics = self._metrics(0)
        self._format = MetricBufferFormat.of(metrics)
        self._buffer = self._format.blank(length)
        self.reader = MetricReader(self._format, every, lag, adapts=adapts)

    @staticmethod
    def _metrics(step: int) -> Any:
        return as_metrics({"m": step, "big": np.full(LARGEST_IN_BUFFER + 1, step, np.int32)}, 1)

    def dispatch(self, first: int, steps: int = 1, *, stacked: bool = False) -> list[MetricWindow]:
        blocks = []
        for step in range(first, first + steps):
            self._buffer, loose = self._buffer.append(self._metrics(step))
            blocks.append(loose)
        # a chunk is padded to its full length
        loose = jax.tree.map(lambda *x: jnp.stack([*x, x[-1] * 0]), *blocks) if stacked else blocks[0]
        self.reader.record(self._buffer, loose, first + steps - 1, steps, stacked=stacked)
        return list(self.reader.ready())


def spans(windows: Any) -> list[tuple[int, int]]:
    return [(rows.first, rows.last) for rows in windows]


@pytest.mark.parametrize(
    ("seconds", "sizes"), [(0.001, [1, 2, 4, 8, 16, 19, 50]), (0.3, [1, 2, 3, 3, 3, 3]), (5.0, [1, 2, 1, 1, 1, 1])]
)
def test_metrics_of_slow_steps_arrive_about_every_second(monkeypatch, seconds, sizes):
    now = [0.0]
    monkeypatch.setattr("jax_trainer.core.metric_buffer.time", SimpleNamespace(perf_counter=lambda: now[0]))
    writer, windows = Writer(every=50, lag=0, length=64, adapts=True), []
    for step in range(1, 101):
        now[0] += seconds
        windows += writer.dispatch(step)
    assert [rows.last - rows.first + 1 for rows in windows][: len(sizes)] == sizes
    assert [step for rows in windows for step in range(rows.first, rows.last + 1)] == list(
        range(1, windows[-1].last + 1)
    )


def test_flushed_windows_end_at_multiples():
    writer = Writer(every=10, lag=99, length=64, adapts=True)
    for step in range(1, 16):
        assert not writer.dispatch(step)
    [first, second] = writer.reader.flush()
    assert spans([first, second]) == [(1, 10), (11, 15)]
    assert first.values_of("m").tolist() == list(range(1, 11))
    assert [step["big"][0] for step in second.off_buffer] == list(range(11, 16))


def test_windows_end_at_multiples_of_every():
    writer = Writer(every=3, lag=0)
    found = [span for step in range(1, 9) for span in spans(writer.dispatch(step))]
    assert found == [(1, 3), (4, 6)]


def test_a_resumed_run_closes_its_first_window_at_the_next_multiple():
    writer = Writer(every=5, lag=0)
    assert [span for step in range(8, 16) for span in spans(writer.dispatch(step))] == [(8, 10), (11, 15)]


def test_a_window_is_read_some_dispatches_after_it_closed():
    for lag in [0, 1, 3]:
        writer = Writer(every=2, lag=lag)
        ready = [spans(writer.dispatch(step)) for step in range(1, 7)]
        assert ready.index([(1, 2)]) + 1 == 2 + lag, lag


def test_flush_returns_the_rest_in_order_and_then_nothing():
    writer = Writer(every=2, lag=100)
    for step in range(1, 6):
        assert writer.dispatch(step) == []
    assert spans(writer.reader.flush()) == [(1, 2), (3, 4), (5, 5)]
    assert spans(writer.reader.flush()) == []


def test_values_outside_the_buffer_belong_to_their_steps_stacked_or_not():
    writer = Writer(every=4, lag=0)
    writer.dispatch(1)
    (rows,) = writer.dispatch(2, steps=3, stacked=True)
    for name in ("m", "big"):
        np.testing.assert_array_equal(rows.columns[name].values.reshape(4, -1)[:, 0], [1, 2, 3, 4])


def test_a_window_read_late_is_not_disturbed_by_later_steps():
    writer = Writer(every=2, lag=3, length=2)
    windows = [rows for step in range(1, 9) for rows in writer.dispatch(step)]
    assert [list(rows.columns["m"].values) for rows in windows] == [[1, 2], [3, 4]]


FOLDED = [mode for mode in LogMetricMode if mode is not LogMetricMode.CONCAT]
VALUE_DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "int32": jnp.int32}


def report(values: jax.Array) -> Any:
    mean = values.mean(dtype=jnp.float32).astype(values.dtype)
    folded = {mode.value: {"value": mean, "mode": mode} for mode in FOLDED}
    return as_metrics({**folded, "concat": {"value": values, "mode": "concat"}}, values.shape[0])


@cache
def appending(size: int, dtype: str) -> Any:
    formats: list[MetricBufferFormat] = []
    traced = lambda values: formats.append(MetricBufferFormat.of(report(values)))
    jax.eval_shape(traced, jax.ShapeDtypeStruct((size,), VALUE_DTYPES[dtype]))
    return formats[0], jax.jit(lambda buffer, values: buffer.append(report(values)))


@jax.jit
def mean_of(values: Any) -> Any:
    return report(values).by_name["mean"].value


def oracle(means: np.ndarray, sizes: np.ndarray) -> dict[str, float]:
    mean = np.average(means, weights=sizes)
    return {
        "mean": mean,
        "std": np.sqrt(np.average((means - mean) ** 2, weights=sizes)),
        "sum": means.sum(),
        "max": means.max(),
        "min": means.min(),
        "single": means[-1],
    }


@settings(deadline=None, max_examples=40)
@given(
    sizes=st.lists(st.integers(1, 3), min_size=1, max_size=15),
    every=st.integers(1, 16),
    lag=st.integers(0, 4),
    dtype=st.sampled_from(list(VALUE_DTYPES)),
    seed=st.integers(0, 2**16),
)
def test_an_epoch_of_ragged_batches_agrees_with_numpy_whatever_the_window(sizes, every, lag, dtype, seed):
    rng = np.random.default_rng(seed)
    batches = [rng.normal(scale=100, size=size).astype(VALUE_DTYPES[dtype]) for size in sizes]
    fmt = appending(sizes[0], dtype)[0]
    buffer, reader, accumulator = fmt.blank(16), MetricReader(fmt, every, lag), WindowAccumulator(LogMode.TRAIN)
    for step, batch in enumerate(batches, start=1):
        buffer, loose = appending(len(batch), dtype)[1](buffer, batch)
        reader.record(buffer, loose, step, 1, stacked=False)
        for rows in reader.ready():
            accumulator.add(rows)
    for rows in reader.flush():
        accumulator.add(rows)
    found = accumulator.compute()
    means = np.array([np.asarray(mean_of(batch), np.float64) for batch in batches])
    np.testing.assert_array_equal(found.pop("concat"), np.concatenate(batches), strict=True)
    for name, expected in oracle(means, np.array(sizes)).items():
        np.testing.assert_allclose(found[name], expected, rtol=1e-6, atol=1e-9 * np.abs(means).max(), err_msg=name)


def ragged_batches(sizes: tuple[int, ...]) -> Iterator[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    for size in sizes:
        yield {"x": rng.normal(loc=2, size=(size, 3)).astype(np.float32)}


@pytest.mark.parametrize("every", [1, 2, 7])
def test_a_compiled_program_reports_epoch_means_over_all_examples(every):
    def loss(params, batch, *, rng, train):
        squares = ((batch["x"] @ params["w"]) ** 2).astype(jnp.float32)
        return squares.mean(), {"big": (squares > 10).mean(), "seen": {"value": batch["x"][:, 0], "mode": "concat"}}

    program = function_program(lambda key, batch: {"w": jnp.ones(3)}, loss, optax.sgd(0.0))
    compiled = compile_program(program, on_recompile="ignore")
    batches = list(ragged_batches((8, 8, 5, 8, 3)))
    state = compiled.init(jax.random.key(0), batches[0])
    buffer = compiled.train_buffer(state, batches[0], 8)
    fmt = buffer.format
    reader, accumulator = MetricReader(fmt, every, lag=2), WindowAccumulator(LogMode.TRAIN)
    for step, batch in enumerate(batches, start=1):
        state, buffer, (loose, _) = compiled.train_step(state, buffer, batch)
        reader.record(buffer, loose, step, 1, stacked=False)
    for rows in reader.flush():
        accumulator.add(rows)
    found = accumulator.compute()
    x = np.concatenate([batch["x"] for batch in batches])
    squares = x.astype(np.float64).sum(-1) ** 2
    assert_close([found["loss"], found["big"]], [squares.mean(), (squares > 10).mean()], rtol=1e-6, atol=0)
    np.testing.assert_array_equal(found["seen"], x[:, 0], strict=True)


def test_one_metric_can_be_read_alone():
    rows = numbered_rows(4, first=5)
    assert list(rows.values_of("mean")) == list(rows.values_of("concat")) == [5, 6, 7, 8]


def test_a_long_epoch_has_the_same_bits_whatever_the_windows_it_arrives_in():
    values = np.random.default_rng(0).normal(loc=5, size=3 * FOLD_AFTER + 5).astype(np.float32)
    metrics = as_metrics({"m": values[0], "spread": {"value": values[0], "mode": "std"}}, 3)
    fmt = MetricBufferFormat.of(metrics)
    words = np.repeat(np.asarray(fmt.blank(1).append(metrics)[0].rows), len(values), axis=0)
    for name in ("m", "spread"):
        words[:, fmt.metrics[name].value.start] = values.view(np.uint32)
    found = []
    for window in (1, 8, 50, 5000, len(values)):
        accumulator = WindowAccumulator(LogMode.TRAIN)
        for start in range(0, len(values), window):
            accumulator.add(MetricWindow(start + 1, fmt, words[start : start + window]))
            if window > 8:  # a run that is interrupted and resumed after every window
                kept, accumulator = accumulator.state(), WindowAccumulator(LogMode.TRAIN)
                accumulator.load(kept)
        found.append(accumulator.compute())
    assert found[1:] == found[:-1]
    assert found[0] == pytest.approx({"m": values.mean(dtype=np.float64), "spread": values.std(dtype=np.float64)})


def test_a_long_epoch_is_folded_in_parts_and_comes_out_the_same():
    rows = numbered_rows(7)
    many, accumulator = -(-3 * FOLD_AFTER // 7), WindowAccumulator(LogMode.TRAIN)
    for _ in range(many):
        accumulator.add(rows)
    found = accumulator.compute()
    once = np.arange(1, 8)
    assert found["mean"] == pytest.approx(np.average(once, weights=10 * once), rel=1e-12)
    assert len(found["concat"]) == 7 * many
    assert accumulator.compute() == {}


def test_a_state_has_all_steps_and_loading_one_discards_the_others():
    accumulator, other = WindowAccumulator(LogMode.TRAIN), WindowAccumulator(LogMode.TRAIN)
    assert accumulator.state() == {}
    accumulator.add(numbered_rows(3))
    other.add(numbered_rows(2, first=50))
    other.load(accumulator.state())
    for each in (accumulator, other):
        each.add(numbered_rows(4, first=4))
    found, expected = other.compute(), accumulator.compute()
    np.testing.assert_array_equal(found.pop("concat"), [1, 2, 3, 4, 5, 6, 7])
    expected.pop("concat")
    assert found == expected == {"mean": np.average(np.arange(1, 8), weights=np.arange(1, 8))}


def test_large_arrays_do_not_accumulate(monkeypatch):
    monkeypatch.setattr("jax_trainer.core.metric_accumulator.FOLD_BYTES", 3 * 4 * (LARGEST_IN_BUFFER + 1))
    metrics = as_metrics({"big": np.ones(LARGEST_IN_BUFFER + 1, np.float32)}, 1)
    fmt, accumulator = MetricBufferFormat.of(metrics), WindowAccumulator(LogMode.TRAIN)
    words, seen = np.asarray(fmt.blank(1).append(metrics)[0].rows), []
    for step in range(1, 9):
        array = np.full(LARGEST_IN_BUFFER + 1, step, np.float32)
        seen.append(weakref.ref(array))
        accumulator.add(MetricWindow(step, fmt, words, ({"big": array},)))
        del array
    assert [there() is not None for there in seen] == [False] * 6 + [True] * 2
    np.testing.assert_array_equal(accumulator.compute()["big"], np.full(LARGEST_IN_BUFFER + 1, 4.5))
