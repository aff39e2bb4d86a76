import enum
from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_trainer.core import LogFreq, LogMetricMode, LogMode, Metrics, as_metrics, batch_weight
from jax_trainer.core.metric_accumulator import WindowAccumulator
from jax_trainer.core.metric_buffer import Column
from jax_trainer.core.metrics import Metric, mask_of_values, masked_sum, merge_micro
from jax_trainer.testing import assert_close, assert_same_bits

OPTIONS: dict[str, type[enum.Enum]] = {"mode": LogMetricMode, "log_freq": LogFreq, "log_mode": LogMode}
CHOICES = [(option, choice) for option, kind in OPTIONS.items() for choice in kind]


def test_a_plain_value_is_a_mean_weighted_by_the_examples_of_the_batch():
    metrics = as_metrics({"acc": 0.5}, weight=32)
    metric = metrics.by_name["acc"]
    assert (metric.mode, metric.log_freq, metric.log_mode) == (LogMetricMode.MEAN, LogFreq.ANY, LogMode.ANY)
    assert float(metric.value) == 0.5
    assert metrics.weight_of("acc") == 32


def test_a_dict_may_set_every_option():
    entry = {"value": 2.0, "mode": "max", "log_freq": "epoch", "log_mode": "eval", "count": 7}
    metrics = as_metrics({"worst": entry}, weight=32)
    metric = metrics.by_name["worst"]
    assert (metric.mode, metric.log_freq, metric.log_mode) == (LogMetricMode.MAX, LogFreq.EPOCH, LogMode.EVAL)
    assert float(metric.value) == 2.0
    assert metrics.weight_of("worst") == 7


def test_an_option_may_be_an_enum_or_its_name():
    for option, choice in CHOICES:
        for spelling in [lambda c: c, lambda c: c.value, lambda c: c.name]:
            metrics = as_metrics({"m": {"value": 1.0, option: spelling(choice)}}, weight=1)
            assert getattr(metrics.by_name["m"], option) is choice, (option, choice, spelling)


def test_an_unknown_choice_is_an_error_that_names_the_metric_and_the_choices():
    for option in OPTIONS:
        with pytest.raises(ValueError, match=r"'speed'.*'fast'") as error:
            as_metrics({"speed": {"value": 1.0, option: "fast"}}, weight=1)
        assert all(choice.value in str(error.value) for choice in OPTIONS[option]), option


def test_an_unknown_option_is_an_error_that_names_the_metric_and_the_options():
    with pytest.raises(ValueError, match=r"'acc'.*'modus'.*compute, count, log_freq, log_mode, mode"):
        as_metrics({"acc": {"value": 1.0, "modus": "max"}}, weight=1)


def test_a_dict_without_a_value_is_an_error_that_names_the_metric():
    with pytest.raises(ValueError, match=r"'acc'.*needs `value`"):
        as_metrics({"acc": {"mode": "max"}}, weight=1)


def test_a_value_that_is_not_numeric_is_an_error_that_names_the_metric():
    for value in ["high", object(), np.array(["a", "b"])]:
        for wrap in [lambda v: v, lambda v: {"value": v}]:
            with pytest.raises(TypeError, match=r"'quality'.*not a number"):
                as_metrics({"quality": wrap(value)}, weight=1)


PHASES = (LogMode.TRAIN, LogMode.VAL, LogMode.TEST)


def test_a_log_mode_covers_its_phases_and_no_other():
    for mode, covered in [
        (LogMode.ANY, PHASES),
        (LogMode.TRAIN, (LogMode.TRAIN,)),
        (LogMode.VAL, (LogMode.VAL,)),
        (LogMode.TEST, (LogMode.TEST,)),
        (LogMode.EVAL, (LogMode.VAL, LogMode.TEST)),
    ]:
        assert tuple(phase for phase in PHASES if mode.covers(phase)) == covered, (mode, covered)


def test_metrics_of_a_phase_are_those_that_it_reports():
    for phases, kept in [
        ([LogMode.TRAIN], {"any", "train"}),
        ([LogMode.VAL], {"any", "val", "eval"}),
        ([LogMode.VAL, LogMode.TEST], {"any", "val", "test", "eval"}),
    ]:
        metrics = as_metrics({mode.value: {"value": 1.0, "log_mode": mode} for mode in LogMode}, weight=3)
        assert set(metrics.only(*phases).by_name) == kept, (phases, kept)
        assert metrics.only(*phases).weight == 3, (phases, kept)


