"""`TracedModel`: the prediction of a trainer as a function of those arrays, by name, that it depends on."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from jax_trainer.core import Batch, PyTree
from jax_trainer.diagnostics.jax_internals import needed_inputs
from jax_trainer.diagnostics.leaves import leaf_path
from jax_trainer.runs.predictions import Predictor
from jax_trainer.sharding import resized
from jax_trainer.tools.exporting.artifact import BATCH, ArraySpec, ExportError

OUTPUT = "output"  # of a model that returns one array
_AVERAGED, _PARAMS = "extra.ema.", "params."

Arrays = dict[str, Any]


@dataclass(frozen=True)
class TracedModel:
    """A prediction: `call(weights, inputs)` returns its outputs, all of them by name.

    Args:
        call: the function, which JAX can trace.
        weights: the arrays of the state that the outputs depend on.
        inputs: the arrays of the batch that the outputs depend on.
        outputs: what `call` returns.
        example: inputs, with a row per example.
    """

    call: Callable[[Arrays, Arrays], Arrays]
    weights: dict[str, np.ndarray]
    inputs: tuple[ArraySpec, ...]
    outputs: tuple[ArraySpec, ...]
    example: dict[str, np.ndarray]

    @property
    def weight_shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The shapes of the weights."""
        return {name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in self.weights.items()}

    @property
    def input_shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The shapes of the inputs; with a symbolic size, that of one scope for all of them."""
        (size,) = jax.export.symbolic_shape(BATCH)
        return {spec.name: spec.sized(size) for spec in self.inputs}


def traced_model(predictor: Predictor, batch: Batch, size: int | None = None) -> TracedModel:
    """The prediction of `predictor` for batches like `batch`; `size`: of every batch, None: any."""
    (state_names, state), (batch_names, rows_of) = _named(predictor.state), _named(batch)
    structures = jax.tree.structure(predictor.state), jax.tree.structure(batch)
    leaves = [jnp.asarray(leaf) for leaf in rows_of.values()]
    rows = _rows(leaves)
    used = _used(predictor, structures, [*state.values()], leaves)
    used_state = {name for name, is_used in zip(state_names, used, strict=False) if is_used}
    used_batch = [name for name, is_used in zip(batch_names, used[len(state_names) :], strict=True) if is_used]
    if not used_batch:
        raise ExportError("The predictions do not depend on the batch, so there is nothing to export.")
    short = _short_names(used_state)
    call = partial(_call, predictor, structures, (state, short), dict(zip(batch_names, leaves, strict=True)), rows)
    weights = {short[name]: np.asarray(jax.device_get(_plain(state[name]))) for name in state_names if name in short}
    example = {name: np.asarray(leaf) for name, leaf in zip(batch_names, leaves, strict=True) if name in used_batch}
    first = BATCH if size is None else size
    inputs = tuple(ArraySpec(name, str(array.dtype), _shape(array, rows, first)) for name, array in example.items())
    found = TracedModel(call, weights, inputs, (), example)
    return TracedModel(call, weights, inputs, _outputs(found, size), example)


def _call(
    predictor: Predictor,
    structures: tuple[Any, Any],
    stored: tuple[Arrays, dict[str, str]],
    entries: Arrays,
    rows: int,
    weights: Arrays,
    inputs: Arrays,
) -> Arrays:
    state, short = stored
    size = next(inputs[name].shape[0] for name in inputs if entries[name].shape[:1] == (rows,))
    # zeros for what the outputs do not depend on: JAX removes them
    state_leaves = [
        _like(leaf, weights[short[name]] if name in short else jnp.zeros(*_plain_shape(leaf)))
        for name, leaf in state.items()
    ]
    batch_leaves = [
        inputs[name] if name in inputs else jnp.zeros(_shape(leaf, rows, size), leaf.dtype)
        for name, leaf in entries.items()
    ]
    made = [structure.unflatten(each) for structure, each in zip(structures, (state_leaves, batch_leaves), strict=True)]
    outputs = predictor.program.traced_predict(made[0], resized(made[1], size))
    return {leaf_path(path) or OUTPUT: leaf for path, leaf in jax.tree_util.tree_leaves_with_path(outputs)}


def _named(tree: PyTree) -> tuple[list[str], Arrays]:
    named = {leaf_path(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
    return list(named), named


def _rows(leaves: Sequence[jax.Array]) -> int:
    sizes = {leaf.shape[0] for leaf in leaves if leaf.ndim}
    if len(sizes) != 1:
        raise ExportError(f"The arrays of a batch must share their first axis, to be exported; found {sorted(sizes)}.")
    return sizes.pop()


def _used(predictor: Predictor, structures: tuple[Any, Any], state: list[Any], batch: list[Any]) -> list[bool]:
    """Which leaves of the state, and then of the batch, the outputs depend on."""

    def predict(state: list[Any], batch: list[Any]) -> PyTree:
        return predictor.program.traced_predict(structures[0].unflatten(state), structures[1].unflatten(batch))

    traced = jax.make_jaxpr(predict)(state, batch)
    return needed_inputs(traced.jaxpr, [True] * len(traced.jaxpr.outvars))


def _short_names(used: set[str]) -> dict[str, str]:
    """The names of weights: averaged parameters have those of the parameters, unless both are needed."""
    short = {name: name.replace(_AVERAGED, _PARAMS, 1) for name in used}
    return short if len(set(short.values())) == len(used) else {name: name for name in used}


def _outputs(model: TracedModel, size: int | None) -> tuple[ArraySpec, ...]:
    try:
        shapes = jax.eval_shape(model.call, model.weight_shapes, model.input_shapes)
    except Exception as error:
        if size is not None:
            raise
        reason = str(error).partition("\n")[0]
        raise ExportError(
            f"The model cannot be traced with a batch of any size: {type(error).__name__}: {reason} Export it for one "
            "size (`batch=64`, or `--batch 64`)."
        ) from error
    return tuple(_output(name, one) for name, one in shapes.items())


def _output(name: str, one: jax.ShapeDtypeStruct) -> ArraySpec:
    shape = [length if isinstance(length, int) else str(length) for length in one.shape]
    if odd := [length for length in shape if isinstance(length, str) and length != BATCH]:
        raise ExportError(
            f"The output {name} has the size {odd[0]}, which is neither fixed nor that of the batch. Export the model "
            "for one batch size (`batch=64`, or `--batch 64`)."
        )
    return ArraySpec(name, str(one.dtype), tuple(shape))


def _shape(array: Any, rows: int, size: Any) -> tuple[Any, ...]:
    return (size, *array.shape[1:]) if array.shape[:1] == (rows,) else array.shape


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _plain(leaf: Any) -> Any:
    """Random keys as numbers, which files can have."""
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf


def _plain_shape(leaf: Any) -> tuple[tuple[int, ...], Any]:
    plain = jax.eval_shape(_plain, leaf)
    return plain.shape, plain.dtype


def _like(leaf: Any, value: Any) -> Any:
    return jax.random.wrap_key_data(value, impl=jax.random.key_impl(leaf)) if _is_key(leaf) else value
