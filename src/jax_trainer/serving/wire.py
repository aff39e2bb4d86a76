"""The bodies of requests and responses: JSON, npy and raw bytes. A body is not trusted.

Everything that is wrong with a body is a `Refused` with a status code, the reason and the expected form.
"""

import io
import json
import math
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, NoReturn

import numpy as np

from jax_trainer.json_values import finite
from jax_trainer.serving.artifact import ArraySpec

JSON, NPY, RAW = "application/json", "application/x-npy", "application/octet-stream"
_MAX_HEADER = 10_000  # bytes of the header of an npy file


class Refused(Exception):
    """A request that is answered with an error.

    Args:
        status: the status code.
        reason: what is wrong, and what to do.
    """

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status, self.reason = status, reason


def decode(body: bytes, kind: str, inputs: Sequence[ArraySpec], most: int) -> tuple[dict[str, np.ndarray], int]:
    """The inputs in the body of a request, and the number of examples.

    Args:
        body: the body.
        kind: its media type.
        inputs: what the model expects.
        most: examples per request.
    """
    match kind:
        case "application/json":
            arrays = _from_json(body, inputs)
        case "application/x-npy":
            arrays = {_only(inputs, kind).name: _from_npy(body, inputs[0])}
        case "application/octet-stream":
            arrays = {_only(inputs, kind).name: _from_raw(body, inputs[0])}
        case _:
            raise Refused(415, f"The media type {kind[:80]!r} is not supported. Use {JSON}, {NPY} or {RAW}.")
    arrays = {spec.name: _checked(arrays[spec.name], spec) for spec in inputs}
    counts = {name: len(array) for name, array in arrays.items()}
    if len(set(counts.values())) > 1:
        raise Refused(422, f"The inputs have different numbers of examples: {counts}.")
    count = next(iter(counts.values()))
    if not count:
        raise Refused(422, "The request has no examples: send at least one.")
    if count > most:
        raise Refused(413, f"The request has {count} examples, more than {most}. Split it.")
    return arrays, count


def expected_form(inputs: Sequence[ArraySpec]) -> list[dict[str, Any]]:
    """The inputs, as an error shows them."""
    return [{"name": spec.name, "dtype": spec.dtype, "shape": list(spec.shape)} for spec in inputs]


def _only(inputs: Sequence[ArraySpec], kind: str) -> ArraySpec:
    if len(inputs) > 1:
        raise Refused(415, f"{kind} has one array, but the model has {len(inputs)} inputs. Use {JSON}.")
    return inputs[0]


