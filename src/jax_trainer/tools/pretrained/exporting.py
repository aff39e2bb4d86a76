"""`export_pretrained`: writes weights as safetensors files with a `config.json`, which transformers loads."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_trainer.adapters import handle_of
from jax_trainer.checkpoint.arrays import Spec
from jax_trainer.checkpoint.record import read_saved
from jax_trainer.checkpoint.restore import read_named, read_verified, stored_in
from jax_trainer.config import as_data
from jax_trainer.config.settings import SettingsError
from jax_trainer.core import TrainState, model_params
from jax_trainer.diagnostics.suggestions import checks_keywords
from jax_trainer.engine.costs import parse_bytes
from jax_trainer.models.pretrained.files import CONFIG, INDEX, WEIGHTS, PretrainedError, write_json, write_tensors
from jax_trainer.models.pretrained.mapping import MappingConfig, MappingLike, known_mappings, read_mapping
from jax_trainer.models.pretrained.matching import Matcher, Transfer
from jax_trainer.tools.pretrained.configs import hf_config
from jax_trainer.tools.pretrained.loading import fields_of, is_float, named_leaves
from jax_trainer.trainer import TrainerModule
from jax_trainer.trainer.experiment import rebuilt
from jax_trainer.trainer.run_folder import Which, stored_checkpoint

Arrays = tuple[dict[str, Spec], Callable[[str], np.ndarray]]  # all arrays, and a function that reads one
_AVERAGED = "extra.ema."


@checks_keywords
def export_pretrained(
    source: Any,
    path: str | Path,
    mapping: MappingLike | None = None,
    *,
    config: Any = None,
    which: Which = "best",
    dtype: str | None = None,
    shard_size: int | str = "5GB",
) -> Path:
    """Writes the weights of a model as safetensors files, with a `config.json`; returns the folder.

    Averaged weights (`ema`) are written if there are any, and adapters of LoRA are merged.

    Args:
        source: a run folder or one of its checkpoints; a `TrainerModule` (its current weights); a `TrainState`; or an
            nnx module.
        path: the folder to write, which must not have a model yet.
        mapping: see `load_pretrained`; None: the known mapping for the model's configuration.
        config: the model's configuration, for a `TrainState`.
        which: of a run folder: the "best" checkpoint, the "latest", or that of a step.
        dtype: of the floats, such as "bfloat16"; None: as they are.
        shard_size: largest size of a file, in bytes or as text ("5GB").
    """
    (specs, read), own = _arrays(source, which)
    config = own if config is None else config
    name, rows = mapping_for(config) if mapping is None else read_mapping(mapping)
    matcher = Matcher(name, rows, config)
    transfers = matcher.reverse(specs)
    content = hf_config(config, rows, specs) if config is not None and rows.rows else None
    folder = new_folder(Path(path), (WEIGHTS, INDEX, CONFIG))
    tensors = dict(_tensors(transfers, specs, matcher, dtype))
    values = _values(transfers, read, matcher, tensors)
    sizes = {tensor: spec.nbytes for tensor, spec in tensors.items()}
    write_tensors(folder, values, sizes, parse_bytes(shard_size) if isinstance(shard_size, str) else shard_size)
    if content is not None:
        floats = [spec.dtype for spec in tensors.values() if jnp.issubdtype(spec.dtype, jnp.floating)]
        write_json(folder / CONFIG, {**content, "torch_dtype": floats[0]})
    return folder


def _arrays(source: Any, which: Which) -> tuple[Arrays, Any]:
    """The arrays of `source`, and its model configuration, if it has one."""
    if isinstance(source, str | Path):
        run, place = stored_checkpoint(source, which)
        if not read_saved(place)[1].frozen:
            return _stored(place), run.model
        source = trainer_of(source, which)
    if isinstance(source, TrainerModule):
        return _of_state(source.state), source.model_config
    if isinstance(source, TrainState):
        return _of_state(source), None
    handle = handle_of(source)
    if not handle.has_weights:
        raise TypeError(f"{handle.name} has no weights to write. Pass a module with its weights, a state, or a run.")
    return _in_memory(fields_of(*handle.initial_weights())), getattr(source, "config", None)


def _of_state(state: TrainState) -> Arrays:
    return _in_memory(fields_of(model_params(state), state.model_state))


def _in_memory(weights: dict[str, Any]) -> Arrays:
    leaves = named_leaves(weights)
    if distributed := [name for name, leaf in leaves.items() if not getattr(leaf, "is_fully_addressable", True)]:
        raise PretrainedError(
            f"{distributed[0]} is sharded over several processes. Export the run folder in one process."
        )
    return _floats({name: Spec.of(leaf) for name, leaf in leaves.items()}), lambda name: np.asarray(leaves[name])


def trainer_of(path: str | Path, which: Which) -> TrainerModule:
    """The trainer of a LoRA run with a checkpoint, whose adapters need the base: the weights of `init_from`."""
    try:
        trainer, step = rebuilt(TrainerModule, Path(path), ())
        trainer.load_model(which=which if step is None else step)
    except (SettingsError, OSError, TypeError) as error:
        raise PretrainedError(
            f"{path} has the adapters of LoRA only, and their base cannot be loaded: {error} Pass the trainer, which "
            "has both: `load_from_checkpoint` of its class."
        ) from error
    return trainer


def _stored(place: Path) -> Arrays:
    read_verified(place)
    _, record = read_saved(place)
    stored = stored_in(place, record)
    averaged = {name.replace(_AVERAGED, "params.", 1): name for name in stored if name.startswith(_AVERAGED)}
    specs = {name: spec for name, spec in stored.items() if name.startswith(("params.", "model_state."))}

    def read(name: str) -> np.ndarray:
        source = averaged.get(name, name)
        return read_named(place, record, {source: specs[name]})[source]

    return _floats(specs), read


def _floats(specs: dict[str, Spec]) -> dict[str, Spec]:
    return {name: spec for name, spec in specs.items() if is_float(spec)}


def mapping_for(config: Any) -> tuple[str, MappingConfig]:
    """The known mapping for a configuration of ours, which has its constants."""
    data = {} if config is None else as_data(config)
    own = {
        name: one for name, one in known_mappings().items() if one.model == data.get("class_name") and one.model_types
    }
    for name, one in own.items():
        if all(data.get(key) == value for key, value in one.constants.items()):
            return name, one
    what = "This model has no configuration of ours" if config is None else f"No mapping is known for {config!r}"
    needed = "; ".join(f"{name} has {one.constants}" for name, one in own.items())
    raise PretrainedError(f"{what}. Pass `mapping`, a YAML file.{f' Known: {needed}.' if needed else ''}")


def new_folder(folder: Path, files: Sequence[str]) -> Path:
    """The folder, which must not have these files yet."""
    if there := [name for name in files if (folder / name).exists()]:
        raise FileExistsError(f"{folder} already has a {there[0]}. Choose another folder, or delete it.")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _tensors(
    transfers: list[Transfer], specs: Mapping[str, Spec], matcher: Matcher, dtype: str | None
) -> Iterator[tuple[str, Spec]]:
    """The specs of all tensors, without reading the arrays."""
    for transfer in transfers:
        # a view of nothing: no memory for the zeros
        empty = lambda name: np.broadcast_to(np.zeros((), jnp.dtype(dtype or specs[name].dtype)), specs[name].shape)
        for name, value in transfer.to_tensors(empty):
            yield name, Spec(str(value.dtype), value.shape)
        if (counter := matcher.beside(transfer)) is not None:
            yield counter, Spec("int64", ())


def _values(
    transfers: list[Transfer], read: Callable[[str], np.ndarray], matcher: Matcher, tensors: Mapping[str, Spec]
) -> Iterator[tuple[str, np.ndarray]]:
    for transfer in transfers:
        for name, value in transfer.to_tensors(read):
            yield name, value.astype(jnp.dtype(tensors[name].dtype))
        if (counter := matcher.beside(transfer)) is not None:
            yield counter, np.zeros((), np.int64)
