"""Runs what was exported in a new process that does not import this library, and compares it with the trainer.

The process gets a short script, the files of the export and the inputs as an npz file, and nothing else.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jax_trainer.tools.exporting.artifact import PROGRAM, WEIGHTS, ExportError
from jax_trainer.tools.exporting.formats import HF, ExportJob, lowered

Arrays = Mapping[str, np.ndarray]
Case = tuple[Arrays, Arrays]  # inputs, and expected outputs
PATIENCE = 1800.0  # seconds: a large program takes long to compile
_TAIL = 600  # characters of the output of a process that failed

_STABLEHLO = """
import json, sys
import numpy as np
import jax
import jax.export

program, weights, names, inputs, outputs = sys.argv[1:]
with open(program, "rb") as file:
    exported = jax.export.deserialize(bytearray(file.read()))
names, stored = json.loads(names), {}
if names:
    from safetensors.numpy import load_file
    stored = load_file(weights)
with np.load(inputs, allow_pickle=False) as file:
    found = exported.call([stored[name] for name in names], dict(file))
"""
_HF = """
import os, sys
os.environ["HF_HUB_OFFLINE"] = "1"
import numpy as np
import torch
import transformers

folder, inputs, outputs = sys.argv[1:]
config = transformers.AutoConfig.from_pretrained(folder)
model = getattr(transformers, config.architectures[0]).from_pretrained(folder, dtype=torch.float32).eval()
with np.load(inputs, allow_pickle=False) as file:
    array = file["input"]
if array.ndim == 4:
    array = array.transpose(0, 3, 1, 2)
with torch.no_grad():
    made = model(torch.tensor(array if array.dtype.kind == "f" else array.astype(np.int64)))
kinds = ("logits", "prediction_logits", "last_hidden_state")
found = {"output": next(made[kind] for kind in kinds if kind in made).numpy()}
"""
_END = """
assert not [name for name in sys.modules if name.partition(".")[0] == "jax_trainer"]
np.savez(outputs, **{name: np.asarray(array).astype(np.float64) for name, array in found.items()})
"""


@dataclass(frozen=True)
class ExportCheck:
    """How an export agrees with its trainer.

    Args:
        examples: number of examples that both have predicted.
        difference: the largest difference of any output.
        tolerance: the largest that is allowed.
    """

    examples: int
    difference: float
    tolerance: float


def check(
    job: ExportJob, folder: Path, cases: Mapping[str, Case], tolerances: Mapping[str, float]
) -> dict[str, ExportCheck]:
    """Runs each of the formats in `folder`; raises an `ExportError` for one that differs from what is expected.

    Args:
        job: what was exported.
        folder: the files.
        cases: the inputs and the expected outputs of each format.
        tolerances: the largest difference by format, relative to the largest output where that is more than 1.
    """
    examples = len(next(iter(job.model.example.values())))
    checks: dict[str, ExportCheck] = {}
    with tempfile.TemporaryDirectory() as place:
        for one, (given, expected) in cases.items():
            if one == "safetensors" and "stablehlo" in checks and job.weights == "beside":  # they share the file
                checks[one] = checks["stablehlo"]
                continue
            found = _run(one, _command(one, job, folder, Path(place)), Path(place), given)
            largest = max(float(np.abs(array).max(initial=0.0)) for array in expected.values())
            allowed = tolerances[one] * (max(1.0, largest) if np.isfinite(largest) else 1.0)
            difference = largest_difference(found, expected)
            if not difference <= allowed:
                raise ExportError(
                    f"The export as {one} differs from the trainer by {difference:.3g} on {examples} examples, which "
                    f"is more than {allowed:.3g}. Nothing was written. If this is rounding, as in bfloat16, allow it "
                    f"with a larger tolerance (`--tolerance`, now {tolerances[one]:g})."
                )
            checks[one] = ExportCheck(examples, difference, allowed)
    return checks


def largest_difference(found: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> float:
    """The largest absolute difference of any value; infinite if names, shapes, or what is not finite differ."""
    if found.keys() != expected.keys():
        return np.inf
    largest = 0.0
    for name, array in expected.items():
        ours, other = np.asarray(array).astype(np.float64), found[name]
        if ours.shape != other.shape or not np.array_equal(np.isfinite(ours), np.isfinite(other)):
            return np.inf
        is_finite = np.isfinite(ours)
        if not np.array_equal(ours[~is_finite], other[~is_finite], equal_nan=True):
            return np.inf
        largest = max(largest, float(np.abs(ours[is_finite] - other[is_finite]).max(initial=0.0)))
    return largest


def _command(one: str, job: ExportJob, folder: Path, place: Path) -> list[str]:
    """The script for a format, and its arguments."""
    match one:
        case "stablehlo":
            is_beside = job.weights == "beside"
            names = json.dumps(list(job.model.weights) if is_beside else [])
            return [_STABLEHLO, str(folder / PROGRAM), str(folder / WEIGHTS), names]
        case "safetensors":  # weights cannot run alone: with a program that is not kept
            (place / PROGRAM).write_bytes(lowered(job, is_beside=True))
            return [_STABLEHLO, str(place / PROGRAM), str(folder / WEIGHTS), json.dumps(list(job.model.weights))]
        case _:
            return [_HF, str(folder / HF)]


def _run(one: str, command: list[str], place: Path, given: Arrays) -> dict[str, np.ndarray]:
    script, *arguments = command
    inputs, outputs = place / f"{one}-inputs.npz", place / f"{one}-outputs.npz"
    np.savez(inputs, **given)  # type: ignore[arg-type]
    words = [sys.executable, "-I", "-c", script + _END, *arguments, str(inputs), str(outputs)]
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # this process has its memory already
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=PATIENCE, cwd=place)
    if done.returncode:
        missing = " It needs torch and transformers." if "ModuleNotFoundError" in done.stderr and one == "hf" else ""
        raise ExportError(
            f"The export as {one} does not run in a process without this library.{missing} Nothing was written. It "
            f"ended with {done.returncode}: …{done.stderr[-_TAIL:].strip()}"
        )
    with np.load(outputs, allow_pickle=False) as file:
        return dict(file)
