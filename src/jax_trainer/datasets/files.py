"""Readers of IDX files (MNIST, Fashion-MNIST) and of both versions of CIFAR-10, without running their code."""

import gzip
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

CIFAR_SHAPE = (3, 32, 32)
CIFAR_RECORD = 1 + 3 * 32 * 32
_ARRAY_PARTS = {  # the only names that a file of the python version may refer to
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
}


def read_bytes(path: Path | str) -> bytes:
    """The content of a file, decompressed if its name ends in `.gz`."""
    data = Path(path).read_bytes()
    if Path(path).suffix != ".gz":
        return data
    try:
        return gzip.decompress(data)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path} is not a complete gzip file ({error}). Download it again.") from error


def read_idx(path: Path | str, *, dimensions: int) -> np.ndarray:
    """The uint8 array of an IDX file, plain or `.gz`: images have 3 dimensions, labels 1."""
    data = read_bytes(path)
    magic, header = bytes([0, 0, 8, dimensions]), 4 + 4 * dimensions
    if data[:4] != magic:
        raise ValueError(
            f"{path} starts with {data[:4].hex(' ') or 'nothing'}, but an IDX file of uint8 with {dimensions} "
            f"dimension{'s' * (dimensions > 1)} starts with {magic.hex(' ')}. It is another file, or it is damaged."
        )
    if len(data) < header:
        raise ValueError(f"{path} is truncated in its header, after {len(data)} of {header} bytes. Download it again.")
    shape = struct.unpack(f">{dimensions}I", data[4:header])
    expected = header + int(np.prod(shape, dtype=object))  # as Python integers: a wrong header must not overflow
    if len(data) != expected:
        raise ValueError(
            f"{path} has the shape {shape} and must have {expected} bytes, but has {len(data)}. Download it again."
        )
    return np.frombuffer(data, np.uint8, offset=header).reshape(shape)


def read_cifar10_binary(path: Path | str) -> tuple[np.ndarray, np.ndarray]:
    """Images [n, 32, 32, 3] uint8 and labels [n] of a file of the binary version, such as `data_batch_1.bin`."""
    data = read_bytes(path)
    if not data or len(data) % CIFAR_RECORD:
        raise ValueError(
            f"{path} has {len(data)} bytes, which is not a multiple of the record size {CIFAR_RECORD} (30,730,000 in "
            "the original). Download it again."
        )
    records = np.frombuffer(data, np.uint8).reshape(-1, CIFAR_RECORD)
    return _channels_last(records[:, 1:]), records[:, 0]


def read_cifar10_python(path: Path | str) -> tuple[np.ndarray, np.ndarray]:
    """Images and labels of a file of the python version, such as `data_batch_1`, read without unpickling."""
    content = _PickleReader(read_bytes(path), str(path)).run()
    content = {_text(key): value for key, value in content.items()} if isinstance(content, dict) else {}
    labels, data = content.get("labels"), content.get("data")
    array = data.value if isinstance(data, _Array) else None
    if array is None or array.ndim != 2 or array.shape[1] != CIFAR_RECORD - 1:
        raise ValueError(f"{path} has no `data` of shape [n, {CIFAR_RECORD - 1}]: it is not a CIFAR-10 file.")
    if not isinstance(labels, list) or len(labels) != len(array) or not all(type(each) is int for each in labels):
        raise ValueError(f"{path} has no list `labels` of {len(array)} integers: it is not a CIFAR-10 file.")
    return _channels_last(array), np.asarray(labels)


def check_labels(labels: np.ndarray, classes: int, path: Path | str) -> np.ndarray:
    """The labels as int32; raises if one is not below `classes`."""
    wrong = np.flatnonzero((labels < 0) | (labels >= classes))
    if len(wrong):
        raise ValueError(
            f"{path} has the label {labels[wrong[0]]} at index {wrong[0]}, but labels must be from 0 to {classes - 1}. "
            "It is another file, or it is damaged."
        )
    return labels.astype(np.int32)


