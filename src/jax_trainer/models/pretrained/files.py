"""The files of a pretrained model: tensors in safetensors files, in one or in several, and `config.json`.

Tensors are read one at a time. Formats that can run code when they are read are refused.
"""

import json
import logging
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_trainer.checkpoint.arrays import Spec
from jax_trainer.diagnostics.files import label, write_atomically
from jax_trainer.diagnostics.optional_import import from_extra

WEIGHTS, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
TEXT_FILES = (  # of language models: a tokenizer, and how transformers uses it
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)
_UNSAFE = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".h5", ".msgpack")
_KINDS = {"F": "float", "BF": "bfloat", "I": "int", "U": "uint"}  # of safetensors, before the number of bits
LOG = logging.getLogger("jax_trainer")


class PretrainedError(ValueError):
    """Pretrained weights that cannot be read, or do not match a model."""


@dataclass(frozen=True)
class TensorFiles:
    """The tensors of a pretrained model, by name.

    Args:
        path: what was passed: a folder, or a safetensors file.
        files: the file of each tensor.
    """

    path: Path
    files: Mapping[str, Path]

    @classmethod
    def open(cls, path: str | Path) -> "TensorFiles":
        """The tensors in a folder, or in one safetensors file."""
        path = Path(path)
        if not path.exists():
            raise FileNotFoundError(
                f"{path} does not exist. Pass a folder with safetensors files, or one such file. To download a model "
                f"of the Hugging Face Hub: `hf download NAME --local-dir {path.name or 'FOLDER'}`."
            )
        if (path / INDEX).is_file():
            return cls(path, _indexed(path))
        found = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
        usual = [file for file in found if file.name == WEIGHTS]
        found = usual or found
        if len(found) == 1 and found[0].suffix == ".safetensors":
            with _opened(found[0]) as opened:
                return cls(path, dict.fromkeys(opened.keys(), found[0]))
        raise _no_tensors(path, found)

    @cached_property
    def specs(self) -> dict[str, Spec]:
        """The dtype and the shape of every tensor; reads none of them."""
        found: dict[str, Spec] = {}
        for file in dict.fromkeys(self.files.values()):
            with _opened(file) as opened:
                there = set(opened.keys())
                for name in (name for name, other in self.files.items() if other == file):
                    if name not in there:
                        raise PretrainedError(f"{file} lacks the tensor {label(name)}, which {INDEX} lists.")
                    found[name] = _spec(opened.get_slice(name), name, file)
        return found

    def read(self, name: str) -> np.ndarray:
        """One tensor, on the host."""
        with _opened(self.files[name]) as opened:
            return opened.get_tensor(name)

    @cached_property
    def config(self) -> dict[str, Any] | None:
        """The content of `config.json`; None without any."""
        folder = self.path if self.path.is_dir() else self.path.parent
        return read_config(folder) if (folder / CONFIG).is_file() else None


def read_config(folder: Path) -> dict[str, Any]:
    """The content of `config.json` in a folder, or of a JSON file."""
    return _json(folder / CONFIG if folder.is_dir() else folder)


def write_tensors(folder: Path, arrays: Iterator[tuple[str, np.ndarray]], sizes: Mapping[str, int], most: int) -> None:
    """Writes tensors to safetensors files of at most `most` bytes each, with an index if there are several.

    Args:
        folder: an existing folder.
        arrays: the tensors by name, in the order of `sizes`; held in memory until their file is full.
        sizes: the bytes of every tensor.
        most: bytes per file; a larger tensor has a file of its own.
    """
    with from_extra("hf"):
        from safetensors.numpy import save_file

    groups, used = [[]], 0
    for name, size in sizes.items():
        if groups[-1] and used + size > most:
            groups.append([])
            used = 0
        groups[-1].append(name)
        used += size
    count = len(groups)
    files = [WEIGHTS] if count == 1 else [f"model-{n:05}-of-{count:05}.safetensors" for n in range(1, count + 1)]
    for file, names in zip(files, groups, strict=True):
        content = {name: np.asarray(array, order="C") for name, (_, array) in zip(names, arrays, strict=False)}
        save_file(content, folder / file, metadata={"format": "pt"})  # what transformers looks for
    if count > 1:
        of_each = {name: file for file, names in zip(files, groups, strict=True) for name in names}
        write_json(folder / INDEX, {"metadata": {"total_size": sum(sizes.values())}, "weight_map": of_each})


