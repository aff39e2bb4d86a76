import compoconf
import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_trainer.config.settings import SettingsError
from jax_trainer.optimizer.scheduler import (
    ConcatScheduleConfig,
    ConstantScheduleConfig,
    CosineScheduleConfig,
    ExponentialScheduleConfig,
    LinearScheduleConfig,
    ScheduleInterface,
)
from tests.rows import noted_row

COUNTS = np.arange(160)


def built(config, total=None):
    return config.instantiate(ScheduleInterface).build(total)


def line(counts: np.ndarray, start: float, end: float, steps: int) -> np.ndarray:
    return start + (end - start) * np.clip(counts / steps, 0, 1)


def ramps(*ends: float, lengths: tuple[int | None, ...], **keys) -> ConcatScheduleConfig:
    """Straight lines from 0 to the first end, from there to the next, and so on."""
    starts = [0.0, *ends[:-1]]
    parts = {
        f"part{index}": LinearScheduleConfig(init_value=start, end_value=end, steps=steps)
        for index, (start, end, steps) in enumerate(zip(starts, ends, lengths, strict=True))
    }
    return ConcatScheduleConfig(schedules=parts, **keys)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 5, width=32), st.integers(1, 30)), min_size=1, max_size=5),
    st.integers(0, 4),
    st.booleans(),
)
def test_any_number_of_parts_follow_each_other(parts, open_part, leave_one_open):
    ends, lengths = [end for end, _ in parts], [length for _, length in parts]
    total, expected, start, begin = sum(lengths), np.zeros(len(COUNTS)), 0.0, 0
    for end, length in parts:
        expected = np.where(begin <= COUNTS, line(COUNTS - begin, start, end, length), expected)
        start, begin = end, begin + length
    given_lengths = [
        None if leave_one_open and index == open_part % len(parts) else length for index, length in enumerate(lengths)
    ]
    found = built(ramps(*ends, lengths=tuple(given_lengths)), total)(COUNTS)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_parts_of_all_kinds_are_what_they_are_alone():
    parts = {
        "warmup": LinearScheduleConfig(init_value=0.0, end_value=1.0, steps=10),
        "hold": ConstantScheduleConfig(init_value=1.0, steps=20),
        "inner": ConcatScheduleConfig(
            schedules={
                "wave": CosineScheduleConfig(init_value=1.0, decay_factor=0.5, steps=30),
                "fall": ExponentialScheduleConfig(init_value=0.5, decay_rate=0.1, steps=40),
            }
        ),
    }
    at = built(ConcatScheduleConfig(schedules=parts, init_value=0.0, end_value=0.05, steps=100), 100)(COUNTS)
    assert at[:10].tolist() == built(parts["warmup"])(COUNTS)[:10].tolist()
    assert at[10:30].tolist() == [1.0] * 20
    assert at[30:60].tolist() == built(parts["inner"].schedules["wave"])(COUNTS)[:30].tolist()
    assert at[60:].tolist() == built(parts["inner"].schedules["fall"])(COUNTS)[:100].tolist()


def test_the_part_without_a_length_gets_the_rest_wherever_it_stands():
    full = built(ramps(1.0, 2.0, 0.0, lengths=(5, 15, 20)))(COUNTS).tolist()
    for lengths in ((None, 15, 20), (5, None, 20), (5, 15, None)):
        assert built(ramps(1.0, 2.0, 0.0, lengths=lengths), 40)(COUNTS).tolist() == full
        assert built(ramps(1.0, 2.0, 0.0, lengths=lengths, steps=40))(COUNTS).tolist() == full


def test_a_constant_part_at_the_end_needs_no_length():
    parts = {"up": LinearScheduleConfig(init_value=0.0, steps=10), "stay": ConstantScheduleConfig()}
    at = built(ConcatScheduleConfig(schedules=parts))
    assert at(9) < at(10) == at(100_000) == np.float32(1e-3)


def test_parts_that_cannot_be_are_refused():
    for keys, key, words in [
        ({"schedules": {}}, "schedules", "`schedules` is empty"),
        (
            {"schedules": {"a": CosineScheduleConfig(), "b": CosineScheduleConfig()}},
            "schedules",
            "Only one part .* a and b",
        ),
        (
            {"schedules": {"a": CosineScheduleConfig(steps=3), "b": CosineScheduleConfig(steps=4)}, "steps": 8},
            "steps",
            "`steps` is 8, .*7 updates",
        ),
    ]:
        with noted_row(keys, key, words):
            with pytest.raises(SettingsError, match=words) as caught:
                ConcatScheduleConfig(**keys)
            assert caught.value.problems[0][0] == key


def test_lengths_and_values_that_do_not_fit_the_run_are_errors():
    for config, total, key, words in [
        (ramps(1.0, 2.0, lengths=(5, 6)), 12, "schedules", "11 updates, .*12"),
        (ramps(1.0, 2.0, lengths=(5, None)), 5, "schedules.part1", "'part1'.* 5 of 5 updates"),
        (ramps(1.0, 2.0, lengths=(None, 5)), None, "schedules.part0.steps", "'part0' is unknown"),
        (ramps(1.0, 2.0, lengths=(5, None)), None, "schedules.part1.steps", "Set its `steps`"),
        (ramps(1.0, 2.0, lengths=(5, 5), init_value=0.5), None, "init_value", "`init_value` is 0.5, .* 0"),
        (ramps(1.0, 2.0, lengths=(5, 5), end_value=0.5), None, "end_value", "`end_value` is 0.5, .* 2"),
    ]:
        with noted_row(config, total, key, words):
            with pytest.raises(SettingsError, match=words) as caught:
                built(config, total)
            assert caught.value.problems[0][0] == key


JUMP = {
    "up": LinearScheduleConfig(init_value=0.0, end_value=0.3, steps=10),
    "down": CosineScheduleConfig(init_value=0.2, steps=10),
}


def test_a_jump_is_an_error_that_names_both_values_and_the_part():
    with pytest.raises(SettingsError, match="'up' ends at 0.3, but 'down' starts at 0.2") as caught:
        built(ConcatScheduleConfig(schedules=JUMP))
    assert caught.value.problems[0][0] == "schedules.down"


def test_a_jump_is_made_without_check_continuity():
    at = built(ConcatScheduleConfig(schedules=JUMP, check_continuity=False))
    assert at(9) > 0.26 and at(10) == np.float32(0.2)


def test_a_schedule_can_be_built_while_something_is_traced():
    traced = jax.jit(lambda count: built(ramps(1.0, 2.0, lengths=(5, 6)))(count))
    np.testing.assert_allclose(traced(5), 1.0, rtol=1e-6)


def test_a_file_may_nest_schedules():
    part = {"class_name": "LinearSchedule", "init_value": 0, "end_value": 1, "steps": 4}
    content = {"class_name": "ConcatSchedule", "schedules": {"a": part, "b": {**part, "init_value": 1.0}}}
    config = compoconf.parse_config(ScheduleInterface.cfgtype, content)
    np.testing.assert_allclose(built(config, 8)(2), 0.5, rtol=1e-6)
