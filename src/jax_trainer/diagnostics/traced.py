"""What the equations of a traced step tell, without compiling anything: its FLOPs, and what it uses as indices.

FLOPs are counted by module, in the forward and the backward pass. XLA's own count is of the compiled code, where the
names of modules are mixed by fusion, and counts the body of a loop once.

JAX raises no error for a label of 10 with ten classes or a token id beyond the vocabulary: it reads NaN, and a negative
index counts from the end. The jaxpr of the step shows which arrays of a batch index which axis, so that their values
can be checked on the host before the first step.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.core import Tracer

from jax_trainer.diagnostics.jax_internals import body_of, inner_functions, is_literal, scopes_of, traceback_of
from jax_trainer.diagnostics.leaves import Batch
from jax_trainer.diagnostics.user_frame import line_of

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
        is_backward = "transpose" in changed or outer == "backward"
        phase: Phase = "backward" if is_backward else "forward" if "jvp" in changed else outer
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


# indices

# primitives that keep the values of their first operand
_SAME_VALUES = {
    "broadcast_in_dim", "convert_element_type", "copy", "copy_p", "expand_dims", "optimization_barrier", "reshape",
    "sharding_constraint", "slice", "squeeze", "stop_gradient", "transpose",
}  # fmt: skip
_COMPARISONS = {"eq", "ne", "ge", "gt", "le", "lt"}
_MASKS = ("mask", "weight", "valid", "pad")


class IndexRangeError(ValueError):
    """Labels or token ids of a batch are out of range for the axis that they index."""


@dataclass(frozen=True)
class Use:
    """Entry `leaf` of the flat batch is an index into an axis of `size`, in `line` of the user's code."""

    leaf: int
    size: int
    line: str = field(default="", compare=False)


def index_uses(jaxpr: Any, first: int) -> frozenset[Use]:
    """The inputs from number `first` on that are used as indices, except those compared with a constant.

    A comparison with a constant (`labels != -1`) masks the labels that are out of range.
    """
    found = _Uses()
    inputs = jaxpr.jaxpr.invars[first:]
    found.follow(jaxpr.jaxpr, {variable: Known("value", leaf) for leaf, variable in enumerate(inputs)})
    return frozenset(use for use in found.uses if use.leaf not in found.compared)


class Known(NamedTuple):
    """A variable of a jaxpr that is the `value` of a leaf, the mask of its `negative` entries, or the `shifted` value.

    An `index` is a value whose negative entries were wrapped to count from the end, as array indexing does.
    """

    kind: str
    leaf: int


class _Uses:
    """Follows the values of a batch through a jaxpr."""

    def __init__(self) -> None:
        self.uses: set[Use] = set()
        self.compared: set[int] = set()

    def follow(self, jaxpr: Any, known: dict[Any, Known], line: str = "") -> list[Known | None]:
        """Visits every operation; returns what is known of the results.

        Args:
            line: of the user's code that calls this function, where JAX caches its trace and so the lines inside.
        """
        columns: dict[Any, list[int | None]] = {}  # of concatenated indices: the leaf of each column
        for equation in jaxpr.eqns:
            name, operands, out = equation.primitive.name, equation.invars, equation.outvars
            found = [None if is_literal(operand) else known.get(operand) for operand in operands]
            leaves = [one.leaf if one is not None and one.kind in ("value", "index") else None for one in found]
            joined = [None if is_literal(operand) else columns.get(operand) for operand in operands]
            if not any(one is not None for one in (*found, *joined)):
                continue
            if name in _SAME_VALUES:
                known.update({new: old for new, old in zip(out, found, strict=False) if old is not None})
                columns.update({new: old for new, old in zip(out, joined, strict=False) if old is not None})
            elif name == "lt" and leaves[0] is not None and _is_zero(operands[1]):
                known[out[0]] = Known("negative", leaves[0])
            elif name == "add" and leaves[0] is not None and is_literal(operands[1]):
                known[out[0]] = Known("shifted", leaves[0])
            elif name in _COMPARISONS and any(is_literal(operand) for operand in operands):
                self.compared.update(leaf for leaf in leaves if leaf is not None)
            elif name == "select_n" and _wraps_negative(found):
                known[out[0]] = Known("index", found[1].leaf)  # type: ignore[union-attr] - all are known
            elif name == "concatenate" and equation.params["dimension"] == out[0].aval.ndim - 1:
                widths = [operand.aval.shape[-1] for operand in operands]
                columns[out[0]] = [leaf for leaf, width in zip(leaves, widths, strict=True) for _ in range(width)]
            elif name == "gather" and not _clips_explicitly(equation, found[1]):
                self._note(equation, leaves[1], joined[1], line or _line_of(equation))
            else:
                calls = line or (_line_of(equation) if name in ("jit", "pjit") else "")  # traced once for all callers
                for inner, numbers in _inner(equation):
                    inputs = zip(inner.invars, (found[number] for number in numbers), strict=True)
                    results = self.follow(inner, {variable: one for variable, one in inputs if one is not None}, calls)
                    if len(results) == len(out):
                        known.update({new: old for new, old in zip(out, results, strict=True) if old is not None})
        return [None if is_literal(variable) else known.get(variable) for variable in jaxpr.outvars]

    def _note(self, equation: Any, leaf: int | None, columns: list[int | None] | None, line: str) -> None:
        numbers, sizes = equation.params["dimension_numbers"], equation.params["slice_sizes"]
        axes, shape = numbers.start_index_map, equation.invars[0].aval.shape
        for axis, source in zip(axes, columns or [leaf] * len(axes), strict=False):
            if source is not None:
                self.uses.add(Use(source, shape[axis] - sizes[axis] + 1, line))


