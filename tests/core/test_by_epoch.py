from itertools import accumulate as running_sum

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_trainer.core.by_epoch import checked_schedule, epochs_until, total_until, value_in

SCHEDULES = st.dictionaries(st.integers(1, 8), st.integers(1, 5)).flatmap(
    lambda later: st.integers(1, 5).map(lambda first: {0: first, **later})
)


@given(SCHEDULES, st.integers(0, 20), st.integers(1, 40))
def test_sums_are_those_of_the_values_of_each_epoch(schedule, epochs, total):
    values = [value_in(schedule, epoch) for epoch in range(1, 50)]
    assert [value for value, start in zip(values, range(50), strict=False) if start in schedule] == [
        schedule[start] for start in sorted(schedule)
    ]
    assert total_until(schedule, epochs) == sum(values[:epochs])
    assert epochs_until(schedule, total) == next(n for n, all in enumerate(running_sum(values), 1) if all >= total)


def test_a_schedule_that_makes_no_sense_is_refused():
    for schedule, named in [
        ({5: 2}, "`size`.*0"),
        ({0: 0}, r"`size\[0\]`.*0"),
        ({0: 1, -1: 2}, "key of size.*-1"),
        ({0: 1.5}, "1.5"),
    ]:
        with pytest.raises(ValueError, match=named):
            checked_schedule("size", schedule)