def _channels_last(rows: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(rows.reshape(-1, *CIFAR_SHAPE).transpose(0, 2, 3, 1))


def _text(value: Any) -> Any:
    return value.decode("latin-1") if isinstance(value, bytes) else value


@dataclass(frozen=True)
class _Named:
    """A class or function that the file refers to. It is compared with known names, never imported."""

    module: str
    name: str


@dataclass
class _Dtype:
    code: str


@dataclass
class _Array:
    value: np.ndarray | None = None


_MARK = object()


class _PickleReader:
    """Interprets the opcodes that the python version of CIFAR-10 contains, and no others."""

    def __init__(self, data: bytes, path: str) -> None:
        self._data, self._path, self._at = data, path, 0
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        self._actions: dict[bytes, Callable[[], None]] = {
            b"\x80": self._version,
            b"(": lambda: self._stack.append(_MARK),
            b"}": lambda: self._stack.append({}),
            b"]": lambda: self._stack.append([]),
            b")": lambda: self._stack.append(()),
            b"N": lambda: self._stack.append(None),
            b"\x88": lambda: self._stack.append(True),
            b"\x89": lambda: self._stack.append(False),
            b"K": lambda: self._stack.append(self._number("<B")),
            b"M": lambda: self._stack.append(self._number("<H")),
            b"J": lambda: self._stack.append(self._number("<i")),
            b"U": lambda: self._stack.append(self._take(self._number("<B"))),
            b"C": lambda: self._stack.append(self._take(self._number("<B"))),
            b"T": lambda: self._stack.append(self._take(self._number("<i"))),
            b"B": lambda: self._stack.append(self._take(self._number("<I"))),
            b"X": lambda: self._stack.append(self._take(self._number("<I")).decode("utf-8", "replace")),
            b"c": self._name,
            b"q": lambda: self._memoize(self._number("<B")),
            b"r": lambda: self._memoize(self._number("<I")),
            b"h": lambda: self._recall(self._number("<B")),
            b"j": lambda: self._recall(self._number("<I")),
            b"\x85": lambda: self._tuple(1),
            b"\x86": lambda: self._tuple(2),
            b"\x87": lambda: self._tuple(3),
            b"t": lambda: self._stack.append(tuple(self._since_mark())),
            b"a": lambda: self._extend([self._pop()]),
            b"e": lambda: self._extend(self._since_mark()),
            b"s": lambda: self._set([self._pop(), self._pop()][::-1]),
            b"u": lambda: self._set(self._since_mark()),
            b"R": self._call,
            b"b": self._fill,
        }

    def run(self) -> Any:
        """The content of the file."""
        while (code := self._take(1)) != b".":
            if code not in self._actions:
                raise self._refusal(f"the opcode {code!r} at byte {self._at - 1}")
            self._actions[code]()
        return self._pop()

    def _refusal(self, what: str) -> ValueError:
        return ValueError(
            f"{self._path} contains {what}, which the python version of CIFAR-10 does not. No code of it was run. "
            "Use the original file, or the binary version."
        )

    def _take(self, count: int) -> bytes:
        end = self._at + count
        if count < 0 or end > len(self._data):
            raise ValueError(f"{self._path} is truncated at byte {len(self._data)}. Download it again.")
        data, self._at = self._data[self._at : end], end
        return data

    def _number(self, format: str) -> int:
        return struct.unpack(format, self._take(struct.calcsize(format)))[0]

    def _line(self) -> str:
        end = self._data.find(b"\n", self._at)
        end = len(self._data) if end < 0 else end  # without a newline, the file is truncated
        return self._take(end + 1 - self._at)[:-1].decode("latin-1")

    def _pop(self) -> Any:
        if not self._stack:
            raise self._refusal(f"an opcode without an operand before byte {self._at}")
        return self._stack.pop()

    def _version(self) -> None:
        version = self._number("<B")
        if version not in (2, 3):
            raise self._refusal(f"the format version {version}")

    def _name(self) -> None:
        module, name = self._line(), self._line()
        if (module, name) not in _ARRAY_PARTS:
            raise self._refusal(f"the name {module}.{name}")
        self._stack.append(_Named(module, name))

    def _memoize(self, index: int) -> None:
        self._memo[index] = self._pop()
        self._stack.append(self._memo[index])

    def _recall(self, index: int) -> None:
        if index not in self._memo:
            raise self._refusal(f"a reference to value {index}, which is not defined,")
        self._stack.append(self._memo[index])

    def _since_mark(self) -> list[Any]:
        values = []
        while (value := self._pop()) is not _MARK:
            values.append(value)
        return values[::-1]

    def _tuple(self, count: int) -> None:
        values = [self._pop() for _ in range(count)]
        self._stack.append(tuple(values[::-1]))

    def _extend(self, values: list[Any]) -> None:
        target = self._pop()
        if not isinstance(target, list):
            raise self._refusal(f"an append to a {type(target).__name__}")
        target.extend(values)
        self._stack.append(target)

    def _set(self, values: list[Any]) -> None:
        target = self._pop()
        if not isinstance(target, dict) or len(values) % 2 or not all(isinstance(k, bytes | str) for k in values[::2]):
            raise self._refusal("a dictionary with keys that are not text")
        target.update(zip(values[::2], values[1::2], strict=True))
        self._stack.append(target)

    def _call(self) -> None:
        arguments, named = self._pop(), self._pop()
        if isinstance(named, _Named) and named.name == "_reconstruct":
            self._stack.append(_Array())
        elif isinstance(named, _Named) and named.name == "dtype" and isinstance(arguments, tuple) and arguments:
            self._stack.append(_Dtype(str(_text(arguments[0]))))
        else:
            raise self._refusal(f"a call of {named!r}")

    def _fill(self) -> None:
        state, target = self._pop(), self._pop()
        if isinstance(target, _Array):
            target.value = self._array(state)
        elif not isinstance(target, _Dtype):
            raise self._refusal(f"a state for {target!r}")
        self._stack.append(target)

    def _array(self, state: Any) -> np.ndarray:
        match state:
            case (int(), tuple(shape), _Dtype("u1" | "|u1"), bool(fortran), bytes(data)) if all(
                type(size) is int and size >= 0 for size in shape
            ) and np.prod(shape, dtype=object) == len(data):
                return np.frombuffer(data, np.uint8).reshape(shape, order="F" if fortran else "C")
        raise self._refusal("an array that is not uint8 or not complete,")
