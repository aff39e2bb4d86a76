"""Checks that an `optimizer` argument is an optax optimizer."""

from typing import Any

import optax

from jax_trainer.core import class_of


def checked_optimizer(optimizer: Any, or_else: str = "") -> optax.GradientTransformation:
    """`optimizer`, if it is an optax optimizer; `or_else` names accepted alternatives.

    >>> checked_optimizer(optax.adam)
    Traceback (most recent call last):
    TypeError: `optimizer` must be an optax optimizer, got the function `adam`. Call it: `optax.adam(1e-3)`.
    """
    if isinstance(optimizer, optax.MultiSteps):
        return optimizer.gradient_transformation()
    if isinstance(optimizer, optax.GradientTransformation):
        return optimizer
    raise TypeError(f"`optimizer` must be an optax optimizer{or_else}, got {_kind(optimizer)}. {_hint(optimizer)}")


def _kind(optimizer: Any) -> str:
    if isinstance(optimizer, type):
        return f"the class {class_of(optimizer)}"
    if hasattr(optimizer, "__name__"):
        return f"the function `{optimizer.__name__}`"
    return "None" if optimizer is None else f"{optimizer!r} of class {class_of(optimizer)}"


def _hint(optimizer: Any) -> str:
    if isinstance(optimizer, str) and callable(getattr(optax, optimizer, None)):
        return f"Pass `optax.{optimizer}(1e-3)`."
    if isinstance(optimizer, float):
        return f"Pass `optax.adam({optimizer})`."
    if isinstance(optimizer, list | tuple):
        return "Pass `optax.chain(…)`, which applies them in order."
    if callable(optimizer) and optimizer is getattr(optax, getattr(optimizer, "__name__", ""), None):
        return f"Call it: `optax.{optimizer.__name__}(1e-3)`."
    return "Pass `optax.adam(1e-3)`, or `optax.adam(schedule)`."
