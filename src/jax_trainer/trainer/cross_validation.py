"""`cross_validate`: k runs, each validated on another k-th of the examples, and the mean of their metrics."""

import gc
import hashlib
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from copy import copy, deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jax_trainer.checkpoint.files import read_json, write_atomically
from jax_trainer.checkpoint.folder import CONFIG
from jax_trainer.config import dump_config
from jax_trainer.config.settings import SettingsError
from jax_trainer.datasets import DatasetModule
from jax_trainer.diagnostics.suggestions import checks_keywords
from jax_trainer.runs.evaluations import json_number
from jax_trainer.trainer.experiment import build, load_experiment, made_dataset
from jax_trainer.trainer.folds import FoldDataset, all_examples, fold_rows, labels_of, rows_of
from jax_trainer.trainer.run_folder import write_into
from jax_trainer.trainer.training import TrainResults

RECORD = "cv.json"
PARENT = Path("runs") / "cv"
_MAX_BYTES = 1 << 26
MakeTrainer = Callable[[DatasetModule], Any]


class CrossValidationError(ValueError):
    """The folder has another cross-validation, or its record cannot be read."""


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
    there is any. A fold that has ended is not trained again; one that was killed resumes from its latest checkpoint.

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
    home = folder_of(experiment, folder)
    identity = {"folds": folds, "seed": seed, "stratified": use_labels, "examples": examples}
    record: _Record | None = None
    for number, val in enumerate(rows, 1):
        if record is not None and number in record.results:
            continue
        gc.collect()  # frees the arrays of the previous fold
        train = np.setdiff1d(np.arange(examples), val)
        trainer = make(FoldDataset(data, rows_of(arrays, train), rows_of(arrays, val)))
        if record is None:
            digest = hashlib.sha256(dump_config(trainer.configs).encode()).hexdigest()
            record = _Record(home, {**identity, "config": digest})
        if number not in record.results:
            record.add(_trained(number, trainer, home / f"fold_{number}", quiet=quiet))
    assert record is not None
    return CrossValidation(home, [record.results[number] for number in range(1, folds + 1)])


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
    data, runs = trainer.dataset, sorted(file.parent for file in folder.rglob(CONFIG))
    options: dict[str, Any] = {"resume": runs[-1] if runs else False, "quiet": quiet}
    results: TrainResults = trainer.train_model(data.train_loader, data.val_loader, data.test_loader, **options)
    if not results.validations:
        raise ValueError("The run has no validation to compare folds by. Set `check_val_every_n_epoch`.")
    best = results.best or results.validations[-1]
    metrics = {**best.metrics, **results.get("test", {})}
    scalars = {name: float(value) for name, value in metrics.items() if np.ndim(value) == 0}
    return FoldResult(number, str(trainer.folder.path), best.epoch, best.step, scalars)


class _Record:
    """`cv.json` of the parent folder: what was asked for, and the folds that have ended."""

    def __init__(self, folder: Path, identity: Mapping[str, Any]) -> None:
        self._file, self._identity = folder / RECORD, dict(identity)
        self.results: dict[int, FoldResult] = {}
        if self._file.exists() or self._file.is_symlink():
            self._read()
        else:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._write()

    def add(self, result: FoldResult) -> None:
        """Records a fold that has ended."""
        self.results[result.fold] = result
        self._write()

    def _read(self) -> None:
        try:
            found = read_json(self._file, _MAX_BYTES)
            known, results = found["identity"], [FoldResult(**one) for one in found["results"]]
            self.results = {one.fold: FoldResult(**_numbers(one, float)) for one in results}
        except (ValueError, KeyError, TypeError) as error:
            raise CrossValidationError(f"{self._file} cannot be read: {error}. Use another folder.") from None
        other = [name for name, value in self._identity.items() if known.get(name) != value]
        if other:
            was, now = known.get(other[0]), self._identity[other[0]]
            text = f"{self._file.parent} has a cross-validation with another `{other[0]}`"
            text += "." if other[0] == "config" else f": {was!r:.40}, not {now!r:.40}."
            raise CrossValidationError(f"{text} Use another folder.")

    def _write(self) -> None:
        results = [_numbers(one, json_number) for one in self.results.values()]
        text = json.dumps({"identity": self._identity, "results": results}, indent=1, allow_nan=False)
        write_atomically(self._file, f"{text}\n")


def _numbers(result: FoldResult, convert: Callable[[Any], Any]) -> dict[str, Any]:
    """A result as plain data, with its metrics as `convert` returns them."""
    return {**asdict(result), "metrics": {name: convert(value) for name, value in result.metrics.items()}}


def _sample_std(values: list[float]) -> float:
    return statistics.stdev(values) if all(map(math.isfinite, values)) else math.nan
