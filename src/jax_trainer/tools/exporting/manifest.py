"""`export.json`: what an export has, where it comes from, and the digest of each of its files."""

import json
import shutil
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from jax_trainer.checkpoint.files import write_unsynced
from jax_trainer.checkpoint.store import SavedCheckpoint
from jax_trainer.config import as_data, redact
from jax_trainer.config.json_values import finite
from jax_trainer.datasets.examples import Tokenizer, Vocabulary
from jax_trainer.tools.exporting.artifact import FORMAT, MANIFEST, TOKENIZER, VOCABULARY, sha256
from jax_trainer.tools.exporting.traced import TracedModel

_PACKAGES = ("jax", "jaxlib", "flax", "numpy", "jax-trainer")


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


def metadata(facts: Mapping[str, Any]) -> dict[str, str]:
    """The description of a model as texts, for the header of a file."""
    return {name: value if isinstance(value, str) else json.dumps(value) for name, value in facts.items()}


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
        write_unsynced(folder / VOCABULARY, json.dumps(content) + "\n")
        return {"text": {"file": VOCABULARY}}
    return {}


def write_manifest(folder: Path, model: TracedModel, facts: Mapping[str, Any], entries: Mapping[str, Any]) -> None:
    """Writes `export.json`, after all other files."""
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    content = {
        "format": FORMAT,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        **facts,
        "inputs": [spec.data() for spec in model.inputs],
        "outputs": [spec.data() for spec in model.outputs],
        "formats": dict(entries),
        "files": {
            file.relative_to(folder).as_posix(): {"bytes": file.stat().st_size, "sha256": sha256(file)}
            for file in files
        },
        "versions": _versions(),
    }
    write_unsynced(folder / MANIFEST, json.dumps(content, indent=1) + "\n")


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):  # a source tree on the path, not installed
            found[name] = version(name)
    return found
