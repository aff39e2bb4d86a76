"""`TracedModel`: the prediction of a trainer as a function of the arrays that it depends on, by name; its examples."""

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from jax_trainer.core import Batch, PyTree, TrainState, compiled_function, stream
from jax_trainer.datasets import DataSource
from jax_trainer.diagnostics.jax_internals import needed_inputs
from jax_trainer.runs.predictions import Predictor
from jax_trainer.sharding import resized
from jax_trainer.tools.exporting import BATCH, ArraySpec, ExportError
from jax_trainer.tools.pretrained.loading import named_leaves

OUTPUT = "output"  # of a model that returns one array
EXAMPLES = 64
OUTPUTS = 2**29  # bytes  # of all examples together, at most
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
    def input_shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The shapes of the inputs; with a symbolic size, that of one scope for all of them."""
        (size,) = jax.export.symbolic_shape(BATCH)
        sized = lambda spec: tuple(size if one == BATCH else one for one in spec.shape)
        return {spec.name: jax.ShapeDtypeStruct(sized(spec), spec.dtype) for spec in self.inputs}


def traced_model(predictor: Predictor, batch: Batch, size: int | None = None) -> TracedModel:
    """The prediction of `predictor` for batches like `batch`; `size`: of every batch, None: any."""
    program, (treedef, batch_treedef) = predictor.program, map(jax.tree.structure, (predictor.state, batch))
    state = named_leaves(predictor.state)
    entries = {name: jnp.asarray(leaf) for name, leaf in named_leaves(batch).items()}
    sizes = {leaf.shape[0] for leaf in entries.values() if leaf.ndim}
    if len(sizes) != 1:
        raise ExportError(f"The arrays of a batch must share their first axis, to be exported; found {sorted(sizes)}.")
    rows = sizes.pop()

    def predict(state: Sequence[Any], batch: Sequence[Any]) -> PyTree:
        return program.traced_predict(treedef.unflatten(state), batch_treedef.unflatten(batch))

    traced = jax.make_jaxpr(predict)([*state.values()], [*entries.values()])
    used = needed_inputs(traced.jaxpr, [True] * len(traced.jaxpr.outvars))
    needed = [name for name, is_used in zip(state, used, strict=False) if is_used]
    # averaged parameters have the names of the parameters, unless both are needed
    short = {name: name.replace(_AVERAGED, _PARAMS, 1) for name in needed}
    short = short if len({*short.values()}) == len(needed) else {name: name for name in needed}
    of_batch = zip(entries.items(), used[len(state) :], strict=True)
    example = {name: np.asarray(leaf) for (name, leaf), is_used in of_batch if is_used}
    if not example:
        raise ExportError("The predictions do not depend on the batch, so there is nothing to export.")

    def call(weights: Arrays, inputs: Arrays) -> Arrays:
        count = next(inputs[name].shape[0] for name in inputs if entries[name].shape[:1] == (rows,))
        # zeros for what the outputs do not depend on: JAX removes them
        zeros = lambda leaf, shape=None: jnp.zeros(shape or leaf.shape, leaf.dtype)
        plain = {name: weights[short[name]] if name in short else zeros(_plain(leaf)) for name, leaf in state.items()}
        others = [inputs.get(name, zeros(leaf, _shape(leaf, rows, count))) for name, leaf in entries.items()]
        batch = resized(batch_treedef.unflatten(others), count)
        key = lambda leaf, value: jax.random.wrap_key_data(value, impl=jax.random.key_impl(leaf))
        leaves = [key(leaf, plain[name]) if _is_key(leaf) else plain[name] for name, leaf in state.items()]
        return _outputs(program.traced_predict(treedef.unflatten(leaves), batch))

    weights = {short[name]: np.asarray(jax.device_get(_plain(leaf))) for name, leaf in state.items() if name in short}
    first = BATCH if size is None else size
    inputs = tuple(ArraySpec(name, str(array.dtype), _shape(array, rows, first)) for name, array in example.items())
    found = TracedModel(call, weights, inputs, (), example)
    return replace(found, outputs=_output_specs(found, size))


def _outputs(tree: PyTree) -> Arrays:
    return {path or OUTPUT: leaf for path, leaf in named_leaves(tree).items()}


def _output_specs(model: TracedModel, size: int | None) -> tuple[ArraySpec, ...]:
    advice = "Export it for one size (`batch=64`, or `--batch 64`)."
    try:
        shapes = jax.eval_shape(model.call, model.weights, model.input_shapes)
    except Exception as error:
        if size is not None:
            raise
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise ExportError(f"The model cannot be traced with a batch of any size: {reason} {advice}") from error
    found = tuple(ArraySpec.of(name, one) for name, one in shapes.items())
    for one in found:
        if odd := [length for length in one.shape if isinstance(length, str) and length != BATCH]:
            raise ExportError(
                f"The output {one.name} has the size {odd[0]}, which is neither fixed nor that of the batch. {advice}"
            )
    return found


def _shape(array: Any, rows: int, size: Any) -> tuple[Any, ...]:
    return (size, *array.shape[1:]) if array.shape[:1] == (rows,) else array.shape


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _plain(leaf: Any) -> Any:
    """Random keys as numbers, which files can have."""
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf


# examples


def first_examples(trainer: Any, size: int | None = None) -> Batch:
    """The first 64 examples of the test set, and of the others if it has fewer, in one batch; or `size` of them."""
    dataset, wanted = trainer.dataset, size or EXAMPLES
    sets = [] if dataset is None else [dataset.test_loader, dataset.val_loader, dataset.train_loader]
    parts = _first([one for one in sets if one is not None], wanted) or [_as_numpy(trainer.exmp_input)]
    joined = jax.tree.map(lambda *each: np.concatenate(each)[:wanted] if np.ndim(each[0]) else each[0], *parts)
    rows = _size(joined)
    if size is not None and rows != size:
        raise ExportError(f"There are {rows} examples, too few for a batch of {size}.")
    return resized(joined, rows)


def limited(predictor: Predictor, examples: Batch) -> Batch:
    """The first of `examples`, as many as have outputs of at most 512 MB: logits of long texts are large."""
    rows, outputs = _size(examples), jax.eval_shape(predictor.program.traced_predict, predictor.state, examples)
    size = sum(one.size * one.dtype.itemsize for one in jax.tree.leaves(outputs))
    fewer = max(1, min(rows, rows * OUTPUTS // max(1, size)))
    return resized(jax.tree.map(lambda leaf: leaf[:fewer] if np.ndim(leaf) else leaf, examples), fewer)


def _first(loaders: Sequence[Any], wanted: int) -> list[Batch]:
    parts: list[Batch] = []
    form = lambda batch: (jax.tree.structure(batch), [np.shape(leaf)[1:] for leaf in jax.tree.leaves(batch)])
    for loader in loaders:
        with closing(DataSource(loader, "export").open(1)) as batches:
            while sum(map(_size, parts)) < wanted and (found := batches.take(1)) is not None:
                part = _as_numpy(found.batch)
                if parts and form(part) != form(parts[0]):  # such as with a mask
                    return parts
                parts.append(part)
    return parts


def _as_numpy(batch: Batch) -> Batch:
    # its size is a part of its structure, which must be the same for all
    return resized(jax.tree.map(np.asarray, jax.device_get(batch)), 0)


def _size(batch: Batch) -> int:
    return next((len(leaf) for leaf in jax.tree.leaves(batch) if np.ndim(leaf)), 0)


def expected_outputs(predictor: Predictor, examples: Batch) -> dict[str, np.ndarray]:
    """The outputs of the trainer by name."""
    outputs = _outputs(jax.device_get(predictor.program.predict(predictor.state, examples)))
    return {name: np.asarray(leaf) for name, leaf in outputs.items()}


def model_call(trainer: Any, state: TrainState, examples: Batch) -> tuple[Arrays, Arrays]:
    """The input of the model itself, after the transforms of the data, and its output in float32.

    The weights of a Hugging Face folder are compared by them: they have no transforms, and no precision of a training.
    """
    key = stream(jax.random.key(0), "eval transforms")
    given = np.asarray(trainer.batch_to_input(trainer.transform_batch(key, examples, False)))
    call = compiled_function(lambda state, given: trainer.bind_model(state, transforms=False)(given))
    with jax.default_matmul_precision("highest"):  # GPUs round the factors of a product otherwise
        outputs = jax.tree.leaves(call(state, given))
    if len(outputs) != 1:
        raise ExportError(f"The model has {len(outputs)} outputs, but a Hugging Face model is compared by one.")
    return {"input": given}, {OUTPUT: np.asarray(outputs[0])}