def _from_json(body: bytes, inputs: Sequence[ArraySpec]) -> dict[str, np.ndarray]:
    try:
        data = json.loads(body, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise Refused(400, f"The body is not JSON: {str(error)[:200] or 'it is nested too deeply'}.") from None
    if not isinstance(data, dict) or "inputs" not in data:
        raise Refused(422, 'The body must be a JSON object with the key "inputs".')
    values = data["inputs"]
    if not isinstance(values, dict):
        if len(inputs) > 1:
            raise Refused(422, '"inputs" must be an object with an array for each input, by name.')
        values = {inputs[0].name: values}
    names = {spec.name for spec in inputs}
    if set(values) != names:
        shown = ", ".join(sorted(map(str, values)))[:200] or "none"
        raise Refused(422, f'"inputs" must have {", ".join(sorted(names))}; it has {shown}.')
    return {spec.name: _from_lists(values[spec.name], spec) for spec in inputs}


def _refuse_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is not a number of JSON")


def _from_lists(value: Any, spec: ArraySpec) -> np.ndarray:
    """The array in nested lists, whose types are checked before numpy makes an array of them: it would accept text."""
    values, shape = [value], []
    for axis in range(len(spec.shape)):
        if not set(map(type, values)) <= {list}:
            raise Refused(422, f"{spec.name} has {axis} axes, or numbers among its lists. Expected {spec}.")
        lengths = set(map(len, values)) or {0}
        if len(lengths) > 1:
            raise Refused(422, f"{spec.name} is ragged: its lists have different lengths. Expected {spec}.")
        shape.append(lengths.pop())
        values = list(chain.from_iterable(values))
    kinds, wanted = set(map(type, values)), np.dtype(spec.dtype)
    allowed = {"i": {int}, "u": {int}, "b": {bool}}.get(wanted.kind, {int, float})
    if not kinds <= allowed:
        found = ", ".join(sorted(one.__name__ for one in kinds - allowed))
        raise Refused(422, f"{spec.name} has values of type {found}. Expected {spec}.")
    if wanted.kind in "iu" and values:
        limits = np.iinfo(wanted)
        if min(values) < limits.min or max(values) > limits.max:
            raise Refused(422, f"{spec.name} has values outside of {limits.min} to {limits.max}. Expected {spec}.")
    try:
        with np.errstate(over="ignore"):  # becomes infinite, which `_checked` refuses
            return np.array(values, wanted if wanted.kind in "iub" else np.float64).astype(wanted).reshape(shape)
    except OverflowError:
        raise Refused(422, f"{spec.name} has values that are too large for {spec.dtype}.") from None


def _from_npy(body: bytes, spec: ArraySpec) -> np.ndarray:
    file = io.BytesIO(body)
    try:
        version = np.lib.format.read_magic(file)
        read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}[version]
        shape, is_fortran, dtype = read(file, max_header_size=_MAX_HEADER)
    except (ValueError, KeyError, TypeError, SyntaxError, RecursionError, MemoryError) as error:
        raise Refused(400, f"The body is not an npy file: {str(error)[:200]}.") from None
    # reading objects could run code
    if dtype.hasobject or dtype != np.dtype(spec.dtype):
        raise Refused(422, f"{spec.name} must be {spec.dtype}, got {str(dtype)[:80]}. Expected {spec}.")
    rest = body[file.tell() :]
    if math.prod(shape) * dtype.itemsize != len(rest):
        raise Refused(400, f"The npy file has {len(rest)} bytes of data, which is not {list(shape)} of {dtype}.")
    array = np.frombuffer(rest, dtype)
    return array.reshape(shape[::-1]).T if is_fortran else array.reshape(shape)


def _from_raw(body: bytes, spec: ArraySpec) -> np.ndarray:
    dtype = np.dtype(spec.dtype)
    size = math.prod(spec.row) * dtype.itemsize
    if not size or len(body) % size:
        raise Refused(422, f"The body has {len(body)} bytes, which is no multiple of {size}. Expected {spec}.")
    return np.frombuffer(body, dtype).reshape(-1, *spec.row)


def _checked(array: np.ndarray, spec: ArraySpec) -> np.ndarray:
    if array.ndim != len(spec.shape) or (array.shape[1:] != spec.row and array.size):
        raise Refused(422, f"{spec.name} has the shape {list(array.shape)[:8]}. Expected {spec}.")
    if array.dtype.kind not in "iub" and not np.isfinite(array).all():
        raise Refused(422, f"{spec.name} has values that are NaN, infinite or too large for {spec.dtype}.")
    return array


def encode(outputs: Mapping[str, np.ndarray], kind: str) -> bytes:
    """The body of a response."""
    if kind == NPY:
        file = io.BytesIO()
        np.lib.format.write_array(file, _storable(next(iter(outputs.values()))), allow_pickle=False)
        return file.getvalue()
    return json.dumps({"outputs": {name: _plain(array) for name, array in outputs.items()}}).encode()


def _storable(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float32) if array.dtype.kind == "V" else array  # bfloat16


def _plain(array: np.ndarray) -> list[Any]:
    array = _storable(array)
    values = array.tolist()
    return finite(values) if array.dtype.kind == "f" and not np.isfinite(array).all() else values
