"""Random keys derived from names and numbers, never from the order of calls; and sequences of keys for `TrainLoop`.

>>> keys = sequence(seed=0)
>>> weights, noise = next(keys), next(keys)
>>> bool(weights == noise)
False
"""

import zlib
from collections.abc import Iterator, Sequence
from typing import Literal, overload

import jax
import jax.numpy as jnp

__all__ = ["into_collection", "into_sequence", "sequence"]

_IMPL_BY_WORDS = {2: "threefry2x32", 4: "rbg"}


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


def key_data(key: jax.Array) -> jax.Array:
    """The uint32 data of `key`, typed or not. States hold these: a typed key costs 9 µs per call of a compiled step."""
    return jax.random.key_data(key) if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else jnp.asarray(key)


def key_of(data: jax.Array) -> jax.Array:
    """The typed key with this data."""
    return jax.random.wrap_key_data(data, impl=_IMPL_BY_WORDS[data.shape[-1]])


def stream(key: jax.Array, name: str) -> jax.Array:
    """The key of the stream `name`.

    >>> bool((stream(jax.random.key(0), "dropout") == stream(jax.random.key(0), "noise")).all())
    False
    """
    return jax.random.fold_in(key, zlib.crc32(name.encode()))


def streams(key: jax.Array, *names: str) -> dict[str, jax.Array]:
    """One key per name, as linen's `rngs=` takes them."""
    return {name: stream(key, name) for name in names}
