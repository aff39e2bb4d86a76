"""Converts logged values to plain numbers and plain data, as copies."""

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

BINS = 30


def number_of(value: Any) -> float | int | None:
    """`value` as a plain number; None if it is not a scalar. Waits for an array on a device.

    >>> number_of(np.float32(0.5)), number_of(np.array([3])), number_of([1, 2])
    (0.5, 3, None)
    """
    if type(value) in (int, float):
        return value
    array = np.asarray(value)
    if array.size != 1 or array.dtype.kind in "OUSMm":
        return None
    item = array.reshape(())
    return int(item) if item.dtype.kind in "biu" else float(item)


def numbers_of(values: Mapping[str, Any]) -> dict[str, float]:
    """The scalars of `values`."""
    found = ((name, number_of(value)) for name, value in values.items())
    return {name: number for name, number in found if number is not None}


def plain_of(value: Any) -> Any:
    """`value` as plain data: numbers, texts, and lists and dicts of them.

    >>> plain_of({"acc": np.float32(0.5), "matrix": np.eye(2)})
    {'acc': 0.5, 'matrix': [[1.0, 0.0], [0.0, 1.0]]}
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(name): plain_of(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_of(item) for item in value]
    if not hasattr(value, "dtype"):
        return str(value)
    array = np.asarray(value)
    return array.tolist() if array.dtype.kind in "biuf" else array.astype(np.float32).tolist()  # of bfloat16, say


def json_safe(data: Any) -> Any:
    """Plain data for JSON: NaN and infinities become strings.

    >>> json_safe({"loss": float("nan"), "all": [1, float("inf")]})
    {'loss': 'nan', 'all': [1, 'inf']}
    """
    if isinstance(data, Mapping):
        return {name: json_safe(value) for name, value in data.items()}
    if isinstance(data, list | tuple):
        return [json_safe(value) for value in data]
    return str(data) if isinstance(data, float) and not math.isfinite(data) else data


def flat(data: Any) -> dict[str, Any]:
    """Nested data flattened to dotted names, as in overrides of a configuration; empty parts are omitted.

    >>> flat({"optimizer": {"lr": 0.1, "betas": [0.9, 0.99]}, "seed": 1})
    {'optimizer.lr': 0.1, 'optimizer.betas.0': 0.9, 'optimizer.betas.1': 0.99, 'seed': 1}
    """
    return dict(_leaves(plain_of(data), ""))


def _leaves(data: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(data, dict | list):
        for name, item in data.items() if isinstance(data, dict) else enumerate(data):
            yield from _leaves(item, f"{path}.{name}".removeprefix("."))
    else:
        yield path, data


class Bins(NamedTuple):
    """A histogram: `counts[i]` values lie between `edges[i]` and `edges[i + 1]`; `left_out`: non-finite ones."""

    counts: list[int]
    edges: list[float]
    left_out: int


def bins_of(values: np.ndarray) -> Bins:
    """A histogram of the finite values, in bins of equal width."""
    kept = finite(values)
    counts, edges = np.histogram(kept, bins=BINS)
    return Bins(counts.tolist(), edges.tolist(), values.size - kept.size)


def finite(values: np.ndarray) -> np.ndarray:
    """The finite values as a flat float64 array."""
    exact = values.reshape(-1).astype(np.float64)
    return exact[np.isfinite(exact)]
