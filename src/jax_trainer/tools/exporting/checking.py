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
from typing import Any

import numpy as np

from jax_trainer.tools.exporting.artifact import PROGRAM, WEIGHTS, ExportError
from jax_trainer.tools.exporting.formats import HF, ExportJob, lowered

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
    job: ExportJob,
    folder: Path,
    formats: Mapping[str, Any],
    expected: Mapping[str, np.ndarray],
    hf: tuple[np.ndarray, Mapping[str, np.ndarray]] | None,
    tolerances: Mapping[str, float],
) -> dict[str, ExportCheck]:
    """Runs each of the formats in `folder`; raises an `ExportError` for one that differs from `expected`.

    Args:
        job: what was exported.
        folder: the files.
        formats: the entries of the formats.
        expected: the outputs of the trainer.
        hf: for the format hf: the transformed input of the model, and its output.
        tolerances: the largest difference by format, relative to the largest output where that is more than 1.
    """
    size = max((float(np.abs(array).max(initial=0.0)) for array in expected.values()), default=0.0)
    largest = max(1.0, size if np.isfinite(size) else 1.0)
    examples = len(next(iter(job.model.example.values())))
    checks: dict[str, ExportCheck] = {}
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        for one, entry in formats.items():
            is_same_run = one == "safetensors" and entry["file"] == WEIGHTS and "stablehlo" in checks
            if is_same_run and formats["stablehlo"]["weights"] == "beside":
                checks[one] = checks["stablehlo"]
                continue
            given, wanted = (hf[0], hf[1]) if one == "hf" and hf is not None else (None, expected)
            found = _run(one, _command(one, job, folder, place), place, job, given)
            difference, allowed = largest_difference(found, wanted), tolerances[one] * largest
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


def _run(one: str, command: list[str], place: Path, job: ExportJob, hf_input: Any) -> dict[str, np.ndarray]:
    script, *arguments = command
    inputs, outputs = place / f"{one}-inputs.npz", place / f"{one}-outputs.npz"
    given: dict[str, Any] = {"input": hf_input} if one == "hf" else job.model.example
    np.savez(inputs, **given)
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
