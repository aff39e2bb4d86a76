"""`load_pretrained` reads the tensors of a pretrained model into a model, a trainer or a state, one at a time.

`import_pretrained` writes them as a run folder, from which trainings start.
"""

from collections.abc import Callable, Container, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from compoconf import Registry

from jax_trainer.adapters import handle_of
from jax_trainer.checkpoint.arrays import Spec
from jax_trainer.checkpoint.folder import CONFIG, RECORD, RunFolder
from jax_trainer.checkpoint.record import read_saved
from jax_trainer.checkpoint.restore import stored_in
from jax_trainer.checkpoint.store import CheckpointStore
from jax_trainer.config.settings import config_of
from jax_trainer.core import Batch, PyTree, TrainState, copy_state, unadapted, with_base
from jax_trainer.core.program import ProgramInfo
from jax_trainer.core.random import key_data
from jax_trainer.datasets import Position, SupervisedBatch
from jax_trainer.diagnostics.files import label
from jax_trainer.diagnostics.leaves import leaf_path
from jax_trainer.diagnostics.suggestions import checks_keywords
from jax_trainer.models.pretrained.files import LOG, PretrainedError, TensorFiles, copy_text_files
from jax_trainer.models.pretrained.mapping import MappingConfig, MappingLike, known_mappings
from jax_trainer.models.pretrained.matching import Match, Matcher
from jax_trainer.tools.pretrained.configs import example_of, hf_config, model_config, select_mapping
from jax_trainer.trainer import TrainerModule
from jax_trainer.trainer.base import BaseTrainer
from jax_trainer.trainer.experiment import configs_of, stored_files, trainer_class
from jax_trainer.trainer.run_folder import frozen_at_random, stored_checkpoint

_EXAMPLES, _TOKENS = 8, 1024  # random ones; a longer context would take long to check
Weights = dict[str, PyTree]  # `params` and `model_state`
_MOST_NAMED = 5  # tensors in a message


@checks_keywords
def load_pretrained(
    target: Any,
    path: str | Path,
    mapping: MappingLike | None = None,
    *,
    example: Batch = None,
    partial: bool = False,
    cast: bool = False,
) -> Any:
    """Loads the weights of a pretrained model, from safetensors files.

    Each tensor is read alone, and put onto the devices where its array is: with a mesh, each device receives its shard.
    Everything is checked before the first tensor is read: an error lists all tensors and arrays without a counterpart.

    Args:
        target: a `TrainerModule` (its state is set, and training starts from it); a `TrainState` (a new one is
            returned); an nnx module (updated in place); or a configuration, or a model of any other kind, for which
            what its initialisation would return is returned, such as the variables of a linen module.
        path: a folder with safetensors files and `config.json`, or a safetensors file.
        mapping: the name of a known mapping, a YAML file, a dict, or a `MappingConfig`. None: by the `model_type` of
            `config.json`.
        example: an input of the model, if it is built here; only shapes and dtypes matter.
        partial: load the tensors that both have; all others are left unchanged, and logged.
        cast: also convert to a dtype that cannot represent every value, as from float32 to bfloat16.
    """
    files = TensorFiles.open(path)
    named = select_mapping(mapping, files.config, files.path)
    options: dict[str, Any] = {"partial": partial, "cast": cast}
    if isinstance(target, TrainerModule | TrainState):
        is_trainer = isinstance(target, TrainerModule)
        state, info = (target.state, target.program.info) if is_trainer else (target, ProgramInfo())
        base = unadapted(state)
        options["problem_of"] = lambda names: frozen_at_random(names, state, info)
        config = target.model_config if is_trainer else None
        loaded = read_weights(files, *named, config, fields_of(base.params, base.model_state), **options)
        if base is not state:
            state = with_base(state, base.replace(**loaded))
        else:  # averaged weights start from the loaded ones
            averaged = {"ema": copy_state(loaded["params"])} if "ema" in state.extra else {}
            state = state.replace(**loaded, extra={**state.extra, **averaged})
        if not is_trainer:
            return state
        target.state = state
        return target
    handle = handle_of(target)
    config = getattr(target, "config", None) if handle.config is None else handle.config
    batch = example_of(named[1], files.config) if example is None else example
    weights = fields_of(*handle.initial_weights(batch))
    loaded = read_weights(files, *named, config, weights, **options)
    return handle.filled(loaded["params"], loaded["model_state"])


