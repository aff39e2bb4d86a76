"""Checks what users pass and return: integers, and the signatures and results of functions that are traced."""

import inspect
import operator
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

TRACED = (jax.Array, jax.ShapeDtypeStruct)
_LARGEST = 2**63 - 1


def checked_int(name: str, value: Any, low: int, alternative: str = "") -> int:
    """`value` as an int of at least `low`; an error that names it `name` otherwise.

    >>> import numpy as np
    >>> checked_int("num_epochs", np.int64(3), 1)
    3
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:  # a float, a string, a larger array
        number = None
    if number is None or number < low:
        raise ValueError(f"`{name}` must be an integer of at least {low}{alternative}, got {value!r}.")
    if number > _LARGEST:
        raise ValueError(f"`{name}` is an integer of {len(str(number))} digits, and must be at most {_LARGEST}.")
    return number


def check_call(function: Callable[..., Any], name: str, *arguments: str, offered: tuple[str, ...] = ()) -> None:
    """Raises unless `function` accepts these positional arguments; those `offered` are optional keywords.

    >>> check_call(lambda model, batch: 0, "val_step", "model", "rng_key", "batch")
    Traceback (most recent call last):
    TypeError: `val_step` is called as `val_step(model, rng_key, batch)`, but takes (model, batch): too many positional arguments.
    """  # noqa: E501 - an exception in a doctest is one line
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some functions written in C have none
        return
    try:
        signature.bind(*arguments, **{name: name for name in offered if name in signature.parameters})
    except TypeError as error:
        raise TypeError(
            f"`{name}` is called as `{name}({', '.join(arguments)})`, but takes {signature}: {error}."
        ) from None
    for wanted, found in zip(arguments, signature.parameters, strict=False):
        if found != wanted and found in arguments:
            raise TypeError(
                f"`{name}` is called as `{name}({', '.join(arguments)})`, but takes {signature}, in another order."
            )


def loss_and_metrics(returned: Any, name: str) -> tuple[Any, dict[str, Any]]:
    """The loss and the metrics in the result of the function `name`: `loss`, or `(loss, metrics)`.

    The loss may be several, by name.
    """
    match returned:
        case Mapping() if "loss" in returned:
            hint = " Return the loss separately from the metrics."
        case (Mapping(), Mapping() as metrics) if "loss" in metrics:
            hint = " The loss comes first; with several losses by name, `loss` is their sum."
        case (Mapping(), other) if not isinstance(other, Mapping):
            hint = " The loss comes first."
        case (loss, Mapping() as metrics):
            return checked_losses(loss, name), dict(metrics)
        case tuple() | list() | None:
            hint = ""
        case loss:
            return checked_losses(loss, name), {}
    raise TypeError(
        f"`{name}` returned {kinds_of(returned)}; it must return the loss, or the loss and a dict of metrics: "
        f"`return loss, {{'accuracy': accuracy}}`.{hint}"
    )


def checked_losses(losses: Any, name: str) -> Any:
    """`losses`, one or several by name, as arrays; raises unless each is a real floating point number."""
    if not isinstance(losses, Mapping):
        return checked_loss(losses, name)
    odd = [one for one in losses if not isinstance(one, str) or one == "loss"]
    if odd or not losses:
        found = f"a loss with the name {odd[0]!r}" if odd else "no loss"
        raise TypeError(
            f"`{name}` returned {found}. Several losses are a dict of numbers by name, such as `{{'ce': ce, 'aux': "
            "aux}`; `loss` is their sum."
        )
    return {one: checked_loss(loss, f"{name}[{one!r}]") for one, loss in losses.items()}


def checked_loss(loss: Any, name: str) -> jax.Array:
    """`loss` as an array; raises unless it is a real floating point number."""
    dtype = getattr(loss, "dtype", None)
    if (not isinstance(loss, int | float | complex) and dtype is None) or str(dtype).startswith(("<U", "|S", "object")):
        raise TypeError(
            f"`{name}` returned {kinds_of(loss)} as the loss; it must be a number, such as the mean over the batch."
        )
    array = jnp.asarray(loss)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise TypeError(
            f"`{name}` returned a loss of dtype {array.dtype}, which has no gradient; it must be a real floating point "
            "number. Error counts, `argmax` and comparisons have no gradient; return them as metrics."
        )
    return array


def kinds_of(returned: Any) -> str:
    """The type of a returned value, for a message.

    >>> kinds_of(({}, 1.0)), kinds_of(None)
    ('a tuple of dict, float', 'nothing')
    """
    if isinstance(returned, tuple | list):
        return f"a {type(returned).__name__} of {', '.join(map(_kind, returned)) or 'nothing'}"
    return "nothing" if returned is None else f"a {_kind(returned)}"


def class_of(thing: Any) -> str:
    """The class of `thing`, with its module unless it is built in.

    >>> class_of(0.1), class_of(jax.ShapeDtypeStruct((), "int32")).split(".")[0]
    ('float', 'jax')
    """
    kind = thing if isinstance(thing, type) else type(thing)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


def _kind(part: Any) -> str:
    return f"{part.dtype} array of shape {part.shape}" if isinstance(part, TRACED) else type(part).__name__
