"""Truncates `metrics.jsonl` on resume: rows after the checkpoint are written again."""

import json
import os
from pathlib import Path
from typing import Any

from jax_trainer.logger.run_log import LOG

TAIL = 2**20  # bytes searched for the last row of metrics; rows of images and texts may follow it


def cut(file: Path, size: int | None) -> bool:
    """Truncates a `metrics.jsonl` to the `size` bytes that it had at a checkpoint, and syncs it.

    Returns whether that was possible. If the size is unknown (None) or does not fit the file, the file is unchanged.
    """
    problem = _cut(file, size)
    if problem:
        LOG.warning(
            f"{file} {problem}, so it is not truncated. Steps that are trained again may have two rows; the later one "
            "is of this run."
        )
    return not problem


def last_step(file: Path) -> int:
    """The step of the last row of metrics in a `metrics.jsonl`; 0 if there is none."""
    if not file.is_file():  # reading a device might not end
        return 0
    try:
        with file.open("rb") as record:
            record.seek(max(0, record.seek(0, os.SEEK_END) - TAIL))
            lines = record.read(TAIL).decode(errors="replace").splitlines()
    except OSError:
        return 0
    rows = (row for line in reversed(lines) if (row := _row(line)))
    numbers = (row for row in rows if not any(isinstance(value, dict) for value in row.values()))
    return next((row["step"] for row in numbers), 0)


def _cut(file: Path, size: int | None) -> str:
    """Truncates `file`; returns why not, or ""."""
    if size is None:
        return "has no position in the checkpoint" if file.exists() else ""
    try:
        with file.open("rb+") as record:
            if (found := record.seek(0, os.SEEK_END)) < size:
                return f"has {found} bytes, fewer than the {size} at the checkpoint"
            record.seek(max(0, size - 1))
            if size and record.read(1) != b"\n":
                return f"has no line that ends after {size} bytes, where the checkpoint was saved"
            record.truncate(size)
            os.fsync(record.fileno())
    except FileNotFoundError:
        return f"is missing, and had {size} bytes at the checkpoint" if size else ""
    except OSError as problem:
        return f"cannot be truncated ({problem})"
    return ""


def _row(line: str) -> dict[str, Any]:
    """The row of a line; empty if the process was killed while writing it."""
    try:
        row = json.loads(line)
    except ValueError:
        return {}
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else {}
