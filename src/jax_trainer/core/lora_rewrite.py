"""Adapters in a traced function: each product `x @ W` with an adapted `W` becomes `x @ W + scale · dropout(x) @ A @ B`.

With DoRA, its outputs are multiplied by a gain each.

The function is traced, and its equations are evaluated again with adapted parameters as `Kernel`s, also inside of
`jit`, `scan`, `cond` and `jax.checkpoint`. So it works for every model library, and no module has to know of it. A
parameter that is used in another way than in a product (an embedding lookup, a convolution) is replaced there by the
full `W + scale · A @ B`.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_trainer.core.random import stream
from jax_trainer.diagnostics.jax_internals import (
    body_of,
    constants_of,
    context_of,
    evaluated,
    inner_functions,
    is_literal,
    scan_counts,
)

Axes = tuple[int, ...]
MakeKey = Callable[[], jax.Array]
_INLINED = ("jit", "pjit", "closed_call")
_SAME_AXES = ("convert_element_type", "copy", "copy_p", "sharding_constraint")


class LoRAError(ValueError):
    """The settings of LoRA do not fit the model; the message names the parameter."""


class Adapter(NamedTuple):
    """The trained arrays of one parameter: `a` [*stacked, inputs, rank] and `b` [*stacked, rank, outputs].

    `magnitude` [*stacked, outputs] is that of DoRA; None without it. While a function is evaluated, it is the gain.
    """

    a: Any
    b: Any
    magnitude: Any = None


@dataclass(frozen=True)
class KernelSpec:
    """How a parameter is adapted: which of its axes are inputs, outputs and stacked layers, its rank and its scale."""

    path: str
    shape: tuple[int, ...]
    stacked: Axes
    inputs: Axes
    outputs: Axes
    rank: int
    scale: float

    def size(self, axes: Axes) -> int:
        """The number of elements along these axes."""
        return math.prod(self.shape[axis] for axis in axes)

    def delta(self, adapter: Adapter, without: int = 0) -> jax.Array:
        """`scale · A @ B` in the shape of the parameter, without its first `without` stacked axes."""
        order = (*self.stacked[without:], *self.inputs, *self.outputs)
        full = (self.scale * jnp.matmul(adapter.a, adapter.b, precision="highest")).reshape(
            [self.shape[axis] for axis in order]
        )
        return full.transpose(np.argsort(order))

    def norms(self, value: jax.Array) -> jax.Array:
        """The norm of each output of a parameter, over its inputs: [*stacked, outputs]."""
        stack = [self.shape[axis] for axis in self.stacked]
        order, outputs = (*self.stacked, *self.inputs, *self.outputs), self.size(self.outputs)
        columns = value.transpose(order).reshape((*stack, -1, outputs))
        return jnp.linalg.norm(columns.astype(jnp.promote_types(value.dtype, jnp.float32)), axis=-2)

    def gain(self, value: jax.Array, adapter: Adapter) -> jax.Array:
        """What DoRA multiplies each output by: its magnitude over the norm of `W + scale · A @ B`, a constant."""
        full = value.astype(jnp.float32) + self.delta(adapter).astype(jnp.float32)
        norms = lax.stop_gradient(self.norms(full))
        is_zero = norms == 0  # an output without a direction
        return jnp.where(is_zero, 1, adapter.magnitude.astype(jnp.float32) / jnp.where(is_zero, 1, norms))

    def spread(self, gain: jax.Array, axes: Axes, without: int = 0) -> jax.Array:
        """A gain that broadcasts to an array with these axes, without the first `without` stacked axes."""
        own = (*self.stacked[without:], *self.outputs)
        full = gain.reshape([self.shape[axis] for axis in own])
        full = full.transpose([own.index(axis) for axis in axes if axis in own])
        return full.reshape([self.shape[axis] if axis in own else 1 for axis in axes])


class Kernel(flax.struct.PyTreeNode):
    """An adapted parameter while a function is evaluated, maybe cast, transposed, or sliced by a scan.

    `axes` are those of the parameter that the axes of `value` are; `sliced` those that scans have sliced.
    """

    value: Any
    adapter: Adapter | None  # None: uses are recorded only
    spec: KernelSpec = flax.struct.field(pytree_node=False)
    axes: Axes = flax.struct.field(pytree_node=False)
    sliced: Axes = flax.struct.field(pytree_node=False, default=())

    @property
    def can_be_sliced(self) -> bool:
        """Whether a scan over the first axis can slice the adapter, too."""
        return self.adapter is None or self.spec.stacked[len(self.sliced) :][:1] == self.axes[:1]


class Use(NamedTuple):
    """A use of a parameter: the operation, and for a product the axes that it contracts, and its stacked axes.

    `is_rewritten`: the operation gets the product of the adapter added, instead of full weights.
    """

    operation: str
    inputs: Axes = ()
    stacked: Axes = ()
    is_rewritten: bool = False


class _Scope:
    """Keys by name and number of use, so that they do not depend on what else is traced, or how often."""

    def __init__(self, make: MakeKey) -> None:
        self._make, self._counts = make, Counter[str]()

    def key(self, name: str) -> MakeKey:
        """The next key of this name; computed when it is called."""
        number, self._counts[name] = self._counts[name], self._counts[name] + 1
        return lambda: jax.random.fold_in(stream(self._make(), name), number)


class Rewriter:
    """Evaluates traced functions with `Kernel`s among their arguments.

    Args:
        dropout: rate of the inputs of adapters.
        key: for the dropout; None: no dropout, as in an evaluation.
        uses: if not None, adapters are ignored, and the uses of parameters are collected here by path.
    """

    def __init__(
        self, *, dropout: float = 0.0, key: jax.Array | None = None, uses: dict[str, list[Use]] | None = None
    ) -> None:
        self._dropout, self._key, self._uses = dropout, key if dropout else None, uses

    def __call__(self, function: Callable[..., Any], *args: Any) -> Any:
        """`function(*args)`, where some of `args` are kernels."""
        others: list[Any] = []  # what is not an array among the results, such as the mode of a metric
        structure = None

        def traced(*values: Any) -> list[Any]:
            nonlocal structure
            leaves, structure = jax.tree.flatten(function(*values))
            others[:] = [None if _is_array(leaf) else leaf for leaf in leaves]
            return [leaf for leaf in leaves if _is_array(leaf)]

        values = [one.value if isinstance(one, Kernel) else one for one in args]
        closed = jax.make_jaxpr(traced)(*values)
        found = self._evaluate(closed, args, _Scope(self._root))
        results = iter(self._resolved(found, "return"))
        return jax.tree.unflatten(structure, [next(results) if one is None else one for one in others])

    def _root(self) -> jax.Array:
        assert self._key is not None
        return self._key

    def _evaluate(self, function: Any, args: Sequence[Any], scope: _Scope) -> list[Any]:
        jaxpr = body_of(function)
        known = constants_of(function) | dict(zip(jaxpr.invars, args, strict=True))
        read = lambda one: one.val if is_literal(one) else known[one]
        for equation in jaxpr.eqns:
            with context_of(equation):
                results = self._equation(equation, [read(one) for one in equation.invars], scope)
            known.update(zip(equation.outvars, results, strict=True))
        return [read(one) for one in jaxpr.outvars]

    def _equation(self, equation: Any, values: list[Any], scope: _Scope) -> Sequence[Any]:
        name, params = equation.primitive.name, equation.params
        kernels = [one for one in values if isinstance(one, Kernel)]
        if not kernels:
            return evaluated(equation, values)
        if name in _INLINED:
            [called] = inner_functions(equation)
            return self._evaluate(called, values, scope)
        if name in _SAME_AXES or name == "transpose":
            return [_changed(equation, *values)]
        if name == "dot_general" and len(kernels) == 1:
            return [self._product(equation, values, scope)]
        key = scope.key(name)
        in_full = lambda function: lambda *args: self._resolved(self._evaluate(function, args, _Scope(key)), name)
        if name in ("remat2", "checkpoint"):
            [body] = map(in_full, inner_functions(equation))
            return jax.checkpoint(body, prevent_cse=params["prevent_cse"], policy=params["policy"])(*values)
        if name == "scan":
            return self._scan(equation, values, key)
        if name == "cond":
            index, *operands = values
            return lax.switch(index, [in_full(one) for one in inner_functions(equation)], *operands)
        return evaluated(equation, self._resolved(values, name))

    def _scan(self, equation: Any, values: list[Any], key: MakeKey) -> list[Any]:
        [called], params = inner_functions(equation), equation.params
        first, count = scan_counts(equation)
        consts, carry, xs = values[:first], values[first : first + count], values[first + count :]
        is_whole = lambda one: isinstance(one, Kernel) and not one.can_be_sliced
        xs = [self._resolved([one], "scan")[0] if is_whole(one) else one for one in xs]

        def body(carry: list[Any], item: tuple[Any, list[Any]]) -> tuple[list[Any], list[Any]]:
            index, parts = item
            # the scan has sliced the arrays of kernels
            slice_of = lambda one: one.replace(axes=one.axes[1:], sliced=(*one.sliced, one.axes[0]))
            parts = [slice_of(one) if isinstance(one, Kernel) else one for one in parts]
            scope = _Scope(lambda: jax.random.fold_in(key(), index))
            results = self._evaluate(called, [*consts, *carry, *parts], scope)
            results = self._resolved(results, "scan")
            return results[:count], results[count:]

        index = None if self._key is None else jnp.arange(params["length"])
        options = {name: params[name] for name in ("length", "reverse", "unroll")}
        carry, ys = lax.scan(body, self._resolved(carry, "scan"), (index, xs), **options)
        return [*carry, *ys]

    def _product(self, equation: Any, values: list[Any], scope: _Scope) -> Any:
        """`dot_general` of a kernel and an array, with the product of its adapter added."""
        at = 0 if isinstance(values[0], Kernel) else 1
        kernel, x = values[at], values[1 - at]
        contracted, batched = (sides[at] for sides in equation.params["dimension_numbers"])
        contracted = tuple(kernel.axes[axis] for axis in contracted)
        of_x = tuple(equation.params["dimension_numbers"][0][1 - at])
        if self._uses is not None:
            stacked = (*kernel.sliced, *(kernel.axes[axis] for axis in batched))
            name = "dot_general with batch dimensions" if batched else "dot_general"
            self._record(kernel, Use(name, tuple(sorted(contracted)), stacked, not batched))
        sides = {frozenset(kernel.spec.inputs): False, frozenset(kernel.spec.outputs): True}
        if self._uses is not None or batched or frozenset(contracted) not in sides:
            return evaluated(equation, self._resolved(values, "dot_general", is_recorded=self._uses is not None))[0]
        is_swapped, gain = sides[frozenset(contracted)], kernel.adapter.magnitude
        if gain is not None and is_swapped:  # outputs of the parameter are inputs of the product
            x = x * _along(kernel.spec.spread(gain, contracted, len(kernel.sliced)), of_x, x.ndim).astype(x.dtype)
        [result] = evaluated(equation, [kernel.value if one is kernel else x for one in values])
        into, out = _factors(kernel, contracted, is_swapped=is_swapped)
        x = lax.optimization_barrier(x)  # a GPU would merge both products of `x` into one, with other rounding
        if self._key is not None:
            x = _dropped(x, self._dropout, scope.key(kernel.spec.path)())
        precision = equation.params["precision"]
        inner = lax.dot_general(x, into, ((of_x, tuple(range(len(contracted)))), ((), ())), precision=precision)
        preferred = equation.params["preferred_element_type"]
        dims = (((inner.ndim - 1,), (0,)), ((), ()))
        added = lax.dot_general(inner, out, dims, precision=precision, preferred_element_type=preferred)
        if at == 0:  # the axes of the kernel come first
            free = inner.ndim - 1
            added = jnp.transpose(added, (*range(free, added.ndim), *range(free)))
        result = result + (kernel.spec.scale * added).astype(result.dtype)
        if gain is None or is_swapped:
            return result
        free = tuple(axis for axis in kernel.axes if axis not in contracted)
        first = 0 if at == 0 else result.ndim - len(free)
        axes = tuple(range(first, first + len(free)))
        return result * _along(kernel.spec.spread(gain, free, len(kernel.sliced)), axes, result.ndim).astype(
            result.dtype
        )

    def _resolved(self, values: Sequence[Any], operation: str, *, is_recorded: bool = False) -> list[Any]:
        """`values` with each kernel as the full array `W + scale · A @ B`, for operations that are not products."""
        return [self._full(one, operation, is_recorded) if isinstance(one, Kernel) else one for one in values]

    def _full(self, kernel: Kernel, operation: str, is_recorded: bool) -> Any:
        if kernel.adapter is None:
            if not is_recorded:
                self._record(kernel, Use(operation))
            return kernel.value
        if self._key is not None:
            raise dropout_error(kernel.spec.path, operation)
        delta = kernel.spec.delta(kernel.adapter, len(kernel.sliced))
        left = sorted(kernel.axes)
        full = kernel.value + delta.transpose([left.index(axis) for axis in kernel.axes]).astype(kernel.value.dtype)
        if (gain := kernel.adapter.magnitude) is None:
            return full
        return full * kernel.spec.spread(gain, kernel.axes, len(kernel.sliced)).astype(full.dtype)

    def _record(self, kernel: Kernel, use: Use) -> None:
        assert self._uses is not None
        self._uses.setdefault(kernel.spec.path, []).append(use)


def dropout_error(path: str, operation: str) -> LoRAError:
    """The error for a parameter that is used in an operation whose input has no dropout."""
    return LoRAError(
        f"`lora.match` selects {path}, which the model uses in `{operation}`. The dropout of LoRA is applied to the "
        "input of a matrix product (`dot_general`) only. Set `lora.dropout` to 0, or match other parameters."
    )


def _changed(equation: Any, kernel: Any, *others: Any) -> Kernel:
    """A cast or transposed kernel."""
    if equation.primitive.name == "transpose":
        permutation = equation.params["permutation"]
        value, axes = lax.transpose(kernel.value, permutation), tuple(kernel.axes[one] for one in permutation)
        return kernel.replace(value=value, axes=axes)
    [value] = evaluated(equation, [kernel.value, *others])
    adapter = jax.tree.map(lambda leaf: leaf.astype(value.dtype), kernel.adapter)
    return kernel.replace(value=value, adapter=adapter)


def _factors(kernel: Kernel, contracted: Axes, *, is_swapped: bool) -> tuple[jax.Array, jax.Array]:
    """The arrays [*contracted, rank] and [rank, *others], with axes in the order in which the kernel has them."""
    assert kernel.adapter is not None
    spec, a, b = kernel.spec, kernel.adapter.a, kernel.adapter.b
    first, second = (spec.outputs, spec.inputs) if is_swapped else (spec.inputs, spec.outputs)
    into, out = (b.T, a.T) if is_swapped else (a, b)
    into, out = into.astype(kernel.value.dtype), out.astype(kernel.value.dtype)
    into = into.reshape([*(spec.shape[axis] for axis in first), spec.rank])
    out = out.reshape([spec.rank, *(spec.shape[axis] for axis in second)])
    free = [axis for axis in kernel.axes if axis not in contracted]
    into = into.transpose([*(first.index(axis) for axis in contracted), len(first)])
    return into, out.transpose([0, *(second.index(axis) + 1 for axis in free)])


def _along(array: jax.Array, axes: Axes, ndim: int) -> jax.Array:
    """`array`, whose axes are `axes` of another one with `ndim` axes, so that it broadcasts to that one."""
    array = array.transpose(np.argsort(axes))
    return lax.expand_dims(array, [axis for axis in range(ndim) if axis not in axes])


def _dropped(x: jax.Array, rate: float, key: jax.Array) -> jax.Array:
    keep = jax.random.bernoulli(key, 1 - rate, x.shape)
    return jnp.where(keep, x / (1 - rate), jnp.zeros_like(x))


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray)
