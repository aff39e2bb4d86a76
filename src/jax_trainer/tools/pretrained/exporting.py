"""`export_pretrained` writes weights as transformers loads them, `export_adapter` the adapters of LoRA as peft does."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_trainer.adapters import handle_of
from jax_trainer.checkpoint.arrays import Spec
from jax_trainer.checkpoint.record import read_saved
from jax_trainer.checkpoint.restore import read_named, read_verified, stored_in
from jax_trainer.config import as_data
from jax_trainer.config.settings import SettingsError
from jax_trainer.core import FrozenBase, TrainState, model_params
from jax_trainer.core.lora_rewrite import Adapter, KernelSpec
from jax_trainer.core.state import eval_params
from jax_trainer.diagnostics.optional_import import from_extra
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
ADAPTER_CONFIG, ADAPTER = "adapter_config.json", "adapter_model.safetensors"
_PREFIX, _WEIGHT = "base_model.model.", ".weight"


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
    # a view of nothing: no memory for the zeros
    empty = lambda name: np.broadcast_to(np.zeros((), jnp.dtype(dtype or specs[name].dtype)), specs[name].shape)
    dtypes = {tensor: value.dtype for tensor, value in _tensors(transfers, matcher, empty)}
    sizes = {tensor: value.nbytes for tensor, value in _tensors(transfers, matcher, empty)}
    values = ((tensor, value.astype(dtypes[tensor])) for tensor, value in _tensors(transfers, matcher, read))
    write_tensors(folder, values, sizes, parse_bytes(shard_size) if isinstance(shard_size, str) else shard_size)
    if content is not None:
        floats = [str(one) for one in dtypes.values() if jnp.issubdtype(one, jnp.floating)]
        write_json(folder / CONFIG, {**content, "torch_dtype": floats[0]})
    return folder


def _arrays(source: Any, which: Which) -> tuple[Arrays, Any]:
    """The arrays of `source`, and its model configuration, if it has one."""
    if isinstance(source, str | Path):
        run, place = stored_checkpoint(source, which)
        if not read_saved(place)[1].frozen:
            return _stored(place), run.model
        source = trainer_of(source, which)
    state, config = (source.state, source.model_config) if isinstance(source, TrainerModule) else (source, None)
    if isinstance(state, TrainState):
        leaves = named_leaves(fields_of(model_params(state), state.model_state))
    else:
        handle, config = handle_of(source), getattr(source, "config", None)
        if not handle.has_weights:
            raise TypeError(f"{handle.name} has no weights to write. Pass a module with its weights, a state, a run.")
        leaves = named_leaves(fields_of(*handle.initial_weights()))
    if distributed := [name for name, leaf in leaves.items() if not getattr(leaf, "is_fully_addressable", True)]:
        raise PretrainedError(
            f"{distributed[0]} is sharded over several processes. Export the run folder in one process."
        )
    specs = {name: Spec.of(leaf) for name, leaf in leaves.items()}
    return ({name: spec for name, spec in specs.items() if is_float(spec)}, lambda one: np.asarray(leaves[one])), config


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

    return {name: spec for name, spec in specs.items() if is_float(spec)}, read


def mapping_for(config: Any) -> tuple[str, MappingConfig]:
    """The known mapping for a configuration of ours, which has its constants."""
    data = {} if config is None else as_data(config)
    known = known_mappings().items()
    own = {name: one for name, one in known if one.model == data.get("class_name") and one.model_types}
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
    transfers: list[Transfer], matcher: Matcher, read: Callable[[str], np.ndarray]
) -> Iterator[tuple[str, np.ndarray]]:
    """All tensors of the files, from arrays that are read one by one."""
    for transfer in transfers:
        yield from transfer.to_tensors(read)
        if (counter := matcher.beside(transfer)) is not None:
            yield counter, np.zeros((), np.int64)


# adapters


@checks_keywords
def export_adapter(
    source: Any,
    path: str | Path,
    mapping: MappingLike | None = None,
    *,
    config: Any = None,
    which: Which = "best",
    base_model: str | None = None,
) -> Path:
    """Writes the adapters of a LoRA training in the format of peft; returns the folder.

    `peft.PeftModel.from_pretrained(model, folder)` loads them over the model of transformers that has the base. For
    merged weights see `export_pretrained`.

    Args:
        source: a run folder or one of its checkpoints; a `TrainerModule` (its current weights); or a `TrainState`.
        path: the folder to write, which must not have an adapter yet.
        mapping: see `load_pretrained`; None: the known mapping for the model's configuration.
        config: the model's configuration, for a `TrainState`.
        which: of a run folder: the "best" checkpoint, the "latest", or that of a step.
        base_model: name or folder of the base, which is written to `adapter_config.json`.
    """
    with from_extra("hf"):
        from safetensors.numpy import save_file

    source = trainer_of(source, which) if isinstance(source, str | Path) else source
    state, own = (source.state, source.model_config) if isinstance(source, TrainerModule) else (source, None)
    if not isinstance(state, TrainState) or not isinstance(state.frozen, FrozenBase):
        raise PretrainedError(
            f"{type(source).__name__} has no adapters: it was not trained with `lora`. Use `export_pretrained`."
        )
    config = own if config is None else config
    name, rows = mapping_for(config) if mapping is None else read_mapping(mapping)
    shapes = jax.eval_shape(lambda: fields_of(state.frozen.params, state.model_state))
    specs = {key: Spec.of(leaf) for key, leaf in named_leaves(shapes).items()}
    transfers = Matcher(name, rows, config).reverse({key: spec for key, spec in specs.items() if is_float(spec)})
    adapters = jax.device_get(eval_params(state.params, state.extra))
    kernels = {one.path: one for one in state.frozen.kernels}
    tensors = list(_adapted(transfers, kernels, adapters, specs))
    trained = dict(_trained(transfers, {path: one for path, one in adapters.items() if path not in kernels}))
    folder = new_folder(Path(path), (ADAPTER_CONFIG, ADAPTER))
    arrays = {name: array for one in tensors for name, array in one.arrays()}
    arrays |= {f"{_PREFIX}{tensor}": array for tensor, array in trained.items()}
    save_file(arrays, folder / ADAPTER, {"format": "pt"})
    saved = {"modules_to_save": sorted({tensor.rpartition(".")[0] for tensor in trained})} if trained else {}
    write_json(folder / ADAPTER_CONFIG, {**_peft_config(tensors, state.frozen, base_model), **saved})
    return folder


class Factors(NamedTuple):
    """The adapter of a tensor of the files: `b @ a` is added to it; transposed, if it is [inputs, outputs].

    `magnitude` [outputs] is that of DoRA.
    """

    tensor: str
    a: np.ndarray  # [rank, inputs]
    b: np.ndarray  # [outputs, rank]
    scale: float
    is_transposed: bool
    magnitude: np.ndarray | None = None

    @property
    def module(self) -> str:
        """The module of transformers."""
        return self.tensor.removesuffix(_WEIGHT)

    def arrays(self) -> Iterator[tuple[str, np.ndarray]]:
        """The arrays as peft names them."""
        yield f"{_PREFIX}{self.module}.lora_A.weight", np.ascontiguousarray(self.a)
        yield f"{_PREFIX}{self.module}.lora_B.weight", np.ascontiguousarray(self.b)
        if self.magnitude is not None:
            yield f"{_PREFIX}{self.module}.lora_magnitude_vector", np.ascontiguousarray(self.magnitude)


def _adapted(
    transfers: list[Transfer],
    kernels: Mapping[str, KernelSpec],
    adapters: Mapping[str, Adapter],
    specs: Mapping[str, Spec],
) -> Iterator[Factors]:
    for transfer in transfers:
        own = [kernels[one] for name in transfer.arrays if (one := name.removeprefix("params.")) in kernels]
        if not own:
            continue
        deltas = {f"params.{one.path}": np.asarray(one.delta(adapters[one.path]), np.float32) for one in own}
        deltas = {name: deltas.get(name, np.zeros(specs[name].shape, np.float32)) for name in transfer.arrays}
        magnitudes = _magnitudes(transfer, own, adapters)
        for tensor, delta in transfer.to_tensors(deltas.__getitem__):
            if delta.ndim != 2 or not tensor.endswith(_WEIGHT) or "embed" in tensor:
                raise PretrainedError(
                    f"{own[0].path} is {tensor} {list(delta.shape)} in transformers, not the weight of a linear layer: "
                    "peft has another format for it. Export merged weights: `export_pretrained`."
                )
            found = _same(tensor, delta, own, adapters) or _factorised(tensor, delta, own)
            if tensor in magnitudes:
                columns = magnitudes[tensor] if found.is_transposed else magnitudes[tensor].T  # [inputs, outputs]
                found = found._replace(magnitude=columns[0])
            yield found


def _trained(transfers: list[Transfer], trained: Mapping[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors of the files for the parameters that were trained themselves."""
    for transfer in transfers:
        own = [name for name in transfer.arrays if name.removeprefix("params.") in trained]
        if own and len(own) < len(transfer.arrays):
            raise PretrainedError(
                f"{own[0]} is one tensor with a frozen parameter in transformers. Export merged weights: "
                "`export_pretrained`."
            )
        if own:
            read = lambda name: np.asarray(trained[name.removeprefix("params.")], np.float32)
            yield from ((tensor, np.ascontiguousarray(array)) for tensor, array in transfer.to_tensors(read))


