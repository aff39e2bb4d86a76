"""The examples that an export is traced and checked with, and what the trainer predicts for them."""

from collections.abc import Sequence
from contextlib import closing
from typing import Any

import jax
import numpy as np

from jax_trainer.core import Batch, TrainState, compiled_function, stream
from jax_trainer.datasets import DataSource
from jax_trainer.diagnostics.leaves import leaf_path
from jax_trainer.runs.predictions import Predictor
from jax_trainer.sharding import resized
from jax_trainer.tools.exporting.artifact import ExportError
from jax_trainer.tools.exporting.traced import OUTPUT

EXAMPLES = 64
OUTPUTS = 2**29  # bytes


def first_examples(trainer: Any, size: int | None = None) -> Batch:
    """The first 64 examples of the test set, and of the others if it has fewer, in one batch; or `size` of them."""
    dataset, wanted = trainer.dataset, size or EXAMPLES
    sets = [] if dataset is None else [dataset.test_loader, dataset.val_loader, dataset.train_loader]
    parts = _first([one for one in sets if one is not None], wanted) or [_plain(trainer.exmp_input)]
    joined = jax.tree.map(lambda *each: np.concatenate(each)[:wanted] if np.ndim(each[0]) else each[0], *parts)
    rows = _rows(joined)
    if size is not None and rows != size:
        raise ExportError(f"There are {rows} examples, too few for a batch of {size}.")
    return resized(joined, rows)


def limited(predictor: Predictor, examples: Batch) -> Batch:
    """The first of `examples`, as many as have outputs of at most 512 MB: logits of long texts are large."""
    rows, outputs = _rows(examples), jax.eval_shape(predictor.program.traced_predict, predictor.state, examples)
    size = sum(one.size * one.dtype.itemsize for one in jax.tree.leaves(outputs))
    fewer = max(1, min(rows, rows * OUTPUTS // max(1, size)))
    return resized(jax.tree.map(lambda leaf: leaf[:fewer] if np.ndim(leaf) else leaf, examples), fewer)


def _first(loaders: Sequence[Any], wanted: int) -> list[Batch]:
    parts: list[Batch] = []
    for loader in loaders:
        with closing(DataSource(loader, "export").open(1)) as batches:
            while sum(map(_rows, parts)) < wanted and (found := batches.take(1)) is not None:
                part = _plain(found.batch)
                if parts and _form(part) != _form(parts[0]):  # such as with a mask
                    return parts
                parts.append(part)
    return parts


def _form(batch: Batch) -> Any:
    return jax.tree.structure(batch), [np.shape(leaf)[1:] for leaf in jax.tree.leaves(batch)]


def _plain(batch: Batch) -> Batch:
    # its size is a part of its structure, which must be the same for all
    return resized(jax.tree.map(np.asarray, jax.device_get(batch)), 0)


def _rows(batch: Batch) -> int:
    return next((len(leaf) for leaf in jax.tree.leaves(batch) if np.ndim(leaf)), 0)


def expected_outputs(predictor: Predictor, examples: Batch) -> dict[str, np.ndarray]:
    """The outputs of the trainer by name."""
    outputs = jax.device_get(predictor.program.predict(predictor.state, examples))
    leaves = jax.tree_util.tree_leaves_with_path(outputs)
    return {leaf_path(path) or OUTPUT: np.asarray(leaf) for path, leaf in leaves}


def model_call(trainer: Any, state: TrainState, examples: Batch) -> tuple[np.ndarray, dict[str, np.ndarray]]:
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
    return given, {OUTPUT: np.asarray(outputs[0])}