def _line_of(equation: Any) -> str:
    trace = traceback_of(equation)
    return "" if trace is None else line_of(trace.as_python_traceback())


def _is_zero(variable: Any) -> bool:
    return is_literal(variable) and np.ndim(variable.val) == 0 and variable.val == 0


def _wraps_negative(found: list[Known | None]) -> bool:
    """Whether these are the operands of JAX's `select_n` between index and index + size."""
    kinds = [one.kind for one in found if one is not None]
    return kinds == ["negative", "value", "shifted"] and len({one.leaf for one in found if one is not None}) == 1


def _clips_explicitly(equation: Any, index: Known | None) -> bool:
    """Whether the user requested `mode="clip"`; indexing under `vmap` clips as well."""
    return equation.params.get("mode") is lax.GatherScatterMode.CLIP and index is not None and index.kind == "value"


def _inner(equation: Any) -> Iterator[tuple[Any, range]]:
    """The jaxprs nested in an equation, each with the numbers of its operands."""
    inner, count = [body_of(one) for one in inner_functions(equation)], len(equation.invars)
    if equation.primitive.name == "cond":
        yield from ((branch, range(1, count)) for branch in inner)
    elif len(inner) == 1 and len(inner[0].invars) == count:
        yield inner[0], range(count)


def ranges_of(uses: frozenset[Use], batch: Batch) -> str:
    """The entries of a batch that are indices, with their valid ranges, as text.

    >>> ranges_of(frozenset({Use(1, 3)}), (np.zeros((8, 4)), np.zeros(8, np.int32)))
    'batch[1] must be 0 to 2'
    """
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(batch)]
    ranges = sorted((names[use.leaf], use.size) for use in uses)
    return ", ".join(f"batch{name} must be 0 to {size - 1}" for name, size in ranges)


def out_of_range(uses: frozenset[Use], batch: Batch) -> str:
    """The error message about indices in `batch`, which may be the complete data set; empty if all are in range.

    Of a batch with a mask or weights, what these leave out is not checked.
    """
    return next((text for _, text in _wrong_uses(uses, batch)), "")


def check_range(uses: frozenset[Use], batch: Batch) -> None:
    """Raises an `IndexRangeError` with the user's line for indices in `batch` that are out of range."""
    for use, text in _wrong_uses(uses, batch):
        error = IndexRangeError(text)
        if use.line:
            error.add_note(use.line)
        raise error


def _wrong_uses(uses: frozenset[Use], batch: Batch) -> Iterator[tuple[Use, str]]:
    leaves = [(jax.tree_util.keystr(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(batch)]
    masks = [leaf for name, leaf in leaves if any(one in name.lower() for one in _MASKS)]
    if not all(map(_is_known, masks)):
        return
    for use in sorted(uses, key=lambda use: (use.leaf, use.size)):
        name, values = leaves[use.leaf]
        if not (_is_known(values) and np.issubdtype(values.dtype, np.integer)):
            continue
        values = np.asarray(jax.device_get(values))
        kept = np.ones(values.shape[:1], bool)
        for mask in map(np.asarray, masks):
            if mask.shape != values.shape[: mask.ndim]:
                return  # of something else
            kept = kept.reshape((*kept.shape, *(1,) * (mask.ndim - kept.ndim))) & (mask != 0)
        values = values[np.broadcast_to(kept, values.shape[: kept.ndim])]
        if values.size and (values.min() < 0 or values.max() >= use.size):
            yield use, _message(f"batch{name}", int(values.min()), int(values.max()), use.size)


def _is_known(values: Any) -> bool:
    """Whether this process has these values: not a shape, not traced, not in other processes."""
    is_array = isinstance(values, np.ndarray | jax.Array) and not isinstance(values, Tracer)
    return is_array and (isinstance(values, np.ndarray) or values.is_fully_addressable)


def _message(name: str, low: int, high: int, size: int) -> str:
    fix = f"Give the model {high + 1} outputs (or embeddings)."
    if low < 0:
        fix = "Mask unknown labels with a comparison (`labels != -1`), or add a `mask` to the batch."
    elif low > 0 and high - low < size:
        fix = f"Labels count from 0: subtract {low}."
    return (
        f"{name} holds {high if high >= size else low} (its values are {low} to {high}), but is used as an index, such "
        f"as a label or token id, into an axis of size {size}: its values must be 0 to {size - 1}. {fix}"
    )
