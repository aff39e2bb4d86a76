"""Trainers whose class has an `__init__` of its own, made from what a file or a run's folder says."""

import inspect
from collections.abc import Mapping
from typing import Any

from jax_trainer.trainer.config import BaseTrainer

AFTERWARDS = ("folder", "other_configs")  # what a trainer can also be given when it is made
GIVEN = ("model", "optimizer", "callbacks", "dataset")  # what somebody passes, who would not know that it had no effect


def has_own_init(kind: type[Any]) -> bool:
    """Whether a class of users has its own `__init__`, which may make the model, the optimizer or the example."""
    first = next(base for base in kind.__mro__ if "__init__" in vars(base))
    return not first.__module__.startswith(f"{BaseTrainer.__module__.partition('.')[0]}.")


def made(kind: type[Any], options: Mapping[str, Any], own: Mapping[str, Any]) -> Any:
    """An object of `kind`, from those of `options` that its `__init__` has parameters for, and its `own` arguments."""
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
            f"`{kind.__name__}.__init__` needs `{missing[0]}`, which no configuration has. Pass it, as in "
            f"`{kind.__name__}.load_from_checkpoint(…, {missing[0]}=…)`, or give it a default."
        )
    if unused := [name for name in GIVEN if name in options and name not in passed]:
        raise TypeError(f"`{kind.__name__}.__init__` has no parameter `{unused[0]}`: leave it out, or let it have one.")
    trainer = kind(**passed)
    for name in AFTERWARDS:
        if name in options and name not in passed:
            setattr(trainer, name, options[name])
    return trainer
