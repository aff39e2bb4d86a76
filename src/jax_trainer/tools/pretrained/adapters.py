"""`export_adapter`: writes the adapters of LoRA as peft reads them, for the matching model of transformers."""

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jax_trainer.checkpoint.arrays import Spec
from jax_trainer.core import FrozenBase, TrainState
from jax_trainer.core.lora_rewrite import Adapter, KernelSpec
from jax_trainer.core.state import eval_params
from jax_trainer.diagnostics.optional_import import from_extra
from jax_trainer.diagnostics.suggestions import checks_keywords
from jax_trainer.models.pretrained.files import PretrainedError, write_json
from jax_trainer.models.pretrained.mapping import MappingLike, read_mapping
from jax_trainer.models.pretrained.matching import Matcher, Transfer
from jax_trainer.tools.pretrained.exporting import mapping_for, new_folder, trainer_of
from jax_trainer.tools.pretrained.loading import fields_of, is_float, named_leaves
from jax_trainer.trainer import TrainerModule
from jax_trainer.trainer.run_folder import Which

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX, _WEIGHT = "base_model.model.", ".weight"


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
    folder = new_folder(Path(path), (CONFIG, WEIGHTS))
    arrays = {name: array for one in tensors for name, array in one.arrays()}
    arrays |= {f"{_PREFIX}{tensor}": array for tensor, array in trained.items()}
    save_file(arrays, folder / WEIGHTS, {"format": "pt"})
    saved = {"modules_to_save": sorted({tensor.rpartition(".")[0] for tensor in trained})} if trained else {}
    write_json(folder / CONFIG, {**_peft_config(tensors, state.frozen, base_model), **saved})
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
