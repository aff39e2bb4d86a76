"""Converts logged values to plain numbers, plain data and PNG files, as copies."""

import io
import json
import struct
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from jax_trainer.config.dumping import finite

BINS = 30
_COLOURS = {1: 0, 3: 2, 4: 6}  # colour type of PNG by number of channels
_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def number_of(value: Any) -> float | int | None:
    """`value` as a plain number; None if it is not a scalar. Waits for an array on a device.

    >>> number_of(np.float32(0.5)), number_of(np.array([3])), number_of([1, 2])
    (0.5, 3, None)
    """
    if type(value) in (int, float):
        return value
    if isinstance(value, np.floating):  # most metrics: as quick as possible
        return float(value)
    array = np.asarray(value)
    if array.size != 1 or array.dtype.kind in "OUSMm":
        return None
    item = array.reshape(())
    return int(item) if item.dtype.kind in "biu" else float(item)


def numbers_of(values: Mapping[str, Any]) -> dict[str, float]:
    """The scalars of `values`."""
    found = ((name, number_of(value)) for name, value in values.items())
    return {name: number for name, number in found if number is not None}


def plain_of(value: Any) -> Any:
    """`value` as plain data: numbers, texts, and lists and dicts of them.

    >>> plain_of({"acc": np.float32(0.5), "matrix": np.eye(2)})
    {'acc': 0.5, 'matrix': [[1.0, 0.0], [0.0, 1.0]]}
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(name): plain_of(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_of(item) for item in value]
    if not hasattr(value, "dtype"):
        return str(value)
    array = np.asarray(value)
    return array.tolist() if array.dtype.kind in "biuf" else array.astype(np.float32).tolist()  # of bfloat16, say


def json_text(data: Any) -> str:
    """Plain data as one line of JSON."""
    try:
        return json.dumps(data, allow_nan=False)
    except ValueError:
        return json.dumps(finite(data), allow_nan=False)


def flat(data: Any) -> dict[str, Any]:
    """Nested data flattened to dotted names, as in overrides of a configuration; empty parts are omitted.

    >>> flat({"optimizer": {"lr": 0.1, "betas": [0.9, 0.99]}, "seed": 1})
    {'optimizer.lr': 0.1, 'optimizer.betas.0': 0.9, 'optimizer.betas.1': 0.99, 'seed': 1}
    """
    return dict(_leaves(plain_of(data), ""))


def _leaves(data: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(data, dict | list):
        for name, item in data.items() if isinstance(data, dict) else enumerate(data):
            yield from _leaves(item, f"{path}.{name}".removeprefix("."))
    else:
        yield path, data


class Bins(NamedTuple):
    """A histogram: `counts[i]` values lie between `edges[i]` and `edges[i + 1]`; `left_out`: non-finite ones."""

    counts: list[int]
    edges: list[float]
    left_out: int


def bins_of(values: np.ndarray) -> Bins:
    """A histogram of the finite values, in bins of equal width."""
    kept = finite_values(values)
    counts, edges = np.histogram(kept, bins=BINS)
    return Bins(counts.tolist(), edges.tolist(), values.size - kept.size)


def values_of(bins: Bins) -> np.ndarray:
    """Values whose histogram is `bins`: the ends of its range, and the centres of its bins.

    >>> bins = bins_of(np.array([0.0, 1.0, 1.1, 3.0, np.nan]))
    >>> bins_of(values_of(bins)) == bins
    True
    """
    centres = (np.array(bins.edges[:-1]) + np.array(bins.edges[1:])) / 2
    values = np.repeat(centres, bins.counts)
    if bins.counts[0] and bins.counts[-1]:  # otherwise all values are equal, in the middle
        values[0], values[-1] = bins.edges[0], bins.edges[-1]
    return np.concatenate([values, np.full(bins.left_out, np.nan)])


def finite_values(values: np.ndarray) -> np.ndarray:
    """The finite values as a flat float64 array."""
    exact = values.reshape(-1).astype(np.float64)
    return exact[np.isfinite(exact)]


def pixels_of(image: Any) -> np.ndarray:
    """A copy of `image` as uint8 [height, width, channels]; the input may lack channels, or have floats from 0 to 1."""
    pixels = np.asarray(image)
    pixels = pixels[..., None] if pixels.ndim == 2 else pixels
    if pixels.ndim != 3 or pixels.shape[-1] not in _COLOURS or not pixels.size:
        raise ValueError(
            f"An image must be [height, width] or [height, width, 1, 3 or 4], got the shape {np.shape(image)}."
        )
    if pixels.dtype == np.uint8:
        return pixels.copy()
    if pixels.dtype.kind in "iuO":
        raise ValueError(f"An image must have uint8 values, or floats from 0 to 1, got {pixels.dtype}.")
    return np.round(np.nan_to_num(pixels.astype(np.float32)).clip(0, 1) * 255).astype(np.uint8)


def png_of(pixels: np.ndarray) -> bytes:
    """A uint8 array [height, width, channels] as a PNG file."""
    height, width, channels = pixels.shape
    header = struct.pack(">IIBBBBB", width, height, 8, _COLOURS[channels], 0, 0, 0)
    lines = pixels.reshape(height, width * channels)
    filtered = np.pad(lines, ((0, 0), (1, 0)))  # the filter type of every line: none
    parts = (b"IHDR", header), (b"IDAT", zlib.compress(filtered.tobytes())), (b"IEND", b"")
    chunks = (
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in parts
    )
    return _SIGNATURE + b"".join(chunks)


def drawn(figure: Any) -> bytes:
    """A matplotlib figure as a PNG file, without `pyplot` or a display."""
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()


def png_shape(png: bytes) -> tuple[int, int, int]:
    """Height, width and channels of a PNG file."""
    width, height, _, colours = struct.unpack(">IIBB", png[16:26])
    return height, width, next(channels for channels, colour in _COLOURS.items() if colour == colours)
