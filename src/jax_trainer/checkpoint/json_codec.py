"""Plain data as JSON and back, exactly: numbers, text, bytes, arrays of numbers, and lists, tuples and dicts of these.

Types that JSON lacks are objects with the key `$`, which names the type. Decoding imports and runs nothing.
"""

import base64
import math
import re
import struct
import sys
from collections.abc import Callable, Hashable, Iterator
from itertools import chain
from typing import Annotated, Any

import jax.numpy as jnp
import numpy as np

from jax_trainer.checkpoint.files import shown
from jax_trainer.settings import AtLeast, fits

PLAIN = (
    "text, bytes, numbers, true, false, None, numpy arrays and torch tensors of numbers, and lists, tuples and dicts "
    "of these"
)
_TAG = "$"
_DEEPEST = 100
_ATOMS = frozenset((type(None), bool, int, float, str, bytes))
DTYPES = {
    str(dtype): dtype
    for dtype in map(
        np.dtype,
        (
            *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
            *("float16", "float32", "float64", "complex64", "complex128"),
            *(jnp.bfloat16, jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.int4, jnp.uint4),
        ),
    )
}
_TORCH_DTYPES = DTYPES.keys() - {"uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2", "int4", "uint4"}
_BITS = re.compile("[0-9a-f]{16}")
_Shape = list[Annotated[int, AtLeast(0)]]


def not_plain(value: Any, where: str) -> str:
    """Which part of `value` cannot be encoded exactly; "" if all of it can."""
    return "" if _is_plain(value, 0) else _problem(value, where, 0)


def _is_plain(value: Any, depth: int) -> bool:
    """Fast check without the path to a problem, since most values have none."""
    if type(value) in _ATOMS:
        return True
    if depth <= _DEEPEST and (isinstance(value, list) or type(value) is tuple):
        return all(_is_plain(item, depth + 1) for item in value)
    if depth <= _DEEPEST and isinstance(value, dict):
        return all(type(item) in _ATOMS or _is_plain(item, depth + 1) for item in chain(value, value.values()))
    return not _problem(value, "", depth)


def _problem(value: Any, where: str, depth: int) -> str:
    if type(value) in _ATOMS:
        return ""
    if isinstance(value, np.ndarray | np.generic) or _is_tensor(value):
        return _odd_numbers(value, where)
    if not (isinstance(value, list | dict) or type(value) is tuple):
        return f"{where} is {shown(value)}, of type {type(value).__name__}"
    if depth > _DEEPEST:
        return f"{where} is nested too deeply"
    return next((problem for item, path in _within(value, where) if (problem := _problem(item, path, depth + 1))), "")


def not_named(value: dict[Any, Any], where: str) -> str:
    """Which key of `value` is not a string; "" if all are."""
    odd = [key for key in value if type(key) is not str]
    return f"{where} has the key {shown(odd[0])}, of type {type(odd[0]).__name__}" if odd else ""


def encoded(value: Any) -> Any:
    """Plain `value` as JSON data. Shares no mutable object with it."""
    if type(value) is float and not math.isfinite(value):
        return {_TAG: "float", "bits": struct.pack(">d", value).hex()}
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, bytes):
        return {_TAG: "bytes", "base64": _as_text(value)}
    if isinstance(value, np.ndarray | np.generic):
        kind = "array" if isinstance(value, np.ndarray) else "scalar"
        return {_TAG: kind, "dtype": str(value.dtype), "shape": list(value.shape), "base64": _as_text(value.tobytes())}
    if isinstance(value, list):
        return [encoded(item) for item in value]
    if isinstance(value, tuple):
        return {_TAG: "tuple", "items": [encoded(item) for item in value]}
    if isinstance(value, dict):
        if _TAG not in value and not not_named(value, ""):
            return {key: encoded(item) for key, item in value.items()}
        return {_TAG: "dict", "items": [[encoded(key), encoded(item)] for key, item in value.items()]}
    return _encoded_tensor(value)


def decoded(content: Any) -> Any:
    """The inverse of `encoded`; a `ValueError` for other data."""
    if isinstance(content, list):
        return [decoded(item) for item in content]
    if not isinstance(content, dict):
        return content
    if _TAG not in content:
        return {name: decoded(item) for name, item in content.items()}
    kind, fields = content[_TAG], {name: item for name, item in content.items() if name != _TAG}
    keys, decode = _FORMS.get(kind, ((), None)) if isinstance(kind, str) else ((), None)
    if decode is None or sorted(fields) != sorted(keys):
        raise ValueError(f"{shown(content)} is not a known encoding")
    return decode(**fields)