def test_adding_takes_entries_like_those_of_a_loss_function():
    metrics = as_metrics({"loss": 1.0}, weight=8).adding(worst={"value": 2.0, "mode": "max"})
    assert set(metrics.by_name) == {"loss", "worst"}
    assert metrics.by_name["worst"].mode is LogMetricMode.MAX


def test_metrics_cross_jit_with_their_options():
    metrics = as_metrics({"worst": {"value": 2.0, "mode": "max", "log_freq": "epoch", "count": 3}}, weight=8)
    returned = jax.jit(lambda m: m)(metrics)
    assert_same_bits(returned, jax.tree.map(jnp.asarray, metrics))
    assert returned.by_name["worst"].mode is LogMetricMode.MAX


class SizedBatch(flax.struct.PyTreeNode):
    x: jax.Array
    size: int = flax.struct.field(pytree_node=False)


def test_a_batch_is_weighted_by_its_examples():
    for batch in [
        (np.zeros((5, 3)), np.zeros(5)),
        {"x": np.zeros((5, 3)), "y": np.zeros(5)},
        {"x": np.zeros((5, 3)), "temperature": 0.7},
        SizedBatch(jnp.zeros((2, 3)), size=5),
        {"nodes": np.zeros((40, 3)), "edges": np.zeros((70, 2)), "size": 5},
        {"a": np.zeros((16, 3)), "b": np.zeros((8, 3)), "size": np.int64(5)},
        {"x": np.zeros((5, 3)), "size": np.ones(5)},
        np.zeros((5, 3)),
        jnp.zeros((5, 3)),
        [np.zeros((5, 3))],
    ]:
        assert batch_weight(batch) == 5, batch


def test_a_batch_of_ambiguous_length_is_an_error_that_names_the_sizes():
    with pytest.raises(ValueError, match=r"leading sizes \[4, 6\].*`size`.*batch_size_of.*`size_of=`"):
        batch_weight({"x": np.zeros((6, 3)), "y": np.zeros(4)})


def test_a_function_may_count_the_examples_of_a_batch():
    batch = {"x": np.zeros((6, 3)), "real": np.array([1, 1, 0, 0])}
    assert batch_weight(batch, lambda batch: batch["real"].sum()) == 2
    with pytest.raises(ValueError, match=r"`batch_size_of`.*\(4,\)"):
        batch_weight(batch, lambda batch: batch["real"])


def test_a_batch_without_any_length_is_an_error():
    with pytest.raises(ValueError, match=r"number of examples"):
        batch_weight({"temperature": 0.7})


MERGED = {
    LogMetricMode.MEAN: lambda v, w: (v * w).sum() / w.sum(),
    LogMetricMode.SUM: lambda v, w: v.sum(),
    LogMetricMode.MAX: lambda v, w: v.max(),
    LogMetricMode.MIN: lambda v, w: v.min(),
    LogMetricMode.SINGLE: lambda v, w: v[-1],
    LogMetricMode.CONCAT: lambda v, w: v,
}


@settings(deadline=None, max_examples=120)
@given(
    mode=st.sampled_from(list(MERGED)),
    ragged=st.booleans(),
    values=st.lists(st.floats(-10, 10, width=32), min_size=4, max_size=4),
    weights=st.lists(st.integers(1, 9), min_size=4, max_size=4),
)
def test_metrics_of_micro_batches_merge_into_those_of_the_batch(mode, ragged, values, weights):
    v, w = np.asarray(values, np.float32), np.asarray(weights, np.int32)

    def metrics(v, w):
        return Metrics({"m": Metric(jnp.asarray(v), jnp.asarray(w), mode)}, jnp.asarray(w))

    merged = merge_micro(metrics(v[:3], w[:3]), metrics(v[3], w[3])) if ragged else merge_micro(metrics(v, w))
    expected = MERGED[mode](v.astype(np.float64), w)
    assert_close(np.asarray(merged.by_name["m"].value), np.asarray(expected), atol=1e-5)
    assert int(merged.weight) == int(merged.weight_of("m")) == w.sum()


