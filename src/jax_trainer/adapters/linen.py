"""A linen module and a loss, as a `Program`."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, Protocol, Unpack

import jax
import optax
from flax import linen as nn
from flax.linen.spmd import logical_to_mesh_axes
from jax.sharding import PartitionSpec

from jax_trainer.adapters.calls import ToInput, arguments, sown_metrics, whole_batch
from jax_trainer.adapters.mode import mode_flags
from jax_trainer.core import (
    Batch,
    FlaxState,
    PredictFn,
    Program,
    PyTree,
    StepOptions,
    TrainState,
    check_call,
    kinds_of,
    leaf_path,
    make_program,
    stream,
    streams,
)
from jax_trainer.core.user_frame import attribute_to

SOWN = "intermediates"  # the collection that Flax keeps for what a model sows


class LinenView(NamedTuple):
    """What a linen loss function finds in its `state` argument."""

    apply_fn: Callable[..., Any]
    params: PyTree
    mutable_variables: PyTree
    rng: jax.Array
    collected: tuple[str, ...] = ()  # collections that are no state, but are wanted after training calls
    step: jax.Array | int = 0  # how many optimizer steps the parameters have behind them

    @property
    def batch_stats(self) -> PyTree:
        """The BatchNorm statistics; empty for a model that has none."""
        return self.mutable_variables.get("batch_stats", {})

    def apply(
        self,
        params: PyTree,
        *inputs: Any,
        train: bool,
        rngs: tuple[str, ...] | Mapping[str, jax.Array] = ("dropout",),
        **kwargs: Any,
    ) -> tuple[Any, PyTree]:
        """Runs the model: its output, and its mutable collections after it (unchanged when not training).

        What the model has sown comes with them where somebody wants it; it is reported if the loss returns them.
        `rngs` names the random streams it may ask for, or has their keys. A model whose call takes `train` (or
        `training`, `is_training`, `deterministic`, `use_running_average`) is told, unless `kwargs` says otherwise.
        """
        told = {**mode_flags(self.apply_fn, train=train), **kwargs}
        variables = {"params": params, **self.mutable_variables}
        keys = rngs if isinstance(rngs, Mapping) else streams(self.rng, *rngs)
        call = partial(self.apply_fn, variables, *inputs, rngs=keys, **told)
        mutable = [*self.mutable_variables, *self.collected]
        return call(mutable=mutable) if train else (call(), self.mutable_variables)


class LinenLoss(Protocol):
    """A loss over a linen model."""

    def __call__(
        self, params: PyTree, state: LinenView, batch: Batch, rng: jax.Array, train: bool
    ) -> tuple[jax.Array, tuple[PyTree | None, Mapping[str, Any]]]:
        """Returns the loss, the changed collections (None: none changed), and what else to report."""
        ...


def linen_program(
    model: nn.Module,
    loss: LinenLoss,
    tx: optax.GradientTransformation,
    *,
    to_input: ToInput = whole_batch,
    init_kwargs: Mapping[str, Any] | None = None,
    init_rngs: tuple[str, ...] = ("params", "dropout"),
    init_variables: Callable[[jax.Array, Batch], Mapping[str, PyTree]] | None = None,
    **options: Unpack[StepOptions],
) -> Program:
    """A program that trains `model`, initialised from an example batch.

    Args:
        loss: `loss(params, state, batch, rng, train) -> loss, (mutable, metrics)`.
        to_input: what of a batch the model is called with; a tuple is several arguments.
        init_kwargs: further arguments of the model's first call, e.g. `{"train": True}`.
        init_rngs: the named streams that the first call, and later ones that predict, may ask for.
        init_variables: `(key, batch) -> variables`, instead of the model's `init`.
        options: see `make_program`.
    """
    if init_variables is not None and init_kwargs is not None:
        raise ValueError("`init_kwargs` are for the model's `init`, which `init_variables` replaces. Pass one of them.")

    def first_call(key: jax.Array, batch: Batch) -> Mapping[str, PyTree]:
        told = {**mode_flags(model.init, train=False, only_required=True), **(init_kwargs or {})}
        return model.init(streams(key, *init_rngs), *arguments(to_input(batch)), **told)

    said: dict[str, PartitionSpec] = {}

    def variables(key: jax.Array, batch: Batch) -> tuple[PyTree, PyTree]:
        boxed = dict(first_call(key, batch) if init_variables is None else _checked(init_variables(key, batch)))
        said.update(_said_of(boxed.get("params", {})))
        made = nn.meta.unbox(boxed)
        params = made.pop("params", {})
        made.pop(SOWN, None)  # while initialising: of no use later
        return params, made

    names = tuple(name for name in init_rngs if name != "params")
    predict_fn = _predict_fn(model.apply, to_input, names)
    program = make_program(variables, _loss_fn(model.apply, loss, options), tx, predict_fn=predict_fn, **options)
    return program._replace(partition_specs=lambda: said)


def flax_state_program(
    state: FlaxState,
    loss: LinenLoss,
    *,
    to_input: ToInput = whole_batch,
    **options: Unpack[StepOptions],
) -> Program:
    """A program that goes on from a state made by `TrainState.create`; the caller's arrays stay alive.

    Args:
        to_input: what of a batch the model is called with when it predicts; a tuple is several arguments.
        options: see `make_program`.
    """
    said, state = _said_of(state.params), nn.meta.unbox(state)
    if options.get("clip_norm") is not None:
        raise ValueError(
            "This state has an optimizer state already, which has no place for `clip_norm`. "
            "Clip in its `tx`: `optax.chain(optax.clip_by_global_norm(…), …)`."
        )

    def variables(key: jax.Array, batch: Batch) -> tuple[PyTree, PyTree]:
        return state.params, state.model_state

    predict_fn = _predict_fn(state.apply_fn, to_input, ("dropout",))
    loss_fn = _loss_fn(state.apply_fn, loss, options)
    program = make_program(variables, loss_fn, state.tx, predict_fn=predict_fn, **options)

    def init(key: jax.Array, batch: Batch) -> TrainState:
        return state.plain()

    return program._replace(
        init=init, init_is_traced=False, init_from_params=None, initial_variables=None, partition_specs=lambda: said
    )


def _said_of(params: PyTree) -> dict[str, PartitionSpec]:
    """How parameters that were made `nn.with_partitioning` are to be split, by their dotted names."""
    is_box = lambda leaf: isinstance(leaf, nn.meta.AxisMetadata)
    leaves = jax.tree_util.tree_leaves_with_path(params, is_leaf=is_box)
    specs = {leaf_path(path): _spec_of(leaf) for path, leaf in leaves if is_box(leaf)}
    return {path: spec for path, spec in specs.items() if spec is not None}


def _spec_of(box: Any) -> PartitionSpec | None:
    if not isinstance(box, nn.LogicallyPartitioned):
        return nn.get_partition_spec(box)
    # names of the user's own mean something only together with rules
    rules = box.rules or nn.get_logical_axis_rules()
    return logical_to_mesh_axes(box.names, rules) if rules else None


def _checked(variables: Any) -> Mapping[str, PyTree]:
    if not isinstance(variables, Mapping) or "params" not in variables:
        found = ", ".join(map(str, variables)) if isinstance(variables, Mapping) else f"a {type(variables).__name__}"
        raise ValueError(
            f'`init_variables` must return the model\'s collections, as `model.init` does: a dict with "params"; this '
            f"one has {found or 'nothing'}."
        )
    return variables


def _are_collections(mutable: Mapping[str, Any] | None) -> bool:
    """Whether these can be what the model changed: metrics in their place would be numbers."""
    return all(isinstance(collection, Mapping) for collection in (mutable or {}).values())


def _in_words(returned: Any) -> str:
    match returned:
        case (_, (first, second)):
            return f"a loss with ({_words_for(first)}, {_words_for(second)})"
    return kinds_of(returned)


def _words_for(part: Any) -> str:
    return f"a dict with {', '.join(map(str, part)) or 'nothing'}" if isinstance(part, Mapping) else kinds_of(part)


def _predict_fn(apply_fn: Callable[..., Any], to_input: ToInput, rngs: tuple[str, ...]) -> PredictFn:
    def predict_fn(params: PyTree, model_state: PyTree, batch: Batch, rng: jax.Array) -> PyTree:
        view = LinenView(apply_fn, params, model_state, stream(rng, "model"))
        return view.apply(params, *arguments(to_input(batch)), train=False, rngs=rngs)[0]

    return predict_fn


def _loss_fn(apply_fn: Callable[..., Any], loss: LinenLoss, options: StepOptions) -> Any:
    modes, name = options.get("intermediates", ()), getattr(loss, "__name__", "loss")
    check_call(loss, name, "params", "state", "batch", "rng", "train")

    def loss_fn(
        params: PyTree, model_state: PyTree, batch: Batch, rng: jax.Array, *, train: bool, step: jax.Array
    ) -> tuple[jax.Array, tuple[PyTree, Mapping[str, Any]]]:
        collected = (SOWN,) if modes and train and SOWN not in model_state else ()
        view = LinenView(apply_fn, params, model_state, stream(rng, "model"), collected, step)
        match loss(params, view, batch, rng, train):
            case (value, (Mapping() | None as mutable, Mapping() as reported)) if _are_collections(mutable):
                pass
            case other:
                raise TypeError(
                    f"`{name}` of a linen model returns `loss, (mutable, metrics)`, the changed collections (or None) "
                    f"and a dict; this one returned {_in_words(other)}."
                )
        if train and "batch_stats" in model_state and "batch_stats" not in (mutable or {}):
            raise TypeError(
                f"`{name}` returned {_words_for(mutable)} as the changed collections, and the model has batch_stats, "
                "which would never change. Return what `apply` gives besides the output: "
                "`loss, (mutable, metrics)`; `state.mutable_variables` leaves them as they are."
            )
        # collections the model did not start with (sown intermediates) are not state
        kept = {name: (mutable or {}).get(name, old) for name, old in model_state.items()}
        told = sown_metrics((mutable or {}).get(SOWN, {}), modes) if train else {}
        return value, (kept if train else model_state, {**reported, **told})

    return attribute_to(loss_fn, loss)
