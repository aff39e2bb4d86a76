"""Small arrays kept together as one: a state has many of them, and writing each by itself takes as long as a large one.

Most are biases, scales and counters. Written one by one they also leave the memory of the process in pieces.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np

from jax_trainer.checkpoint.arrays import placed, read_arrays
from jax_trainer.checkpoint.durable import write_atomically
from jax_trainer.checkpoint.json_codec import DTYPES
from jax_trainer.checkpoint.leaves import Spec
from jax_trainer.checkpoint.names import shown
from jax_trainer.checkpoint.record import CheckpointError
from jax_trainer.checkpoint.untrusted import read_bounded
from jax_trainer.settings import AtLeast, fits

PACK = "(small)"  # no name of an array in a state
INDEX = "small.json"
LARGEST = 1 << 16  # bytes of an array that counts as small
_MAX_INDEX_BYTES = 1 << 22  # some ten thousand names
_Count = Annotated[int, AtLeast(0)]
Places = dict[str, tuple[str, list[_Count], _Count]]  # dtype, shape, and where in the pack it begins


def packed(arrays: Mapping[str, Any]) -> tuple[dict[str, Any], Places]:
    """`arrays` with the small ones among them as one, and where in it each of them is."""
    small = {name: array for name, array in arrays.items() if _is_small(array)}
    if len(small) < 2:
        return dict(arrays), {}
    pieces, places, end = [], Places(), 0
    for name, array in jax.device_get(small).items():
        places[name] = (str(array.dtype), list(array.shape), end)
        pieces.append(np.frombuffer(np.ascontiguousarray(array).tobytes(), np.uint8))
        end += len(pieces[-1])
    return {**{name: a for name, a in arrays.items() if name not in small}, PACK: np.concatenate(pieces)}, places


def write_places(folder: Path, places: Places) -> None:
    """Writes what `packed` gave besides the arrays."""
    if places:
        write_atomically(folder / INDEX, json.dumps(places))


def read_places(folder: Path, stored: Mapping[str, Spec]) -> Places:
    """Where in the pack each small array is; `stored` is what the arrays' own index says of it."""
    if PACK not in stored:
        return {}
    try:
        content = json.loads(read_bounded(folder / INDEX, _MAX_INDEX_BYTES))
        places = {name: (dtype, shape, start) for name, (dtype, shape, start) in content.items()}
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{folder}: {INDEX} cannot be read: {error}.") from error
    end = 0
    for name, place in places.items():
        is_sane = fits(Places, {name: place}) and place[0] in DTYPES and place[2] == end and _bytes(place) <= LARGEST
        if not is_sane:
            raise CheckpointError(f"{folder}: {INDEX} says of {shown(name)}: {shown(place)}, which makes no sense.")
        end += _bytes(place)
    if stored[PACK] != Spec("uint8", (end,)):  # before it is read: it may say that it has any size
        raise CheckpointError(f"{folder}: {INDEX} is of {end} bytes, and they are stored as {stored[PACK]}.")
    return places


def specs_of(places: Places) -> dict[str, Spec]:
    """What the small arrays are."""
    return {name: Spec(dtype, tuple(shape)) for name, (dtype, shape, _) in places.items()}


def read_packed(folder: Path, places: Places, size: int, like: Mapping[str, Any]) -> dict[str, Any]:
    """The small arrays that `like` names, out of the pack of so many bytes among the arrays in `folder`."""
    if not like:
        return {}
    pack = read_arrays(folder, {PACK: Spec("uint8", (size,))})[PACK]
    return {name: placed(_array(pack, places[name]), leaf) for name, leaf in like.items()}


def _array(pack: np.ndarray, place: tuple[str, list[int], int]) -> np.ndarray:
    dtype, shape, start = place
    content = bytearray(pack[start : start + _bytes(place)])  # of its own: it may be written to
    return np.frombuffer(content, DTYPES[dtype]).reshape(shape)


def _bytes(place: tuple[str, list[int], int]) -> int:
    return math.prod(place[1]) * DTYPES[place[0]].itemsize


def _is_small(array: Any) -> bool:
    is_here = not isinstance(array, jax.Array) or array.is_fully_addressable
    return is_here and 0 < Spec.of(array).nbytes <= LARGEST and str(array.dtype) in DTYPES