def read_weights(
    files: TensorFiles,
    name: str,
    mapping: MappingConfig,
    config: Any,
    weights: Weights,
    *,
    partial: bool = False,
    cast: bool = False,
    dtype: Any = None,
    problem_of: Callable[[Container[str]], str] = lambda names: "",
) -> Weights:
    """`weights`, arrays or shapes, with the tensors of the files.

    Args:
        files: the tensors of a pretrained model.
        name: of the mapping, in messages.
        mapping: which tensor is which array.
        config: our configuration of the model; None if it has none.
        weights: arrays, or shapes.
        partial: see `load_pretrained`.
        cast: see `load_pretrained`.
        dtype: of floats, instead of their own.
        problem_of: what is wrong with loading only the arrays of these names; "" if nothing is.
    """
    leaves = named_leaves(weights)
    wanted = {name: Spec.of(leaf) for name, leaf in leaves.items()}
    floats = {name: spec for name, spec in wanted.items() if is_float(spec)}
    found = Matcher(name, mapping, config).match(files.specs, floats)
    found.check(files.path, name, partial=partial)
    if problem := problem_of(found.sources):
        raise PretrainedError(f"{files.path} {problem}")
    if not cast and dtype is None:
        _check_dtypes(files, found, wanted)
    bare = [one for one, leaf in leaves.items() if isinstance(leaf, jax.ShapeDtypeStruct)]
    if bare := [one for one in bare if one not in found.sources]:  # these keep their values, so they must have some
        raise PretrainedError(
            f"{bare[0]} has no tensor in {files.path}, and the model has no weights yet. Initialise the model first, "
            "and pass it, or a trainer."
        )
    for tensor, other in found.tied.items():
        if not np.array_equal(files.read(tensor), files.read(other)):
            raise PretrainedError(
                f"{files.path}: {tensor} and {other} differ, but this model has one array for both. Use a model "
                "with an output head of its own: `tied: false`."
            )
    loaded, odd = dict(leaves), dict[str, int]()

    def read(tensor: str) -> np.ndarray:
        value = files.read(tensor)
        if count := int(np.count_nonzero(~np.isfinite(value))):
            odd[tensor] = count
        return value

    for transfer in found.transfers:
        for array, value in transfer.to_arrays(read, wanted):
            loaded[array] = _placed(value, leaves[array], leaves[array].dtype if dtype is None else dtype)
            del value
    if odd:
        names = ", ".join(f"{label(one)} ({count})" for one, count in islice(odd.items(), _MOST_NAMED))
        more = f" and {len(odd) - _MOST_NAMED} more" if len(odd) > _MOST_NAMED else ""
        LOG.warning(f"{files.path} has weights that are NaN or infinite, which are loaded: {names}{more}.")
    return jax.tree.unflatten(jax.tree.structure(weights), loaded.values())


def _check_dtypes(files: TensorFiles, found: Match, wanted: Mapping[str, Spec]) -> None:
    specs = files.specs
    pairs = [(one, two) for transfer in found.transfers for one in transfer.tensors for two in transfer.arrays]
    # whether every value of the first dtype is one of the second
    is_exact = lambda source, target: jnp.promote_types(source, target) == jnp.dtype(target)
    lossy = [(one, two) for one, two in pairs if not is_exact(specs[one].dtype, wanted[two].dtype)]
    if lossy:
        (tensor, array), more = lossy[0], f" and {len(lossy) - 1} more" if len(lossy) > 1 else ""
        raise PretrainedError(
            f"{tensor} is {specs[tensor].dtype} and {array} is {wanted[array].dtype}, which cannot represent all "
            f"of its values{more}. Pass `cast=True` to round them."
        )


def fields_of(params: PyTree, model_state: PyTree) -> Weights:
    """Weights as the fields of a state."""
    return {"params": params, "model_state": model_state}


