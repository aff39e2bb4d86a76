from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_trainer.core import LogFreq, LogMetricMode, LogMode, as_metrics
from jax_trainer.core.metric_buffer import LARGEST_IN_BUFFER, Column, MetricBufferFormat


def through_the_buffer(value: Any, **options: Any) -> Column:
    """The column of a metric that one step reported."""
    metrics = as_metrics({"m": {"value": value, **options}}, weight=3)
    fmt = MetricBufferFormat.of(metrics)
    buffer, loose = fmt.blank(4).append(metrics)
    return fmt.read(np.asarray(buffer.rows)[-1:], [jax.device_get(loose)])["m"]


@settings(deadline=None, max_examples=30)
@given(value=st.one_of(st.integers(-(2**31), 2**31 - 1), st.sampled_from([2**31 - 1, -(2**31), 2**24 + 1, 0])))
def test_integers_come_back_exactly(value):
    assert through_the_buffer(jnp.int32(value)).values == [value]


def test_every_type_comes_back_exactly():
    for dtype, numbers in [
        (jnp.bool_, [True, False]),
        (jnp.bfloat16, [1.0078125, -3e38, 0.0]),
        (jnp.float16, [1.0009765625, -65504.0, 6e-8]),
        (jnp.float32, [1.0000001, -3.4e38, 1e-38]),
        (jnp.uint8, [0, 255]),
        (jnp.int8, [-128, 127]),
        (jnp.uint32, [2**32 - 1, 2**31]),
    ]:
        value = jnp.asarray(numbers, dtype)
        np.testing.assert_array_equal(through_the_buffer(value).values, np.asarray(value).astype(np.float64)[None])


def test_a_value_that_is_not_finite_comes_back():
    for value in [np.nan, np.inf, -np.inf]:
        np.testing.assert_array_equal(through_the_buffer(value).values, [value])


def test_a_metric_comes_back_with_its_options_and_weight():
    plain = through_the_buffer(1.0)
    assert (plain.mode, plain.log_freq, plain.log_mode) == (LogMetricMode.MEAN, LogFreq.ANY, LogMode.ANY)
    assert plain.weights == [3]
    other = through_the_buffer(1.0, mode="max", log_freq="epoch", log_mode="train", count=0.5)
    assert (other.mode, other.log_freq, other.log_mode) == (LogMetricMode.MAX, LogFreq.EPOCH, LogMode.TRAIN)
    assert other.weights == [0.5]


def test_a_large_metric_is_returned_outside_the_buffer():
    for shape in [(LARGEST_IN_BUFFER + 1,), (3, LARGEST_IN_BUFFER)]:
        value = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
        fmt = MetricBufferFormat.of(as_metrics({"m": value}, 1))
        assert fmt.off_buffer == ("m",), shape
        assert fmt.width == MetricBufferFormat.of(as_metrics({}, 1)).width, shape
        np.testing.assert_array_equal(through_the_buffer(value).values, value[None])


def test_a_small_metric_is_in_the_buffer():
    for shape in [(), (LARGEST_IN_BUFFER,), (8, 8)]:
        value = np.random.default_rng(0).normal(size=shape).astype(np.float32)
        assert MetricBufferFormat.of(as_metrics({"m": value}, 1)).off_buffer == (), shape
        np.testing.assert_array_equal(through_the_buffer(value).values, value[None])


def test_concat_is_outside_the_buffer_whatever_its_size():
    metrics = as_metrics({"m": {"value": jnp.ones(2), "mode": "concat"}}, 1)
    assert MetricBufferFormat.of(metrics).off_buffer == ("m",)


def test_the_buffer_keeps_the_last_steps_and_counts_all():
    fmt = MetricBufferFormat.of(as_metrics({"m": 0}, 1))
    buffer = fmt.blank(3)
    for step in range(1, 6):
        buffer, _ = buffer.append(as_metrics({"m": 10 * step}, step))
        assert int(buffer.rows_written) == step
    column = fmt.read(np.asarray(buffer.rows), [])["m"]
    np.testing.assert_array_equal(column.values, [30, 40, 50])
    np.testing.assert_array_equal(column.weights, [3, 4, 5])


def test_changed_metrics_are_an_error_that_names_them():
    for changed, old, new in [
        ({"loss": 1.0, "f1": 1.0}, r"acc \(float32\[\]\)", r"f1 \(float32\[\]\)"),
        ({"loss": 1.0}, "acc", "loss"),
        ({"loss": 1.0, "acc": jnp.ones(3)}, r"acc \(float32\[\]\)", r"acc \(float32\[3\]\)"),
        ({"loss": 1.0, "acc": 1}, r"acc \(float32\[\]\)", r"acc \(int32\[\]\)"),
        ({"loss": 1.0, "acc": {"value": 1.0, "mode": "concat"}}, r"acc \(float32\[\]\)", r"acc \(concat\)"),
    ]:
        fmt = MetricBufferFormat.of(as_metrics({"loss": 1.0, "acc": 1.0}, 1))
        with pytest.raises(ValueError, match=f"from .*{old}.* to .*{new}"):
            fmt.blank(2).append(as_metrics(changed, 1))
