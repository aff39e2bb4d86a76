"""Reads TensorBoard's event files: records with their length and checksums around them."""

import struct
from pathlib import Path
from typing import Any

from tensorboardX.proto.event_pb2 import Event  # type: ignore[attr-defined] - made when it is imported


def events_in(folder: Path) -> list[Any]:
    """The events of all event files in `folder`, in the order in which they were written."""
    # their names have the second, then the process and a number: 10 comes before 9
    files = sorted(folder.glob("events.out.*"), key=lambda file: file.stat().st_mtime_ns)
    return [Event.FromString(record) for file in files for record in _records(file)]


def scalars_in(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Places on the x-axis and numbers, by tag."""
    found = values_in(folder).items()
    points = {
        tag: [(x, one.simple_value) for x, one in values if one.HasField("simple_value")] for tag, values in found
    }
    return {tag: some for tag, some in points.items() if some}


def values_in(folder: Path) -> dict[str, list[tuple[int, Any]]]:
    """Places on the x-axis and whatever is shown there, by tag."""
    found: dict[str, list[tuple[int, Any]]] = {}
    for event in events_in(folder):
        for value in event.summary.value:
            found.setdefault(value.tag, []).append((event.step, value))
    return found


def _records(file: Path) -> list[bytes]:
    data, records = file.read_bytes(), []
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        for piece, checksum in ((data[:8], data[8:12]), (data[12 : 12 + length], data[12 + length : 16 + length])):
            assert struct.unpack("<I", checksum) == (_masked(_crc32c(piece)),)
        records.append(data[12 : 12 + length])
        data = data[16 + length :]
    return records


def _crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def _masked(crc: int) -> int:
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
