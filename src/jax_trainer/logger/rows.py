"""A run's record when the run is resumed: what it wrote after its checkpoint will be written again."""

import json
import os
from pathlib import Path
from typing import Any

from jax_trainer.logger.run_log import LOG

TAIL = 2**20  # bytes in which the last row of numbers is looked for; pictures and texts may follow it


def cut(file: Path, size: int | None) -> bool:
    """Takes what was written after a checkpoint out of a `metrics.jsonl`, which had `size` bytes then; durably.

    Returns whether that was possible. Where the size is not known (None), or the file is not the one that it was taken
    of, it stays as it is.
    """
    problem = _cut(file, size)
    if problem:
        LOG.warning(
            f"{file} {problem}, so it stays as it is. Rows of steps that are trained again may be in it twice; "
            "the later ones belong to this run."
        )
    return not problem


def last_step(file: Path) -> int:
    """The step of the last row of numbers in a `metrics.jsonl`; 0 where there is none."""
    if not file.is_file():  # of a device, say, reading might not end
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
    """Cuts `file`; otherwise says why not."""
    if size is None:
        return "was not followed by the checkpoint" if file.exists() else ""
    try:
        with file.open("rb+") as record:
            if (found := record.seek(0, os.SEEK_END)) < size:
                return f"has {found} bytes, and had {size} at the checkpoint"
            record.seek(max(0, size - 1))
            if size and record.read(1) != b"\n":
                return f"has no line that ends after {size} bytes, where the checkpoint was saved"
            record.truncate(size)
            os.fsync(record.fileno())
    except FileNotFoundError:
        return f"is gone, and had {size} bytes at the checkpoint" if size else ""
    except OSError as problem:
        return f"cannot be cut ({problem})"
    return ""


def _row(line: str) -> dict[str, Any]:
    """What a line says; nothing if the process was killed while it wrote it."""
    try:
        row = json.loads(line)
    except ValueError:
        return {}
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else {}
