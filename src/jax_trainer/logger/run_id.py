"""The id of a run in a logging tool, kept in the run folder: a resumed run continues under it."""

import re
from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

from jax_trainer.logger.jsonl import write_atomically

_ID = re.compile(r"[A-Za-z0-9_\-]{1,64}")


def known_id(folder: Path, tool: str) -> str:
    """The id in `<tool>-id.txt` of the run folder; empty if there is none, or none that is valid."""
    file = folder / f"{tool}-id.txt"
    known = file.read_text(encoding="utf-8", errors="replace").strip() if file.is_file() else ""
    return known if _ID.fullmatch(known) else ""


def run_id(folder: Path, tool: str, new: Callable[[], str] = lambda: uuid4().hex[:12]) -> str:
    """The id of the run in `tool`: the known one, or a `new` one, which is written to `<tool>-id.txt`."""
    if known := known_id(folder, tool):
        return known
    created = new()
    write_atomically(folder / f"{tool}-id.txt", f"{created}\n".encode())
    return created
