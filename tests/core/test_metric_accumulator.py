import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from jax_trainer.core import LogFreq, LogMetricMode, LogMode, MetricWindow, as_metrics
from jax_trainer.core.metric_accumulator import WindowAccumulator, step_values
from jax_trainer.core.metric_buffer import Column, Columns, MetricBufferFormat

FOLDED = [mode for mode in LogMetricMode if mode is not LogMetricMode.CONCAT]


class Run(NamedTuple):
    """The values of many steps, and where windows end."""

    values: Any
    weights: np.ndarray
    cuts: list[int]

    def windows(self, mode: LogMetricMode) -> Iterator[Columns]:
        for start, stop in zip([0, *self.cuts], [*self.cuts, len(self.weights)], strict=True):
            yield {"m": column(mode, self.values[start:stop], self.weights[start:stop])}


def column(mode: LogMetricMode, values: Any, weights: Any = None) -> Column:
    weights = np.ones(len(values)) if weights is None else np.asarray(weights, np.float64)
    return Column(mode, LogFreq.ANY, LogMode.ANY, values, weights)


def accumulated(windows: Iterator[Columns] | list[Columns]) -> dict[str, Any]:
    accumulator = WindowAccumulator()
    for window in windows:
        accumulator.add_columns(window)
    return accumulator.compute()


def oracle(mode: LogMetricMode, values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """The documented aggregation, over all steps at once."""
    values, weights = values[weights > 0], weights[weights > 0]
    mean = np.average(values, axis=0, weights=weights)
    return {
        LogMetricMode.MEAN: mean,
        LogMetricMode.STD: np.sqrt(np.average((values - mean) ** 2, axis=0, weights=weights)),
        LogMetricMode.SUM: values.sum(0),
        LogMetricMode.MAX: values.max(0),
        LogMetricMode.MIN: values.min(0),
        LogMetricMode.SINGLE: values[-1],
    }[mode]


@st.composite
def runs(draw: st.DrawFn) -> Run:
    steps, shape = draw(st.integers(1, 20)), draw(st.sampled_from([(), (3,), (2, 2)]))
    values = draw(arrays(np.float64, (steps, *shape), elements=st.floats(-1e6, 1e6, width=32)))
    weights = draw(arrays(np.float64, steps, elements=st.integers(0, 64).map(float)))
    weights[draw(st.integers(0, steps - 1))] = 1
    return Run(values, weights, sorted(draw(st.lists(st.integers(0, steps), max_size=5))))


@settings(deadline=None, max_examples=200)
@given(run=runs(), mode=st.sampled_from(FOLDED))
def test_every_mode_agrees_with_numpy_however_the_steps_are_cut_into_windows(mode, run):
    found = accumulated(run.windows(mode))["m"]
    scale = np.abs(run.values).max()
    np.testing.assert_allclose(found, oracle(mode, run.values, run.weights), rtol=1e-6, atol=1e-9 * scale)


@settings(deadline=None, max_examples=50)
@given(
    sizes=st.lists(st.integers(0, 4), min_size=1, max_size=12),
    cuts=st.lists(st.integers(0, 12), max_size=4),
    width=st.sampled_from([(), (2,)]),
)
def test_concat_keeps_every_value_bit_for_bit_and_in_order(sizes, cuts, width):
    rng = np.random.default_rng(0)
    values = [rng.normal(size=(size, *width)).astype(np.float32) for size in sizes]
    run = Run(values, np.ones(len(sizes)), sorted(min(cut, len(sizes)) for cut in cuts))
    found = accumulated(run.windows(LogMetricMode.CONCAT))["m"]
    np.testing.assert_array_equal(found, np.concatenate(values), strict=True)


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 2**16), cuts=st.lists(st.integers(0, 500), max_size=6), mean=st.sampled_from([1e4, -1e4]))
def test_std_stays_accurate_when_the_spread_is_tiny_against_the_mean(seed, cuts, mean):
    rng = np.random.default_rng(seed)
    run = Run(mean + 1e-2 * rng.normal(size=500), rng.integers(1, 64, 500).astype(np.float64), sorted(cuts))
    found = accumulated(run.windows(LogMetricMode.STD))["m"]
    np.testing.assert_allclose(found, oracle(LogMetricMode.STD, run.values, run.weights), rtol=1e-6)


