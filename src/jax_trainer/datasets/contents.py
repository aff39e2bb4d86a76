"""What a data set contains, as facts that tell it from another one: its size, its order, and digests of its values.

| data | digest |
|---|---|
| arrays | of every array: all of it up to 64 MiB, otherwise of evenly spaced examples |
| memory-mapped arrays, lists of batches | of 64 evenly spaced examples, or batches |
| a loader with a `dataset` of examples by number, such as torch's | of 16 evenly spaced examples, and of nothing else |
| these, and any other loader, stream or generator | of its first batch, by which other kinds of data are compared |

Sizes and values, no times: files that were copied to another machine are the same data.
"""

import hashlib
from collections.abc import Collection, Mapping
from typing import Any

import jax
import numpy as np

from jax_trainer.core import Batch
from jax_trainer.core.equations import array_digest
from jax_trainer.datasets.arrays import ArrayLoader, Ordered
from jax_trainer.datasets.batch import INPUTS, TARGETS
from jax_trainer.datasets.data_source import DataSource, peeked
from jax_trainer.datasets.foreign import as_arrays
from jax_trainer.datasets.sources import CombinedLoader
from jax_trainer.diagnostics.leaves import leaf_path

MOST_BYTES = 1 << 26  # of an array that is read completely
MAPPED_ROWS, SAMPLED_EXAMPLES = 64, 16
FIRST_BATCH = "first batch/"  # prefix of the digests of one


def content_of(data: Any, first: Batch | None = None, *, reads: bool = True) -> dict[str, Any]:
    """The kind of a data set, its length and order where it has them, and digests of its values by name.

    Args:
        data: data of any kind that a run accepts.
        first: its first batch, if that was read; None: it is read if nothing else is known of the values.
        reads: False: nothing is read; of several processes, each may have a part of the data, or none.
    """
    facts: dict[str, Any] = {"kind": type(data).__name__}
    if (length := DataSource(data, "data", may_be_empty=True).length) is not None:
        facts["batches"] = length
    if isinstance(data, Ordered):
        order, sizes = data.schedule, data.schedule.sizes
        facts |= {"examples": order.examples, "batch_size": order.batch_size, "drop_last": order.drop_last}
        facts |= {"batch_sizes": None if sizes is None else {str(epoch): size for epoch, size in sizes.items()}}
        facts |= {"shuffle": order.shuffle, "seed": order.seed if order.shuffle else None}
    if isinstance(own := getattr(data, "digest", None), str):
        return {**facts, "digests": {"": own[:1000]}}
    if isinstance(data, ArrayLoader):
        rows = min(data.examples, MAPPED_ROWS) if data.is_mapped else data.examples
        digests = {name: _sampled(leaf, rows) for name, leaf in _named(data.arrays)}
    elif isinstance(data, CombinedLoader):
        parts = {name: content_of(loader, reads=False) for name, loader in data.loaders.items()}
        digests = {f"{name}/{key}": one for name, part in parts.items() for key, one in part["digests"].items()}
        facts["mode"] = data.mode
    elif isinstance(data, list | tuple):
        digests = _of_examples(data, MAPPED_ROWS)
    elif digests := _of_examples(getattr(data, "dataset", None), SAMPLED_EXAMPLES):
        return {**facts, "digests": digests}  # the first batch of a shuffle without a seed is always another
    if reads and length != 0:
        if isinstance(data, ArrayLoader) and not data.has_host_transforms:  # no batch is made of resident data
            rows = data.schedule.cut(data.order(1), 0)
            first = jax.tree.map(lambda leaf: leaf[rows], data.arrays)
        digests |= _of_batch(peeked(data)[0] if first is None else first)
    return {**facts, "digests": digests}


def is_reproducible(data: Any, digests: Mapping[str, str]) -> bool:
    """Whether `data`, opened again, has the first batch with these digests; an iterator cannot be opened again."""
    return DataSource(data, "data").is_one_shot or _of_batch(peeked(data)[0]) == digests


def value_name(name: str, names: Collection[str]) -> str:
    """What the array `name` of a data set with these `names` is for a person.

    >>> value_name("1", ["0", "1"]), value_name("target", ["input", "target"]), value_name("mask", ["x", "mask"])
    ('labels', 'labels', 'values of `mask`')
    """
    name, is_pair = name.removeprefix(FIRST_BATCH), {one.removeprefix(FIRST_BATCH) for one in names} == {"0", "1"}
    if name in TARGETS or (is_pair and name == "1"):
        return "labels"
    return "inputs" if name in INPUTS or is_pair else f"values of `{name}`" if name else "values"


def _named(tree: Any) -> list[tuple[str, np.ndarray]]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [(leaf_path(path), np.asarray(leaf)) for path, leaf in leaves]


def _digest(leaf: np.ndarray) -> str:
    return "" if leaf.dtype.hasobject else array_digest(leaf)


def _sampled(leaf: np.ndarray, rows: int) -> str:
    if rows == len(leaf) and leaf.nbytes > MOST_BYTES:
        rows = max(1, rows * MOST_BYTES // leaf.nbytes)
    chosen = leaf if rows == len(leaf) else leaf[_spread(len(leaf), rows)]
    return f"{leaf.dtype}{list(leaf.shape)} {_digest(chosen)}"


def _spread(length: int, most: int) -> np.ndarray:
    return np.linspace(0, max(length - 1, 0), min(length, most)).astype(np.int64)


def _of_batch(batch: Batch) -> dict[str, str]:
    return {f"{FIRST_BATCH}{name}": _digest(leaf) for name, leaf in _named(batch)}


def _of_example(example: Any) -> dict[str, str]:
    leaves = _named(as_arrays(example, copy=False))
    is_text = all(leaf.dtype.kind in "SU" for _, leaf in leaves)  # the name of a file, or of the data: not its values
    return {} if is_text else {name: _digest(leaf) for name, leaf in leaves}


def _of_examples(examples: Any, most: int) -> dict[str, str]:
    """Digests of evenly spaced examples, or batches, by the name of the array; none if reading them is random."""
    if not (hasattr(examples, "__getitem__") and hasattr(examples, "__len__")):
        return {}
    numbers = _spread(len(examples), most).tolist()
    try:
        read = [_of_example(examples[at]) for at in numbers]
        again = _of_example(examples[numbers[0]])
    except (LookupError, TypeError, ValueError):  # not by number, such as a table by column
        return {}
    if again != read[0]:
        return {}
    found = {name: " ".join(one.get(name, "") for one in read) for name in again}
    return {name: hashlib.sha256(text.encode()).hexdigest()[:32] for name, text in found.items()}
