"""A `Program` from a linen module and a loss."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, Unpack

import jax
import optax
from flax import linen as nn
from flax.linen.spmd import logical_to_mesh_axes
from jax.sharding import PartitionSpec

from jax_trainer.adapters.calls import ToInput, arguments, full_batch, mode_flags, sown_metrics, takes_optimizer
from jax_trainer.adapters.remat import linen_remat
from jax_trainer.core import (
    Batch,
    FlaxState,
    Precision,
    PredictFn,
    Program,
    PyTree,
    StepOptions,
    TrainState,
    make_program,
    stream,
    streams,
)
from jax_trainer.core.loss_scale import with_loss_scale
from jax_trainer.core.steps import Reported
from jax_trainer.diagnostics.leaves import leaf_path
from jax_trainer.diagnostics.returned import check_call, kinds_of
from jax_trainer.diagnostics.user_frame import attribute_to

SOWN = "intermediates"  # the collection of sown values


class LinenView(NamedTuple):
    """The `state` argument of a linen loss function."""

    apply_fn: Callable[..., Any]
    params: PyTree
    mutable_variables: PyTree
    rng: jax.Array
    collected: tuple[str, ...] = ()  # collections returned by training calls that are not state
    step: jax.Array | int = 0  # number of optimizer steps so far

    @property
    def batch_stats(self) -> PyTree:
        """The BatchNorm statistics; empty if the model has none."""
        return self.mutable_variables.get("batch_stats", {})

    def apply(
        self,
        params: PyTree,
        *inputs: Any,
        train: bool,
        rngs: tuple[str, ...] | Mapping[str, jax.Array] = ("dropout",),
        **kwargs: Any,
    ) -> tuple[Any, PyTree]:
        """Calls the model. Returns its output and its mutable collections after the call (unchanged if not training).

        If intermediates are logged, the collections include the sown values; return them from the loss. `rngs` are the
        names of random streams, or their keys. `train` is passed to the model's parameter `train` (or `training`,
        `is_training`, `deterministic`, `use_running_average`) unless `kwargs` sets it.
        """
        options = {**mode_flags(self.apply_fn, train=train), **kwargs}
        variables = {"params": params, **self.mutable_variables}
        keys = rngs if isinstance(rngs, Mapping) else streams(self.rng, *rngs)
        call = partial(self.apply_fn, variables, *inputs, rngs=keys, **options)
        mutable = [*self.mutable_variables, *self.collected]
        return call(mutable=mutable) if train else (call(), self.mutable_variables)


# (params, state, batch, rng, train) -> the loss, and (the changed collections or None, metrics); `state`: a `LinenView`
LinenLoss = Callable[..., tuple[jax.Array, tuple[PyTree | None, Mapping[str, Any]]]]


def linen_program(
    model: nn.Module,
    loss: LinenLoss,
    tx: optax.GradientTransformation,
    *,
    to_input: ToInput = full_batch,
    init_kwargs: Mapping[str, Any] | None = None,
    init_rngs: tuple[str, ...] = ("params", "dropout"),
    init_variables: Callable[[jax.Array, Batch], Mapping[str, PyTree]] | None = None,
    **options: Unpack[StepOptions],
) -> Program:
    """A program that trains `model`, initialised with an example batch.

    Args:
        loss: `loss(params, state, batch, rng, train) -> loss, (mutable, metrics)`.
        to_input: selects the inputs of the model from a batch; a tuple is several arguments.
        init_kwargs: further arguments of `model.init`, e.g. `{"train": True}`.
        init_rngs: names of the random streams of `model.init`; predictions get all but "params".
        init_variables: `(key, batch) -> variables`, instead of `model.init`.
        options: see `make_program`.
    """

    def first_call(key: jax.Array, batch: Batch) -> Mapping[str, PyTree]:
        options = {**mode_flags(model.init, train=False, only_required=True), **(init_kwargs or {})}
        return model.init(streams(key, *init_rngs), *arguments(to_input(batch)), **options)

    specs: dict[str, PartitionSpec] = {}

    def variables(key: jax.Array, batch: Batch) -> tuple[PyTree, PyTree]:
        boxed = dict(first_call(key, batch) if init_variables is None else _checked(init_variables(key, batch)))
        specs.update(_partition_specs(boxed.get("params", {})))
        return split_variables(boxed)

    names = tuple(name for name in init_rngs if name != "params")
    return _program(model.apply, variables, loss, tx, _predict_fn(model.apply, to_input, names), specs, options)


def is_batch_stat(path: str) -> bool:
    """Whether this is the path of a BatchNorm statistic in the collections of a linen model."""
    return path.startswith("batch_stats.") and path.endswith((".mean", ".var"))


def split_variables(boxed: Mapping[str, PyTree]) -> tuple[PyTree, PyTree]:
    """The parameters, and the collections that are state, of what `model.init` returns."""
    collections = nn.meta.unbox(dict(boxed))
    params = collections.pop("params", {})
    collections.pop(SOWN, None)  # sown by `init`
    return params, collections


def flax_state_program(
    state: FlaxState, loss: LinenLoss, *, to_input: ToInput = full_batch, **options: Unpack[StepOptions]
) -> Program:
    """A program that continues from a state of `TrainState.create`; the caller's arrays are not deleted.

    Args:
        to_input: selects the inputs of the model from a batch for predictions; a tuple is several arguments.
        options: see `make_program`.
    """
    specs, state = _partition_specs(state.params), nn.meta.unbox(state)

    def variables(key: jax.Array, batch: Batch) -> tuple[PyTree, PyTree]:
        return state.params, state.model_state

    predict_fn = _predict_fn(state.apply_fn, to_input, ("dropout",))
    program = _program(state.apply_fn, variables, loss, state.tx, predict_fn, specs, options)
    program = program.with_info(init_is_traced=False)
    scale = Precision.named(options.get("precision", Precision())).loss_scale

    def init(key: jax.Array, batch: Batch) -> TrainState:
        return with_loss_scale(state.plain(), scale)

    if options.get("lora") is not None:  # its own step and optimizer state are those of all parameters
        return program.with_info(initial_variables=variables)
    return program._replace(init=init).with_info(init_from_params=None, initial_variables=None)


def _program(
    apply_fn: Any, variables: Any, loss: LinenLoss, tx: Any, predict_fn: PredictFn, specs: Any, options: StepOptions
) -> Program:
    of_step: Any = {**options, "predict_fn": predict_fn, "per_optimizer": takes_optimizer(loss), "remat": None}
    program = make_program(variables, _loss_fn(apply_fn, loss, options), tx, **of_step)
    return program.with_info(partition_specs=lambda: specs, is_batch_stat=is_batch_stat)


def _partition_specs(params: PyTree) -> dict[str, PartitionSpec]:
    """The specs of parameters with `nn.with_partitioning`, by dotted path."""
    is_box = lambda leaf: isinstance(leaf, nn.meta.AxisMetadata)
    leaves = jax.tree_util.tree_leaves_with_path(params, is_leaf=is_box)
    specs = {leaf_path(path): _spec_of(leaf) for path, leaf in leaves if is_box(leaf)}
    return {path: spec for path, spec in specs.items() if spec is not None}


def _spec_of(box: Any) -> PartitionSpec | None:
    if not isinstance(box, nn.LogicallyPartitioned):
        return nn.get_partition_spec(box)
    # logical names have no meaning without rules
    rules = box.rules or nn.get_logical_axis_rules()
    return logical_to_mesh_axes(box.names, rules) if rules else None


def _checked(variables: Any) -> Mapping[str, PyTree]:
    if not isinstance(variables, Mapping) or "params" not in variables:
        found = ", ".join(map(str, variables)) if isinstance(variables, Mapping) else f"a {type(variables).__name__}"
        raise ValueError(
            f'`init_variables` must return the model\'s collections like `model.init`: a dict with "params"; it '
            f"has {found or 'nothing'}."
        )
    return variables


def _predict_fn(apply_fn: Callable[..., Any], to_input: ToInput, rngs: tuple[str, ...]) -> PredictFn:
    def predict_fn(params: PyTree, model_state: PyTree, batch: Batch, rng: jax.Array) -> PyTree:
        view = LinenView(apply_fn, params, model_state, stream(rng, "model"))
        return view.apply(params, *arguments(to_input(batch)), train=False, rngs=rngs)[0]

    return predict_fn


def _loss_fn(apply_fn: Callable[..., Any], loss: LinenLoss, options: StepOptions) -> Any:
    modes, name = options.get("intermediates", ()), getattr(loss, "__name__", "loss")
    check_call(loss, name, "params", "state", "batch", "rng", "train", offered=("optimizer",))
    train_apply_fn = linen_remat(apply_fn, options.get("remat"))

    def loss_fn(  # `chosen`: the name of an optimizer
        params: PyTree, model_state: PyTree, batch: Batch, rng: jax.Array, *, train: bool, step: Any, **chosen: str
    ) -> Reported:
        collected = (SOWN,) if modes and train and SOWN not in model_state else ()
        call = train_apply_fn if train else apply_fn
        view = LinenView(call, params, model_state, stream(rng, "model"), collected, step)
        match loss(params, view, batch, rng, train, **chosen):
            # collections are dicts; metrics in their place would be numbers
            case (value, (Mapping() | None as mutable, Mapping() as reported)) if all(
                isinstance(one, Mapping) for one in (mutable or {}).values()
            ):
                pass
            case other:
                raise TypeError(
                    f"`{name}` of a linen model must return `loss, (mutable, metrics)`, with the changed collections "
                    f"(or None) and a dict; it returned {kinds_of(other)}."
                )
        if train and "batch_stats" in model_state and "batch_stats" not in (mutable or {}):
            raise TypeError(
                f"`{name}` returned {kinds_of(mutable)} as the changed collections, without the model's "
                "batch_stats, which would never be updated. Return the collections that `apply` returns: "
                "`loss, (mutable, metrics)`; `state.mutable_variables` keeps them unchanged."
            )
        # collections that are not initial ones (sown intermediates) are not state
        kept = {name: (mutable or {}).get(name, old) for name, old in model_state.items()}
        sown = sown_metrics((mutable or {}).get(SOWN, {}), modes) if train else {}
        return value, (kept, {**reported, **sown})

    return attribute_to(loss_fn, loss)
