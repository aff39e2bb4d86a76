"""`load_pretrained`: reads the tensors of a pretrained model into a model, a trainer or a state, one at a time."""

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_trainer.adapters import handle_of
from jax_trainer.checkpoint.arrays import Spec
from jax_trainer.core import Batch, PyTree, TrainState, copy_state, unadapted, with_base
from jax_trainer.core.program import ProgramInfo
from jax_trainer.diagnostics.files import label
from jax_trainer.diagnostics.leaves import leaf_path
from jax_trainer.diagnostics.suggestions import checks_keywords
from jax_trainer.models.pretrained.files import LOG, PretrainedError, TensorFiles
from jax_trainer.models.pretrained.mapping import MappingConfig, MappingLike
from jax_trainer.models.pretrained.matching import Match, Matcher
from jax_trainer.tools.pretrained.configs import example_of, select_mapping
from jax_trainer.trainer import TrainerModule
from jax_trainer.trainer.run_folder import frozen_at_random

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
    if isinstance(target, TrainerModule):
        source = Source(files, *named, target.model_config)
        target.state = _loaded_state(target.state, source, options, target.program.info)
        return target
    if isinstance(target, TrainState):
        return _loaded_state(target, Source(files, *named, None), options, ProgramInfo())
    handle = handle_of(target)
    config = getattr(target, "config", None) if handle.config is None else handle.config
    batch = example_of(named[1], files.config) if example is None else example
    weights = fields_of(*handle.initial_weights(batch))
    loaded = Source(files, *named, config).load(weights, **options)
    return handle.filled(loaded["params"], loaded["model_state"])


def _loaded_state(state: TrainState, source: "Source", options: Mapping[str, Any], info: ProgramInfo) -> TrainState:
    base = unadapted(state)
    problem_of = lambda names: frozen_at_random(names, state, info)
    loaded = source.load(fields_of(base.params, base.model_state), problem_of=problem_of, **options)
    if base is not state:
        return with_base(state, base.replace(**loaded))
    # averaged weights start from the loaded ones
    averaged = {"ema": copy_state(loaded["params"])} if "ema" in state.extra else {}
    return state.replace(**loaded, extra={**state.extra, **averaged})


@dataclass(frozen=True)
class Source:
    """The files of a pretrained model, and how a model has their weights.

    Args:
        files: the tensors.
        name: of the mapping, in messages.
        mapping: which tensor is which array.
        config: our configuration of the model; None if it has none.
    """

    files: TensorFiles
    name: str
    mapping: MappingConfig
    config: Any

    def load(
        self,
        weights: Weights,
        *,
        partial: bool = False,
        cast: bool = False,
        dtype: Any = None,
        problem_of: Callable[[Container[str]], str] = lambda names: "",
    ) -> Weights:
        """`weights`, arrays or shapes, with the tensors of the files.

        Args:
            dtype: of floats, instead of their own.
            problem_of: what is wrong with loading only the arrays of these names; "" if nothing is.
        """
        leaves = named_leaves(weights)
        wanted = {name: Spec.of(leaf) for name, leaf in leaves.items()}
        floats = {name: spec for name, spec in wanted.items() if is_float(spec)}
        found = Matcher(self.name, self.mapping, self.config).match(self.files.specs, floats)
        found.check(self.files.path, self.name, partial=partial)
        if problem := problem_of(found.sources):
            raise PretrainedError(f"{self.files.path} {problem}")
        if not cast and dtype is None:
            self._check_dtypes(found, wanted)
        self._check_shapes_only(found, leaves)
        for name, other in found.tied.items():
            if not np.array_equal(self.files.read(name), self.files.read(other)):
                raise PretrainedError(
                    f"{self.files.path}: {name} and {other} differ, but this model has one array for both. Use a model "
                    "with an output head of its own: `tied: false`."
                )
        loaded, odd = dict(leaves), dict[str, int]()

        def read(name: str) -> np.ndarray:
            value = self.files.read(name)
            if count := int(np.count_nonzero(~np.isfinite(value))):
                odd[name] = count
            return value

        for transfer in found.transfers:
            for name, value in transfer.to_arrays(read, wanted):
                loaded[name] = _placed(value, leaves[name], leaves[name].dtype if dtype is None else dtype)
                del value
        if odd:
            names = ", ".join(f"{label(name)} ({count})" for name, count in islice(odd.items(), _MOST_NAMED))
            more = f" and {len(odd) - _MOST_NAMED} more" if len(odd) > _MOST_NAMED else ""
            LOG.warning(f"{self.files.path} has weights that are NaN or infinite, which are loaded: {names}{more}.")
        return jax.tree.unflatten(jax.tree.structure(weights), loaded.values())

    def _check_dtypes(self, found: Match, wanted: Mapping[str, Spec]) -> None:
        specs = self.files.specs
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

    def _check_shapes_only(self, found: Match, leaves: Mapping[str, Any]) -> None:
        """Arrays that keep their values must have some."""
        kept = {name: leaf for name, leaf in leaves.items() if name not in found.sources}
        bare = [name for name, leaf in kept.items() if isinstance(leaf, jax.ShapeDtypeStruct)]
        if bare:
            raise PretrainedError(
                f"{bare[0]} has no tensor in {self.files.path}, and the model has no weights yet. Initialise the model "
                "first, and pass it, or a trainer."
            )


def fields_of(params: PyTree, model_state: PyTree) -> Weights:
    """Weights as the fields of a state."""
    return {"params": params, "model_state": model_state}


def named_leaves(weights: Weights) -> dict[str, Any]:
    """The leaves of weights by their dotted path, such as `params.blocks.0.norm.scale`."""
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
