"""Passes training or evaluation mode to model calls, under the parameter names that Flax users use."""

import inspect
from collections.abc import Callable
from typing import Any

from flax import linen as nn

# parameter names, with the value in training
_FLAGS = {"train": True, "training": True, "is_training": True, "deterministic": False, "use_running_average": False}


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