def test_a_count_must_be_a_scalar():
    with pytest.raises(ValueError, match=r"'m'.*`count`.*\(2,\)"):
        as_metrics({"m": {"value": [1.0, 2.0], "count": [3, 0]}}, 4)


def test_a_value_that_is_no_array_is_an_error_that_names_the_metric():
    for value in [None, [[1], [2, 3]]]:
        with pytest.raises(TypeError, match="Metric 'm' is a"):
            as_metrics({"m": value}, 1)


def test_a_size_per_example_is_not_the_size_of_the_batch():
    class Lengths(NamedTuple):
        x: jax.Array
        size: jax.Array

    assert batch_weight(Lengths(jnp.zeros((4, 2)), jnp.arange(4))) == 4


SUMS, COUNTS = [10.0, 2.0], [4, 1]
WITH_COUNT = {
    "mean": 12 / 5,  # the sum of all values over the sum of all counts
    "std": np.sqrt((4 * 2.5**2 + 1 * 2.0**2) / 5 - (12 / 5) ** 2),  # of the steps' means, weighted by their counts
    "sum": 12.0,
    "max": 10.0,
    "min": 2.0,
    "single": 2.0,
}


def test_a_value_with_a_count_is_a_sum_over_that_many():
    for mode in WITH_COUNT:
        steps = [
            as_metrics({"m": {"value": v, "count": n, "mode": mode}}, 8) for v, n in zip(SUMS, COUNTS, strict=True)
        ]
        values, weights = (np.array([float(x) for x in column]) for column in zip(*map(_one, steps), strict=True))
        accumulator = WindowAccumulator()
        accumulator.add_columns({"m": Column(LogMetricMode(mode), LogFreq.ANY, LogMode.ANY, values, weights)})
        assert_close(accumulator.compute()["m"], WITH_COUNT[mode])
        stacked = jax.tree.map(lambda *parts: jnp.stack([jnp.asarray(part) for part in parts]), *steps)
        if mode != "std":  # for micro-batches it is the mean of the step
            assert_close(merge_micro(stacked).by_name["m"].value, WITH_COUNT[mode])


def _one(metrics: Metrics) -> tuple[jax.Array, int]:
    return metrics.by_name["m"].value, metrics.weight_of("m")


def test_a_mean_over_nothing_is_finite_and_has_weight_0():
    metrics = as_metrics({"m": {"value": 0.0, "count": 0}}, 8)
    assert np.isfinite(metrics.by_name["m"].value)
    assert metrics.weight_of("m") == 0


def test_an_array_metric_without_a_mode_is_an_error_that_names_its_shape():
    for shape in [(8,), (3,), (1,), (8, 3)]:
        with pytest.raises(ValueError, match=rf"'per_class'.*\({shape[0]},.*8 examples.*'mode'"):
            as_metrics({"per_class": jnp.ones(shape)}, weight=8)
        assert as_metrics({"per_class": {"value": jnp.ones(shape), "mode": "mean"}}, weight=8).by_name, shape


class Parts:
    """A `compute` that reports two numbers."""

    results = ("low", "high")

    def __call__(self, statistics):
        return {"low": statistics.min(), "high": statistics.max()}


def test_the_names_that_are_reported_are_those_of_the_results():
    entries = {"loss": 1.0, "part": {"value": jnp.ones(3), "mode": "sum", "compute": Parts()}}
    metrics = as_metrics({**entries, "root": {"value": 4.0, "compute": np.sqrt}}, 3)
    assert metrics.names == ["loss", "part_low", "part_high", "root"]
    assert metrics.computes.keys() == {"part", "root"}
    assert jax.jit(lambda m: m)(metrics).by_name["root"].compute is np.sqrt


def test_a_mask_has_one_entry_per_example_or_per_value():
    values = jnp.array([[1.0, 3.0], [5.0, jnp.nan]])
    assert masked_sum(values, jnp.array([2, 0])) == (8.0, 4.0)
    assert masked_sum(values, jnp.array([[0, 0.5], [1, 0]])) == (6.5, 1.5)
    with pytest.raises(ValueError, match=r"`mask`.*\(3,\).*\(2, 2\)"):
        mask_of_values(jnp.zeros(3), (2, 2))
