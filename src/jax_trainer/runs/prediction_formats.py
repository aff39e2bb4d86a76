"""The formats of a file of predictions, by its suffix: how groups of rows are written, and joined to one file.

Rows are written in groups, to files in a folder of their own. After a crash, `cut` removes what the last, incomplete
group has left there; the joined file has the same bytes as without the crash.
"""

import io
import json
import os
import shutil
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from jax_trainer.config.json_values import finite
from jax_trainer.datasets import DataError
from jax_trainer.diagnostics.optional_import import from_extra

Columns = Mapping[str, np.ndarray]  # by name, one row per example
Sizes = dict[str, int]  # bytes of each file of the folder


class Format(ABC):
    """Writes groups of rows to files in `folder`, and joins them.

    Args:
        folder: an existing folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @abstractmethod
    def write(self, group: int, parts: Sequence[Columns]) -> Sizes:
        """Writes a group, to the disk; returns the sizes of the files that it has written to."""

    @abstractmethod
    def join(self, groups: int, rows: int) -> Path:
        """One file of all groups, in the folder."""

    def cut(self, sizes: Sizes) -> bool:
        """Removes what was written after the files had these sizes; False if they lack some of it."""
        for file in self.folder.iterdir():
            if file.name not in sizes and file.suffix in _OWN:
                file.unlink()
        for name, size in sizes.items():
            file = self.folder / name
            if not file.is_file() or file.stat().st_size < size:
                return False
            os.truncate(file, size)
        return True


class Jsonl(Format):
    """One JSON object per row: `{"id": 0, "prediction": [0.1, 0.9]}`. NaN and infinity are text."""

    def write(self, group: int, parts: Sequence[Columns]) -> Sizes:
        lines = []
        for columns in parts:
            values = {name: _plain(array) for name, array in columns.items()}
            lines += [json.dumps(dict(zip(values, row, strict=True))) for row in zip(*values.values(), strict=True)]
        return _append(self.folder / "rows.jsonl", "".join(f"{line}\n" for line in lines).encode())

    def join(self, groups: int, rows: int) -> Path:
        return self.folder / "rows.jsonl"


class Npz(Format):
    """One array per column, `numpy.load` reads it. While predictions are computed, each column is a file of bytes."""

    def write(self, group: int, parts: Sequence[Columns]) -> Sizes:
        written: Sizes = {}
        for number, name in enumerate(parts[0]):
            for columns in parts:
                written |= self._checked(number, name, columns[name])
            content = b"".join(np.ascontiguousarray(columns[name]).tobytes() for columns in parts)
            written |= _append(self.folder / f"{number}.column", content)
        return written

    def _checked(self, number: int, name: str, array: np.ndarray) -> Sizes:
        """The file with the dtype and shape of a column, which the first rows decide."""
        kind = {"name": name, "dtype": array.dtype.str, "shape": list(array.shape[1:])}
        file = self.folder / f"{number}.kind"
        if not file.exists():
            return _append(file, json.dumps(kind).encode())
        if (first := json.loads(file.read_text())) != kind:
            raise _other_kind(name, first, kind)
        return {file.name: file.stat().st_size}

    def join(self, groups: int, rows: int) -> Path:
        joined = self.folder / "joined.npz"
        kinds = sorted(self.folder.glob("*.kind"), key=lambda file: int(file.stem))
        with zipfile.ZipFile(joined, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
            for file in kinds:
                kind = json.loads(file.read_text())
                # a constant time: the same predictions are the same bytes
                entry = zipfile.ZipInfo(f"{kind['name']}.npy", (1980, 1, 1, 0, 0, 0))
                with archive.open(entry, "w", force_zip64=True) as out, file.with_suffix(".column").open("rb") as read:
                    out.write(_npy_header(kind["dtype"], (rows, *kind["shape"])))
                    shutil.copyfileobj(read, out, 1 << 20)
        return joined


class Parquet(Format):
    """A Parquet file with one row group per group; vectors are lists of a fixed size. It needs pyarrow."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        with from_extra("parquet"):
            import pyarrow
            import pyarrow.parquet

        self._arrow: Any = pyarrow

    def write(self, group: int, parts: Sequence[Columns]) -> Sizes:
        tables = [self._arrow.table({name: self._array(array) for name, array in columns.items()}) for columns in parts]
        first = self._opened(0).schema if group else tables[0].schema
        for table in tables:
            for one, other in zip(first, table.schema, strict=True):
                if one != other:
                    raise _other_kind(one.name, one.type, other.type)
        sink = io.BytesIO()
        with self._arrow.ipc.new_file(sink, first) as writer:
            writer.write_table(self._arrow.concat_tables(tables).combine_chunks())
        return _append(self._file(group), sink.getvalue())

    def join(self, groups: int, rows: int) -> Path:
        joined = self.folder / "joined.parquet"
        with self._arrow.parquet.ParquetWriter(joined, self._opened(0).schema) as writer:
            for group in range(groups):
                table = self._opened(group).read_all()
                writer.write_table(table, row_group_size=max(1, len(table)))
        return joined

    def _file(self, group: int) -> Path:
        return self.folder / f"{group:08}.arrow"

    def _opened(self, group: int) -> Any:
        return self._arrow.ipc.open_file(self._arrow.memory_map(str(self._file(group))))

    def _array(self, array: np.ndarray) -> Any:
        flat = self._arrow.array(np.ascontiguousarray(array).reshape(-1))
        for size in reversed(array.shape[1:]):
            flat = self._arrow.FixedSizeListArray.from_arrays(flat, size)
        return flat


FORMATS: dict[str, type[Format]] = {".jsonl": Jsonl, ".npz": Npz, ".parquet": Parquet}
_OWN = (".jsonl", ".column", ".kind", ".arrow", ".npz", ".parquet")  # suffixes of what formats write


def format_of(file: Path) -> type[Format]:
    """The format of a file, by its suffix."""
    if file.suffix not in FORMATS:
        raise ValueError(
            f"A file of predictions is one of {', '.join(FORMATS)}, got {file.name!r}. Give it one of these suffixes."
        )
    return FORMATS[file.suffix]


def _append(file: Path, content: bytes) -> Sizes:
    with file.open("ab") as opened:
        opened.write(content)
        opened.flush()
        os.fsync(opened.fileno())
        return {file.name: opened.tell()}


def _plain(array: np.ndarray) -> list[Any]:
    """The rows as plain values; what JSON cannot represent is text."""
    values = array.tolist()
    is_float = np.issubdtype(array.dtype, np.floating)
    return values if not is_float or np.isfinite(array).all() else finite(values)


def _npy_header(dtype: str, shape: tuple[int, ...]) -> bytes:
    header: BinaryIO = io.BytesIO()
    described = {"descr": dtype, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_2_0(header, described)  # type: ignore[arg-type]  # a binary file is enough
    return header.getvalue()  # type: ignore[attr-defined]


def _other_kind(name: str, first: Any, other: Any) -> DataError:
    return DataError(
        f"The column {name!r} changes from {first} to {other} between batches, which this format cannot represent. "
        "Write a .jsonl file, or give all batches the same shape."
    )
