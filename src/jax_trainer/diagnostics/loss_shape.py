"""Checks of losses, while tracing: that a loss is a scalar, with errors that name the shapes it was computed from, and
that the losses of examples do not depend on each other.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp

from jax_trainer.diagnostics.jax_internals import body_of, inner_functions
from jax_trainer.diagnostics.leaves import Batch, PyTree, leaf_path

_OF_JAX = re.compile(r"only defined for scalar-output functions\. Output had shape: \(([\d, ]+)\)")
_PRIMES = (1009, 1013)  # numbers of rows that no array of a model has by chance


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
    arrays = [leaf if hasattr(leaf, "dtype") else jnp.asarray(leaf) for leaf in jax.tree.leaves((predictions, targets))]
    if len(arrays) != 2 or sorted(array.ndim for array in arrays) != [1, 2] or arrays[0].size != arrays[1].size:
        return
    if any(array.shape not in ((array.size,), (array.size, 1)) for array in arrays):
        return
    rows = [jax.ShapeDtypeStruct((n, *a.shape[1:]), a.dtype) for n, a in zip(_PRIMES, arrays, strict=True)]
    structure = jax.tree.structure((predictions, targets))
    try:
        traced = str(jax.make_jaxpr(lambda a, b: function(*structure.unflatten((a, b))))(*rows))
    except Exception:  # any error: different lengths are incompatible, as they should be
        return
    if re.search(f"{_PRIMES[0]},{_PRIMES[1]}|{_PRIMES[1]},{_PRIMES[0]}", traced):
        size = arrays[0].size
        raise _shape_error(
            (size, size),
            {"predictions": predictions, "targets": targets},
            what,
            "of each prediction and its own target",
        )


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


_LOOPS = {"cond", "scan", "while"}
_ALONG_AXES = {  # may combine elements along an axis without reducing it
    *("cumlogsumexp", "cummax", "cummin", "cumprod", "cumsum", "dynamic_update_slice"),
    *("conv_general_dilated", "fft", "reduce_window", "rev", "scatter", "scatter_add", "sort", "top_k"),
    *("io_callback", "pure_callback", "reduce_window_max", "reduce_window_sum", "select_and_scatter_add"),
}


def _keeps_rows_apart(jaxpr: Any) -> bool:
    return all(not any(map(_row_axes, one.invars)) or _is_apart(one) for one in jaxpr.eqns)


def _is_apart(equation: Any) -> bool:
    """Whether an operation on rows keeps them apart."""
    name, params = equation.primitive.name, equation.params
    if name in _LOOPS or name in _ALONG_AXES or any(_row_axes(one) != 1 for one in equation.outvars):
        return False
    if name == "gather":
        operand, indices = equation.invars
        axis = operand.aval.shape.index(_PRIMES[0]) if _row_axes(operand) else None
        is_batch = axis in params["dimension_numbers"].operand_batching_dims
        # rows of a table by the indices of each row, elements of each row by its own indices, or of all rows alike
        return axis is None or is_batch or (not _row_axes(indices) and params["slice_sizes"][axis] == _PRIMES[0])
    return all(_keeps_rows_apart(body_of(one)) for one in inner_functions(equation))


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
        error_with_shapes = _shape_error(shape, {"batch": batch}, "The loss", "one number")
        raise error_with_shapes.with_traceback(error.__traceback__) from None


def _shape_error(shape: tuple[int, ...], seen: Mapping[str, PyTree], what: str, allowed: str) -> ValueError:
    return ValueError(f"{what} must be {allowed}, got shape {shape} from {_shapes(seen)}. {_fix(shape, seen)}")


def _fix(shape: tuple[int, ...], seen: Mapping[str, PyTree]) -> str:
    if len(shape) == 2 and shape[0] == shape[1] > 1:
        n = shape[0]
        wide, flat = "predictions", "targets"
        if any(jnp.shape(leaf) == (n, 1) for leaf in jax.tree.leaves(seen.get(flat))):
            wide, flat = flat, wide
        return (
            f"{wide.capitalize()} [{n}, 1] and {flat} [{n}] broadcast to [{n}, {n}], every prediction with every "
            f"target. Squeeze the last axis of the {wide}: `{wide}.squeeze(-1)`."
        )
    return "Take its mean."


def _shapes(seen: Mapping[str, PyTree]) -> str:
    single = {name: tree[0] if isinstance(tree, tuple) and len(tree) == 1 else tree for name, tree in seen.items()}
    leaves = jax.tree_util.tree_leaves_with_path(single)
    return ", ".join(f"{leaf_path(path)} {jnp.shape(leaf)}" for path, leaf in leaves)
