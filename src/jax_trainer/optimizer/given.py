"""An optimizer that somebody passes as an object."""

from typing import Any

import optax

from jax_trainer.core import class_of


def checked_optimizer(given: Any, or_else: str = "") -> optax.GradientTransformation:
    """`given`, if it is an optax optimizer; `or_else` says what would do as well.

    >>> checked_optimizer(optax.adam)
    Traceback (most recent call last):
    TypeError: `optimizer` is the function `adam`, and must be an optax optimizer. Call it: `optax.adam(1e-3)`.
    """
    if isinstance(given, optax.MultiSteps):
        return given.gradient_transformation()
    if isinstance(given, optax.GradientTransformation):
        return given
    raise TypeError(f"`optimizer` is {_kind(given)}, and must be an optax optimizer{or_else}. {_cure(given)}")


def _kind(given: Any) -> str:
    if isinstance(given, type):
        return f"the class {class_of(given)}"
    if hasattr(given, "__name__"):
        return f"the function `{given.__name__}`"
    return "None" if given is None else f"{given!r} of class {class_of(given)}"


def _cure(given: Any) -> str:
    if isinstance(given, str) and callable(getattr(optax, given, None)):
        return f"Pass `optax.{given}(1e-3)`."
    if isinstance(given, float):
        return f"Pass `optax.adam({given})`."
    if isinstance(given, list | tuple):
        return "Pass `optax.chain(…)`, which does one after the other."
    if callable(given) and given is getattr(optax, getattr(given, "__name__", ""), None):
        return f"Call it: `optax.{given.__name__}(1e-3)`."
    return "Pass `optax.adam(1e-3)`, or `optax.adam(schedule)`."