def test_no_initial_value_affects_the_largest_and_the_smallest():
    for mode, values, expected in (("max", [-3.0, -2.0, -5.0], -2.0), ("min", [3.0, 2.0, 5.0], 2.0)):
        windows = Run(np.array(values), np.ones(3), [1]).windows(LogMetricMode(mode))
        assert accumulated(windows) == {"m": expected}, mode


def test_a_second_epoch_starts_fresh():
    accumulator = WindowAccumulator()
    accumulator.add_columns({mode.value: column(mode, np.array([100.0, -100.0])) for mode in LogMetricMode})
    accumulator.compute()
    accumulator.add_columns({mode.value: column(mode, np.array([2.0, 2.0])) for mode in LogMetricMode})
    found = {name: [*np.unique(value)] for name, value in accumulator.compute().items()}
    assert found == {mode.value: [2.0] for mode in LogMetricMode} | {"sum": [4.0], "std": [0.0]}
    assert accumulator.compute() == {}


def test_a_step_of_weight_0_is_excluded_even_if_it_is_nan():
    expected = {
        LogMetricMode.MEAN: 2.0,
        LogMetricMode.STD: 1.0,
        LogMetricMode.SUM: 4.0,
        LogMetricMode.MAX: 3.0,
        LogMetricMode.MIN: 1.0,
        LogMetricMode.SINGLE: 3.0,
        LogMetricMode.CONCAT: [1.0, 3.0],
    }
    for mode, cuts in itertools.product(expected, [[], [1], [2], [1, 2]]):
        run = Run(np.array([1.0, np.nan, 3.0]), np.array([2.0, 0.0, 2.0]), cuts)
        found = accumulated(run.windows(mode))["m"]
        np.testing.assert_array_equal(found, expected[mode], err_msg=f"{mode} {cuts}")
        assert accumulated([{"m": column(mode, np.array([np.nan, np.nan]), [0, 0])}]) == {}, mode
    run = Run(np.array([1.0, 2.0, np.nan]), np.array([1.0, 1.0, 0.0]), [2])
    assert accumulated(run.windows(LogMetricMode.SINGLE)) == {"m": 2.0}


def test_a_nan_of_positive_weight_shows():
    assert np.isnan(accumulated([{"m": column(LogMetricMode.MEAN, np.array([1.0, np.nan]))}])["m"])


def test_a_scalar_metric_comes_out_as_a_float_and_a_vector_as_an_array():
    for mode in FOLDED:
        found = accumulated([{"scalar": column(mode, np.ones(2)), "vector": column(mode, np.ones((2, 3)))}])
        assert type(found["scalar"]) is float, mode
        assert found["vector"].shape == (3,), mode


def test_each_metric_has_its_own_weights():
    mean = LogMetricMode.MEAN
    values = np.array([0.0, 1.0])
    columns = {"even": column(mean, values), "skewed": column(mean, values, [1, 3])}
    assert accumulated([columns]) == {"even": 0.5, "skewed": 0.75}


def test_a_metric_that_appears_late_is_averaged_from_there():
    a, b = column(LogMetricMode.MEAN, np.array([1.0])), column(LogMetricMode.MEAN, np.array([5.0]))
    assert accumulated([{"a": a}, {"a": b, "b": b}]) == {"a": 3.0, "b": 5.0}


def test_an_accumulator_keeps_the_metrics_of_its_phase_and_frequencies():
    kinds = {"plain": {}, "step": {"log_freq": "step"}, "epoch": {"log_freq": "epoch"}, "val": {"log_mode": "val"}}
    metrics = as_metrics({name: {"value": 1, **options} for name, options in kinds.items()}, weight=1)
    fmt = MetricBufferFormat.of(metrics)
    window = MetricWindow(1, fmt, np.asarray(fmt.blank(1).append(metrics)[0].rows))
    for phase, freqs, names in (
        (LogMode.TRAIN, LogFreq, {"plain", "step", "epoch"}),
        (LogMode.TRAIN, (LogFreq.ANY, LogFreq.EPOCH), {"plain", "epoch"}),
        (LogMode.TRAIN, (LogFreq.ANY, LogFreq.STEP), {"plain", "step"}),
        (LogMode.VAL, LogFreq, {"plain", "step", "epoch", "val"}),
        (LogMode.TEST, (LogFreq.ANY,), {"plain"}),
    ):
        accumulator = WindowAccumulator(phase, freqs)
        accumulator.add(window)
        assert accumulator.compute().keys() == names, (phase, freqs)


