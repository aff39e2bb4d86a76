"""Checks what users pass and return: integers, signatures, and losses, whose examples must not be mixed up."""

import inspect
import operator
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp

from jax_trainer.diagnostics.jax_internals import body_of, inner_functions
from jax_trainer.diagnostics.leaves import Batch, PyTree, leaf_path

TRACED = (jax.Array, jax.ShapeDtypeStruct)
_LARGEST = 2**63 - 1
_OF_JAX = re.compile(r"only defined for scalar-output functions\. Output had shape: \(([\d, ]+)\)")
_PRIMES = (1009, 1013)  # numbers of rows that no array of a model has by chance


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


def check_loss(loss: Any, seen: Mapping[str, PyTree], examples: Collection[int] = ()) -> None:
    """Raises unless `loss` is a scalar, or a vector whose length is in `examples`.

    Args:
        loss: the result of a loss function: one loss, or several by name.
        seen: its inputs by name, for the message.
        examples: allowed lengths of a loss per example; empty: scalars only.
    """
    named = (
        {f"The loss {name!r}": one for name, one in loss.items()} if isinstance(loss, Mapping) else {"The loss": loss}
    )
    for what, one in named.items():
        shape = jnp.shape(one)
        if shape and not (len(shape) == 1 and shape[0] in examples):
            raise _shape_error(shape, seen, what, "one number" + ", or one per example" * bool(examples))


def check_pairing(
    function: Callable[[Any, Any], Any], predictions: Any, targets: Any, *, what: str = "The loss"
) -> None:
    """Raises if `function` compares predictions [n, 1] with targets [n] (or the reverse) by broadcasting to [n, n].

    It is traced with different numbers of predictions and targets, which fails for a loss that compares each
    prediction with its own target.
    """
    leaves, structure = jax.tree.flatten((predictions, targets))
    shapes = [jnp.shape(leaf) for leaf in leaves]
    size = shapes[0][0] if shapes and shapes[0] else 0
    if sorted(shapes) != [(size,), (size, 1)]:
        return
    rows = [
        jax.ShapeDtypeStruct((n, *shape[1:]), jnp.result_type(leaf))
        for n, shape, leaf in zip(_PRIMES, shapes, leaves, strict=True)
    ]
    try:
        traced = str(jax.make_jaxpr(lambda a, b: function(*structure.unflatten((a, b))))(*rows))
    except Exception:  # any error: different lengths are incompatible, as they should be
        return
    if re.search(f"{_PRIMES[0]},{_PRIMES[1]}|{_PRIMES[1]},{_PRIMES[0]}", traced):
        seen, allowed = {"predictions": predictions, "targets": targets}, "of each prediction and its own target"
        raise _shape_error((size, size), seen, what, allowed)


def is_row_wise(function: Callable[..., Any], *arguments: Any) -> bool:
    """Whether row i of all results depends on row i of the arguments only, so that more rows change none of the others.

    It is traced with a prime number of rows, which no other axis has: nothing may reduce that axis, pair it with
    itself, or move along it. False also if the trace does not show it, such as for a loop.

    >>> is_row_wise(lambda x, y: (x - y) ** 2, jnp.zeros(3), jnp.zeros(3))
    True
    >>> is_row_wise(lambda x, y: x - y.mean(), jnp.zeros(3), jnp.zeros(3))
    False
    """
    leaves, structure = jax.tree.flatten(arguments)
    lengths = {jnp.shape(leaf)[0] for leaf in leaves if jnp.ndim(leaf)}
    if len(lengths) != 1 or any(_PRIMES[0] in jnp.shape(leaf) for leaf in leaves):
        return False
    rows = [
        jax.ShapeDtypeStruct((_PRIMES[0], *jnp.shape(leaf)[1:]), jnp.result_type(leaf)) if jnp.ndim(leaf) else leaf
        for leaf in leaves
    ]
    try:
        traced = jax.make_jaxpr(lambda *leaves: function(*structure.unflatten(leaves)))(*rows)
    except Exception:  # a function of exactly these shapes
        return False
    return _keeps_rows_apart(traced.jaxpr) and all(_row_axes(one) == 1 for one in traced.jaxpr.outvars)


_ALONG_AXES = {  # may combine elements along an axis without reducing it
    *("cumlogsumexp", "cummax", "cummin", "cumprod", "cumsum", "dynamic_update_slice", "cond", "scan", "while"),
    *("conv_general_dilated", "fft", "reduce_window", "rev", "scatter", "scatter_add", "sort", "top_k"),
    *("io_callback", "pure_callback", "reduce_window_max", "reduce_window_sum", "select_and_scatter_add"),
}


def _keeps_rows_apart(jaxpr: Any) -> bool:
    """Whether no operation on rows combines them."""
    for equation in jaxpr.eqns:
        if not any(map(_row_axes, equation.invars)):
            continue
        name, params, operand = equation.primitive.name, equation.params, equation.invars[0]
        if name in _ALONG_AXES or any(_row_axes(one) != 1 for one in equation.outvars):
            return False
        if name == "gather" and _row_axes(operand):  # elements of each row by its own indices, or of all rows alike
            axis = operand.aval.shape.index(_PRIMES[0])
            is_batch = axis in params["dimension_numbers"].operand_batching_dims
            if not is_batch and params["slice_sizes"][axis] != _PRIMES[0]:
                return False
        if not all(_keeps_rows_apart(body_of(one)) for one in inner_functions(equation)):
            return False
    return True


def _row_axes(variable: Any) -> int:
    return variable.aval.shape.count(_PRIMES[0])


@contextmanager
def explaining_shapes(batch: Batch) -> Iterator[None]:
    """Replaces JAX's error about the gradient of a non-scalar by one that names the shapes of `batch`."""
    try:
        yield
    except TypeError as error:
        found = _OF_JAX.search(str(error))
        if found is None:
            raise
        shape = tuple(int(size) for size in found[1].split(",") if size.strip())
        explained = _shape_error(shape, {"batch": batch}, "The loss", "one number")
        raise explained.with_traceback(error.__traceback__) from None


def _shape_error(shape: tuple[int, ...], seen: Mapping[str, PyTree], what: str, allowed: str) -> ValueError:
    single = {name: tree[0] if isinstance(tree, tuple) and len(tree) == 1 else tree for name, tree in seen.items()}
    leaves = jax.tree_util.tree_leaves_with_path(single)
    shapes = ", ".join(f"{leaf_path(path)} {jnp.shape(leaf)}" for path, leaf in leaves)
    fix = "Take its mean."
    if len(shape) == 2 and shape[0] == shape[1] > 1:
        n, wide, flat = shape[0], "predictions", "targets"
        if any(jnp.shape(leaf) == (n, 1) for leaf in jax.tree.leaves(seen.get(flat))):
            wide, flat = flat, wide
        fix = (
            f"{wide.capitalize()} [{n}, 1] and {flat} [{n}] broadcast to [{n}, {n}], every prediction with every "
            f"target. Squeeze the last axis of the {wide}: `{wide}.squeeze(-1)`."
        )
    return ValueError(f"{what} must be {allowed}, got shape {shape} from {shapes}. {fix}")
