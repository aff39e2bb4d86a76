"""Plain data as JSON and back, exactly: numbers, text, bytes, arrays of numbers, and lists, tuples and dicts of these.

Types that JSON lacks are objects with the key `$`, which names the type. Decoding imports and runs nothing.
"""

import base64
import math
import re
import struct
import sys
from collections.abc import Callable, Hashable, Iterator
from typing import Annotated, Any

import jax.numpy as jnp
import numpy as np

from jax_trainer.checkpoint.files import shown
from jax_trainer.config.settings import AtLeast, fits

PLAIN = (
    "text, bytes, numbers, true, false, None, numpy arrays and torch tensors of numbers, and lists, tuples and dicts "
    "of these"
)
_TAG = "$"
_DEEPEST = 100
_JSON = frozenset((bool, int, str))
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


class NotPlainError(ValueError):
    """A part of the data cannot be encoded exactly."""


def encoded(value: Any, where: str = "the data") -> Any:
    """Plain `value` as JSON data, which shares no mutable object with it; a `NotPlainError` names other parts."""
    return _encoded(value, (where,), 0)


def not_plain(value: Any, where: str) -> str:
    """Which part of `value` cannot be encoded exactly; "" if all of it can."""
    try:
        encoded(value, where)
    except NotPlainError as error:
        return str(error)
    return ""


def _encoded(value: Any, at: tuple[Any, ...], depth: int) -> Any:
    """`at` is where the value is: the name of the data, then keys and indices."""
    kind = type(value)
    if value is None or kind in _JSON or (kind is float and math.isfinite(value)):
        return value
    if kind is float:
        return {_TAG: "float", "bits": struct.pack(">d", value).hex()}
    if kind is bytes:
        return {_TAG: "bytes", "base64": _as_text(value)}
    if kind is np.ndarray or isinstance(value, np.generic):
        if (dtype := str(value.dtype)) not in DTYPES:
            raise NotPlainError(f"{_path(at)} is {shown(value)}, of the dtype {dtype}")
        tag = "array" if kind is np.ndarray else "scalar"
        return {_TAG: tag, "dtype": dtype, "shape": list(value.shape), "base64": _as_text(value.tobytes())}
    if _is_tensor(value):
        return _encoded_tensor(value, at)
    if not (isinstance(value, list | dict) or kind is tuple):
        raise NotPlainError(f"{_path(at)} is {shown(value)}, of type {kind.__name__}")
    if depth > _DEEPEST:
        raise NotPlainError(f"{_path(at)} is nested too deeply")
    if not isinstance(value, dict):
        items = [_encoded(item, (*at, index), depth + 1) for index, item in enumerate(value)]
        return {_TAG: "tuple", "items": items} if kind is tuple else items
    if _TAG not in value and all(type(key) is str for key in value):
        return {key: _encoded(item, (*at, key), depth + 1) for key, item in value.items()}
    keys = [_encoded(key, (f"the key {shown(key)} of {_path(at)}",), depth + 1) for key in value]
    items = [_encoded(item, (*at, key), depth + 1) for key, item in value.items()]
    return {_TAG: "dict", "items": [list(pair) for pair in zip(keys, items, strict=True)]}


def _path(at: tuple[Any, ...]) -> str:
    return at[0] + "".join(f"[{shown(key)}]" for key in at[1:])


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


def _is_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, getattr(torch, "Tensor", ()))


def _encoded_tensor(value: Any, at: tuple[Any, ...]) -> dict[str, Any]:
    torch, dtype = sys.modules["torch"], str(value.dtype).removeprefix("torch.")
    if str(value.layout) != "torch.strided" or value.is_quantized or dtype not in _TORCH_DTYPES:
        raise NotPlainError(f"{_path(at)} is a tensor that is not dense, or of the dtype {dtype}")
    raw = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
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
