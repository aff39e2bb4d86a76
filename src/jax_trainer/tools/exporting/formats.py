"""The formats of an export: each function writes its files to a folder, and returns its entry of `export.json`."""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal, get_args

import jax
import jax.export
import numpy as np

from jax_trainer.checkpoint.store import SavedCheckpoint
from jax_trainer.config import as_data, redact
from jax_trainer.config.json_values import finite
from jax_trainer.core import TrainState
from jax_trainer.core.compile import compiled_function
from jax_trainer.datasets.examples import Tokenizer, Vocabulary
from jax_trainer.diagnostics.files import write_atomically
from jax_trainer.diagnostics.optional_import import from_extra
from jax_trainer.models.pretrained import PretrainedError
from jax_trainer.models.pretrained.files import copy_text_files
from jax_trainer.tools.exporting import artifact
from jax_trainer.tools.exporting.artifact import PROGRAM, TOKENIZER, WEIGHTS, ExportError
from jax_trainer.tools.exporting.traced import TracedModel
from jax_trainer.tools.pretrained import export_pretrained

ExportFormat = Literal["stablehlo", "safetensors", "hf"]
WeightsPlace = Literal["beside", "embedded"]
FORMATS: tuple[str, ...] = get_args(ExportFormat)
PLATFORMS = ("cpu", "cuda", "tpu")
HF = "hf"
_PACKAGES = ("jax", "jaxlib", "flax", "numpy", "jax-trainer")

Entry = dict[str, Any]


@dataclass(frozen=True)
class ExportJob:
    """What is exported.

    Args:
        model: the prediction.
        trainer: its trainer, for the configuration of its model and its tokenizer.
        state: the state that it predicts with.
        weights: where those of the StableHLO program are.
        platforms: that the StableHLO program is lowered for.
        facts: what describes the model, for the metadata of files.
    """

    model: TracedModel
    trainer: Any
    state: TrainState
    weights: WeightsPlace
    platforms: Sequence[str]
    facts: Mapping[str, Any]


def write_stablehlo(job: ExportJob, folder: Path) -> Entry:
    """The program as StableHLO, serialized by `jax.export`; its weights are in it, or arguments in a file beside it."""
    is_beside = job.weights == "beside"
    (folder / PROGRAM).write_bytes(lowered(job, is_beside=is_beside))
    if is_beside:
        write_weights(job, folder)
    arguments = list(job.model.weights) if is_beside else []
    return {"file": PROGRAM, "weights": job.weights, "arguments": arguments, "platforms": list(job.platforms)}


def lowered(job: ExportJob, *, is_beside: bool) -> bytes:
    """The serialized program, a function of a list of weights (none, if they are in it) and of inputs by name."""
    model, names = job.model, list(job.model.weights)

    def call(weights: list[Any], inputs: dict[str, Any]) -> dict[str, Any]:
        return model.call(dict(zip(names, weights, strict=True)) if is_beside else model.weights, inputs)

    shapes = list(model.weight_shapes.values()) if is_beside else []
    try:
        program = jax.export.export(compiled_function(call), platforms=job.platforms)(shapes, model.input_shapes)
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise ExportError(
            f"The program cannot be lowered for {', '.join(job.platforms)}: {type(error).__name__}: {reason} Export it "
            "for the platforms that it runs on (`--platforms cpu`)."
        ) from error
    if program.nr_devices != 1:
        raise ExportError(
            f"The program is sharded over {program.nr_devices} devices, but an export is for one. Export it with one "
            "device: leave out `mesh` and `sharding` (`trainer.mesh=null trainer.sharding=null`)."
        )
    return bytes(program.serialize())


def write_weights(job: ExportJob, folder: Path) -> None:
    """The weights as safetensors, with metadata; stablehlo and safetensors share this file."""
    with from_extra("export"):
        from safetensors.numpy import save_file
    if not (folder / WEIGHTS).exists():
        arrays = {name: np.asarray(array, order="C") for name, array in job.model.weights.items()}
        texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in job.facts.items()}
        save_file(arrays, folder / WEIGHTS, metadata=texts)


def write_safetensors(job: ExportJob, folder: Path) -> Entry:
    """The weights that predictions need, by name, with the configuration of the model as metadata."""
    write_weights(job, folder)
    return {"file": WEIGHTS}


def write_hf(job: ExportJob, folder: Path) -> Entry:
    """The folder of a Hugging Face model: safetensors and `config.json`, which transformers loads."""
    try:
        export_pretrained(job.state, folder / HF, config=job.trainer.model_config)
    except PretrainedError as error:
        raise ExportError(str(error)) from None
    if (file := tokenizer_file(job.trainer)) is not None:
        shutil.copyfile(file, folder / HF / TOKENIZER)  # it may have another name
        copy_text_files(file.parent, folder / HF)
    return {"folder": HF}


WRITERS: dict[str, Callable[[ExportJob, Path], Entry]] = {
    "stablehlo": write_stablehlo,
    "safetensors": write_safetensors,
    "hf": write_hf,
}


# export.json


def describe(trainer: Any, saved: SavedCheckpoint | None) -> dict[str, Any]:
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


def tokenizer_file(trainer: Any) -> Path | None:
    """The `tokenizer.json` of a language model: that of its dataset, or of the folder that it was imported to."""
    known = getattr(trainer.dataset, "vocabulary", None)
    own = trainer.folder.path / TOKENIZER if trainer.dataset is None and trainer.folder is not None else None
    return known.path if isinstance(known, Tokenizer) else own if own is not None and own.is_file() else None


def write_text_files(trainer: Any, model: TracedModel, folder: Path) -> dict[str, Any]:
    """The tokenizer or the vocabulary of a language model, as files; {} for other models."""
    is_next_token = len(model.inputs) == len(model.outputs) == 1 and len(model.outputs[0].shape) == 3
    if not is_next_token or not hasattr(trainer, "generate"):
        return {}
    if (file := tokenizer_file(trainer)) is not None:
        shutil.copyfile(file, folder / TOKENIZER)
        return {"text": {"file": TOKENIZER}}
    if isinstance(known := getattr(trainer.dataset, "vocabulary", None), Vocabulary):
        content = {"level": known.level, "symbols": list(known.symbols)}
        write_atomically(folder / artifact.VOCABULARY, json.dumps(content) + "\n", durable=False)
        return {"text": {"file": artifact.VOCABULARY}}
    return {}


def write_manifest(folder: Path, model: TracedModel, facts: Mapping[str, Any], entries: Mapping[str, Any]) -> None:
    """Writes `export.json`, after all other files."""
    files, versions = sorted(file for file in folder.rglob("*") if file.is_file()), dict[str, str]()
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):  # a source tree on the path, not installed
            versions[name] = version(name)
    content = {
        "format": artifact.FORMAT,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        **facts,
        "inputs": [spec.data() for spec in model.inputs],
        "outputs": [spec.data() for spec in model.outputs],
        "formats": dict(entries),
        "files": {
            file.relative_to(folder).as_posix(): {"bytes": file.stat().st_size, "sha256": artifact.sha256(file)}
            for file in files
        },
        "versions": versions,
    }
    write_atomically(folder / artifact.MANIFEST, json.dumps(content, indent=1) + "\n", durable=False)
