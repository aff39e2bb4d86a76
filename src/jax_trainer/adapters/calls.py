"""Arguments and sown values of model calls; training or evaluation mode under the names that Flax users use."""

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax
from flax import linen as nn
from flax import nnx

from jax_trainer.core import Batch, PyTree
from jax_trainer.diagnostics.leaves import leaf_statistics

ToInput = Callable[[Batch], Any]

# parameter names, with the value in training
_FLAGS = {"train": True, "training": True, "is_training": True, "deterministic": False, "use_running_average": False}


def full_batch(batch: Batch) -> Batch:
    """The default of `to_input`: the model is called with the batch."""
    return batch


def arguments(inputs: Any) -> tuple[Any, ...]:
    """The positional arguments of a model call: a tuple is several arguments."""
    return inputs if isinstance(inputs, tuple) else (inputs,)


def requested(function: Callable[..., Any], offered: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of `offered` that `function` has parameters for.

    >>> requested(lambda model, batch, train, rng: 0, {"rng": 1, "step": 2})
    {'rng': 1}
    """
    parameters = inspect.signature(function).parameters
    return {name: value for name, value in offered.items() if name in parameters}


def mode_flags(function: Callable[..., Any], *, train: bool, only_required: bool = False) -> dict[str, bool]:
    """The mode arguments that `function` has parameters for; for a method of a linen module, those of its call.

    >>> mode_flags(lambda x, deterministic=True: x, train=True)
    {'deterministic': False}
    """
    module = getattr(function, "__self__", None)
    parameters = inspect.signature(type(module).__call__ if isinstance(module, nn.Module) else function).parameters
    return {
        name: train is while_training
        for name, while_training in _FLAGS.items()
        if name in parameters and not (only_required and parameters[name].default is not inspect.Parameter.empty)
    }


def required_rngs(model: Callable[..., Any], rng: jax.Array) -> dict[str, nnx.Rngs]:
    """The random streams that the call of a model requires: those of its parameter `rngs`, if that has no default."""
    parameter = inspect.signature(model).parameters.get("rngs")
    return {} if parameter is None or parameter.default is not parameter.empty else {"rngs": nnx.Rngs(rng)}


def takes_optimizer(loss: Callable[..., Any]) -> bool:
    """Whether a loss has a parameter `optimizer`: it returns the loss of the optimizer of this name."""
    return "optimizer" in inspect.signature(loss).parameters


def sown_metrics(sown: PyTree, modes: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Metrics `intermediate/path_mode` of sown values: nested dicts of tuples with one entry per call.

    >>> import jax.numpy as jnp
    >>> list(sown_metrics({"block": {"act": (jnp.ones(3),)}}, ("mean",)))
    ['intermediate/block.act_mean']
    """
    return leaf_statistics("intermediate", _unwrapped(sown), modes)


@contextmanager
def allow_sow() -> Iterator[None]:
    """Context in which nnx modules may sow."""
    # Flax deprecates `sow` outside `nnx.capture`, which would hide sown values from losses that read them
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Using 'Module.sow", DeprecationWarning)
        yield


def _unwrapped(sown: PyTree) -> PyTree:
    """`sown` with tuples of one entry unwrapped."""
    if isinstance(sown, Mapping):
        return {name: _unwrapped(entry) for name, entry in sown.items()}
    return sown[0] if isinstance(sown, tuple) and len(sown) == 1 else sown
