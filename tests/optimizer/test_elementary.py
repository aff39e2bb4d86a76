"""Every schedule against its formula in plain numbers, at every update, at its ends and past them."""

from itertools import product
from typing import Any

import compoconf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_trainer.config.settings import SettingsError
from jax_trainer.optimizer.scheduler import (
    BaseScheduleConfig,
    ConstantScheduleConfig,
    CosineScheduleConfig,
    ExponentialScheduleConfig,
    LinearScheduleConfig,
    ScheduleInterface,
    WarmupCosineDecayScheduleConfig,
)
from tests.rows import noted_row

COUNTS = np.arange(160)  # one length for all: every other one would be compiled anew


def built(config: BaseScheduleConfig, total: int | None = None):
    return config.instantiate(ScheduleInterface).build(total)


def values(config: BaseScheduleConfig, total: int | None = None) -> np.ndarray:
    return np.asarray(built(config, total)(COUNTS), np.float64)


def share(counts: np.ndarray, steps: int) -> np.ndarray:
    return np.minimum(counts / steps, 1.0)


def cosine(counts: np.ndarray, start: float, end: float, steps: int, exponent: float = 1.0) -> np.ndarray:
    return end + (start - end) * (0.5 * (1 + np.cos(np.pi * share(counts, steps)))) ** exponent


def line(counts: np.ndarray, start: float, end: float, steps: int) -> np.ndarray:
    return start + (end - start) * share(counts, steps)


def warmed_up(counts: np.ndarray, init: float, peak: float, end: float, warmup: int, decay: int, exponent: float):
    down = cosine(np.maximum(counts - warmup, 0), peak, end, decay, exponent)
    return np.where(counts < warmup, line(counts, init, peak, warmup), down)


FORMULAS = {
    "constant": (ConstantScheduleConfig(init_value=0.3, steps=50), np.full(len(COUNTS), 0.3)),
    "cosine": (CosineScheduleConfig(init_value=0.5, decay_factor=0.2, steps=100), cosine(COUNTS, 0.5, 0.1, 100)),
    "cosine squared": (CosineScheduleConfig(0.5, steps=7, exponent=2.0), cosine(COUNTS, 0.5, 0.05, 7, 2.0)),
    "cosine root": (CosineScheduleConfig(0.5, steps=7, exponent=0.5), cosine(COUNTS, 0.5, 0.05, 7, 0.5)),
    "linear": (LinearScheduleConfig(init_value=0.1, end_value=0.7, steps=90), line(COUNTS, 0.1, 0.7, 90)),
    "one step": (LinearScheduleConfig(init_value=0.1, end_value=0.7, steps=1), line(COUNTS, 0.1, 0.7, 1)),
    "exponential": (
        ExponentialScheduleConfig(init_value=0.5, decay_rate=0.01, steps=80),
        0.5 * 0.01 ** share(COUNTS, 80),
    ),
    "warmup": (
        WarmupCosineDecayScheduleConfig(init_value=0.01, peak_value=0.4, warmup_steps=20, decay_steps=80),
        warmed_up(COUNTS, 0.01, 0.4, 0.04, 20, 80, 1.0),
    ),
    "warmup cubed": (
        WarmupCosineDecayScheduleConfig(peak_value=0.4, decay_factor=0.0, warmup_steps=3, steps=45, exponent=3.0),
        warmed_up(COUNTS, 0.0, 0.4, 0.0, 3, 42, 3.0),
    ),
}


def test_a_schedule_follows_its_formula_at_every_update_and_past_its_end():
    for name in FORMULAS:
        with noted_row(name):
            config, expected = FORMULAS[name]
            np.testing.assert_allclose(values(config), expected, rtol=2e-6, atol=2e-7 * expected.max())


def test_a_schedule_is_the_same_inside_a_compiled_step():
    for name in FORMULAS:
        with noted_row(name):
            config, expected = FORMULAS[name]
            compiled = jax.jit(built(config))(jnp.int32(5))
            assert compiled.dtype == jnp.float32
            np.testing.assert_allclose(compiled, expected[5], rtol=2e-6, atol=2e-7 * expected.max())


