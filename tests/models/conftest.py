"""Models without waiting for their initialisers, which cost more to compile than everything else in these tests."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_trainer.adapters import BaseModelConfig, build_model


def _outline(config: BaseModelConfig, shape: tuple[int, ...], dtype: Any = np.float32) -> Any:
    return nnx.eval_shape(lambda: build_model(config, jax.ShapeDtypeStruct(shape, dtype), nnx.Rngs(0)))


@pytest.fixture(autouse=True)
def quick_keys() -> Iterator[None]:
    """Keys that compile in a fraction of the time: which numbers they draw does not matter here."""
    with jax.default_prng_impl("unsafe_rbg"):
        yield


@pytest.fixture
def outline() -> Callable[..., Any]:
    """`outline(config, shape, dtype)`: the model without values."""
    return _outline


@pytest.fixture
def filled() -> Callable[..., Any]:
    """`filled(config, shape, dtype)`: the model with values so large that every part of it matters."""

    def fill(config: BaseModelConfig, shape: tuple[int, ...], dtype: Any = np.float32) -> Any:
        graph, params, keys, rest = nnx.split(_outline(config, shape, dtype), nnx.Param, nnx.RngState, ...)
        rng = np.random.default_rng(0)
        params = jax.tree.map(
            lambda leaf: jnp.asarray(rng.normal(1 / leaf.ndim**3, 0.4, leaf.shape).astype(leaf.dtype)), params
        )
        rest = jax.tree.map(lambda leaf: jnp.asarray(rng.uniform(0.5, 1.5, leaf.shape).astype(leaf.dtype)), rest)
        is_key = lambda leaf: jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        zeros = lambda leaf: jnp.asarray(np.zeros(leaf.shape, leaf.dtype))
        fresh = lambda leaf: jax.random.key(rng.integers(1000)) if is_key(leaf) else zeros(leaf)
        return nnx.merge(graph, params, jax.tree.map(fresh, keys), rest)

    return fill


@pytest.fixture
def parameters() -> Callable[[nnx.Module], int]:
    """How many numbers a model learns."""
    return lambda model: sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))


@pytest.fixture(scope="session")
def call() -> Callable[..., Any]:
    """`call(model, *inputs)`, compiled."""
    return nnx.jit(lambda model, *inputs: model(*inputs))
