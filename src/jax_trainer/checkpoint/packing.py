"""Packs small arrays (biases, scales, counters) into one: writing each alone takes as long as writing a large array.

Writing them one by one also fragments the memory of the process.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np

from jax_trainer.checkpoint.arrays import placed, read_arrays
from jax_trainer.checkpoint.durable import write_unsynced
from jax_trainer.checkpoint.json_codec import DTYPES
from jax_trainer.checkpoint.leaves import Spec
from jax_trainer.checkpoint.names import shown
from jax_trainer.checkpoint.record import CheckpointError
from jax_trainer.checkpoint.untrusted import read_bounded
from jax_trainer.settings import AtLeast, fits

PACK = "(small)"  # not a possible name of an array in a state
INDEX = "small.json"
LARGEST = 1 << 16  # bytes up to which an array counts as small
_MAX_INDEX_BYTES = 1 << 22  # some ten thousand names
_Count = Annotated[int, AtLeast(0)]
PackIndex = dict[str, tuple[str, list[_Count], _Count]]  # dtype, shape, offset in the pack


def packed(arrays: Mapping[str, Any]) -> tuple[dict[str, Any], PackIndex]:
    """`arrays` with the small ones packed into one, and the index of the pack."""
    small = {name: array for name, array in arrays.items() if _is_small(array)}
    if len(small) < 2:
        return dict(arrays), {}
    pieces, pack_index, end = [], PackIndex(), 0
    for name, array in jax.device_get(small).items():
        pack_index[name] = (str(array.dtype), list(array.shape), end)
        pieces.append(np.frombuffer(np.ascontiguousarray(array).tobytes(), np.uint8))
        end += len(pieces[-1])
    return {**{name: a for name, a in arrays.items() if name not in small}, PACK: np.concatenate(pieces)}, pack_index


def write_pack_index(folder: Path, pack_index: PackIndex) -> None:
    """Writes the index of `packed` into `folder`."""
    if pack_index:
        write_unsynced(folder / INDEX, json.dumps(pack_index))


def read_pack_index(folder: Path, stored: Mapping[str, Spec]) -> PackIndex:
    """Reads and validates the index of the pack; `stored` are the specs of the stored arrays."""
    if PACK not in stored:
        return {}
    try:
        content = json.loads(read_bounded(folder / INDEX, _MAX_INDEX_BYTES))
        pack_index = {name: (dtype, shape, start) for name, (dtype, shape, start) in content.items()}
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{folder}: {INDEX} cannot be read: {error}.") from error
    end = 0
    for name, entry in pack_index.items():
        is_sane = fits(PackIndex, {name: entry}) and entry[0] in DTYPES and entry[2] == end and _bytes(entry) <= LARGEST
        if not is_sane:
            raise CheckpointError(f"{folder}: {INDEX} has an invalid entry for {shown(name)}: {shown(entry)}.")
        end += _bytes(entry)
    if stored[PACK] != Spec("uint8", (end,)):  # before reading: it may claim any size
        raise CheckpointError(f"{folder}: {INDEX} describes {end} bytes, and they are stored as {stored[PACK]}.")
    return pack_index


def specs_of(pack_index: PackIndex) -> dict[str, Spec]:
    """The specs of the packed arrays."""
    return {name: Spec(dtype, tuple(shape)) for name, (dtype, shape, _) in pack_index.items()}


def read_packed(folder: Path, pack_index: PackIndex, size: int, like: Mapping[str, Any]) -> dict[str, Any]:
    """The packed arrays named in `like`, from the pack of `size` bytes in `folder`."""
    if not like:
        return {}
    pack = read_arrays(folder, {PACK: Spec("uint8", (size,))})[PACK]
    return {name: placed(_array(pack, pack_index[name]), leaf) for name, leaf in like.items()}


def _array(pack: np.ndarray, entry: tuple[str, list[int], int]) -> np.ndarray:
    dtype, shape, start = entry
    content = bytearray(pack[start : start + _bytes(entry)])  # a copy, so that it is writable
    return np.frombuffer(content, DTYPES[dtype]).reshape(shape)


def _bytes(entry: tuple[str, list[int], int]) -> int:
    return math.prod(entry[1]) * DTYPES[entry[0]].itemsize


def _is_small(array: Any) -> bool:
    is_local = not isinstance(array, jax.Array) or array.is_fully_addressable
    return is_local and 0 < Spec.of(array).nbytes <= LARGEST and str(array.dtype) in DTYPES