def write_json(file: Path, data: Mapping[str, Any]) -> None:
    """Writes a JSON file, with sorted keys."""
    write_atomically(file, json.dumps(data, indent=2, sort_keys=True) + "\n")


def copy_text_files(source: Path, target: Path) -> None:
    """Copies those of `TEXT_FILES` that `source` has, and `target` does not; no link that leads out of `source`."""
    own = source.resolve()
    roots = (own, own.parent.parent / "blobs")  # the second: of a snapshot in the cache of the Hugging Face Hub
    for file in (source / name for name in TEXT_FILES):
        if not file.is_file() or (target / file.name).exists():
            continue
        if any(file.resolve().is_relative_to(root) for root in roots):
            shutil.copyfile(file, target / file.name)
        else:
            LOG.warning(f"{file} is not copied: it is a link to {file.resolve()}. Put the file itself there.")


def _indexed(folder: Path) -> dict[str, Path]:
    weights = _json(folder / INDEX).get("weight_map")
    if not isinstance(weights, dict) or not all(isinstance(name, str) for name in weights.values()):
        raise PretrainedError(f"{folder / INDEX} has no `weight_map` from tensors to files.")
    for name in set(weights.values()):
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise PretrainedError(
                f"{folder / INDEX} names {label(name)!r}, which is no safetensors file of its folder."
            )
        if not (folder / name).is_file():
            raise PretrainedError(f"{folder / INDEX} names {name}, which is missing. Download it again.")
    return {tensor: folder / name for tensor, name in weights.items()}


def _json(file: Path) -> dict[str, Any]:
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise PretrainedError(f"{file} is not JSON: {error}.") from None
    if not isinstance(data, dict):
        raise PretrainedError(f"{file} is not a JSON object.")
    return data


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    with from_extra("hf"):
        from safetensors import SafetensorError, safe_open
    try:
        with safe_open(file, framework="np") as opened:
            yield opened
    except SafetensorError as error:
        raise PretrainedError(f"{file} cannot be read as safetensors: {error}. Download it again.") from None


def _spec(tensor: Any, name: str, file: Path) -> Spec:
    dtype = tensor.get_dtype()
    parts = re.fullmatch(r"([A-Z]+)(8|16|32|64)", dtype)
    if dtype != "BOOL" and (parts is None or parts[1] not in _KINDS):
        raise PretrainedError(f"The tensor {label(name)} of {file} is {dtype}, not supported. Convert the model first.")
    numpy_dtype = "bool" if parts is None else f"{_KINDS[parts[1]]}{parts[2]}"
    return Spec(str(jnp.dtype(numpy_dtype)), tuple(tensor.get_shape()))


def _no_tensors(path: Path, found: list[Path]) -> PretrainedError:
    unsafe = [file for file in ([path] if path.is_file() else sorted(path.iterdir())) if file.suffix in _UNSAFE]
    if len(found) > 1:
        names = ", ".join(file.name for file in found[:5])
        return PretrainedError(f"{path} has several safetensors files ({names}), but no {INDEX}. Pass one of them.")
    if unsafe:
        return PretrainedError(
            f"{unsafe[0]} is not loaded: reading such a file can run any code in it. Convert it to safetensors where "
            f"you trust it: `AutoModel.from_pretrained(folder).save_pretrained(folder)` of transformers, or "
            f"`safetensors.torch.save_file(state_dict, {WEIGHTS!r})`."
        )
    return PretrainedError(f"{path} has no safetensors files. Pass a folder with {WEIGHTS}, or one such file.")
