"""Images and figures as PNG files, which every tool can show."""

import io
import struct
import zlib
from typing import Any

import numpy as np

_COLOURS = {1: 0, 3: 2, 4: 6}  # colour type of PNG by number of channels
_SIGNATURE = b"\x89PNG\r\n\x1a\n"


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
    return _SIGNATURE + b"".join(_chunk(kind, data) for kind, data in parts)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def drawn(figure: Any) -> bytes:
    """A matplotlib figure as a PNG file, without `pyplot` or a display."""
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()


def png_size(png: bytes) -> tuple[int, int]:
    """Height and width of a PNG file."""
    width, height = struct.unpack(">II", png[16:24])
    return height, width
