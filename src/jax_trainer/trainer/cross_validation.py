"""`cross_validate`: k runs, each validated on another k-th of the examples, and the mean of their metrics."""

import gc
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from copy import copy, deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jax_trainer.config.settings import SettingsError
from jax_trainer.core import PyTree
from jax_trainer.datasets import ArrayLoader, DataError, DatasetModule
from jax_trainer.diagnostics.returned import checked_int
from jax_trainer.diagnostics.suggestions import checks_keywords
from jax_trainer.sharding import resized
from jax_trainer.trainer.experiment import build, load_experiment, made_dataset
from jax_trainer.trainer.run_folder import write_into
from jax_trainer.trainer.training import TrainResults

PARENT = Path("runs") / "cv"
MakeTrainer = Callable[[DatasetModule], Any]
_LABELS = ("target", "targets", "y", "label", "labels")


@dataclass(frozen=True)
class FoldResult:
    """One fold: its run folder, the epoch and step of its best weights, and their metrics in validation and test."""

    fold: int  # from 1
    run: str
    epoch: int
    step: int
    metrics: dict[str, float]


@dataclass(frozen=True)
class CrossValidation:
    """The result of `cross_validate`.

    Attributes:
        folder: the parent of the run folders.
        folds: one result per fold.
        mean, std: of each metric over the folds; the standard deviation is that of a sample (n - 1).
    """

    folder: Path
    folds: list[FoldResult]

    @property
    def mean(self) -> dict[str, float]:
        """The mean of each metric."""
        return {name: statistics.fmean(values) for name, values in self._values.items()}

    @property
    def std(self) -> dict[str, float]:
        """The standard deviation of each metric."""
        return {name: _sample_std(values) for name, values in self._values.items()}

    def data(self) -> dict[str, Any]:
        """The result as plain data."""
        folds = [asdict(one) for one in self.folds]
        return {"folder": str(self.folder), "folds": folds, "mean": self.mean, "std": self.std}

    @property
    def _values(self) -> dict[str, list[float]]:
        """By metric that every fold reports."""
        names = [name for name in self.folds[0].metrics if all(name in one.metrics for one in self.folds)]
        return {name: [one.metrics[name] for one in self.folds] for name in names}


@checks_keywords
def cross_validate(
    experiment: str | Path | MakeTrainer,
    folds: int = 5,
    *,
    dataset: DatasetModule | None = None,
    seed: int = 42,
    stratify: bool | None = None,
    overrides: Sequence[str] = (),
    folder: str | Path | None = None,
    quiet: bool = False,
) -> CrossValidation:
    """Trains one run per fold, validated on the examples of the fold; call it again to resume.

    The examples are those of the training and the validation data together. Every fold is tested on the test data, if
    there is any. Each fold is a run that `resume="auto"` finds: one that has ended is not trained again, and one that
    was killed resumes from its latest checkpoint. For this, the trainer needs a `ModelCheckpoint`.

    Args:
        experiment: a YAML file; or a function that returns the trainer of a fold, given its dataset.
        folds: the number of folds.
        dataset: the data, in memory, for a function.
        seed: of the assignment of examples to folds.
        stratify: whether every fold has its share of each class; None: if there are integer labels.
        overrides: of the file, such as `trainer.train_epochs=3`.
        folder: the parent of the run folders; None: `runs/cv/<name>`.
        quiet: show no progress.
    """
    make, data = _parts(experiment, dataset, overrides)
    arrays = all_examples(data)
    labels = labels_of(arrays)
    if stratify and labels is None:
        raise ValueError("`stratify` is on, but the data has no integer labels. Leave it out.")
    use_labels = labels is not None and stratify is not False
    examples = len(jax.tree.leaves(arrays)[0])
    rows = fold_rows(examples, folds, seed, labels if use_labels else None)
    home, results = folder_of(experiment, folder), []
    for number, val in enumerate(rows, 1):
        gc.collect()  # frees the arrays of the previous fold
        train = np.setdiff1d(np.arange(examples), val)
        trainer = make(FoldDataset(data, rows_of(arrays, train), rows_of(arrays, val)))
        results.append(_trained(number, trainer, home / f"fold_{number}", quiet=quiet))
    return CrossValidation(home, results)


def folder_of(experiment: str | Path | MakeTrainer, folder: str | Path | None = None) -> Path:
    """The parent of the run folders."""
    name = getattr(experiment, "__name__", "trainer") if callable(experiment) else Path(experiment).stem
    return (PARENT / name if folder is None else Path(folder)).absolute()


def _parts(
    experiment: str | Path | MakeTrainer, dataset: DatasetModule | None, overrides: Sequence[str]
) -> tuple[MakeTrainer, DatasetModule]:
    """The function that makes the trainer of a fold, and the data."""
    if callable(experiment):
        if dataset is None:
            raise TypeError("Pass `dataset`, the data of which each fold gets its part.")
        if overrides:
            raise TypeError("`overrides` are for a YAML file: a function has no configuration to override.")
        return experiment, dataset
    if dataset is not None:
        raise TypeError("`dataset` is for a function: the file has a dataset of its own.")
    file, changes = Path(experiment), list(overrides)

    def make(data: DatasetModule) -> Any:
        loaded = load_experiment(file, changes)
        try:
            loaded.value.trainer.check_limited()
            return build(loaded.value, dataset=data)
        except SettingsError as error:
            raise loaded.error(error) from None

    loaded = load_experiment(file, changes)
    try:
        return make, made_dataset(loaded.value.dataset)
    except SettingsError as error:
        raise loaded.error(error) from None


def _trained(number: int, trainer: Any, folder: Path, *, quiet: bool) -> FoldResult:
    """Trains a fold, or resumes its run."""
    trainer.config = copy(trainer.config)  # the function may share one configuration between folds
    trainer.config.logger = deepcopy(trainer.config.logger)
    write_into(trainer.config.logger, folder)
    data = trainer.dataset
    options: dict[str, Any] = {"resume": "auto" if trainer.config.saver else False, "quiet": quiet}
    results: TrainResults = trainer.train_model(data.train_loader, data.val_loader, data.test_loader, **options)
    if not results.validations:
        raise ValueError("The run has no validation to compare folds by. Set `check_val_every_n_epoch`.")
    best = results.best or results.validations[-1]
    metrics = {**best.metrics, **results.get("test", {})}
    scalars = {name: float(value) for name, value in metrics.items() if np.ndim(value) == 0}
    return FoldResult(number, str(trainer.folder.path), best.epoch, best.step, scalars)


def _sample_std(values: list[float]) -> float:
    return statistics.stdev(values) if all(map(math.isfinite, values)) else math.nan


# the folds


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
