"""`write_predictions`: writes predictions while they are computed, in groups of rows that need not be repeated."""

import json
import logging
import os
import shutil
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_trainer.checkpoint.folder import locked
from jax_trainer.config.dumping import finite
from jax_trainer.core import Batch, CompiledProgram, PyTree, TrainState, digest_of, failpoint
from jax_trainer.datasets import DataError, DataSource
from jax_trainer.datasets.arrays import Ordered
from jax_trainer.datasets.batch import TARGETS
from jax_trainer.datasets.contents import content_of
from jax_trainer.datasets.data_source import peeked
from jax_trainer.datasets.transforms import entries_of
from jax_trainer.diagnostics.files import sync_folder, write_atomically
from jax_trainer.diagnostics.leaves import leaf_path
from jax_trainer.diagnostics.optional_import import from_extra
from jax_trainer.engine import predicted_batches
from jax_trainer.engine.plan import shortest
from jax_trainer.sharding.placement import check_alone

LOG = logging.getLogger("jax_trainer")
GROUP_ROWS, GROUP_BYTES = 4096, 1 << 24  # a group ends with the batch that reaches one of them
Columns = Mapping[str, np.ndarray]  # by name, one row per example
Track = Callable[[Iterable[Any], int | None], Iterable[Any]]
ID, PREDICTION, TARGET = "id", "prediction", "target"
_PROGRESS = "progress.json"
_PREDICTED = ("params", "model_state", "extra")  # the fields of a state that a prediction depends on


class Predictor(NamedTuple):
    """What predictions are computed with."""

    program: CompiledProgram
    state: TrainState

    def outputs(self, source: Any, max_batches: int | None = None) -> PyTree:
        """The concatenated outputs of all batches of `source`, or of at most `max_batches`, as numpy arrays."""
        batches = (outputs for _, outputs in predicted_batches(*self, source, max_batches))
        return jax.tree.map(lambda *parts: np.concatenate([np.atleast_1d(part) for part in parts]), *batches)


class PredictionFile(NamedTuple):
    """A file of predictions.

    Args:
        path: the file.
        rows: number of examples.
        columns: names of its columns.
        resumed: number of rows that an earlier, interrupted call had written.
    """

    path: Path
    rows: int
    columns: tuple[str, ...]
    resumed: int


def write_predictions(
    predictor: Predictor,
    source: Any,
    output: str | Path,
    *,
    max_batches: int | None = None,
    targets: bool = False,
    overwrite: bool = False,
    track: Track = lambda batches, total: batches,
) -> PredictionFile:
    """Writes the predictions for all examples of `source`, with their ids, to `output`, while they are computed.

    If the process is killed, the same call continues with the first group of rows that is not complete; the file then
    has the same bytes as without an interruption. Until all rows are there, they are in the folder `output`.partial.

    Args:
        predictor: the program and its weights.
        source: any data that can be evaluated. Ids are an entry `id` of its batches, else the `ids` of the loader, else
            the index of each example.
        output: a .jsonl, .npz or .parquet file.
        max_batches: only the first so many batches; None: all.
        targets: also write the targets of the batches.
        overwrite: replace an existing file.
        track: wraps the iterator over batches, given their number (None: unknown), as a progress bar does.
    """
    check_alone("write the same file")
    output = Path(output)
    if output.suffix not in FORMATS:
        raise ValueError(
            f"A file of predictions is one of {', '.join(FORMATS)}, got {output.name!r}. Give it one of these suffixes."
        )
    if output.exists() and not overwrite:
        raise FileExistsError(f"{output} already exists. Choose another file, or overwrite it (`overwrite`).")
    if not output.parent.is_dir():
        raise FileNotFoundError(f"The folder {output.parent} does not exist. Create it, or choose another file.")
    first, source = peeked(source, "predict")
    _columns(first, None, np.zeros(0), targets=targets)  # raises what is missing, before anything is computed
    weights = digest_of({name: getattr(predictor.state, name) for name in _PREDICTED})
    found = {"weights": weights, "data": content_of(source, first), "first": digest_of(first)}
    found |= {"targets": targets, "batches": max_batches, "rows": GROUP_ROWS, "bytes": GROUP_BYTES}
    folder = output.with_name(f"{output.name}.partial")
    folder.mkdir(exist_ok=True)
    with locked(folder):
        file = _PartialFile(folder, FORMATS[output.suffix](), json.loads(json.dumps(found)))
        resumed = file.at.rows
        if not file.at.is_complete:
            ids = partial(_ids, source) if isinstance(source, Ordered) else np.arange
            data, start = DataSource(source, "predict"), file.at.batches
            total = shortest(data.length, max_batches)
            batches = predicted_batches(*predictor, data, max_batches, start=start)
            tracked = track(batches, None if total is None else total - start)
            _write_groups(file, tracked, ids, targets=targets)
        file.finish(output)
    return PredictionFile(output, file.at.rows, (*file.at.kinds,), resumed)


