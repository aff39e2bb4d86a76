"""Reads the files that wandb writes offline: blocks of records, which are messages of its protocol."""

import json
import struct
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

_BLOCK, _HEADER = 32768, 7
_WHOLE, _LAST = 1, 4  # kinds of pieces with which a record ends


class WandbFile:
    """What is in the one offline run below `folder`."""

    def __init__(self, folder: Path) -> None:
        [file] = folder.glob("wandb/offline-run-*/run-*.wandb")
        self.files = file.parent / "files"
        self.records = list(_records(file.read_bytes()))

    @property
    def run(self) -> Any:
        """Its name, project, id and the like."""
        return next(record.run for record in self.records if record.HasField("run"))

    @property
    def exit_code(self) -> int:
        """How it ended."""
        return next(record.exit.exit_code for record in self.records if record.HasField("exit"))

    def history(self) -> list[dict[str, Any]]:
        """What was logged, without wandb's own entries."""
        rows = [record.history.item for record in self.records if record.HasField("history")]
        return [{name: value for name, value in _nested(row).items() if name[0] != "_"} for row in rows]

    def config(self) -> dict[str, Any]:
        """What it was made of."""
        updates = [record.config.update for record in self.records if record.HasField("config")]
        return {name: value for update in updates for name, value in _nested(update).items()}

    def summary(self) -> dict[str, Any]:
        """What came out of it."""
        updates = [record.summary.update for record in self.records if record.HasField("summary")]
        return {name: value for update in updates for name, value in _nested(update).items()}

    def axes(self) -> dict[str, str]:
        """The x-axis of every name."""
        metrics = [record.metric for record in self.records if record.HasField("metric")]
        return {metric.name: metric.step_metric for metric in metrics if metric.step_metric}


def _nested(items: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for item in items:
        *path, last = item.nested_key or [item.key]
        inner = found
        for name in path:
            inner = inner.setdefault(name, {})
        inner[last] = json.loads(item.value_json)
    return found


def _records(data: bytes) -> Iterator[Any]:
    import_module("wandb")  # its messages are made when it is loaded
    kind_of_record = __import__("wandb.proto.wandb_internal_pb2", fromlist=("",)).Record
    assert data[:4] == b":W&B"
    place, pieces = _HEADER, b""
    while place + _HEADER <= len(data):
        if (left := _BLOCK - place % _BLOCK) < _HEADER:
            place += left
            continue
        _, length, kind = struct.unpack("<IHB", data[place : place + _HEADER])
        pieces += data[place + _HEADER : place + _HEADER + length]
        place += _HEADER + length
        if kind in (_WHOLE, _LAST):
            yield kind_of_record.FromString(pieces)
            pieces = b""
