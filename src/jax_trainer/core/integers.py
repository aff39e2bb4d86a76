"""Validation of integers: those of Python and numpy, and arrays of one element."""

import operator
from typing import Any

_LARGEST = 2**63 - 1


def checked_int(name: str, value: Any, low: int, alternative: str = "") -> int:
    """`value` as an int of at least `low`; an error that names it `name` otherwise.

    >>> import numpy as np
    >>> checked_int("num_epochs", np.int64(3), 1)
    3
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:  # a float, a string, a larger array
        number = None
    if number is None or number < low:
        raise ValueError(f"`{name}` must be an integer of at least {low}{alternative}, got {value!r}.")
    if number > _LARGEST:
        raise ValueError(f"`{name}` is an integer of {len(str(number))} digits, and must be at most {_LARGEST}.")
    return number
