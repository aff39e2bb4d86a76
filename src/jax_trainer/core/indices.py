"""Which integers of a batch a step uses as indices, and whether they are in range.

A label of 10 for ten classes, or a token id past the vocabulary, is no error to JAX: it reads NaN, and a negative one
counts from the end. The traced step knows which arrays of a batch pick entries out of which axis, so that their values
can be checked on the host, before the first step.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.core import Tracer

from jax_trainer.core.metrics import Batch
from jax_trainer.core.user_frame import line_of

# what hands on its first operand with the same values, in another form
_SAME_VALUES = {
    "broadcast_in_dim", "convert_element_type", "copy", "copy_p", "expand_dims", "optimization_barrier", "reshape",
    "sharding_constraint", "slice", "squeeze", "stop_gradient", "transpose",
}  # fmt: skip
_COMPARISONS = {"eq", "ne", "ge", "gt", "le", "lt"}
_CACHED = {"jit", "pjit"}  # traced once for all callers
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
    """The uses as indices of the inputs from number `first` on; none of those that the step compares with constants.

    Whoever compares labels with a constant (`labels != -1`) masks those that are out of range.
    """
    found = _Uses()
    inputs = jaxpr.jaxpr.invars[first:]
    found.follow(jaxpr.jaxpr, {variable: Known("value", leaf) for leaf, variable in enumerate(inputs)})
    return frozenset(use for use in found.uses if use.leaf not in found.compared)


class Known(NamedTuple):
    """A variable of a traced function that is the `value` of a leaf, or says where it is `negative`, or is `shifted`.

    An `index` is a value of which negative ones count from the end, as where an array is indexed.
    """

    kind: str
    leaf: int


class _Uses:
    """Follows values of the batch through a traced function."""

    def __init__(self) -> None:
        self.uses: set[Use] = set()
        self.compared: set[int] = set()

    def follow(self, jaxpr: Any, known: dict[Any, Known], line: str = "") -> list[Known | None]:
        """Visits every operation; returns what is known of the results.

        Args:
            line: of the user's code that calls this function, where JAX caches its trace and so the lines inside.
        """
        columns: dict[Any, list[int | None]] = {}  # of indices that are put together, the leaf of each column
        for equation in jaxpr.eqns:
            name, operands, out = equation.primitive.name, equation.invars, equation.outvars
            found = [None if hasattr(operand, "val") else known.get(operand) for operand in operands]
            leaves = [one.leaf if one is not None and one.kind in ("value", "index") else None for one in found]
            joined = [None if hasattr(operand, "val") else columns.get(operand) for operand in operands]
            if not any(one is not None for one in (*found, *joined)):
                continue
            if name in _SAME_VALUES:
                known.update({new: old for new, old in zip(out, found, strict=False) if old is not None})
                columns.update({new: old for new, old in zip(out, joined, strict=False) if old is not None})
            elif name == "lt" and leaves[0] is not None and _is_zero(operands[1]):
                known[out[0]] = Known("negative", leaves[0])
            elif name == "add" and leaves[0] is not None and hasattr(operands[1], "val"):
                known[out[0]] = Known("shifted", leaves[0])
            elif name in _COMPARISONS and any(hasattr(operand, "val") for operand in operands):
                self.compared.update(leaf for leaf in leaves if leaf is not None)
            elif name == "select_n" and _counts_from_the_end(found):
                known[out[0]] = Known("index", found[1].leaf)  # type: ignore[union-attr] - all of them are known
            elif name == "concatenate" and equation.params["dimension"] == out[0].aval.ndim - 1:
                widths = [operand.aval.shape[-1] for operand in operands]
                columns[out[0]] = [leaf for leaf, width in zip(leaves, widths, strict=True) for _ in range(width)]
            elif name == "gather" and not _clips_on_purpose(equation, found[1]):
                self._note(equation, leaves[1], joined[1], line or _line_of(equation))
            else:
                calls = line or (_line_of(equation) if name in _CACHED else "")
                for inner, numbers in _inner(equation):
                    inputs = zip(inner.invars, (found[number] for number in numbers), strict=True)
                    results = self.follow(inner, {variable: one for variable, one in inputs if one is not None}, calls)
                    if len(results) == len(out):
                        known.update({new: old for new, old in zip(out, results, strict=True) if old is not None})
        return [None if hasattr(variable, "val") else known.get(variable) for variable in jaxpr.outvars]

    def _note(self, equation: Any, leaf: int | None, columns: list[int | None] | None, line: str) -> None:
        numbers, sizes = equation.params["dimension_numbers"], equation.params["slice_sizes"]
        axes, shape = numbers.start_index_map, equation.invars[0].aval.shape
        for axis, source in zip(axes, columns or [leaf] * len(axes), strict=False):
            if source is not None:
                self.uses.add(Use(source, shape[axis] - sizes[axis] + 1, line))


def _line_of(equation: Any) -> str:
    trace = equation.source_info.traceback
    return "" if trace is None else line_of(trace.as_python_traceback())


def _is_zero(variable: Any) -> bool:
    return hasattr(variable, "val") and np.ndim(variable.val) == 0 and variable.val == 0


def _counts_from_the_end(found: list[Known | None]) -> bool:
    """Whether these are what `select_n` makes of an index that may be negative, as JAX does it: index, index + size."""
    kinds = [one.kind for one in found if one is not None]
    return kinds == ["negative", "value", "shifted"] and len({one.leaf for one in found if one is not None}) == 1


def _clips_on_purpose(equation: Any, index: Known | None) -> bool:
    """Whether the user asked for the last entry where an index is too large; indexing under `vmap` clips as well."""
    return equation.params.get("mode") is lax.GatherScatterMode.CLIP and index is not None and index.kind == "value"


def _inner(equation: Any) -> Iterator[tuple[Any, range]]:
    """The functions inside an operation, with the numbers of the operands that each is given."""
    params, count = equation.params, len(equation.invars)
    if equation.primitive.name == "cond":
        for branch in params["branches"]:
            yield branch.jaxpr, range(1, count)
        return
    inner = params.get("jaxpr", params.get("call_jaxpr", params.get("fun_jaxpr")))
    inner = getattr(inner, "jaxpr", inner)
    if inner is not None and len(inner.invars) == count:
        yield inner, range(count)


def ranges_of(uses: frozenset[Use], batch: Batch) -> str:
    """Which entries of a batch are indices, and what they may be.

    >>> ranges_of(frozenset({Use(1, 3)}), (np.zeros((8, 4)), np.zeros(8, np.int32)))
    'batch[1] must be 0 to 2'
    """
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(batch)]
    ranges = sorted((names[use.leaf], use.size) for use in uses)
    return ", ".join(f"batch{name} must be 0 to {size - 1}" for name, size in ranges)


def out_of_range(uses: frozenset[Use], batch: Batch) -> str:
    """What is wrong with the indices in `batch`, which may be all examples at once; empty if nothing is.

    A batch with a mask or weights may have anything where these are 0.
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
    leaves = jax.tree_util.tree_leaves_with_path(batch)
    names = [jax.tree_util.keystr(path) for path, _ in leaves]
    if any(mask in name.lower() for name in names for mask in _MASKS):
        return
    for use in sorted(uses, key=lambda use: (use.leaf, use.size)):
        values = leaves[use.leaf][1]
        if not _can_be_read(values):
            continue
        values = np.asarray(jax.device_get(values))
        low, high = int(values.min()), int(values.max())
        if low < 0 or high >= use.size:
            yield use, _sentence(f"batch{names[use.leaf]}", low, high, use.size)


def _can_be_read(values: Any) -> bool:
    if isinstance(values, Tracer) or not isinstance(values, np.ndarray | jax.Array):
        return False  # a shape
    here = not isinstance(values, jax.Array) or values.is_fully_addressable
    return here and np.issubdtype(values.dtype, np.integer) and values.size > 0


def _sentence(name: str, low: int, high: int, size: int) -> str:
    wrong = high if high >= size else low
    cure = (
        f"Labels count from 0: subtract {low}."
        if low > 0 and high - low < size
        else f"Give the model {high + 1} outputs (or embeddings)."
        if low >= 0
        else "Mask what is unknown: compare with it (`labels != -1`), or give the batch a `mask`."
    )
    return (
        f"{name} holds {wrong} (its values are {low} to {high}), and is used as an index, as labels and token ids are, "
        f"into an axis of {size}, such as the outputs for {size} classes: it must be 0 to {size - 1}. {cure}"
    )
