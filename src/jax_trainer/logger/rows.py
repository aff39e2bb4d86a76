"""A run's record when the run is resumed: what it wrote after its checkpoint will be written again."""

import json
import os
from pathlib import Path


def drop_rows_after(file: Path, step: int) -> None:
    """Takes rows of later steps, and a last line that was cut off, out of a `metrics.jsonl`."""
    if not file.exists():
        return
    kept = [line for line in file.read_text(encoding="utf-8").splitlines() if _step(line) <= step]
    partial = file.with_suffix(".partial")
    partial.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
    os.replace(partial, file)


def _step(line: str) -> float:
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):  # the process was killed while it wrote this line
        return float("inf")
