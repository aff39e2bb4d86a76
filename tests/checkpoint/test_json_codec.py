import json
import math
import struct
import sys
from types import ModuleType
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_trainer.checkpoint.json_codec import NotPlainError, decoded, encoded


def round_trip(value: Any) -> Any:
    return decoded(json.loads(json.dumps(encoded(value), allow_nan=False)))


def assert_same(again: Any, value: Any) -> None:
    """The same types and the same bits."""
    assert type(again) is type(value)
    if isinstance(value, float):
        assert struct.pack("d", again) == struct.pack("d", value)
    elif isinstance(value, list | tuple):
        assert len(again) == len(value)
        for left, right in zip(again, value, strict=True):
            assert_same(left, right)
    elif isinstance(value, dict):
        assert list(map(repr, again)) == list(map(repr, value))
        for left, right in zip(again.items(), value.items(), strict=True):
            assert_same(left, right)
    elif isinstance(value, np.ndarray | np.generic):
        assert (again.dtype, again.shape, again.tobytes()) == (value.dtype, value.shape, value.tobytes())
    else:
        assert again == value


SIMPLE = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()
KEYS = SIMPLE.filter(lambda key: key == key) | st.tuples(st.integers(), st.text())
PLAIN = st.recursive(
    SIMPLE,
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=8,
)


@given(PLAIN)
def test_plain_data_round_trips_with_types_and_bits(value):
    assert_same(round_trip(value), value)


def test_numpy_arrays_and_scalars_round_trip_bit_for_bit():
    names = ("bool", "int8", "uint64", "float16", "float32", "float64", "complex64")
    for dtype in map(np.dtype, (*names, jnp.bfloat16, jnp.float8_e4m3fn)):
        raw = np.random.default_rng(0).bytes(6 * dtype.itemsize) if dtype != np.bool_ else b"\1\0\1\0\1\1"
        array = np.frombuffer(raw, dtype).reshape(2, 3)
        for value in (array, array.T, array[0, 0], np.zeros((0, 3), dtype), np.array(array[0, 1])):
            assert_same(round_trip(value), value)
        round_trip(array)[0, 0] = 1  # a decoded array is writable


def test_data_that_looks_like_an_encoded_value_round_trips():
    for odd in ({"$": 1}, {"$": "tuple", "items": []}, {"a": {"$": {"$": None}}}, {1: {"$": 2}}):
        assert round_trip(odd) == odd


@pytest.mark.slow
def test_torch_tensors_round_trip_if_torch_is_imported(monkeypatch):
    torch = pytest.importorskip("torch")
    values = [
        torch.arange(6, dtype=torch.uint8).reshape(2, 3).T,
        torch.tensor([math.nan, -0.0, 1e-40]),
        torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
        torch.tensor(True),
        torch.zeros((0, 2), dtype=torch.int64),
    ]
    content = json.dumps(encoded({"all": values}))
    for again, value in zip(decoded(json.loads(content))["all"], values, strict=True):
        assert isinstance(again, torch.Tensor) and (again.dtype, again.shape) == (value.dtype, value.shape)
        bits = [one.contiguous().reshape(-1).view(torch.uint8).tolist() for one in (again, value)]
        assert bits[0] == bits[1]
    monkeypatch.delitem(sys.modules, "torch")
    arrays = decoded(json.loads(content))["all"]
    np.testing.assert_array_equal(arrays[0], np.arange(6, dtype=np.uint8).reshape(2, 3).T)
    assert str(arrays[2].dtype) == "bfloat16" and "torch" not in sys.modules


def test_another_module_named_torch_is_ignored(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", ModuleType("torch"))
    assert round_trip([1]) == [1]


class Text(str):
    """Not JSON: it would be decoded as another type."""


UNKNOWN = [
    *(object(), {1}, 1j, Text("a"), jnp.ones(2), np.array(["a"]), np.array([None]), np.datetime64("2026-11-15")),
    *(np.array([1.0], ">f4"), np.ma.array([1]), {frozenset(): 1}, math.inf.__add__, type("T", (tuple,), {})()),
    np.array([(1, 2)], "i4,i4"),
]


def test_values_of_other_types_are_rejected_with_their_path():
    for value in UNKNOWN:
        with pytest.raises(NotPlainError) as error:
            encoded({"a": [value]}, "it")
        assert "it['a'][0]" in str(error.value), type(value)


def test_recursive_data_is_rejected():
    loop: list[Any] = []
    loop.append((loop,))
    with pytest.raises(NotPlainError, match="nested too deeply"):
        encoded(loop)


def array(**changed: Any) -> dict[str, Any]:
    return {"$": "array", "dtype": "float32", "shape": [1], "base64": "AAAAAA==", **changed}


INVALID = [
    *({"$": "object"}, {"$": None}, {"$": []}, {"$": "tuple"}, {"$": "tuple", "items": {}}, {"$": "bytes"}),
    *({"$": "tuple", "items": [], "more": 1}, {"$": "bytes", "base64": "?"}, {"$": "bytes", "base64": 3}),
    *({"$": "float", "bits": "7ff"}, {"$": "float", "bits": " " * 16}, {"$": "float", "bits": 1}),
    *({"$": "dict", "items": [[1]]}, {"$": "dict", "items": [[[], 1]]}, {"$": "dict", "items": [[array(), 1]]}),
    *(array(dtype="object"), array(dtype="O"), array(dtype="f4,f4"), array(dtype=[]), array(shape=[2])),
    *(array(shape=[-1]), array(shape=[10**12]), array(shape=1), array(shape=[True]), array(shape=[0, 10**30])),
    *({**array(), "$": "scalar"}, {**array(dtype="uint16"), "$": "tensor"}, {**array(dtype=[]), "$": "tensor"}),
]


def test_invalid_encoded_data_is_an_error():
    for content in INVALID:
        with pytest.raises(ValueError, match="not a known encoding"):
            decoded(["fine", {"a": content}])
