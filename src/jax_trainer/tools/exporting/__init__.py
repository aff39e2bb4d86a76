"""Trained models as StableHLO, safetensors and Hugging Face folders, each run by a process without this library.

`load_export` reads the folder of an exported model, verifies it, and runs its program; it imports nothing that trains.
`exporting.py` writes.

The program is StableHLO, which JAX compiles; no class of the run is loaded, and no file that can run code of Python.
The digests show a file that was damaged or exchanged alone; who can write to the folder can change both.
"""

import hashlib
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import jax
import jax.export

from jax_trainer.config.compilation_cache import use_compilation_cache
from jax_trainer.diagnostics.files import read_json, safe_join, shown
from jax_trainer.diagnostics.optional_import import from_extra, require_extra

__all__ = ["ArraySpec", "ExportError", "ExportedModel", "load_export"]

FORMAT = 1  # of `export.json`
MANIFEST, PROGRAM, WEIGHTS = "export.json", "model.stablehlo", "weights.safetensors"
TOKENIZER, VOCABULARY = "tokenizer.json", "vocabulary.json"  # of a language model
BATCH = "batch"  # the size of a symbolic axis
_MAX_MANIFEST_BYTES = 1 << 24


class ExportError(ValueError):
    """A model that cannot be exported, or an export that cannot be read."""


@dataclass(frozen=True)
class ArraySpec:
    """An input or output of an exported model.

    Args:
        name: its name.
        dtype: name of its dtype.
        shape: its sizes; "batch" is any size, the same for all arrays.
    """

    name: str
    dtype: str
    shape: tuple[int | str, ...]

    @property
    def row(self) -> tuple[int, ...]:
        """The shape of one example."""
        return tuple(int(size) for size in self.shape[1:])

    @classmethod
    def of(cls, name: str, array: Any) -> "ArraySpec":
        """The spec of an array, or of its shape, in which a size may be symbolic."""
        return cls(name, str(array.dtype), tuple(one if isinstance(one, int) else str(one) for one in array.shape))

    def __str__(self) -> str:
        return f"{self.name}: {self.dtype} [{', '.join(map(str, self.shape))}]"


class ExportedModel:
    """An exported model that can be called: with its inputs, in their order or by name, as arrays [batch, …].

    Attributes:
        inputs: its inputs.
        outputs: its outputs. A model with one output returns an array, others a dict of arrays.
        manifest: the content of `export.json`: the run, its metrics, class names, versions.
        batch: None if the batch size is symbolic; otherwise the one batch size that it can be called with.
    """

    def __init__(self, folder: Path, manifest: dict[str, Any]) -> None:
        use_compilation_cache()
        self.manifest = manifest
        entry = manifest["formats"]["stablehlo"]
        require_extra("flatbuffers", "export")
        self._program = jax.export.deserialize(bytearray((folder / PROGRAM).read_bytes()))
        platform = jax.export.default_export_platform()
        if platform not in self._program.platforms:
            raise ExportError(
                f"{folder} was exported for {', '.join(self._program.platforms)}, but JAX runs on {platform}. Set "
                f"JAX_PLATFORMS={self._program.platforms[0]}, or export it with `--platforms {platform}`."
            )
        inputs = jax.tree_util.tree_unflatten(self._program.in_tree, self._program.in_avals)[0][1]
        outputs = jax.tree_util.tree_unflatten(self._program.out_tree, self._program.out_avals)
        # in the order of the manifest: that of a dict in a program is by name
        self.inputs = tuple(ArraySpec.of(one["name"], inputs[one["name"]]) for one in manifest["inputs"])
        self.outputs = tuple(ArraySpec.of(one["name"], outputs[one["name"]]) for one in manifest["outputs"])
        stored = _read_weights(folder / WEIGHTS) if entry["arguments"] else {}
        self._weights = jax.device_put([stored[name] for name in entry["arguments"]])
        self._call = jax.jit(self._program.call)
        sizes = {spec.shape[0] for spec in self.inputs if spec.shape}
        self.batch: int | None = None if BATCH in sizes else int(sizes.pop())

    @property
    def name(self) -> str:
        """The name of the model's class."""
        return str(self.manifest.get("model", "model"))

    @property
    def class_names(self) -> tuple[str, ...]:
        """The names of the classes of its dataset; empty if it has none."""
        return tuple(self.manifest.get("classes", ()))

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """The outputs for a batch."""
        names = [spec.name for spec in self.inputs]
        given = {**dict(zip(names, inputs, strict=False)), **named}
        if len(inputs) > len(names) or set(given) != set(names):
            expected = "; ".join(map(str, self.inputs))
            raise TypeError(
                f"{self.name} has the inputs {expected}; got {len(inputs)} and {', '.join(named) or 'none'}."
            )
        outputs = self._call(self._weights, given)
        return outputs if len(outputs) > 1 else next(iter(outputs.values()))

    def __repr__(self) -> str:
        return f"ExportedModel({self.name}; {'; '.join(map(str, self.inputs))} → {'; '.join(map(str, self.outputs))})"


def load_export(path: str | Path) -> ExportedModel:
    """Reads an exported model, after comparing all of its files with their digests; it needs the format `stablehlo`.

    Args:
        path: the folder that `export` has written.
    """
    folder, file = Path(path), Path(path) / MANIFEST
    if not file.is_file():
        raise FileNotFoundError(f"{folder} is not an exported model: it has no {MANIFEST}. See `jax-trainer export`.")
    try:
        manifest = read_json(file, _MAX_MANIFEST_BYTES)
        if (found := manifest.get("format")) != FORMAT:
            raise ExportError(f"{file} has the format {found!r}; this version reads {FORMAT}. Export it again.")
        formats, files = manifest["formats"], manifest["files"]
        if "stablehlo" not in formats:
            raise ExportError(
                f"{folder} has {', '.join(formats)}, but no StableHLO program. Export it with `--to stablehlo`."
            )
        read = {PROGRAM, *([WEIGHTS] if formats["stablehlo"]["arguments"] else [])}
        read |= {manifest["text"]["file"]} if "text" in manifest else set()
        if unlisted := sorted(read - files.keys()):
            raise ExportError(f"{file} has no digest of {shown(unlisted[0])}. Export it again.")
        for name, entry in files.items():
            one = reduce(safe_join, name.split("/"), folder)
            if not one.is_file():
                raise ExportError(f"{folder} lacks {name}. Export it again.")
            if sha256(one) != entry.get("sha256"):
                raise ExportError(f"{one} is damaged: its digest is not that of {MANIFEST}. Export it again.")
        return ExportedModel(folder, manifest)
    except ExportError:
        raise
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ExportError(f"{file} is damaged: {error!r}.") from error


def sha256(file: Path) -> str:
    """The digest of a file, in hexadecimal digits."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _read_weights(file: Path) -> dict[str, Any]:
    with from_extra("export"):
        from safetensors.numpy import load_file
    return load_file(file)
