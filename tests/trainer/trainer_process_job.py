"""One of two processes that train an experiment; says what it wrote to the disk, and what came out."""

import json
import os
import sys
from pathlib import Path

import jax

folder, resume, words = Path(sys.argv[4]).resolve(), sys.argv[5], sys.argv[6:]
written: set[str] = set()
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


def note(event: str, given: tuple) -> None:
    """Notes what is opened to be written, made, renamed or deleted in the folder."""
    is_written = event in ("os.mkdir", "os.rename", "os.remove", "os.rmdir")
    if event == "open" and isinstance(given[0], str):
        is_written = bool(given[2] & _WRITING)
    path = os.path.abspath(str(given[0])) if is_written else ""
    if path.startswith(f"{folder}{os.sep}"):
        written.add(path.removeprefix(str(folder)))


sys.addaudithook(note)

from jax_trainer.trainer import build, load_experiment  # noqa: E402 - what importing writes is to be seen as well

trainer = build(load_experiment(folder / "tiny.yaml", words).value)
data = trainer.dataset
loaders = data.train_loader, data.val_loader, data.test_loader
results = trainer.train_model(*loaders, resume=resume or False, quiet=True)
output = {
    "written": sorted(written),
    "results": {str(place): {n: float(v) for n, v in each.items()} for place, each in results.items()},
    "devices": jax.device_count(),
    "compilations": trainer.program.flat_eval_step.compilations,
    "run": str(trainer.folder.path),
}
sys.stdout.write(json.dumps(output) + "\n")
