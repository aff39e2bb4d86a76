"""A callback made of functions."""

import difflib
from collections.abc import Callable
from typing import Any

from jax_trainer.callbacks.callback import Callback, CallbackConfig
from jax_trainer.callbacks.hook_calls import FOREIGN, hooks_of


class LambdaCallback(Callback):
    """A callback made of functions: pass each by the name of its hook.

    >>> printing = LambdaCallback(on_validation_epoch_end=lambda metrics, epoch: print(epoch, metrics["val/acc"]))
    """

    config: CallbackConfig

    def __init__(self, **hooks: Callable[..., Any]) -> None:
        names = [*hooks_of(Callback), "finalize", "set_dataset"]
        for name, function in hooks.items():
            if name not in names:
                near = FOREIGN.get(name) or next(iter(difflib.get_close_matches(name, names, n=1)), "")
                hint = f"Did you mean `{near}`?" if near else f"The hooks are {', '.join(sorted(names))}."
                raise TypeError(f"Unknown hook {name!r}. {hint}")
            if not callable(function):
                raise TypeError(f"`{name}` must be a function, got {function!r}.")
            setattr(self, name, function)
        super().__init__()