def _magnitudes(transfer: Transfer, own: list[KernelSpec], adapters: Mapping[str, Adapter]) -> Mapping[str, np.ndarray]:
    """The tensors of the files with the magnitude of DoRA of each output, for each of its inputs."""
    if adapters[own[0].path].magnitude is None:
        return {}
    if len(own) < len(transfer.arrays):
        others = [name for name in transfer.arrays if name.removeprefix("params.") not in {one.path for one in own}]
        raise PretrainedError(
            f"{own[0].path} is one tensor with {others[0]} in transformers, which has no magnitude. Match both with "
            "`lora.match`, or export merged weights: `export_pretrained`."
        )
    spread = lambda one: one.spread(adapters[one.path].magnitude, tuple(range(len(one.shape))))
    full = {f"params.{one.path}": np.broadcast_to(np.asarray(spread(one), np.float32), one.shape) for one in own}
    return dict(transfer.to_tensors(full.__getitem__))


def _same(tensor: str, delta: np.ndarray, own: list[KernelSpec], adapters: Mapping[str, Adapter]) -> Factors | None:
    """The factors as they were trained, if the tensor is the parameter or its transpose."""
    [spec, *others] = own
    a, b = (np.asarray(one, np.float32).T for one in adapters[spec.path][:2])
    if others or spec.stacked or a.ndim != 2:
        return None
    for is_transposed in (False, True):
        product = spec.scale * ((b @ a).T if is_transposed else b @ a)
        if product.shape == delta.shape and np.allclose(product, delta, rtol=1e-4, atol=1e-6 * np.abs(delta).max()):
            return Factors(tensor, a, b, spec.scale, is_transposed)
    return None


