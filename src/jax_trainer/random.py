"""Keys for random numbers, one after the other or by name: what `TrainLoop` and its users pass around.

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
    """An endless sequence of keys that belongs to `seed`; with `num` above 1, a list of as many such sequences."""
    if num < 1:
        raise ValueError(f"`num` must be at least 1, got {num}: it is how many sequences there are.")
    key = jax.random.key(seed)
    return into_sequence(key) if num == 1 else [into_sequence(each) for each in jax.random.split(key, num)]


def into_sequence(key: jax.Array) -> Iterator[jax.Array]:
    """An endless sequence of keys that belongs to `key`."""
    while True:
        key, each = jax.random.split(key)
        yield each


def into_collection(key: jax.Array, labels: Sequence[str]) -> dict[str, jax.Array]:
    """A key for each of `labels`, as the `rngs` of a linen module.

    >>> sorted(into_collection(jax.random.key(0), ["params", "dropout"]))
    ['dropout', 'params']
    """
    return dict(zip(labels, jax.random.split(key, len(labels)), strict=True)) if labels else {}
