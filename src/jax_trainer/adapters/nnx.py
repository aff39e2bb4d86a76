"""Split nnx modules, and a `Program` from a user's step that computes its own gradients.

The module is split: its graph is static, its arrays are in `TrainState` as nested dicts, and it is merged inside the
traced step only. Random streams are not part of the state: every step derives their keys from the root key, the step
and the path of the stream in the module.

Linen modules in nnx modules (`nnx.bridge.ToNNX`) get their variables from a first call, see `with_variables`.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, Protocol, Unpack

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import PartitionSpec

from jax_trainer.adapters.calls import allow_sow, arguments
from jax_trainer.adapters.remat import nnx_remat, with_call
from jax_trainer.core import (
    Batch,
    GradFn,
    Metrics,
    Precision,
    Program,
    ProgramInfo,
    PyTree,
    Remat,
    StepOptions,
    TrainState,
    as_metrics,
    batch_weight,
    new_state,
    stream,
)
from jax_trainer.core.by_epoch import schedule_of
from jax_trainer.core.extra_args import by_signature
from jax_trainer.core.loss_scale import unscaled, with_loss_scale, with_scaled_loss
from jax_trainer.core.metrics import BatchSize
from jax_trainer.core.optimizers import Optimizers, alternating_step, own_gradients, with_clipping
from jax_trainer.core.precision import cast_floats, cast_like
from jax_trainer.core.program import warn_of_zero_gradients
from jax_trainer.core.steps import EvalStep, TrainStep, Written, accumulate, check_reported, update_step
from jax_trainer.core.tracing import current
from jax_trainer.diagnostics.jax_internals import forwarded
from jax_trainer.diagnostics.leaves import differing_leaf, leaf_path, leaves_by_path, parameter_paths
from jax_trainer.diagnostics.returned import check_call, check_loss, explaining_shapes, kinds_of, loss_and_metrics
from jax_trainer.diagnostics.user_frame import noting_definition

SCOPE = "module:"  # prefix of the scopes of modules
_OWN = ("to_nnx__", "_pytree__")  # prefixes of attributes of `ToNNX` that are not variables
_METADATA = {
    "out_sharding",
    "sharding_names",
    "sharding",
}  # names of the sharding metadata of variables, over versions of Flax


class NnxStep(Protocol):
    """A training or evaluation step of an nnx model, which is set to the respective mode."""

    def __call__(self, model: Any, rng_key: jax.Array, batch: Batch) -> Any:
        """Returns `(loss, grads)` or `((loss, metrics), grads)`; in evaluation `loss`, `(loss, metrics)` or metrics."""
        ...


class Split:
    """A split module: static graphs for training and evaluation, and the shapes of its random streams."""

    def __init__(self, model: nnx.Module, trainable: Any) -> None:
        self.trainable = trainable
        if lacks_variables(model):
            raise ValueError(
                f"This {type(model).__name__} has a linen module (`nnx.bridge.ToNNX`) without variables. Initialise it "
                "with an example input before creating the optimizer: `nnx.bridge.lazy_init(model, x)`."
            )
        model.train()
        self.train_graph, params, self.rngs, _ = nnx.split(model, trainable, nnx.RngState, ...)
        if not jax.tree.leaves(params):
            raise ValueError(f"{type(model).__name__} has no parameters to train: no variable matches {trainable}.")
        self.partition_specs = _partition_specs(params)
        self._batch_stats = _batch_stats(model)
        model.eval()
        self.eval_graph = nnx.graphdef(model)
        model.train()

    def is_batch_stat(self, path: str) -> bool:
        """Whether this is the path of a BatchNorm statistic."""
        return path in self._batch_stats

    def arrays(self, model: nnx.Module) -> tuple[PyTree, PyTree]:
        """The parameters and the other variables of `model`, as nested dicts of arrays."""
        return _arrays(model, self.trainable)

    def written(self, model: nnx.Module, params: PyTree, again: Callable[[PyTree], nnx.Module]) -> dict[str, Any]:
        """The parameters of `model` that are not those of `params`, from which it was joined, by path.

        `again` makes the model once more from parameters: a part that is compiled or recomputed returns new arrays for
        all of its parameters, and only the equations show which are still the same.
        """
        arrays, paths = lambda model: leaves_by_path(self.arrays(model)[0]), parameter_paths(params)
        now = arrays(model)
        if all(now[path] is leaf for path, leaf in leaves_by_path(params).items()):
            return {}
        traced = jax.make_jaxpr(lambda params: [arrays(again(params))[path] for path in paths])(params)
        same = [number == source for number, source in enumerate(forwarded(traced))]
        return {path: now[path] for path, is_same in zip(paths, same, strict=True) if not is_same}

    def join(self, params: PyTree, model_state: PyTree, rng: jax.Array, *, train: bool) -> Any:
        """The module with these arrays, and random streams derived from `rng`."""
        graph = self.train_graph if train else self.eval_graph
        # copy=True: merging would otherwise reuse Variables of an outer trace, and BatchNorm could not update them
        model = nnx.merge(graph, nnx.State(params), self._streams(rng), nnx.State(model_state), copy=True)
        if current().names_modules:
            _name_scopes(model)
        return model

    def _streams(self, rng: jax.Array) -> nnx.State:
        def fresh(path: tuple, variable: Any) -> Any:
            if isinstance(variable, nnx.RngKey):
                key = stream(rng, leaf_path(path))
                return key if variable.shape == () else jax.random.split(key, variable.shape)
            return jnp.zeros(variable.shape, variable.dtype)

        is_variable = lambda leaf: isinstance(leaf, nnx.Variable)
        return jax.tree_util.tree_map_with_path(fresh, self.rngs, is_leaf=is_variable)


def _name_scopes(model: nnx.Module) -> None:
    """Lets the modules of `model` compute in a `jax.named_scope`: `SCOPE` and their path.

    Flax names linen modules so, but no nnx modules.
    """
    for path, module in nnx.iter_modules(model):
        if callable(module):
            object.__setattr__(module, "__class__", _in_scope(type(module), SCOPE + ".".join(map(str, path))))


@functools.cache
def _in_scope(kind: type[Any], scope: str) -> type[Any]:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with jax.named_scope(scope):
            return kind.__call__(self, *args, **kwargs)

    return with_call(kind, call)


def _partition_specs(params: nnx.State) -> dict[str, PartitionSpec]:
    """The specs of parameters with `nnx.with_partitioning`, by dotted path."""
    flat = nnx.to_flat_state(params)
    annotated = [(path, variable) for path, variable in flat if _METADATA & variable.get_metadata().keys()]
    return {".".join(map(str, path)): nnx.get_partition_spec(variable).get_value() for path, variable in annotated}


def _batch_stats(model: nnx.Module) -> set[str]:
    """The paths of the running means and variances of a module."""
    paths = (".".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(model, nnx.BatchStat)))
    return {path for path in paths if path.rpartition(".")[2] in ("mean", "var")}


def _arrays(model: nnx.Module, trainable: Any) -> tuple[PyTree, PyTree]:
    _, params, _, rest = nnx.split(model, trainable, nnx.RngState, ...)
    return nnx.to_pure_dict(params), nnx.to_pure_dict(rest)


def kept_state(model_state: PyTree, changed: PyTree) -> PyTree:
    """The values of `changed` for the entries of `model_state`; entries that the loss added are not state."""
    if not isinstance(model_state, dict):
        return changed
    return {name: kept_state(old, changed[name]) for name, old in model_state.items()}


def write_back(model: nnx.Module, state: TrainState, *, params: PyTree | None = None) -> None:
    """Copies the arrays of `state` into `model`; `params`, e.g. averaged ones, replace its parameters."""
    for arrays in (state.params if params is None else params, state.model_state):
        nnx.update(model, nnx.State(jax.tree.map(jnp.copy, arrays)))


def nnx_step_program(
    model: nnx.Module,
    optimizer: nnx.Optimizer,
    train_step: NnxStep | Mapping[str, NnxStep],
    val_step: NnxStep | None = None,
    **options: Unpack[StepOptions],
) -> Program:
    """A program that trains `model` with `optimizer` and the gradients of the user's `train_step`.

    It starts from the weights of `model` and from the state and step of `optimizer`; both are unchanged until
    `write_back`. For the same loss, the updates are bit-identical to those of `nnx_program`.

    Args:
        model: the module to train.
        optimizer: its `tx` and `wrt` are used.
        train_step: `train_step(model, rng_key, batch) -> (loss, grads)`, or `((loss, metrics), grads)`; for several
            `Optimizers` one for each by name, of whose gradients those of its parameters are used.
        val_step: `val_step(model, rng_key, batch) -> loss`, or `(loss, metrics)`, or metrics; None: the program cannot
            evaluate.
        options: see `make_program`; the weights keep the dtypes that they have in `model`.
    """
    precision = Precision.named(options.get("precision", Precision()))
    _check_dtypes(model, optimizer, precision)
    if options.get("lora") is not None:
        raise ValueError("`lora`: a step that computes its own gradients computes those of all parameters.")
    if val_step is not None:
        check_call(val_step, "val_step", "model", "rng_key", "batch")
    split = Split(model, optimizer.wrt)
    return Program(
        lambda key, batch: with_loss_scale(nnx_state(model, optimizer, key), precision.loss_scale),
        _user_train_step(split, optimizer, train_step, precision, options),
        _user_eval(split, val_step, precision, options.get("batch_size_of")),
        info=ProgramInfo(
            tx=optimizer.tx,
            checks=(warn_of_zero_gradients,),
            init_is_traced=False,
            partition_specs=lambda: split.partition_specs,
            micro_batches=schedule_of(options.get("micro_batches", 1)),
            is_batch_stat=split.is_batch_stat,
        ),
    )


def _user_train_step(
    split: Split, optimizer: nnx.Optimizer, step: Any, precision: Precision, options: StepOptions
) -> TrainStep:
    tx, micro_batches, remat = optimizer.tx, options.get("micro_batches", 1), options.get("remat")
    clips, log_norms = (options.get("clip_norm"), options.get("clip_adaptive")), options.get("log_norms", True)
    size_of = options.get("batch_size_of")
    if not isinstance(tx, Optimizers) or (tx.joint is not False and not isinstance(step, Mapping)):
        check_call(step, "train_step", "model", "rng_key", "batch")
        grads = accumulate(_user_grads(split, step, precision, remat, size_of), micro_batches)
        tx = with_clipping(nnx_transformation(optimizer), *clips)
        return with_scaled_loss(update_step(grads, tx, log_norms=log_norms), precision.loss_scale)
    if not isinstance(step, Mapping) or step.keys() != tx.by_name.keys():
        found = f"steps for {', '.join(step)}" if isinstance(step, Mapping) else "one training step"
        raise TypeError(f"There are the optimizers {tx.names}, but {found}. Pass a dict with one step for each.")
    for name, one in step.items():
        check_call(one, f"train_step[{name!r}]", "model", "rng_key", "batch")
    own = {name: own_gradients(name, _user_grads(split, one, precision, remat, size_of)) for name, one in step.items()}
    more = {"micro_batches": micro_batches, "log_norms": log_norms, "batch_size_of": size_of}
    return alternating_step(own, with_clipping(tx, *clips), precision, **more)


def optax_of(optimizer: Any) -> Any:
    """The optax optimizer of an `nnx.Optimizer`; anything else is returned as it is."""
    return optimizer.tx if isinstance(optimizer, nnx.Optimizer) else optimizer


def nnx_transformation(optimizer: nnx.Optimizer) -> optax.GradientTransformationExtraArgs:
    """The optax transformation of `optimizer` on nested dicts; its initial state is that of `optimizer`.

    Its `tx` receives `nnx.State`s, as from `optimizer.update`, so that masks and labels written for these apply.
    """
    tx = by_signature(optimizer.tx)
    structure = jax.tree.structure(nnx.as_pure(optimizer.opt_state))

    def init(params: PyTree) -> PyTree:
        return _plain(nnx.as_pure(optimizer.opt_state))

    def update(
        updates: PyTree, state: PyTree, params: PyTree | None = None, **extra: Any
    ) -> tuple[PyTree, optax.OptState]:
        assert params is not None
        # both kinds of trees sort their keys, so their leaves have the same order
        states = structure.unflatten(jax.tree.leaves(state))
        updates, states = tx.update(nnx.State(updates), states, nnx.State(params), **_as_states(extra))
        return _plain(updates), _plain(states)

    return optax.GradientTransformationExtraArgs(init, update)


def _as_states(extra: Mapping[str, Any]) -> dict[str, Any]:
    """Extra arguments of an update with `nnx.State`s instead of nested dicts."""
    changed = dict(extra)
    if "grad" in extra:
        changed["grad"] = nnx.State(extra["grad"])
    if "value_fn" in extra:
        changed["value_fn"] = lambda params: extra["value_fn"](_plain(params))
    if "grad_fn" in extra:
        changed["grad_fn"] = lambda params, *more: nnx.State(extra["grad_fn"](_plain(params), *more))
    return changed


def _plain(tree: PyTree) -> PyTree:
    is_state = lambda node: isinstance(node, nnx.State)
    return jax.tree.map(lambda node: nnx.to_pure_dict(node) if is_state(node) else node, tree, is_leaf=is_state)


def nnx_state(model: nnx.Module, optimizer: nnx.Optimizer, key: jax.Array) -> TrainState:
    """A state of the weights of `model`, the state and step of `optimizer`, and the root key `key`."""
    step = jnp.asarray(optimizer.step.get_value(), jnp.int32)
    return new_state(*_arrays(model, optimizer.wrt), nnx_transformation(optimizer), key).replace(step=step)


def _check_dtypes(model: nnx.Module, optimizer: nnx.Optimizer, precision: Precision) -> None:
    found = {leaf.dtype for leaf in jax.tree.leaves(nnx.state(model, optimizer.wrt))}
    floats = [one for one in found if jnp.issubdtype(one, jnp.floating)]
    if precision.param is not None and any(one != precision.param for one in floats):
        raise ValueError(
            f"The precision has weights in {jnp.dtype(precision.param).name}, but those of the module are "
            f"{', '.join(sorted(map(str, found)))}. Create the module with `param_dtype`, and then its optimizer."
        )


def _user_grads(
    split: Split, train_step: NnxStep, precision: Precision, remat: Remat | None, size_of: BatchSize | None
) -> GradFn:
    def grad_fn(params: PyTree, model_state: PyTree, batch: Batch, rng: jax.Array, *, step: jax.Array) -> Any:
        weights, inputs = cast_floats((params, batch), precision.compute)

        def called(weights: PyTree) -> tuple[nnx.Module, Any]:
            model = split.join(weights, model_state, rng, train=True)
            nnx_remat(model, remat)
            with allow_sow(), explaining_shapes(batch):
                return model, train_step(model, stream(rng, "user"), inputs)

        model, returned = called(weights)
        with noting_definition(train_step):
            swapped = isinstance(returned, tuple) and isinstance(returned[0], nnx.State | nnx.Module)
            if not isinstance(returned, tuple) or len(returned) != 2 or swapped:
                raise TypeError(
                    f"`train_step` must return the loss and the gradients, got {kinds_of(returned)}. Return "
                    "`nnx.value_and_grad(loss_fn)(model, …)`: `(loss, grads)`, or `((loss, metrics), grads)`."
                )
            reported = _reported("train_step", returned[0], batch)
            if "loss" not in reported:
                raise ValueError(
                    f"`train_step` returned no metric `loss`, only {', '.join(sorted(reported)) or 'nothing'}."
                )
            _, new_state = split.arrays(model)
            metrics = as_metrics({**reported, "loss": unscaled(reported["loss"])}, batch_weight(batch, size_of))
            grads = unscaled(cast_like(matching_grads(returned[1], params, split.trainable), params))
            # running statistics keep their dtype: in bf16 their small updates would be rounded away
            kept = cast_like(kept_state(model_state, new_state), model_state)
            if written := split.written(model, weights, lambda weights: called(weights)[0]):
                kept = Written(kept, written).like(params, model_state)
        return (metrics.by_name["loss"].value, (kept, metrics)), grads

    return grad_fn


def _user_eval(split: Split, val_step: NnxStep | None, precision: Precision, size_of: BatchSize | None) -> EvalStep:
    def eval_step(state: TrainState, batch: Batch) -> Metrics:
        if val_step is None:
            raise ValueError("This program cannot evaluate: it was created without a `val_step`.")
        rng = stream(state.key, "eval")
        weights, inputs = cast_floats((state.params, batch), precision.compute)
        model = split.join(weights, state.model_state, rng, train=False)
        with allow_sow():
            returned = val_step(model, stream(rng, "user"), inputs)
        with noting_definition(val_step):
            return as_metrics(_reported("val_step", returned, batch), batch_weight(batch, size_of))

    return eval_step


def _reported(name: str, returned: Any, batch: Batch) -> dict[str, Any]:
    """The metrics of a user's step, including its loss."""
    if isinstance(returned, Mapping):
        return dict(returned)
    loss, metrics = loss_and_metrics(returned, name)
    if isinstance(loss, Mapping):
        raise TypeError(
            f"`{name}` returned several losses by name: {', '.join(loss)}. A step computes its own gradients: return "
            "their sum, and the parts as metrics."
        )
    check_loss(loss, {"batch": batch})
    check_reported(loss, metrics)
    return {"loss": loss, **metrics}


