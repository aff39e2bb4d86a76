"""The formats of a file of predictions, by its suffix: how groups of rows are written, and joined to one file."""

import io
import json
import shutil
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from jax_trainer.config.json_values import finite
from jax_trainer.diagnostics.optional_import import from_extra

Columns = Mapping[str, np.ndarray]  # by name, one row per example


class Format(ABC):
    """Writes groups of rows to files, and joins these."""

    @abstractmethod
    def kind(self, array: np.ndarray) -> Any:
        """What all rows of a column must have in common, as JSON data."""

    @abstractmethod
    def write(self, parts: Sequence[Columns], out: BinaryIO) -> None:
        """Writes a group."""

    @abstractmethod
    def join(self, groups: Sequence[Path], rows: int, out: BinaryIO) -> None:
        """Writes the rows of all groups."""


class Jsonl(Format):
    """One JSON object per row: `{"id": 0, "prediction": [0.1, 0.9]}`. NaN and infinity are text."""

    def kind(self, array: np.ndarray) -> Any:
        return None

    def write(self, parts: Sequence[Columns], out: BinaryIO) -> None:
        for columns in parts:
            values = {name: _plain(array) for name, array in columns.items()}
            for row in zip(*values.values(), strict=True):
                out.write(f"{json.dumps(dict(zip(values, row, strict=True)))}\n".encode())

    def join(self, groups: Sequence[Path], rows: int, out: BinaryIO) -> None:
        for group in groups:
            with group.open("rb") as opened:
                shutil.copyfileobj(opened, out, 1 << 20)


class Npz(Format):
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
                    opened.write(_npy_header(first.dtype.str, (rows, *first.shape[1:])))
                    for group in groups:
                        opened.write(np.load(group)[name].tobytes())


class Parquet(Format):
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


FORMATS: dict[str, type[Format]] = {".jsonl": Jsonl, ".npz": Npz, ".parquet": Parquet}


def _plain(array: np.ndarray) -> list[Any]:
    """The rows as plain values; what JSON cannot represent is text."""
    values = array.tolist()
    is_float = np.issubdtype(array.dtype, np.floating)
    return values if not is_float or np.isfinite(array).all() else finite(values)


def _npy_header(dtype: str, shape: tuple[int, ...]) -> bytes:
    header: Any = io.BytesIO()
    np.lib.format.write_array_header_2_0(header, {"descr": dtype, "fortran_order": False, "shape": shape})
    return header.getvalue()
