"""A run's record when the run is resumed: what it wrote after its checkpoint will be written again."""

import json
import os
from pathlib import Path
from typing import Any


def drop_rows_after(file: Path, step: int, epoch: int) -> None:
    """Takes what was written after the checkpoint of `step`, which ended in `epoch`, out of a `metrics.jsonl`.

    Rows stand in the order in which they were written: from the first one that is later, all of them go. A row without
    an epoch has an axis of its own, so its place alone decides. A line that was cut off goes wherever it is.
    """
    if not file.exists():
        return
    kept: list[str] = []
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        row = _row(line)
        if _is_later(row, step, epoch):
            break
        if row:
            kept.append(line)
    partial = file.with_suffix(".partial")
    partial.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
    os.replace(partial, file)


def _row(line: str) -> dict[str, Any]:
    """What a line says; nothing if the process was killed while it wrote it."""
    try:
        row = json.loads(line)
    except ValueError:
        return {}
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else {}


def _is_later(row: dict[str, Any], step: int, epoch: int) -> bool:
    if not isinstance(row.get("epoch"), int):
        return False
    # a test, and the beginning of the next epoch, come after the checkpoint of the same step
    is_test = any(name.startswith("test") and name.endswith("/time") for name in row)
    return (row["step"], row["epoch"], is_test) > (step, epoch, False)