def test_an_infinite_value_is_an_infinite_mean_in_any_window():
    for cut in range(3):
        run = Run(np.array([1.0, np.inf, 2.0]), np.ones(3), [cut])
        assert accumulated(run.windows(LogMetricMode.MEAN)) == {"m": np.inf}, cut


ANY_FLOAT = st.floats() | st.sampled_from([0.0, -0.0, 1e308, -1e308, np.inf])


@st.composite
def wild_runs(draw: st.DrawFn) -> Run:
    steps, shape = draw(st.integers(1, 30)), draw(st.sampled_from([(), (3,)]))
    values = draw(arrays(np.float64, (steps, *shape), elements=ANY_FLOAT))
    weights = draw(arrays(np.float64, steps, elements=st.floats(0, 64) | st.just(0.0)))
    return Run(values, weights, sorted(draw(st.lists(st.integers(0, steps), max_size=4))))


def bits(value: Any) -> bytes:
    found = np.array(value, np.float64)
    found[np.isnan(found)] = np.nan  # there are many bit patterns of nan
    return found.tobytes()


@settings(deadline=None, max_examples=200)
@given(run=wild_runs(), mode=st.sampled_from(LogMetricMode))
def test_wherever_it_is_cut_saved_and_loaded_the_result_has_the_same_bits(mode, run):
    accumulator = WindowAccumulator()
    for window in run.windows(mode):
        accumulator.add_columns(window)
        kept, accumulator = accumulator.state(), WindowAccumulator()
        accumulator.load(kept)
    once = accumulated([{"m": column(mode, run.values, run.weights)}])
    assert {name: bits(value) for name, value in accumulator.compute().items()} == {k: bits(v) for k, v in once.items()}


def test_which_zero_is_larger_does_not_depend_on_the_windows():
    values = np.where(np.random.default_rng(0).random(40) < 0.5, 0.0, -0.0)
    for mode in (LogMetricMode.MAX, LogMetricMode.MIN):
        found = {bits(accumulated(Run(values, np.ones(40), [cut]).windows(mode))["m"]) for cut in range(41)}
        assert found == {bits(0.0)}, mode


@settings(deadline=None, max_examples=20)
@given(steps=st.integers(1, 1000))
def test_steps_are_added_up_one_after_the_other(steps):
    rng = np.random.default_rng(steps)
    values, weights = rng.normal(size=steps), rng.uniform(1, 2, steps)
    total, weighted, weight = values[0], values[0] * weights[0], weights[0]
    for value, own in zip(values[1:], weights[1:], strict=True):
        total, weighted, weight = total + value, weighted + value * own, weight + own
    columns = {mode.value: column(mode, values, weights) for mode in (LogMetricMode.SUM, LogMetricMode.MEAN)}
    assert accumulated([columns]) == {"sum": total, "mean": weighted / weight}


def test_the_state_does_not_grow_with_the_steps_and_stays_when_more_come():
    for mode, shape in itertools.product(FOLDED, [(), (2, 2)]):
        accumulator = WindowAccumulator()
        accumulator.add_columns({"m": column(mode, np.arange(4000.0).reshape(1000, *shape, -1)[..., 0])})
        name, folded = accumulator.state()["m"]
        parts = folded if isinstance(folded, tuple) else (folded,)
        before = [np.copy(part) for part in parts]
        assert name == mode.value
        assert all(type(part) is float or (part.shape == shape and part.base is None) for part in parts), mode
        accumulator.add_columns({"m": column(mode, -np.ones((5, *shape)))})
        np.testing.assert_equal(list(parts), before)