def _factorised(tensor: str, delta: np.ndarray, own: list[KernelSpec]) -> Factors:
    """New factors with the same product, for a tensor that is several parameters, or a part of one."""
    rank, inputs = sum(spec.rank for spec in own), own[0].size(own[0].inputs)
    is_transposed = delta.shape[1] != inputs
    left, values, right = np.linalg.svd(delta.T if is_transposed else delta, full_matrices=False)
    rank = min(rank, len(values))
    if values[rank:].max(initial=0.0) > 1e-5 * values.max(initial=0.0):
        raise PretrainedError(f"The adapter of {own[0].path} has no adapter of rank {rank} for {tensor}.")
    roots = np.sqrt(values[:rank])
    return Factors(tensor, (roots[:, None] * right[:rank]), left[:, :rank] * roots, 1.0, is_transposed)


def _peft_config(tensors: list[Factors], frozen: FrozenBase, base_model: str | None) -> dict[str, Any]:
    ranks = {one.module: len(one.a) for one in tensors}
    alphas = {one.module: one.scale * len(one.a) for one in tensors}
    rank, alpha = (Counter(of.values()).most_common(1)[0][0] for of in (ranks, alphas))
    return {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": base_model,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": frozen.lora.dropout,
        "target_modules": sorted(ranks),
        "rank_pattern": {name: one for name, one in ranks.items() if one != rank},
        "alpha_pattern": {name: one for name, one in alphas.items() if one != alpha},
        "use_dora": frozen.lora.use_dora,
        "fan_in_fan_out": tensors[0].is_transposed,
        "bias": "none",
    }
