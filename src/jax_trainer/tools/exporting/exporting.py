"""`export_run`: writes a trained model in formats that need neither this library nor the code of the run.

Each format then runs in a new process that does not import this library: it gets a short script, the files of the
export and the inputs as an npz file, and nothing else.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from jax_trainer.checkpoint.commit import partial_folder
from jax_trainer.checkpoint.record import versions_in_use
from jax_trainer.checkpoint.store import SavedCheckpoint
from jax_trainer.config import as_data, redact
from jax_trainer.config.dumping import finite
from jax_trainer.config.settings import AtLeast, checked
from jax_trainer.core import Precision, TrainState, failpoint, merged
from jax_trainer.core.compile import compiled_function
from jax_trainer.datasets.examples import Tokenizer, Vocabulary
from jax_trainer.diagnostics.files import sync_folder, sync_tree, write_atomically
from jax_trainer.diagnostics.optional_import import from_extra, require_extra
from jax_trainer.diagnostics.suggestions import checks_keywords
from jax_trainer.models.pretrained import PretrainedError
from jax_trainer.models.pretrained.files import copy_text_files
from jax_trainer.runs.predictions import Predictor
from jax_trainer.sharding.placement import check_alone
from jax_trainer.tools import exporting as artifact
from jax_trainer.tools.exporting import PROGRAM, TOKENIZER, WEIGHTS, ExportError
from jax_trainer.tools.exporting.traced import (
    Arrays,
    TracedModel,
    expected_outputs,
    first_examples,
    limited,
    model_call,
    traced_model,
)
from jax_trainer.tools.pretrained import export_pretrained
from jax_trainer.tools.pretrained.loading import imported_parts
from jax_trainer.trainer import TrainerModule
from jax_trainer.trainer.experiment import rebuilt
from jax_trainer.trainer.run_folder import Which

ExportFormat = Literal["stablehlo", "safetensors", "hf"]
WeightsPlace = Literal["beside", "embedded"]
PLATFORMS = ("cpu", "cuda", "tpu")
HF = "hf"
TOLERANCE, HALF_TOLERANCE = 1e-4, 0.05  # of a computation in float32, and in bfloat16 or float16
PATIENCE = 1800.0  # seconds: a large program takes long to compile
_TAIL = 600  # characters of the output of a process that failed
_Batch = Annotated[int, AtLeast(1)] | None
_Tolerance = Annotated[float, AtLeast(0)] | None
_OPTIONS = {"to": list[ExportFormat], "weights": WeightsPlace, "batch": _Batch, "tolerance": _Tolerance}

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


@dataclass(frozen=True)
class Exported:
    """An exported model.

    Args:
        path: the folder.
        inputs, outputs: its arrays, as text.
        checks: how each format agrees with the trainer; empty without a check.
    """

    path: Path
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    checks: dict[str, ExportCheck]


@checks_keywords
def export_run(
    source: Any,
    path: str | Path,
    to: Sequence[str] = ("stablehlo",),
    *,
    which: Which = "best",
    weights: WeightsPlace = "beside",
    batch: int | None = None,
    platforms: Sequence[str] = PLATFORMS,
    tolerance: float | None = None,
    verify: bool = True,
    saved: SavedCheckpoint | None = None,
) -> Exported:
    """Writes a trained model to a new folder, in one or several formats, with the transforms of its dataset inside.

    Each format then predicts 64 examples, fewer if their outputs are large, in a new process that does not import this
    library; a difference beyond `tolerance` is an `ExportError`, and nothing is written. Adapters of LoRA are merged.
    The folder appears when it is complete. It needs `pip install 'jax-trainer[export]'`.

    Args:
        source: a run folder or one of its checkpoints; or a `TrainerModule`: its best validated
            weights of the last run, or the current ones without any.
        path: the folder to write, which must not exist.
        to: "stablehlo" (a program for JAX, and `load_export`), "safetensors" (the weights), "hf" (a folder that
            transformers loads, without transforms).
        which: of a run folder: the "best" checkpoint, the "latest", or that of a step.
        weights: of the StableHLO program: "beside" it, as safetensors, or "embedded".
        batch: the size of all batches; None: any size.
        platforms: that the StableHLO program runs on: "cpu", "cuda", "rocm" or "tpu".
        tolerance: largest difference of an output, relative to the largest output where that is more than 1; None:
            1e-4, or 0.05 of a training in bfloat16 or float16 (not of "hf", which is compared in float32).
        verify: False: do not run the export.
        saved: the checkpoint that `load_model` of a trainer has returned, for `export.json`.
    """
    path, to = Path(path), [to] if isinstance(to, str) else list(to)
    checked({"to": to, "weights": weights, "batch": batch, "tolerance": tolerance}, _OPTIONS)
    if not to:
        raise ValueError(f"`to` names no format. Formats: {', '.join(get_args(ExportFormat))}.")
    for package in ("flatbuffers", "safetensors"):
        require_extra(package, "export")
    if os.path.lexists(path):
        raise FileExistsError(f"{path} already exists. Choose another folder, or delete it.")
    check_alone("write the same export")
    trainer = source
    if isinstance(source, str | Path):
        trainer, step = rebuilt(TrainerModule, Path(source), (), own={}, **imported_parts(source))
        saved = trainer.load_model(which=which if step is None else step)
    found = trainer.predictor()
    predictor = Predictor(found.program, merged(found.state))  # LoRA: one set of weights, and no products of adapters
    examples = first_examples(trainer, batch)
    examples = limited(predictor, examples) if batch is None else examples
    model, facts = traced_model(predictor, examples, batch), _described(trainer, saved)
    parent, is_beside = path.absolute().parent, weights == "beside"
    parent.mkdir(parents=True, exist_ok=True)
    with partial_folder(parent) as partial:
        (folder := partial / "export").mkdir()
        entries, expected = dict[str, Any](), expected_outputs(predictor, examples) if verify else {}
        for name in (name for name in get_args(ExportFormat) if name in to):
            if name == "stablehlo":
                (folder / PROGRAM).write_bytes(_lowered(model, platforms, is_beside=is_beside))
                arguments = list(model.weights) if is_beside else []
                stored = {"weights": weights, "arguments": arguments, "platforms": list(platforms)}
                entries[name] = {"file": PROGRAM, **stored}
            if name == "safetensors" or (name == "stablehlo" and is_beside):  # they share this file
                _write_weights(model, facts, folder)
            if name == "safetensors":
                entries[name] = {"file": WEIGHTS}
            if name == "hf":
                entries[name] = _write_hf(trainer, predictor.state, folder)
        for name, entry in entries.items() if verify else ():
            if name == "safetensors" and "stablehlo" in entries and is_beside:
                entry["check"] = entries["stablehlo"]["check"]
                continue
            case = model_call(trainer, predictor.state, examples) if name == "hf" else (model.example, expected)
            allowed = _tolerance(trainer, predictor.state, name) if tolerance is None else tolerance
            script, words = _script(name, model, platforms, folder, partial, is_beside=is_beside)
            entry["check"] = asdict(_check(name, script, words, partial, *case, allowed))
        facts |= _write_text_files(trainer, model, folder)
        _write_manifest(folder, model, facts, entries)
        sync_tree(folder)
        failpoint("before_export")
        os.rename(folder, path)
    sync_folder(parent)
    checks = {name: ExportCheck(**entry["check"]) for name, entry in entries.items() if "check" in entry}
    return Exported(path, tuple(map(str, model.inputs)), tuple(map(str, model.outputs)), checks)


def _tolerance(trainer: Any, state: TrainState, name: str) -> float:
    dtypes = {Precision.named(trainer.config.precision).compute or jnp.float32}
    if name == "hf":  # of the weights alone
        dtypes = {leaf.dtype for leaf in jax.tree.leaves(state.params) if jnp.issubdtype(leaf.dtype, jnp.floating)}
    return HALF_TOLERANCE if any(jnp.dtype(one).itemsize < 4 for one in dtypes) else TOLERANCE


# the formats


def _lowered(model: TracedModel, platforms: Sequence[str], *, is_beside: bool) -> bytes:
    """The program as StableHLO, serialized by `jax.export`: a function of a list of weights (none, if they are in it)
    and of inputs by name.
    """
    names = list(model.weights)

    def call(weights: list[Any], inputs: Arrays) -> Arrays:
        return model.call(dict(zip(names, weights, strict=True)) if is_beside else model.weights, inputs)

    weights = list(model.weights.values()) if is_beside else []
    try:
        program = jax.export.export(compiled_function(call), platforms=platforms)(weights, model.input_shapes)
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise ExportError(
            f"The program cannot be lowered for {', '.join(platforms)}: {type(error).__name__}: {reason} Export it "
            "for the platforms that it runs on (`--platforms cpu`)."
        ) from error
    if program.nr_devices != 1:
        raise ExportError(
            f"The program is sharded over {program.nr_devices} devices, but an export is for one. Export it with one "
            "device: leave out `mesh` and `sharding` (`trainer.mesh=null trainer.sharding=null`)."
        )
    return bytes(program.serialize())


def _write_weights(model: TracedModel, facts: Mapping[str, Any], folder: Path) -> None:
    """The weights that predictions need, by name, with what describes the model as metadata."""
    with from_extra("export"):
        from safetensors.numpy import save_file
    arrays = {name: np.asarray(array, order="C") for name, array in model.weights.items()}
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in facts.items()}
    save_file(arrays, folder / WEIGHTS, metadata=texts)


def _write_hf(trainer: Any, state: TrainState, folder: Path) -> dict[str, Any]:
    """The folder of a Hugging Face model: safetensors and `config.json`, which transformers loads."""
    try:
        export_pretrained(state, folder / HF, config=trainer.model_config)
    except PretrainedError as error:
        raise ExportError(str(error)) from None
    if (file := _tokenizer_file(trainer)) is not None:
        shutil.copyfile(file, folder / HF / TOKENIZER)  # it may have another name
        copy_text_files(file.parent, folder / HF)
    return {"folder": HF}


# the check


def _script(
    name: str, model: TracedModel, platforms: Sequence[str], folder: Path, place: Path, *, is_beside: bool
) -> tuple[str, list[str]]:
    """The script that runs a format, and its arguments."""
    if name == "hf":
        return _HF, [str(folder / HF)]
    program = folder / PROGRAM
    if name == "safetensors":  # weights cannot run alone: with a program that is not kept
        is_beside, program = True, place / PROGRAM
        program.write_bytes(_lowered(model, platforms, is_beside=True))
    return _STABLEHLO, [str(program), str(folder / WEIGHTS), json.dumps(list(model.weights) if is_beside else [])]


def _check(
    name: str, script: str, arguments: list[str], place: Path, given: Arrays, expected: Arrays, tolerance: float
) -> ExportCheck:
    """Runs a format; raises an `ExportError` if it differs from what is expected.

    The tolerance is relative to the largest output where that is more than 1.
    """
    inputs, outputs = place / f"{name}-inputs.npz", place / f"{name}-outputs.npz"
    np.savez(inputs, **given)
    words = [sys.executable, "-I", "-c", script + _END, *arguments, str(inputs), str(outputs)]
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # this process has its memory already
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=PATIENCE, cwd=place)
    if done.returncode:
        missing = " It needs torch and transformers." if "ModuleNotFoundError" in done.stderr and name == "hf" else ""
        raise ExportError(
            f"The export as {name} does not run in a process without this library.{missing} Nothing was written. It "
            f"ended with {done.returncode}: …{done.stderr[-_TAIL:].strip()}"
        )
    with np.load(outputs, allow_pickle=False) as file:
        difference = largest_difference(dict(file), expected)
    examples = len(next(iter(given.values())))
    largest = max(float(np.abs(array).max(initial=0.0)) for array in expected.values())
    allowed = tolerance * (max(1.0, largest) if np.isfinite(largest) else 1.0)
    if not difference <= allowed:
        raise ExportError(
            f"The export as {name} differs from the trainer by {difference:.3g} on {examples} examples, which is more "
            f"than {allowed:.3g}. Nothing was written. If this is rounding, as in bfloat16, allow it with a larger "
            f"tolerance (`--tolerance`, now {tolerance:g})."
        )
    return ExportCheck(examples, difference, allowed)


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


# export.json


def _described(trainer: Any, saved: SavedCheckpoint | None) -> dict[str, Any]:
    """The model of a trainer: its name, configuration and classes, and the run and checkpoint that it comes from."""
    source: dict[str, Any] = {}
    if saved is not None:
        source = {"step": saved.step, "epoch": saved.epoch, "metrics": finite(dict(saved.metrics))}
    if trainer.folder is not None:
        source["run"] = "/".join(trainer.folder.path.absolute().parts[-2:])  # no path of this machine
    config = {} if trainer.model_config is None else {"config": redact(as_data(trainer.model_config))}
    names = () if trainer.dataset is None else trainer.dataset.class_names
    classes = {"classes": list(names)} if names else {}
    return {"model": trainer.model_name, **config, **classes, "source": source}


def _tokenizer_file(trainer: Any) -> Path | None:
    """The `tokenizer.json` of a language model: that of its dataset, or of the folder that it was imported to."""
    known = getattr(trainer.dataset, "vocabulary", None)
    own = trainer.folder.path / TOKENIZER if trainer.dataset is None and trainer.folder is not None else None
    return known.path if isinstance(known, Tokenizer) else own if own is not None and own.is_file() else None


def _write_text_files(trainer: Any, model: TracedModel, folder: Path) -> dict[str, Any]:
    """The tokenizer or the vocabulary of a language model, as files; {} for other models."""
    is_next_token = len(model.inputs) == len(model.outputs) == 1 and len(model.outputs[0].shape) == 3
    if not is_next_token or not hasattr(trainer, "generate"):
        return {}
    if (file := _tokenizer_file(trainer)) is not None:
        shutil.copyfile(file, folder / TOKENIZER)
        return {"text": {"file": TOKENIZER}}
    if isinstance(known := getattr(trainer.dataset, "vocabulary", None), Vocabulary):
        content = {"level": known.level, "symbols": list(known.symbols)}
        write_atomically(folder / artifact.VOCABULARY, json.dumps(content) + "\n", durable=False)
        return {"text": {"file": artifact.VOCABULARY}}
    return {}


def _write_manifest(folder: Path, model: TracedModel, facts: Mapping[str, Any], entries: Mapping[str, Any]) -> None:
    """Writes `export.json`, after all other files."""
    content = {
        "format": artifact.FORMAT,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        **facts,
        "inputs": [*map(asdict, model.inputs)],
        "outputs": [*map(asdict, model.outputs)],
        "formats": dict(entries),
        "files": {
            file.relative_to(folder).as_posix(): {"bytes": file.stat().st_size, "sha256": artifact.sha256(file)}
            for file in sorted(folder.rglob("*"))
            if file.is_file()
        },
        "versions": versions_in_use(),
    }
    write_atomically(folder / artifact.MANIFEST, json.dumps(content, indent=1) + "\n", durable=False)
