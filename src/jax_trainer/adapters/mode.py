"""How the call of a model is told whether it trains: by a parameter, under the names that Flax users give it."""

import inspect
from collections.abc import Callable
from typing import Any

from flax import linen as nn

# the parameter, and what it is while training
_FLAGS = {"train": True, "training": True, "is_training": True, "deterministic": False, "use_running_average": False}


def mode_flags(function: Callable[..., Any], *, train: bool, only_required: bool = False) -> dict[str, bool]:
    """What `function` has to be told about the mode; of a linen module's method, what the module's call has to.

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
