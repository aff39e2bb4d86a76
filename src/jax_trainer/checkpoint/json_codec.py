"""Plain data as JSON and back, exactly: numbers, text, bytes, arrays of numbers, and lists, tuples and dicts of these.

Types that JSON lacks are objects with the key `$`, which names the type. Decoding imports and runs nothing.
"""

import base64
import math
import struct
import sys
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import jax.numpy as jnp
import numpy as np

from jax_trainer.config.settings import AtLeast, fits
from jax_trainer.diagnostics.files import shown

PLAIN = (
    "text, bytes, numbers, true, false, None, numpy arrays and torch tensors of numbers, and lists, tuples and dicts "
    "of these"
)
_TAG = "$"
_DEEPEST = 100
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


class NotPlainError(ValueError):
    """A part of the data cannot be encoded exactly."""


def encoded(value: Any, where: str = "the data") -> Any:
    """Plain `value` as JSON data, which shares no mutable object with it; a `NotPlainError` names other parts."""
    return _encoded(value, (where,))


def _encoded(value: Any, at: tuple[Any, ...]) -> Any:
    """`at` is where the value is: the name of the data, then keys and indices."""
    kind = type(value)
    if value is None or kind in (bool, int, str) or (kind is float and math.isfinite(value)):
        return value
    if kind is float:
        return {_TAG: "float", "bits": struct.pack(">d", value).hex()}
    if kind is bytes:
        return {_TAG: "bytes", "base64": _as_text(value)}
    if kind is np.ndarray or isinstance(value, np.generic):
        tag = "array" if kind is np.ndarray else "scalar"
        return _encoded_array(tag, value, str(value.dtype), value.tobytes, at)
    if (torch := sys.modules.get("torch")) and isinstance(value, getattr(torch, "Tensor", ())):
        dense = str(value.layout) == "torch.strided" and not value.is_quantized
        dtype = str(value.dtype).removeprefix("torch.") if dense else str(value.layout)
        raw = lambda: value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return _encoded_array("tensor", value, dtype, raw, at)
    if not (isinstance(value, list | dict) or kind is tuple):
        raise NotPlainError(f"{_path(at)} is {shown(value)}, of type {kind.__name__}")
    if len(at) > _DEEPEST:
        raise NotPlainError(f"{_path(at)} is nested too deeply")
    if not isinstance(value, dict):
        items = [_encoded(item, (*at, index)) for index, item in enumerate(value)]
        return {_TAG: "tuple", "items": items} if kind is tuple else items
    items = [_encoded(item, (*at, key)) for key, item in value.items()]
    if _TAG not in value and all(type(key) is str for key in value):
        return dict(zip(value, items, strict=True))
    keys = [_encoded(key, (f"the key {shown(key)} of {_path(at)}",)) for key in value]
    return {_TAG: "dict", "items": [list(pair) for pair in zip(keys, items, strict=True)]}


def _encoded_array(tag: str, value: Any, dtype: str, raw: Callable[[], bytes], at: tuple[Any, ...]) -> dict[str, Any]:
    if dtype not in DTYPES:
        raise NotPlainError(f"{_path(at)} is {shown(value)}, of the dtype {dtype}")
    return {_TAG: tag, "dtype": dtype, "shape": list(value.shape), "base64": _as_text(raw())}


def _path(at: tuple[Any, ...]) -> str:
    return at[0] + "".join(f"[{shown(key)}]" for key in at[1:])


def _as_text(raw: bytes) -> str:
    return base64.b64encode(raw).decode("ascii")


def decoded(content: Any) -> Any:
    """The inverse of `encoded`; a `ValueError` for other data."""
    try:
        return _decoded(content)
    except Exception as error:  # of any type: the data is not what was written
        raise ValueError(f"{shown(content)} is not a known encoding: {error!r}") from None


def _decoded(content: Any) -> Any:
    if isinstance(content, list):
        return [_decoded(item) for item in content]
    if not isinstance(content, dict):
        return content
    if _TAG not in content:
        return {name: _decoded(item) for name, item in content.items()}
    return _DECODERS[content[_TAG]](**{name: item for name, item in content.items() if name != _TAG})


def _items(items: Any) -> Iterator[Any]:
    if not isinstance(items, list):
        raise TypeError(f"{shown(items)} is not a list")
    return map(_decoded, items)


def _array(*, dtype: str, shape: Any, **raw: Any) -> np.ndarray:
    content = bytearray(base64.b64decode(raw["base64"], validate=True))  # a copy, so that the array is writable
    if not fits(_Shape, shape) or math.prod(shape) * DTYPES[dtype].itemsize != len(content):
        raise ValueError(f"{len(content)} bytes do not fit dtype {dtype} and shape {shown(shape)}")
    return np.ndarray(shape, DTYPES[dtype], content)


def _scalar(*, shape: Any, **raw: Any) -> Any:
    if shape:
        raise ValueError(f"a scalar has no shape {shown(shape)}")
    return _array(shape=shape, **raw)[()]


def _tensor(*, dtype: str, shape: Any, **raw: Any) -> Any:
    """A tensor if torch is imported, otherwise an array: listing checkpoints needs no torch."""
    array, torch = _array(dtype=dtype, shape=shape, **raw), sys.modules.get("torch")
    if torch is None:
        return array
    if not array.size:
        return torch.zeros(shape, dtype=getattr(torch, dtype))
    return torch.from_numpy(array.reshape(-1).view(np.uint8)).view(getattr(torch, dtype)).reshape(shape)


_Shape = list[Annotated[int, AtLeast(0)]]
_DECODERS: dict[str, Callable[..., Any]] = {
    "float": lambda *, bits: struct.unpack(">d", bytes.fromhex(bits))[0],
    "bytes": lambda **raw: base64.b64decode(raw.pop("base64"), validate=not raw),
    "tuple": lambda *, items: tuple(_items(items)),
    "dict": lambda *, items: dict(_items(items)),
    "array": _array,
    "scalar": _scalar,
    "tensor": _tensor,
}
