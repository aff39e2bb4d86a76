"""FLOPs of a traced function: by module, in the forward and the backward pass, without compiling anything.

XLA's own count is of the compiled code, where the names of modules are mixed by fusion, and counts the body of a loop
once.
"""

import math
from collections.abc import Iterable, Iterator
from typing import Any, Literal, NamedTuple

import jax

from jax_trainer.diagnostics.jax_internals import body_of, inner_functions, scopes_of

FUSED_ATTENTION = "dot_product_attention_"  # prefix of cuDNN's primitives, forward and backward
MOVES = frozenset(  # primitives that move or make values, and compute none
    (
        *("broadcast_in_dim", "reshape", "transpose", "squeeze", "expand_dims", "concatenate", "slice", "split", "pad"),
        *("dynamic_slice", "dynamic_update_slice", "gather", "scatter", "rev", "iota", "copy", "convert_element_type"),
        *("bitcast_convert_type", "stop_gradient", "device_put", "sharding_constraint", "optimization_barrier"),
    )
)

# what is differentiated, its derivative, and all else: the update, transforms of the batch, metrics after the gradient
Phase = Literal["forward", "backward", "other"]


class Flops(NamedTuple):
    """FLOPs of one kind of operation in one module."""

    scopes: tuple[str, ...]  # names of the modules (`jax.named_scope`), from the outermost on
    phase: Phase
    dtype: str  # of a product of matrices; "": of elementwise operations
    flops: float


def flops_of(jaxpr: Any) -> list[Flops]:
    """The FLOPs of a traced function; loops of unknown length count once.

    >>> import jax.numpy as jnp
    >>> traced = jax.make_jaxpr(lambda a, b: a @ b)(jnp.zeros((2, 3)), jnp.zeros((3, 5)))
    >>> [(one.dtype, one.flops) for one in flops_of(traced)]
    [('float32', 60.0)]
    """
    found: dict[tuple[tuple[str, ...], Phase, str], float] = {}
    for scopes, phase, equation, times in _equations(body_of(jaxpr), (), "other", 1.0):
        dtype, count = _cost(equation)
        if count:
            key = scopes, phase, dtype
            found[key] = found.get(key, 0.0) + count * times
    return [Flops(*key, count) for key, count in found.items()]


def total(flops: Iterable[Flops]) -> float:
    """The sum of all counts."""
    return sum(one.flops for one in flops)


def matrix_flops(jaxpr: Any) -> float:
    """Those of all products of matrices and convolutions of a traced function, which MFU counts."""
    return total(one for one in flops_of(jaxpr) if one.dtype)


def _equations(
    jaxpr: Any, scopes: tuple[str, ...], outer: Phase, times: float
) -> Iterator[tuple[tuple[str, ...], Phase, Any, float]]:
    """All equations without those that call others, with their scopes, phase and number of executions."""
    for equation in jaxpr.eqns:
        names, changed = scopes_of(equation)
        phase: Phase = outer
        if "transpose" in changed or outer == "backward":
            phase = "backward"
        elif "jvp" in changed:
            phase = "forward"
        inner = _called(equation)
        if not inner:
            yield scopes + names, phase, equation, times
        repeats = times * equation.params["length"] if equation.primitive.name == "scan" else times
        for one in inner:
            yield from _equations(one, scopes + names, phase, repeats)


def _called(equation: Any) -> list[Any]:
    """The functions that an equation calls; of a condition, the most expensive branch."""
    if equation.primitive.name.startswith(FUSED_ATTENTION):
        return []
    inner = [body_of(one) for one in inner_functions(equation)]
    return [max(inner, key=lambda one: total(flops_of(one)))] if equation.primitive.name == "cond" else inner


def _cost(equation: Any) -> tuple[str, float]:
    """The dtype of a product of matrices, or "", and the FLOPs."""
    name, inputs = equation.primitive.name, [one.aval for one in equation.invars]
    outputs = [one.aval for one in equation.outvars]
    if name.startswith(FUSED_ATTENTION):
        return _attention(name, inputs, equation.params)
    if not outputs or not hasattr(outputs[0], "shape"):
        return "", 0.0
    size = float(math.prod(outputs[0].shape))
    if name == "dot_general":
        (contracted, _), _ = equation.params["dimension_numbers"]
        return str(inputs[0].dtype), 2 * size * math.prod(inputs[0].shape[axis] for axis in contracted)
    if name == "conv_general_dilated":
        kernel, numbers = inputs[1].shape, equation.params["dimension_numbers"].rhs_spec
        # of a dilated input, most values are zeros that are skipped
        zeros = math.prod(equation.params["lhs_dilation"])
        return str(inputs[0].dtype), 2 * size * math.prod(kernel) / kernel[numbers[0]] / zeros
    if name in MOVES or not jax.numpy.issubdtype(outputs[0].dtype, jax.numpy.inexact):
        return "", 0.0
    if name.startswith(("reduce_", "cum", "arg")):
        size = float(math.prod(inputs[0].shape))
    return "", size


def _attention(name: str, inputs: list[Any], params: dict[str, Any]) -> tuple[str, float]:
    """Two products in the forward pass, four in the backward pass, without a mask and without what is recomputed."""
    query, key = inputs[:2]
    if len(query.shape) != 4:
        return "", 0.0
    by_head = "BNTH" in str(params.get("layout", ""))
    seen = key.shape[2 if by_head else 1]
    return str(query.dtype), (8 if "bwd" in name else 4) * float(math.prod(query.shape)) * seen