def test_concat_is_kept_as_one_array_of_its_own_type():
    for dtype, sizes in itertools.product([jnp.bfloat16, np.int32], [[2, 1], [0]]):
        values = [np.asarray(np.arange(3 * size).reshape(size, 3), dtype) for size in sizes]
        accumulator, second = WindowAccumulator(), WindowAccumulator()
        accumulator.add_columns({"m": column(LogMetricMode.CONCAT, values)})
        mode, (kept,) = accumulator.state()["m"]
        assert mode == "concat"
        second.load(accumulator.state())
        for found in (kept, second.compute()["m"], accumulator.compute()["m"]):
            np.testing.assert_array_equal(found, np.concatenate(values), strict=True)


def test_a_metric_with_another_mode_than_before_is_an_error():
    accumulator = WindowAccumulator()
    accumulator.load({"loss": ("mean", (1.0, 2.0))})
    with pytest.raises(ValueError, match="'loss'.*'sum'.*'mean'"):
        accumulator.add_columns({"loss": column(LogMetricMode.SUM, np.ones(1))})


def test_std_stays_accurate_when_the_first_step_is_far_from_all_others():
    values = np.concatenate([[1e6], 1 + 1e-3 * np.random.default_rng(0).normal(size=999)])
    assert accumulated([{"m": column(LogMetricMode.STD, values)}])["m"] == pytest.approx(values.std(), rel=1e-9)


# metrics that are computed from aggregated statistics


def share(statistics: np.ndarray) -> float:
    return statistics[0] / statistics[1]


def span(statistics: np.ndarray) -> dict[str, float]:
    statistics -= statistics.min()  # changes what it gets
    return {"low": statistics[0], "high": statistics[-1]}


COUNTS = np.array([[1.0, 4.0], [2.0, 2.0], [0.0, 4.0]])


def computed(values: Any = COUNTS, mode: LogMetricMode = LogMetricMode.SUM) -> Columns:
    return {
        "share": column(mode, values)._replace(compute=share),
        "span": column(mode, values)._replace(compute=span),
        "plain": column(mode, values),
    }


def test_a_result_is_computed_from_the_aggregated_statistics():
    found = accumulated([computed(COUNTS[:1]), computed(COUNTS[1:])])
    np.testing.assert_array_equal(found.pop("plain"), [3.0, 10.0])
    assert found == {"share": 0.3, "span_low": 0.0, "span_high": 7.0}
    assert type(found["share"]) is float


def test_values_so_far_change_nothing():
    accumulator = WindowAccumulator()
    accumulator.add_columns(computed())
    before = accumulator.values()
    jax.tree.map(np.testing.assert_array_equal, accumulator.values(), before)
    jax.tree.map(np.testing.assert_array_equal, accumulator.compute(), before)
    assert accumulator.values() == {}


def test_a_state_has_no_function_and_what_is_computed_waits_for_it():
    accumulator, second = WindowAccumulator(), WindowAccumulator()
    accumulator.add_columns(computed(COUNTS[:2]))
    kept = accumulator.state()
    assert {name: (state[0], *state[2:]) for name, state in kept.items()} == {
        "share": ("sum", "computed"),
        "span": ("sum", "computed"),
        "plain": ("sum",),
    }
    second.load(kept)
    assert (second.lacking, second.values().keys()) == (["share", "span"], {"plain"})
    assert second.state().keys() == kept.keys()  # and can be saved again
    assert second.state()["share"][2:] == ("computed",)
    second.provide({"share": share, "other": span})
    assert (second.lacking, second.values()["share"]) == (["span"], 0.5)
    second.add_columns(computed(COUNTS[2:]))
    assert (second.lacking, second.compute()["share"]) == ([], 0.3)


def test_other_data_is_no_state():
    for kept in [("sum",), ("sum", 1.0, "other"), ("sum", 1.0, "computed", 1), "sum", ()]:
        with pytest.raises(ValueError, match="'m'.*is not the state"):
            WindowAccumulator().load({"m": kept})


def test_an_error_in_a_compute_names_the_metric():
    accumulator = WindowAccumulator()
    accumulator.add_columns(
        {"m": column(LogMetricMode.SUM, COUNTS)._replace(compute=lambda statistics: statistics.missing)}
    )
    with pytest.raises(AttributeError) as error:
        accumulator.compute()
    assert "'m'" in error.value.__notes__[0]


def test_a_single_step_is_reported_as_its_own_result():
    assert step_values(computed(), 1)["share"] == 1.0
    assert step_values(computed(), 2)["span_high"] == 4.0
