"""Whole numbers that people give: Python's, numpy's, and arrays of one."""

import operator
from typing import Any

_LARGEST = 2**63 - 1


def checked_int(name: str, value: Any, low: int, alternative: str = "") -> int:
    """`value` as a plain int of at least `low`; otherwise an error that calls it `name`.

    >>> import numpy as np
    >>> checked_int("num_epochs", np.int64(3), 1)
    3
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:  # a float, a text, a larger array
        number = None
    if number is None or number < low:
        raise ValueError(f"`{name}` must be a whole number of at least {low}{alternative}, got {value!r}.")
    if number > _LARGEST:
        raise ValueError(f"`{name}` is a whole number of {len(str(number))} digits, and must be at most {_LARGEST}.")
    return number