def _within(value: Any, where: str) -> Iterator[tuple[Any, str]]:
    if not isinstance(value, dict):
        yield from ((item, f"{where}[{index}]") for index, item in enumerate(value))
        return
    for key, item in value.items():
        if type(key) is not str:
            yield key, f"the key {shown(key)} of {where}"
        yield item, f"{where}[{shown(key)}]"


def _odd_numbers(value: Any, where: str) -> str:
    if _is_tensor(value):
        name, known = str(value.dtype).removeprefix("torch."), _TORCH_DTYPES
        if str(value.layout) != "torch.strided" or value.is_quantized:
            return f"{where} is a tensor that is not dense"
    else:
        name, known = str(value.dtype), DTYPES.keys()
        if isinstance(value, np.ndarray) and type(value) is not np.ndarray:
            return f"{where} is {shown(value)}, of type {type(value).__name__}"
    return "" if name in known else f"{where} is {shown(value)}, of the dtype {name}"


def _is_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, getattr(torch, "Tensor", ()))


def _encoded_tensor(value: Any) -> dict[str, Any]:
    torch = sys.modules["torch"]
    raw = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    dtype = str(value.dtype).removeprefix("torch.")
    return {_TAG: "tensor", "dtype": dtype, "shape": list(value.shape), "base64": _as_text(raw)}


def _as_text(raw: bytes) -> str:
    return base64.b64encode(raw).decode("ascii")


def _as_bytes(text: Any) -> bytes:
    if not isinstance(text, str):
        raise ValueError(f"{shown(text)} is not text")
    return base64.b64decode(text, validate=True)


def _float(*, bits: Any) -> float:
    if not isinstance(bits, str) or not _BITS.fullmatch(bits):
        raise ValueError(f"{shown(bits)} are not the bits of a float")
    return struct.unpack(">d", bytes.fromhex(bits))[0]


def _array(*, dtype: Any, shape: Any, **raw: Any) -> np.ndarray:
    content = _as_bytes(raw["base64"])
    if not isinstance(dtype, str) or dtype not in DTYPES or not fits(_Shape, shape):
        raise ValueError(f"no array has dtype {shown(dtype)} and shape {shown(shape)}")
    if math.prod(shape) * DTYPES[dtype].itemsize != len(content):
        raise ValueError(f"{len(content)} bytes do not fit dtype {dtype} and shape {shown(shape)}")
    if not content:
        return np.zeros(shape, DTYPES[dtype])
    return np.frombuffer(bytearray(content), DTYPES[dtype]).reshape(shape)  # a copy, so that it is writable


def _scalar(*, dtype: Any, shape: Any, **raw: Any) -> Any:
    if shape != []:
        raise ValueError(f"a scalar has no shape {shown(shape)}")
    return _array(dtype=dtype, shape=shape, **raw)[()]


def _tensor(*, dtype: Any, shape: Any, **raw: Any) -> Any:
    """A tensor if torch is imported, otherwise an array: listing checkpoints needs no torch."""
    if not isinstance(dtype, str) or dtype not in _TORCH_DTYPES:
        raise ValueError(f"no tensor has dtype {shown(dtype)}")
    array, torch = _array(dtype=dtype, shape=shape, **raw), sys.modules.get("torch")
    if torch is None:
        return array
    if not array.size:
        return torch.zeros(shape, dtype=getattr(torch, dtype))
    return torch.from_numpy(array.reshape(-1).view(np.uint8)).view(getattr(torch, dtype)).reshape(shape)


def _items(items: Any) -> Iterator[Any]:
    if not isinstance(items, list):
        raise ValueError(f"{shown(items)} is not a list")
    return (decoded(item) for item in items)


def _dict(*, items: Any) -> dict[Any, Any]:
    pairs = list(_items(items))
    if not all(isinstance(pair, list) and len(pair) == 2 and _is_key(pair[0]) for pair in pairs):
        raise ValueError(f"{shown(items)} are not keys and values")
    return dict(pairs)


def _is_key(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_key, value))
    return isinstance(value, Hashable) and not _is_tensor(value)


_FORMS: dict[str, tuple[tuple[str, ...], Callable[..., Any]]] = {
    "float": (("bits",), _float),
    "bytes": (("base64",), lambda **raw: _as_bytes(raw["base64"])),
    "tuple": (("items",), lambda *, items: tuple(_items(items))),
    "dict": (("items",), _dict),
    "array": (("dtype", "shape", "base64"), _array),
    "scalar": (("dtype", "shape", "base64"), _scalar),
    "tensor": (("dtype", "shape", "base64"), _tensor),
}
