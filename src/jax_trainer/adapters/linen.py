"""Linen modules, and Flax states with their `apply_fn`: their handles, and a `Program` from one and a loss."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax.linen.spmd import logical_to_mesh_axes
from jax.sharding import PartitionSpec

from jax_trainer.adapters.calls import ToInput, arguments, full_batch, mode_flags, sown_metrics, takes_optimizer
from jax_trainer.adapters.handle import WIDE, ModelHandle, ModelHooks
from jax_trainer.adapters.remat import RECOMPUTED, linen_remat
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
    merged,
    stream,
    streams,
)
from jax_trainer.core.loss_scale import with_loss_scale
from jax_trainer.core.random import key_data
from jax_trainer.core.state import EVALUATED, averages_in, strong
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
    init_rngs: tuple[str, ...] = ("params", "dropout"),
    init_variables: Callable[[jax.Array, Batch], Mapping[str, PyTree]] | None = None,
    **options: Unpack[StepOptions],
) -> Program:
    """A program that trains `model`, initialised with an example batch.

    Args:
        loss: `loss(params, state, batch, rng, train) -> loss, (mutable, metrics)`.
        to_input: selects the inputs of the model from a batch; a tuple is several arguments.
        init_rngs: names of the random streams of `model.init`; predictions get all but "params".
        init_variables: `(key, batch) -> variables`, instead of `model.init`.
        options: see `make_program`.
    """
    init = None if init_variables is None else lambda batch, key: init_variables(key, batch)
    hooks = ModelHooks(to_input, init=init, rngs=lambda key: streams(key, *init_rngs))
    return LinenHandle(model, hooks).program(loss, tx, **options)


def is_batch_stat(path: str) -> bool:
    """Whether this is the path of a BatchNorm statistic in the collections of a linen model."""
    return path.startswith("batch_stats.") and path.endswith((".mean", ".var"))


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


def _predict_fn(
    apply_fn: Callable[..., Any], to_input: ToInput, rngs: Callable[[jax.Array], Iterable[str]]
) -> PredictFn:
    def predict_fn(params: PyTree, model_state: PyTree, batch: Batch, rng: jax.Array) -> PyTree:
        view = LinenView(apply_fn, params, model_state, stream(rng, "model"))
        names = tuple(name for name in rngs(rng) if name != "params")
        return view.apply(params, *arguments(to_input(batch)), train=False, rngs=names)[0]

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


# handles

_FIELDS = tuple(TrainState.__dataclass_fields__)
_OF_FLAX = ("step", "apply_fn", "params", "tx", "opt_state")


class LinenHandle(ModelHandle):
    """A linen module, or the configuration of one; its weights are in the state only."""

    mode = "linen"
    has_modules = True
    loss_name, loss_argument = "loss_function_linen", "params"

    def __init__(self, model: Any, hooks: ModelHooks | None = None) -> None:
        super().__init__(model, hooks)
        self._tx, self._remat = optax.identity(), None
        self._specs: dict[str, PartitionSpec] = {}  # of the parameters, known after `variables`
        if getattr(model, "scope", None) is not None:
            raise TypeError(
                f"This {self.name} is bound to variables (`bind`), but a training initialises new ones. Pass the "
                "unbound module; to pass initial weights, create a state for `fit`: "
                "`TrainState.create(apply_fn=…, params=…, tx=…)`."
            )

    def init(self, batch: Batch, key: jax.Array) -> Any:
        inputs, init = arguments(self.hooks.to_input(batch)), self.module.init
        return init(self.hooks.rngs(key), *inputs, **mode_flags(init, train=False, only_required=True))

    def program(self, loss: Any, tx: optax.GradientTransformation, **options: Unpack[StepOptions]) -> Program:
        self._tx, self._remat = tx, options.get("remat")
        predict_fn = _predict_fn(self.apply_fn, self.hooks.inputs_of, self.hooks.rngs)
        return _program(self.apply_fn, self.variables, loss, tx, predict_fn, self._specs, options)

    def variables(self, key: jax.Array, batch: Batch) -> tuple[PyTree, PyTree]:
        boxed = _checked(self._init(batch, key))
        self._specs.update(_partition_specs(boxed.get("params", {})))
        collections = nn.meta.unbox(dict(boxed))
        params = collections.pop("params", {})
        collections.pop(SOWN, None)  # sown by `init`
        return params, collections

    def filled(self, params: PyTree, model_state: PyTree) -> Any:
        return {"params": params, **model_state}

    def with_weights(self, params: PyTree, model_state: PyTree, rng: jax.Array, *, train: bool = False) -> Any:
        return self.module.bind({"params": params, **model_state})

    def apply(self, model: Any, inputs: Any, train: bool | None = None, **options: Any) -> Any:
        return model(*arguments(inputs), **options)

    def tabulate(self, model: Any, inputs: tuple[Any, ...]) -> str:
        return model.tabulate(self.hooks.rngs(self.key), *inputs, console_kwargs=WIDE)

    def module_of(self, scopes: tuple[str, ...]) -> str:
        # a method that is not `__call__` is `module.method`; one that is computed again is inside of `module`
        names = [name.partition(".")[0] for name in scopes if not name.endswith(f".{RECOMPUTED}")]
        top = self.module.name or type(self.module).__name__
        return ".".join(names[names.index(top) + 1 :]) if top in names else ""

    @property
    def apply_fn(self) -> Callable[..., Any]:
        return self.module.apply

    @property
    def train_apply_fn(self) -> Callable[..., Any]:
        return linen_remat(self.apply_fn, self._remat)

    def module_at(self, state: Callable[[], TrainState]) -> Any:
        return self.module

    def calling(self, loss: Callable[..., Any]) -> Any:
        def of_params(
            params: PyTree, state: LinenView, batch: Batch, rng: jax.Array, train: bool, **chosen: str
        ) -> Any:
            model = _Called(state, params, train=train)
            value, reported = loss(model, batch, train, rng=stream(rng, "user"), step=state.step, **chosen)
            return value, (model.mutable, reported)

        def of_optimizer(
            params: PyTree, state: LinenView, batch: Batch, rng: jax.Array, train: bool, optimizer: str
        ) -> Any:
            return of_params(params, state, batch, rng, train, optimizer=optimizer)

        return attribute_to(of_optimizer if takes_optimizer(loss) else of_params, loss)

    def loss_subject(self, model: Any) -> Any:
        if model.view.mutable_variables:
            raise TypeError(
                f"The model has the collections {', '.join(model.view.mutable_variables)}, which "
                "`loss_fn(params, batch)` cannot update. Write `loss_fn(logits, labels)`."
            )
        return model.params

    def as_passed(self, state: TrainState) -> Any:
        state = merged(state)
        extra = {name: value for name, value in state.extra.items() if name in EVALUATED}
        return FlaxState(**{**_fields(state), "extra": extra}, apply_fn=self.apply_fn, tx=self._tx)

    def evaluated(self, state: TrainState) -> Any:
        return self.as_passed(state)

    def write_back(self, state: TrainState) -> Any:
        return None

    def step_apply(self, state: Any, params: PyTree, *inputs: Any, train: bool = False, **options: Any) -> Any:
        call = self.train_apply_fn if train else self.apply_fn
        view = LinenView(call, params, state.model_state, stream(state.key, "model"), step=state.step)
        return view.apply(params, *inputs, train=train, **options)


class FlaxStateHandle(LinenHandle):
    """A state of `TrainState.create` or of flax.training: a linen `apply_fn` with weights and an optimizer."""

    def __init__(self, passed: Any, hooks: ModelHooks | None = None) -> None:
        super().__init__(passed, hooks)
        self._state = passed if isinstance(passed, FlaxState) else _of_flax(passed, self.hooks.key())
        self.tx = self._tx = self._state.tx
        module = getattr(passed.apply_fn, "__self__", None)
        self.name = type(module).__name__ if module is not None else getattr(passed.apply_fn, "__name__", "apply_fn")

    def program(self, loss: Any, tx: optax.GradientTransformation, **options: Unpack[StepOptions]) -> Program:
        self._remat = options.get("remat")
        return flax_state_program(self._state, loss, to_input=self.hooks.inputs_of, **options)

    def initial_weights(self, batch: Batch = None) -> tuple[PyTree, PyTree]:
        return self._state.params, self._state.model_state

    def filled(self, params: PyTree, model_state: PyTree) -> Any:
        return self.as_passed(self._state.replace(params=params, model_state=model_state))

    @property
    def apply_fn(self) -> Callable[..., Any]:
        return self._state.apply_fn

    @property
    def key(self) -> jax.Array:
        return self._state.key

    def as_passed(self, state: TrainState) -> Any:
        state = merged(state)
        if self.model is self._state:
            extra = {name: value for name, value in state.extra.items() if name in self._state.extra}
            return self._state.replace(**{**_fields(state), "extra": extra})
        return self.model.replace(step=state.step, params=state.params, opt_state=state.opt_state, **state.model_state)


class _Called:
    """A linen model with parameters inside a loss; keeps the collections of its last call."""

    def __init__(self, view: LinenView, params: PyTree, *, train: bool) -> None:
        self.view, self.params, self._train = view, params, train
        self.mutable: PyTree | None = None

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        outputs, self.mutable = self.view.apply(self.params, *inputs, train=self._train, **options)
        return outputs


def is_flax_state(model: Any) -> bool:
    """Whether `model` is a state of `TrainState.create`, or has the fields of one of flax.training."""
    return isinstance(model, FlaxState) or (
        dataclasses.is_dataclass(model) and all(hasattr(model, name) for name in _OF_FLAX)
    )


def is_linen(model: Any) -> bool:
    """Whether `model` is a linen module; raises for its class."""
    if isinstance(model, type) and issubclass(model, nn.Module):
        raise TypeError(f"The model is the linen class {model.__name__}. Pass an object: `{model.__name__}(…)`.")
    return isinstance(model, nn.Module)


def _of_flax(passed: Any, key: jax.Array) -> FlaxState:
    collections = {
        field.name: getattr(passed, field.name)
        for field in dataclasses.fields(passed)
        if field.name not in _OF_FLAX
        and field.metadata.get("pytree_node", True)
        and isinstance(getattr(passed, field.name), Mapping)
    }
    return FlaxState(
        step=jnp.asarray(passed.step, jnp.int32),
        params=strong(passed.params),
        model_state=strong(collections),
        opt_state=strong(passed.opt_state),
        rng=key_data(key),
        extra=averages_in(passed.opt_state, passed.params),
        apply_fn=passed.apply_fn,
        tx=passed.tx,
    )


def _fields(state: TrainState) -> dict[str, Any]:
    return {name: getattr(state, name) for name in _FIELDS}


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

    predict_fn = _predict_fn(state.apply_fn, to_input, lambda rng: ("dropout",))
    program = _program(state.apply_fn, variables, loss, state.tx, predict_fn, specs, options)
    program = program.with_info(init_is_traced=False)
    scale = Precision.named(options.get("precision", Precision())).loss_scale

    def init(key: jax.Array, batch: Batch) -> TrainState:
        return with_loss_scale(state.plain(), scale)

    if options.get("lora") is not None:  # its own step and optimizer state are those of all parameters
        return program.with_info(initial_variables=variables)
    return program._replace(init=init).with_info(init_from_params=None, initial_variables=None)
