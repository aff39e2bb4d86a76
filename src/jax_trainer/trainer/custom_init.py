"""Builds trainers with a custom `__init__` from a file or a stored run."""

import inspect
from collections.abc import Mapping
from typing import Any

from jax_trainer.trainer.config import BaseTrainer

ATTRIBUTES = ("folder", "other_configs")  # set afterwards if `__init__` has no such parameter
OBJECTS = ("model", "optimizer", "callbacks", "dataset")  # refused if `__init__` has no such parameter


def has_custom_init(kind: type[Any]) -> bool:
    """Whether a user's class has its own `__init__`, which may create the model, the optimizer or the example."""
    first = next(base for base in kind.__mro__ if "__init__" in vars(base))
    return not first.__module__.startswith(f"{BaseTrainer.__module__.partition('.')[0]}.")


def made(kind: type[Any], options: Mapping[str, Any], own: Mapping[str, Any]) -> Any:
    """Creates a `kind` with those of `options` that its `__init__` has parameters for, and its `own` arguments."""
    parameters = inspect.signature(kind).parameters
    takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    passed = {name: value for name, value in options.items() if takes_any or name in parameters} | dict(own)
    variable = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    missing = [
        name
        for name, one in parameters.items()
        if one.default is one.empty and one.kind not in variable and name not in passed
    ]
    if missing:
        raise TypeError(
            f"`{kind.__name__}.__init__` requires `{missing[0]}`, which is not configured. Pass it, as in "
            f"`{kind.__name__}.load_from_checkpoint(…, {missing[0]}=…)`, or give it a default."
        )
    if unused := [name for name in OBJECTS if name in options and name not in passed]:
        raise TypeError(
            f"`{kind.__name__}.__init__` has no parameter `{unused[0]}`: leave it out, or add the parameter."
        )
    trainer = kind(**passed)
    for name in ATTRIBUTES:
        if name in options and name not in passed:
            setattr(trainer, name, options[name])
    return trainer
