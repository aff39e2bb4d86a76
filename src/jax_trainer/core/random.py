"""Sequences and named collections of random keys, for `TrainLoop`.

>>> keys = sequence(seed=0)
>>> weights, noise = next(keys), next(keys)
>>> bool(weights == noise)
False
"""

from collections.abc import Iterator, Sequence
from typing import Literal, overload

import jax

__all__ = ["into_collection", "into_sequence", "sequence"]


@overload
def sequence(seed: int, num: Literal[1] = 1) -> Iterator[jax.Array]: ...
@overload
def sequence(seed: int, num: int) -> Iterator[jax.Array] | list[Iterator[jax.Array]]: ...
def sequence(seed: int, num: int = 1) -> Iterator[jax.Array] | list[Iterator[jax.Array]]:
    """An endless iterator of keys derived from `seed`; with `num` above 1, a list of `num` independent iterators."""
    key = jax.random.key(seed)
    return into_sequence(key) if num == 1 else [into_sequence(each) for each in jax.random.split(key, num)]


def into_sequence(key: jax.Array) -> Iterator[jax.Array]:
    """An endless iterator of keys derived from `key`."""
    while True:
        key, each = jax.random.split(key)
        yield each


def into_collection(key: jax.Array, labels: Sequence[str]) -> dict[str, jax.Array]:
    """One key per label, for the `rngs` of a linen module.

    >>> sorted(into_collection(jax.random.key(0), ["params", "dropout"]))
    ['dropout', 'params']
    """
    return dict(zip(labels, jax.random.split(key, len(labels)), strict=True)) if labels else {}