def named_leaves(weights: PyTree) -> dict[str, Any]:
    """The leaves of a tree by their dotted path, such as `params.blocks.0.norm.scale`."""
    return {leaf_path(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(weights)}


def _placed(value: np.ndarray, leaf: Any, dtype: Any) -> jax.Array:
    """`value` on the devices of `leaf`: of a sharded array, each device receives only its part."""
    is_committed = not isinstance(leaf, jax.Array) or leaf.committed
    sharding = getattr(leaf, "sharding", None) if is_committed else None
    if sharding is None:
        return jnp.array(value, dtype)
    places = sharding.addressable_devices_indices_map(value.shape)
    # waits, so that the host has one part at a time besides the tensor
    send = lambda part, device: jax.block_until_ready(jax.device_put(np.array(part, dtype, order="C"), device))
    parts = [send(value[index], device) for device, index in places.items()]
    return jax.make_array_from_single_device_arrays(value.shape, sharding, parts)


def is_float(spec: Spec) -> bool:
    """Whether an array is of floats: others, such as keys and counters, are no weights."""
    return not spec.dtype.startswith("key<") and bool(jnp.issubdtype(spec.dtype, jnp.floating))


# importing


class Imported(NamedTuple):
    """An imported model.

    Args:
        folder: the run folder.
        mapping: name of the mapping.
        config: our configuration of the model.
        parameters: number of parameters.
    """

    folder: RunFolder
    mapping: str
    config: Any
    parameters: int


@checks_keywords
def import_pretrained(
    path: str | Path,
    output: str | Path,
    mapping: MappingLike | None = None,
    *,
    overrides: Sequence[str] = (),
    dtype: str = "float32",
    example: Batch = None,
) -> Imported:
    """Writes a pretrained model as a run folder, with its configuration and one checkpoint, at step 0.

    `TrainerModule.load_weights`, `load_from_checkpoint` and `trainer.init_from` in a file read it.

    Args:
        path: a folder with safetensors files and `config.json`, or a safetensors file.
        output: the folder to write, which must be new or empty.
        mapping: see `load_pretrained`.
        overrides: of our configuration, such as `model.dropout=0.1`.
        dtype: of the floats in the checkpoint.
        example: an input of the model, if the mapping has none and the model needs one.
    """
    files = TensorFiles.open(path)
    name, rows = select_mapping(mapping, files.config, files.path)
    config = model_config(files.config or {}, name, rows, overrides)
    if (layers := getattr(config, "layers", 0)) > len(files.files):  # before a model of so many is built
        raise PretrainedError(
            f"{files.path} has {len(files.files)} tensors, and `layers` is {layers:,}: it lacks some."
        )
    handle = handle_of(config)
    batch = example_of(rows, files.config) if example is None else example
    weights = fields_of(*handle.initial_weights(batch))
    loaded = read_weights(files, name, rows, config, weights, dtype=jnp.dtype(dtype))
    state = TrainState(step=jnp.zeros((), jnp.int32), opt_state={}, rng=key_data(jax.random.key(0)), extra={}, **loaded)
    output = Path(output).absolute()
    folder = RunFolder.create(output.parent, output.name, "")
    kind = Registry.get_class(BaseTrainer, rows.trainer)  # type: ignore[arg-type]  # compoconf annotates an instance
    configs = configs_of(kind, config_of(kind)(), config, None, None, {})
    CheckpointStore(folder.checkpoints).save(state, Position(), {})
    copy_text_files(files.path, folder.path)
    for file, text in stored_files(configs)["files"].items():
        folder.write_text(file, text)
    parameters = sum(leaf.size for leaf in jax.tree.leaves(loaded["params"]))
    return Imported(folder, name, config, parameters)


def imported_parts(path: str | Path) -> dict[str, Any]:
    """What the trainer of a folder of `import_pretrained` lacks: random inputs, and an optimizer; {} for other runs.

    Args:
        path: a run folder, or one of its checkpoints.
    """
    path = Path(path)
    folder = path if (path / CONFIG).is_file() else path.parent.parent
    if (folder / RECORD).exists() or not (folder / CONFIG).is_file():
        return {}
    run, place = stored_checkpoint(path, "latest")
    model: Any = run.model
    name = getattr(model, "class_name", None)
    rows = next((one for one in known_mappings().values() if one.model == name), None)
    is_base = trainer_class(run).batch_to_input is BaseTrainer.batch_to_input  # which has no inputs
    if run.dataset is not None or rows is None or is_base:
        return {}
    rng = np.random.default_rng(0)
    if hasattr(model, "vocab_size"):
        inputs = rng.integers(0, model.vocab_size, (_EXAMPLES, min(model.context, _TOKENS)), np.int32)
    else:
        content = hf_config(model, rows, stored_in(place, read_saved(place)[1]))
        inputs = rng.normal(size=(_EXAMPLES, *example_of(rows, content).shape[1:])).astype(np.float32)
    targets = np.zeros(inputs.shape[: inputs.ndim if inputs.dtype == np.int32 else 1], np.int32)
    return {"exmp_input": SupervisedBatch.of(inputs, targets), "optimizer": optax.set_to_zero()}
