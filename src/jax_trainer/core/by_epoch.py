"""Values that change from epoch to epoch: `{0: 64, 5: 128}` is 64 at first, and 128 after five complete epochs."""

import math
from collections.abc import Mapping
from typing import Any, TypeVar

from jax_trainer.diagnostics.returned import checked_int

Value = TypeVar("Value")
Count = int | Mapping[int, int]  # of micro-batches: one number, or several by the number of complete epochs


def value_in(schedule: Mapping[int, Value], epoch: int) -> Value:
    """The value in epoch `epoch` (from 1).

    >>> [value_in({0: "a", 2: "b"}, epoch) for epoch in (1, 2, 3)]
    ['a', 'a', 'b']
    """
    return schedule[max(start for start in schedule if start < max(epoch, 1))]


def checked_schedule(name: str, schedule: Mapping[Any, Any]) -> dict[int, int]:
    """The schedule, sorted, if its keys are epochs from 0 on and its values integers of at least 1."""
    found = {
        checked_int(f"a key of {name}", key, 0): checked_int(f"{name}[{key!r}]", value, 1)
        for key, value in schedule.items()
    }
    if 0 not in found:
        raise ValueError(
            f"`{name}` by epoch needs the value of the first epoch: add `0:`, as in {{0: 64, 5: 128}}; got {found}."
        )
    return dict(sorted(found.items()))


def schedule_of(count: Count) -> dict[int, int] | None:
    """The numbers of micro-batches by the number of complete epochs; None if there is only one."""
    return checked_schedule("accumulate", count) if isinstance(count, Mapping) else None


def most_of(count: Count) -> int:
    """The largest number of micro-batches.

    >>> most_of({0: 1, 5: 4})
    4
    """
    return max(count.values()) if isinstance(count, Mapping) else count


def phases(schedule: Mapping[int, Value]) -> list[tuple[int, float, Value]]:
    """First and last number of complete epochs of each value, exclusive; the last phase has no end."""
    starts = sorted(schedule)
    return [(a, b, schedule[a]) for a, b in zip(starts, [*starts[1:], math.inf], strict=True)]


def total_until(schedule: Mapping[int, int], epochs: int) -> int:
    """The sum of the values of the first `epochs` epochs.

    >>> total_until({0: 10, 2: 5}, 3)
    25
    """
    return sum(int(min(end, epochs) - start) * value for start, end, value in phases(schedule) if start < epochs)


def epochs_until(schedule: Mapping[int, int], total: int) -> int:
    """The number of epochs after which the values add up to at least `total`.

    >>> epochs_until({0: 10, 2: 5}, 21)
    3
    """
    left = total
    for start, end, value in phases(schedule):
        if left <= value * (end - start):
            return start + -(-left // value)
        left -= value * int(end - start)
    raise AssertionError("the last phase has no end")
