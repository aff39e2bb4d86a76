"""What both Flax adapters do around a call of a model: its arguments, and what it sows."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax_trainer.core import Batch, PyTree, leaf_statistics

ToInput = Callable[[Batch], Any]


def whole_batch(batch: Batch) -> Batch:
    """The batch as it is: what a model is called with unless somebody says otherwise."""
    return batch


def arguments(inputs: Any) -> tuple[Any, ...]:
    """What a model is called with: a tuple is several arguments."""
    return inputs if isinstance(inputs, tuple) else (inputs,)


def requested(function: Callable[..., Any], offered: Mapping[str, Any]) -> dict[str, Any]:
    """What of `offered` the function has parameters for.

    >>> asked_for(lambda model, batch, train, rng: 0, {"rng": 1, "step": 2})
    {'rng': 1}
    """
    parameters = inspect.signature(function).parameters
    return {name: value for name, value in offered.items() if name in parameters}


def sown_metrics(sown: PyTree, modes: Sequence[str]) -> dict[str, dict[str, Any]]:
    """`intermediate/path_mode` of what a model has sown: nested dicts of tuples, an entry for every call.

    >>> import jax.numpy as jnp
    >>> list(sown_metrics({"block": {"act": (jnp.ones(3),)}}, ("mean",)))
    ['intermediate/block.act_mean']
    """
    return leaf_statistics("intermediate", _unwrapped(sown), modes)


def _unwrapped(sown: PyTree) -> PyTree:
    """The same with what was sown once as itself: people think of it as one thing, not as a list of one."""
    if isinstance(sown, Mapping):
        return {name: _unwrapped(entry) for name, entry in sown.items()}
    return sown[0] if isinstance(sown, tuple) and len(sown) == 1 else sown