def matching_grads(grads: Any, params: PyTree, trainable: Any) -> PyTree:
    """`grads` as a nested dict like `params`; raises if paths or shapes differ."""
    if not isinstance(grads, nnx.State | nnx.Module):
        raise TypeError(
            f"The gradients of a step must come from `nnx.grad` or `nnx.value_and_grad`, got a {type(grads).__name__}."
        )
    found = nnx.to_pure_dict(nnx.state(grads, trainable))
    if (differs := differing_leaf(found, params)) is not None:
        name, gradient, parameter = differs
        raise ValueError(
            f"The gradients of a step do not match the parameters of the optimizer: the gradient of {name} is "
            f"{'missing' if gradient is None else gradient}, the parameter is "
            f"{'not one of them' if parameter is None else parameter}. "
            "Differentiate with respect to the `model` argument of the step and the variables of the optimizer's `wrt`."
        )
    return found


def lacks_variables(module: nnx.Module) -> bool:
    """Whether `module` contains a linen module without variables, because it was never called."""
    return bool(_bare(module))


def with_variables(module: Any, inputs: Any, key: jax.Array) -> Any:
    """`module`, with the missing variables of its linen modules initialised by a call with `inputs`.

    Args:
        module: changed in place.
        inputs: of the call; a tuple is several arguments.
        key: for linen modules created without `rngs`.
    """
    bare = _bare(module)
    if not bare:
        return module
    for node in bare:
        if node.to_nnx__rngs is None:
            node.to_nnx__rngs = nnx.data(nnx.Rngs(key))
    return nnx.bridge.lazy_init(module, *jax.tree.map(jnp.asarray, arguments(inputs)))


def _bare(module: nnx.Module) -> list[nnx.bridge.ToNNX]:
    bridged = [node for _, node in nnx.iter_modules(module) if isinstance(node, nnx.bridge.ToNNX)]
    return [node for node in bridged if all(name.startswith(_OWN) for name in vars(node))]