def test_a_warmup_is_exact_where_it_starts_peaks_and_ends():
    config = WarmupCosineDecayScheduleConfig(init_value=0.013, peak_value=0.37, warmup_steps=20, decay_steps=80)
    at = built(config)
    assert at(0) == np.float32(0.013)
    assert at(20) == np.float32(0.37)
    assert at(100) == at(101) == at(10_000) == np.float32(config.last_value)
    assert at(99) > at(100)  # the ancestor was there 20 updates early


def test_both_ends_are_exact_at_any_length():
    for (config, start, end), steps in product(
        [
            (CosineScheduleConfig(init_value=0.37, decay_factor=0.1), 0.37, 0.037),
            (LinearScheduleConfig(init_value=0.013, end_value=0.7), 0.013, 0.7),
            (ExponentialScheduleConfig(init_value=0.37, decay_rate=0.5), 0.37, 0.185),
        ],
        [1, 3, 999, 100_000],
    ):
        with noted_row(config, start, end, steps):
            at = built(config, steps)
            assert at(0) == np.float32(start)
            np.testing.assert_allclose(at(steps), np.float32(end), rtol=1e-7)


@settings(max_examples=60, deadline=None)
@given(st.floats(1e-6, 10), st.floats(0, 10), st.integers(1, 2000))
def test_both_ends_are_exact_for_any_values(start, factor, steps):
    line = LinearScheduleConfig(init_value=start, end_value=factor, steps=steps)
    wave = CosineScheduleConfig(init_value=start, decay_factor=factor, steps=steps)
    assert built(line)(0) == built(wave)(0) == np.float32(start)
    assert built(line)(steps) == np.float32(factor)
    assert built(wave)(steps) == np.float32(wave.last_value)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([CosineScheduleConfig, LinearScheduleConfig, ExponentialScheduleConfig]),
    st.floats(0, 10, width=32),
    st.integers(1, 2_000_000),
)
def test_a_schedule_is_finite_and_never_negative(cls, init_value, steps):
    for exponent in (0.3, 1.0, 4.0) if cls is CosineScheduleConfig else (None,):
        options = {} if exponent is None else {"exponent": exponent}
        found = np.asarray(built(cls(init_value=init_value, steps=steps, **options))(COUNTS * (steps // 100 + 1)))
        assert np.isfinite(found).all()
        assert (found >= 0).all()


def test_a_length_that_was_left_out_is_that_of_the_run():
    for config, same in [
        (CosineScheduleConfig(init_value=0.5), CosineScheduleConfig(init_value=0.5, steps=40)),
        (LinearScheduleConfig(init_value=0.5), LinearScheduleConfig(init_value=0.5, steps=40)),
        (ExponentialScheduleConfig(init_value=0.5), ExponentialScheduleConfig(init_value=0.5, steps=40)),
        (
            WarmupCosineDecayScheduleConfig(warmup_steps=10),
            WarmupCosineDecayScheduleConfig(warmup_steps=10, decay_steps=30),
        ),
        (
            WarmupCosineDecayScheduleConfig(steps=40, decay_steps=30),
            WarmupCosineDecayScheduleConfig(warmup_steps=10, decay_steps=30, steps=40),
        ),
    ]:
        assert values(config, 40).tolist() == values(same, 40).tolist() == values(same).tolist()


def test_a_length_that_is_not_that_of_the_run_is_an_error_with_both_numbers():
    for config, key in [
        (ConstantScheduleConfig(steps=50), "steps"),
        (CosineScheduleConfig(steps=50), "steps"),
        (LinearScheduleConfig(steps=50), "steps"),
        (ExponentialScheduleConfig(steps=50), "steps"),
        (WarmupCosineDecayScheduleConfig(warmup_steps=20, steps=50), "steps"),
        (WarmupCosineDecayScheduleConfig(warmup_steps=20, decay_steps=30), "decay_steps"),
    ]:
        with noted_row(config, key):
            with pytest.raises(SettingsError, match="50 updates, .*40.*Make them agree") as caught:
                built(config, 40)
            assert caught.value.problems[0][0] == key


def test_an_unknown_length_is_an_error():
    for config in [
        CosineScheduleConfig(),
        LinearScheduleConfig(),
        ExponentialScheduleConfig(),
        WarmupCosineDecayScheduleConfig(warmup_steps=20),
    ]:
        with noted_row(config):
            with pytest.raises(SettingsError, match="Set its `steps`") as caught:
                built(config)
            assert caught.value.problems[0][0] == "steps"


def test_a_constant_rate_needs_no_length():
    assert built(ConstantScheduleConfig(init_value=0.2))(10**6) == np.float32(0.2)


def test_a_warmup_as_long_as_the_run_is_an_error():
    with pytest.raises(SettingsError, match="`warmup_steps` is 50, .*40 updates") as caught:
        built(WarmupCosineDecayScheduleConfig(warmup_steps=50), 40)
    assert caught.value.problems[0][0] == "warmup_steps"


def test_a_run_without_updates_is_an_error():
    for total in [0, -3]:
        with (
            noted_row(total),
            pytest.raises(ValueError, match=f"`total_steps` must be at least 1, got {total}"),
        ):
            built(CosineScheduleConfig(), total)


def test_keys_that_cannot_be_are_refused_with_their_values():
    for cls, keys, words in [
        (ConstantScheduleConfig, {"init_value": 0.1, "end_value": 0.2}, "`end_value` is 0.2, .* end at 0.1"),
        (CosineScheduleConfig, {"init_value": 1.0, "end_value": 0.2}, "`end_value` is 0.2, .* end at 0.1"),
        (ExponentialScheduleConfig, {"init_value": 1.0, "end_value": 0.2}, "`end_value` is 0.2, .* end at 0.1"),
        (
            WarmupCosineDecayScheduleConfig,
            {"peak_value": 1.0, "warmup_steps": 2, "end_value": 0.2},
            "`end_value` is 0.2, .* end at 0.1",
        ),
        (WarmupCosineDecayScheduleConfig, {"decay_steps": 3}, "`warmup_steps` is needed"),
        (WarmupCosineDecayScheduleConfig, {"warmup_steps": 5, "steps": 5}, "`warmup_steps` is 5, .*`steps`, 5"),
        (WarmupCosineDecayScheduleConfig, {"decay_steps": 5, "steps": 5}, "`decay_steps` is 5, .*`steps`, 5"),
        (
            WarmupCosineDecayScheduleConfig,
            {"warmup_steps": 2, "decay_steps": 5, "steps": 8},
            "`steps` is 8, but `warmup_steps` 2 [+] `decay_steps` 5 is 7",
        ),
        (CosineScheduleConfig, {"init_value": -1.0}, "`init_value` must be"),
        (CosineScheduleConfig, {"init_value": float("nan")}, "`init_value` must be"),
        (CosineScheduleConfig, {"steps": 0}, "`steps` must be .*at least 1"),
        (CosineScheduleConfig, {"exponent": 0}, "`exponent` must be"),
        (ExponentialScheduleConfig, {"decay_rate": 0}, "`decay_rate` must be"),
    ]:
        with noted_row(cls, keys, words), pytest.raises(SettingsError, match=words):
            cls(**keys)


def test_an_end_value_that_agrees_changes_nothing():
    for config in [
        ConstantScheduleConfig(init_value=0.1, end_value=0.1),
        CosineScheduleConfig(init_value=0.3, end_value=0.03),
        ExponentialScheduleConfig(init_value=0.3, end_value=0.03),
        WarmupCosineDecayScheduleConfig(peak_value=0.3, warmup_steps=2, end_value=0.03),
    ]:
        with noted_row(config):
            without = type(config)(**{**config.stored(), "end_value": None})
            assert values(config, 30).tolist() == values(without, 30).tolist()


def test_a_file_of_the_ancestor_is_read():
    content = {
        "class_name": "WarmupCosineDecaySchedule",
        "decay_factor": 0.1,
        "decay_steps": 1555,
        "init_value": 0.0,
        "peak_value": 0.001,
        "steps": 1755,
        "warmup_steps": 200,
    }
    config: Any = compoconf.parse_config(ScheduleInterface.cfgtype, content)
    at = built(config, 1755)
    assert at(200) == np.float32(0.001) and at(1755) == np.float32(0.0001) and at(1555) > np.float32(0.0001)