def _write_groups(
    file: "_PartialFile", batches: Iterable[tuple[Batch, PyTree]], ids: Callable[..., np.ndarray], *, targets: bool
) -> None:
    group: list[Columns] = []
    row, drawn = file.at.rows, file.at.batches
    for batch, outputs in batches:
        count = _rows(outputs)
        columns = _columns(batch, outputs, ids(row, row + count), targets=targets)
        if odd := [name for name, array in columns.items() if np.shape(array)[:1] != (count,)]:
            raise DataError(f"{odd[0]!r} is {list(columns[odd[0]].shape)}, but the batch has {count} examples.")
        group.append(columns)
        row, drawn = row + count, drawn + 1
        size = sum(array.nbytes for columns in group for array in columns.values())
        if row - file.at.rows >= GROUP_ROWS or size >= GROUP_BYTES:
            file.add(group, row, drawn)
            group = []
    if group:
        file.add(group, row, drawn)
    file.note(is_complete=True)


def _ids(loader: Ordered, start: int, stop: int) -> np.ndarray:
    indices = loader.order(1)[start:stop]
    return indices if loader.ids is None else loader.ids[indices]


def _rows(outputs: PyTree) -> int:
    sizes = {leaf_path(path): np.shape(leaf)[:1] for path, leaf in jax.tree_util.tree_leaves_with_path(outputs)}
    if not sizes or () in sizes.values() or len(set(sizes.values())) > 1:
        found = ", ".join(f"{name or 'the output'} {list(size)}" for name, size in sizes.items()) or "no arrays"
        raise DataError(
            f"The outputs of the model have no common first axis, one row per example: {found}. A file of predictions "
            "has one row per example; return such arrays, or use `predict` without `output`."
        )
    return next(iter(sizes.values()))[0]


def _columns(batch: Batch, outputs: PyTree, ids: np.ndarray, *, targets: bool) -> dict[str, np.ndarray]:
    """The columns of a batch; without `outputs`, only what the batch has."""
    entries = entries_of(batch)
    named = {ID: np.asarray(jax.device_get(entries[ID])) if ID in entries else ids}
    kept = {PREDICTION: outputs}
    if targets:
        kept[TARGET] = _targets(batch, entries)
    for name, tree in kept.items():
        for path, leaf in jax.tree_util.tree_leaves_with_path(jax.device_get(tree)):
            named[".".join(filter(None, (name, leaf_path(path))))] = _storable(np.asarray(leaf))
    return named


def _targets(batch: Batch, entries: dict[Any, Any]) -> PyTree:
    if isinstance(batch, tuple | list) and not hasattr(batch, "_fields") and len(batch) == 2:
        return batch[1]
    found = [entries[name] for name in TARGETS if entries.get(name) is not None]
    if len(found) != 1:
        names = ", ".join(map(str, entries)) or "no named entries"
        raise DataError(
            f"The batches have {names}: which of them is the target? Expected is one of {', '.join(TARGETS)}, or a "
            "pair. Leave out `targets`."
        )
    return found[0]


def _storable(array: np.ndarray) -> np.ndarray:
    """`array` in a dtype of numpy: bfloat16 and the like become float32, which has all of their values."""
    is_foreign = jnp.issubdtype(array.dtype, jnp.floating) and not np.issubdtype(array.dtype, np.floating)
    return array.astype(np.float32) if is_foreign else array


# formats, by the suffix of the file: how groups of rows are written, and joined to one file


class Jsonl:
    """One JSON object per row: `{"id": 0, "prediction": [0.1, 0.9]}`. NaN and infinity are text."""

    def kind(self, array: np.ndarray) -> Any:
        """What all rows of a column must have in common, as JSON data."""

    def write(self, parts: Sequence[Columns], out: BinaryIO) -> None:
        """Writes a group."""
        for columns in parts:
            values = {name: _plain(array) for name, array in columns.items()}
            for row in zip(*values.values(), strict=True):
                out.write(f"{json.dumps(dict(zip(values, row, strict=True)))}\n".encode())

    def join(self, groups: Sequence[Path], rows: int, out: BinaryIO) -> None:
        """Writes the rows of all groups."""
        for group in groups:
            with group.open("rb") as opened:
                shutil.copyfileobj(opened, out, 1 << 20)


class Npz:
    """One array per column, `numpy.load` reads it."""

    def kind(self, array: np.ndarray) -> Any:
        return [array.dtype.str, *array.shape[1:]]

    def write(self, parts: Sequence[Columns], out: BinaryIO) -> None:
        columns = {name: np.concatenate([columns[name] for columns in parts]) for name in parts[0]}
        np.savez(out, allow_pickle=False, **columns)

    def join(self, groups: Sequence[Path], rows: int, out: BinaryIO) -> None:
        with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
            for name, first in np.load(groups[0]).items():
                # a constant time: the same predictions are the same bytes
                entry = zipfile.ZipInfo(f"{name}.npy", (1980, 1, 1, 0, 0, 0))
                with archive.open(entry, "w", force_zip64=True) as opened:
                    shape = (rows, *first.shape[1:])
                    header = {"descr": first.dtype.str, "fortran_order": False, "shape": shape}
                    np.lib.format.write_array_header_2_0(opened, header)  # pyright: ignore[reportArgumentType]
                    for group in groups:
                        opened.write(np.load(group)[name].tobytes())


