"""The folds of k-fold cross-validation: which examples each validates on, and the dataset of a fold."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jax_trainer.core import PyTree
from jax_trainer.datasets import ArrayLoader, DataError, DatasetModule
from jax_trainer.diagnostics.returned import checked_int
from jax_trainer.sharding import resized

_LABELS = ("target", "targets", "y", "label", "labels")


def fold_rows(examples: int, folds: int, seed: int, labels: np.ndarray | None = None) -> list[np.ndarray]:
    """The rows of each fold, in ascending order: every row is in one fold, and the sizes differ by at most 1.

    Args:
        examples: the number of examples.
        folds: the number of folds, at least 2.
        seed: of the shuffling.
        labels: classes of the examples, of which every fold gets its share, to within 1; None: they do not matter.

    >>> [rows.tolist() for rows in fold_rows(6, 3, seed=0, labels=np.array([0, 0, 0, 1, 1, 1]))]
    [[2, 3], [0, 5], [1, 4]]
    """
    checked_int("folds", folds, 2)
    if folds > examples:
        raise ValueError(f"`folds` is {folds}, but there are {examples} examples. Use at most {examples}.")
    order = np.random.default_rng(seed).permutation(examples)
    if labels is not None:
        order = order[np.argsort(labels[order], kind="stable")]  # by class, shuffled in each
    return [np.sort(order[fold::folds]) for fold in range(folds)]


def labels_of(arrays: PyTree) -> np.ndarray | None:
    """The integer labels among the arrays of a dataset, one per example; None if there are none."""
    if isinstance(arrays, Mapping):
        found = [arrays[name] for name in _LABELS if name in arrays]
    elif isinstance(arrays, tuple | list) and not hasattr(arrays, "_fields"):
        found = [arrays[1]] if len(arrays) == 2 else []
    else:
        found = [getattr(arrays, name) for name in _LABELS if hasattr(arrays, name)]
    labels = [np.asarray(one) for one in found]
    are_labels = len(labels) == 1 and labels[0].ndim == 1 and np.issubdtype(labels[0].dtype, np.integer)
    return labels[0] if are_labels else None


def all_examples(dataset: DatasetModule) -> PyTree:
    """The arrays of the training and the validation data of a dataset that has them in memory."""
    loaders = {"train": dataset.train_loader, "val": dataset.val_loader}
    parts = []
    for name, loader in loaders.items():
        if loader is None:
            continue
        if not isinstance(loader, ArrayLoader) or not loader.in_memory:
            is_ours = isinstance(loader, ArrayLoader)
            what = " with transforms on the host, or of arrays that are mapped from a file" if is_ours else ""
            raise DataError(
                f"Cross-validation needs arrays in memory, but the {name!r} data of {type(dataset).__name__} is a "
                f"{type(loader).__name__}{what}. Pass arrays to the `DatasetModule`."
            )
        parts.append(loader.arrays)
    leaves, structure = [jax.tree.leaves(part) for part in parts], jax.tree.structure(parts[0])
    joined = structure.unflatten([np.concatenate(same) for same in zip(*leaves, strict=True)])
    return resized(joined, len(jax.tree.leaves(joined)[0]))


def rows_of(arrays: PyTree, rows: np.ndarray) -> PyTree:
    """Some examples of a dataset."""
    return resized(jax.tree.map(lambda leaf: leaf[rows], arrays), len(rows))


class FoldDataset(DatasetModule):
    """A dataset with other training and validation data; the test data and everything else are those of `dataset`.

    It is no class that a file can name: a run on it is resumed by `cross_validate`, which knows the fold.

    Args:
        dataset: the dataset.
        train, val: arrays.
    """

    def __init__(self, dataset: DatasetModule, train: PyTree, val: PyTree) -> None:
        self._dataset = dataset
        test = {"test": dataset.test, "test_loader": dataset.test_loader}
        about = {"metadata": dataset.metadata, "class_names": dataset.class_names, "transforms": dataset.transforms}
        super().__init__(dataset.config, train, val, **test, **about)

    def __getattr__(self, name: str) -> Any:
        if name == "_dataset":  # while it is copied
            raise AttributeError(name)
        return getattr(self._dataset, name)
