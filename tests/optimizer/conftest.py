"""A small tree of parameters, gradients for it, and a way to apply them inside a compiled step."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

STEPS = 12
SHAPES = {"dense": {"bias": (2,), "kernel": (3, 2)}, "head": {"kernel": (2, 2)}}


def random_tree(seed: int) -> Any:
    rng = np.random.default_rng(seed)
    is_shape = lambda node: isinstance(node, tuple)
    return jax.tree.map(lambda shape: rng.normal(size=shape).astype(np.float32), SHAPES, is_leaf=is_shape)


@pytest.fixture(scope="session")
def params() -> Any:
    return random_tree(0)


@pytest.fixture(scope="session")
def gradients() -> list[Any]:
    return [random_tree(seed) for seed in range(1, STEPS + 1)]


@pytest.fixture(scope="session")
def applied(params: Any, gradients: list[Any]) -> Callable[..., list[tuple[Any, Any]]]:
    """The parameters and the optimizer state before and after every update of a transformation."""

    def states(tx: optax.GradientTransformation, start: Any = None, state: Any = None, first: int = 0) -> list[Any]:
        extended = optax.with_extra_args_support(tx)

        @jax.jit
        def step(grads: Any, weights: Any, inner: Any) -> Any:
            updates, inner = extended.update(grads, inner, weights, value=jnp.float32(1.0))
            return optax.apply_updates(weights, updates), inner

        weights = params if start is None else start
        seen = [(weights, tx.init(weights) if state is None else state)]
        for grads in gradients[first:]:
            seen.append(step(grads, *seen[-1]))
        return seen

    return states