class Parquet:
    """A Parquet file with one row group per group; vectors are lists of a fixed size. It needs pyarrow."""

    def __init__(self) -> None:
        with from_extra("parquet"):
            import pyarrow
            import pyarrow.parquet

        self._arrow: Any = pyarrow

    def kind(self, array: np.ndarray) -> Any:
        return str(self._array(array[:1]).type)

    def write(self, parts: Sequence[Columns], out: BinaryIO) -> None:
        tables = [self._arrow.table({name: self._array(array) for name, array in columns.items()}) for columns in parts]
        with self._arrow.ipc.new_file(out, tables[0].schema) as writer:
            writer.write_table(self._arrow.concat_tables(tables).combine_chunks())

    def join(self, groups: Sequence[Path], rows: int, out: BinaryIO) -> None:
        opened = [self._arrow.ipc.open_file(self._arrow.memory_map(str(group))) for group in groups]
        with self._arrow.parquet.ParquetWriter(out, opened[0].schema) as writer:
            for group in opened:
                table = group.read_all()
                writer.write_table(table, row_group_size=max(1, len(table)))

    def _array(self, array: np.ndarray) -> Any:
        flat = self._arrow.array(np.ascontiguousarray(array).reshape(-1))
        for size in reversed(array.shape[1:]):
            flat = self._arrow.FixedSizeListArray.from_arrays(flat, size)
        return flat


Format = Jsonl | Npz | Parquet
FORMATS: dict[str, type[Format]] = {".jsonl": Jsonl, ".npz": Npz, ".parquet": Parquet}


def _plain(array: np.ndarray) -> list[Any]:
    """The rows as plain values; what JSON cannot represent is text."""
    is_finite = not np.issubdtype(array.dtype, np.floating) or np.isfinite(array).all()
    return array.tolist() if is_finite else finite(array.tolist())


# what is written while predictions are computed


@dataclass
class _Progress:
    """How far the predictions are; written after each group of rows.

    Args:
        predictions: what decides whether they are the same.
        rows, batches: the number of both.
        sizes: of the files of the groups.
        kinds: what all rows of a column have in common.
        is_complete: whether there are no more rows.
    """

    predictions: dict[str, Any]
    rows: int = 0
    batches: int = 0
    sizes: list[int] = field(default_factory=list)
    kinds: dict[str, Any] = field(default_factory=dict)
    is_complete: bool = False


class _PartialFile:
    """The groups of rows so far, in `folder`: a file each, and the progress up to the last complete one."""

    def __init__(self, folder: Path, format: Format, predictions: dict[str, Any]) -> None:
        self.folder, self._format, self.at = folder, format, _Progress(predictions)
        if not (file := folder / _PROGRESS).is_file():
            return
        found = _Progress(**json.loads(file.read_text(encoding="utf-8")))
        if found.predictions != predictions:
            LOG.warning(f"{folder} has predictions of other weights or data. They are replaced.")
        elif [group.stat().st_size for group in self._groups(found) if group.is_file()] != found.sizes:
            LOG.warning(f"{folder} lacks rows that it had. The predictions are computed again.")
        else:
            self.at = found

    def add(self, parts: Sequence[Columns], rows: int, batches: int) -> None:
        """Writes a group of rows, and then that it is complete."""
        failpoint("prediction_group")
        for columns in parts:
            kinds = {name: self._format.kind(array) for name, array in columns.items()}
            self.at.kinds = self.at.kinds or kinds
            if odd := [name for name, kind in kinds.items() if kind != self.at.kinds[name]]:
                raise DataError(
                    f"The column {odd[0]!r} changes from {self.at.kinds[odd[0]]} to {kinds[odd[0]]} between batches, "
                    "which this format cannot represent. Write a .jsonl file, or give all batches the same shape."
                )
        size = self._write(f"{len(self.at.sizes):08}", partial(self._format.write, parts))
        failpoint("prediction_index")
        self.at.rows, self.at.batches, self.at.sizes = rows, batches, [*self.at.sizes, size]
        self.note()

    def note(self, *, is_complete: bool = False) -> None:
        """Writes how far the predictions are."""
        self.at.is_complete = is_complete
        write_atomically(self.folder / _PROGRESS, json.dumps(asdict(self.at)))

    def finish(self, output: Path) -> None:
        """Joins the groups to the file."""
        self._write("joined", partial(self._format.join, self._groups(self.at), self.at.rows))
        failpoint("prediction_join")
        os.replace(self.folder / "joined", output)
        sync_folder(output.absolute().parent)
        shutil.rmtree(self.folder)

    def _groups(self, at: _Progress) -> list[Path]:
        return [self.folder / f"{number:08}" for number in range(len(at.sizes))]

    def _write(self, name: str, write: Callable[[Any], None]) -> int:
        with (self.folder / name).open("wb") as opened:
            write(opened)
            opened.flush()
            os.fsync(opened.fileno())
            return opened.tell()
