"""Values from the files of a run, which may be damaged or hostile: each is checked, or left out."""

import json
import math
from collections.abc import Iterator
from typing import Any, TypeGuard

_MAX_DEPTH = 30  # of nested data
_MAX_INLINE = 40  # items of a list that is shown on one line
_MAX_CLASSES = 200  # of a confusion matrix


def numbers_in(data: Any, key: str) -> list[float]:
    """The numbers of a list in a mapping, without those that cannot be drawn."""
    found = data.get(key) if isinstance(data, dict) else None
    return [one for one in map(number_of, found) if is_size(one)] if isinstance(found, list) else []


def matrix_of(array: Any) -> list[list[float]] | None:
    """A square matrix of counts; None for any other array."""
    if not isinstance(array, list) or not 2 <= len(array) <= _MAX_CLASSES:
        return None
    rows = [[number_of(cell) for cell in row] if isinstance(row, list) else [] for row in array]
    if any(len(row) != len(array) or any(not is_size(cell) or cell < 0 for cell in row) for row in rows):
        return None
    return [[cell for cell in row if cell is not None] for row in rows]


def flattened(data: Any, above: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Nested data as dotted keys and values; short lists of scalars stay values.

    >>> dict(flattened({"model": {"hidden": [16, 32], "act": "gelu"}}))
    {'model.hidden': '[16, 32]', 'model.act': 'gelu'}
    """
    if depth > _MAX_DEPTH:
        yield above, "…"
        return
    if isinstance(data, dict) and data:
        pairs = list(data.items())
    elif isinstance(data, list) and (len(data) > _MAX_INLINE or any(isinstance(one, dict | list) for one in data)):
        pairs = list(enumerate(data))
    else:
        if above:
            yield above, data if isinstance(data, str | int | float | None) else str(data)
        return
    for name, value in pairs:
        yield from flattened(value, f"{above}.{name}" if above else str(name), depth + 1)


def number_of(value: Any) -> float | None:
    """A number, also one that JSON cannot represent; None for anything else."""
    if type(value) is float:
        return value
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    if isinstance(value, str) and value not in ("nan", "inf", "-inf", "NaN", "Infinity", "-Infinity"):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf


def is_count(value: Any) -> TypeGuard[int]:
    """Whether it is a step or an epoch; larger integers are no exact numbers in a page."""
    return type(value) is int and 0 <= value < 2**53


def is_size(value: float | None) -> TypeGuard[float]:
    """Whether it is a number that can be drawn."""
    return value is not None and abs(value) < 1e15


def json_of(line: str | bytes) -> Any:
    """The data of a line of JSON; None if it is none."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):  # killed while writing
        return None
