"""The handle of nnx modules, and a `Program` from one and a loss."""

import inspect
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Unpack

import jax
import optax
from flax import nnx

from jax_trainer.adapters.calls import ToInput, arguments, full_batch, mode_flags, required_rngs, sown_metrics
from jax_trainer.adapters.handle import WIDE, ModelHandle, ModelHooks, StepModel, are_identical, name_of
from jax_trainer.adapters.nnx import (
    SCOPE,
    Split,
    kept_state,
    lacks_variables,
    matching_grads,
    with_variables,
    write_back,
)
from jax_trainer.adapters.remat import nnx_remat
from jax_trainer.core import Batch, Program, PyTree, StepOptions, TrainState, merged, stream
from jax_trainer.core.state import AVERAGE
from jax_trainer.core.tracing import tracing


class NnxHandle(ModelHandle):
    """An nnx module with its initial weights; or a configuration, a class or a function that builds one."""

    mode = "nnx"
    has_modules = True

    def __init__(self, model: Any, hooks: ModelHooks | None = None, trainable: Any = nnx.Param) -> None:
        super().__init__(model, hooks)
        self.has_weights = isinstance(model, nnx.Module)
        self.is_builder = not self.has_weights and self.config is None
        self._trainable, self._split, self._remat = trainable, None, None

    def build(self, inputs: Any, rngs: nnx.Rngs) -> nnx.Module:
        return _built(self.model, rngs, exmp_input=inputs) if self.is_builder else super().build(inputs, rngs)

    def init(self, batch: Batch, key: jax.Array) -> nnx.Module:
        if self.has_weights and self.hooks.build is None and not lacks_variables(self.model):
            return self.model
        inputs = self.hooks.to_input(batch)
        return with_variables(self._build(inputs, nnx.Rngs(key)), inputs, stream(key, "bridged"))

    def program(self, loss: Any, tx: optax.GradientTransformation, **options: Unpack[StepOptions]) -> Program:
        self._split, self._remat = None, options.pop("remat", None)
        if self.has_weights:
            if lacks_variables(self.model) and self.hooks.example is not None:
                self._init_example()  # in place, so before tracing
            if self.hooks.init is None:
                self._split = Split(self.model, self._trainable)
        program = super().program(loss, tx, **options)
        specs, is_batch_stat = lambda: self.split.partition_specs, lambda path: self.split.is_batch_stat(path)
        return program.with_info(partition_specs=specs, is_batch_stat=is_batch_stat)

    def variables(self, key: jax.Array, batch: Batch) -> tuple[PyTree, PyTree]:
        with nnx.use_eager_sharding(False):  # partitioned parameters would need a mesh; the layout shards them
            module = self._init(batch, key)
        if self._split is None:
            self._split = Split(nnx.eval_shape(lambda: module), self._trainable)
        return self._split.arrays(module)

    def filled(self, params: PyTree, model_state: PyTree) -> nnx.Module:
        if not self.has_weights:
            return self.split.join(params, model_state, self.key, train=False)
        for arrays in (params, model_state):
            nnx.update(self.model, nnx.State(arrays))
        return self.model

    def after_call(self, model: Any, model_state: PyTree, modes: Sequence[str]) -> tuple[PyTree, dict[str, Any]]:
        sown = sown_metrics(nnx.to_pure_dict(nnx.state(model, nnx.Intermediate)), modes) if modes else {}
        return kept_state(model_state, self.split.arrays(model)[1]), sown

    def written(self, model: Any, params: PyTree, again: Callable[[PyTree], Any]) -> dict[str, Any]:
        return self.split.written(model, params, again)

    def with_weights(self, params: PyTree, model_state: PyTree, rng: jax.Array, *, train: bool = False) -> Any:
        model = self.split.join(params, model_state, rng, train=train)
        if train:
            nnx_remat(model, self._remat)
        return model

    def apply(self, model: Any, inputs: Any, train: bool | None = None, **options: Any) -> Any:
        flags: dict[str, Any] = {}
        if train is not None:
            model.train() if train else model.eval()
            flags = mode_flags(type(model).__call__, train=train)
        return model(*arguments(inputs), **{**flags, **options})

    def tabulate(self, model: Any, inputs: tuple[Any, ...]) -> str:
        options: dict[str, Any] = {**required_rngs(model, self.key), "console_kwargs": WIDE}
        return nnx.tabulate(model, *inputs, **options)

    def named_modules(self) -> AbstractContextManager[Any]:
        return tracing(names_modules=True)

    def module_of(self, scopes: tuple[str, ...]) -> str:
        return next((name[len(SCOPE) :] for name in reversed(scopes) if name.startswith(SCOPE)), "")

    def network(self, state: TrainState) -> Any:
        return self.bind(state)  # a pytree itself

    def write_back(self, state: TrainState) -> Any:
        if not self.has_weights:
            return self.bind(state)
        state = merged(state)
        write_back(self.model, state, params=state.extra.get(AVERAGE))
        self.model.eval()
        return self.model

    def step_model(self, *, train: bool) -> StepModel:
        return _NnxStepModel(self, train=train)

    @property
    def split(self) -> Split:
        """The split module."""
        if self._split is None:
            with nnx.use_eager_sharding(False):
                self._split = Split(nnx.eval_shape(self._init_example), self._trainable)
        return self._split


class _NnxStepModel(StepModel):
    """The nnx module of a step: merged on first access, and split again after the step."""

    handle: NnxHandle

    def __init__(self, handle: NnxHandle, *, train: bool) -> None:
        super().__init__(handle, train=train)
        self._module: Any = None
        self._known: dict[str, PyTree] = {}  # the arrays that the module and the state share

    def module(self, state: Any) -> Any:
        if self._module is None:
            self._module = super().module(state)
            self._known = self._arrays(state)
        return self._module

    def gradients(self, grads: Any, params: PyTree) -> PyTree:
        # a dict, as `jax.grad` makes of `params`
        return grads if isinstance(grads, dict) else matching_grads(grads, params, self.handle.split.trainable)

    def update(self, state: Any, names: Iterable[str]) -> None:
        if self._module is None:
            return
        for name in names:
            nnx.update(self._module, nnx.State(getattr(state, name)))
            self._known[name] = self._arrays(state)[name]

    def changes(self, state: Any) -> dict[str, PyTree]:
        if self._module is None:
            return {}
        # by identity: a compiled step gives the state other arrays than those that the module was traced with
        before, self._known = self._known, self._arrays(state)
        return {name: arrays for name, arrays in self._known.items() if not are_identical(arrays, before[name])}

    def _arrays(self, state: Any) -> dict[str, PyTree]:
        params, rest = self.handle.split.arrays(self._module)
        return {"params": params, "model_state": kept_state(state.model_state, rest)}


def nnx_program(
    model: nnx.Module | Callable[..., nnx.Module],
    loss: Callable[..., Any],
    tx: optax.GradientTransformation,
    *,
    trainable: Any = nnx.Param,
    to_input: ToInput = full_batch,
    **options: Unpack[StepOptions],
) -> Program:
    """A program that trains `model`.

    Args:
        model: a module with the initial weights (its own arrays are unchanged until `write_back`); or a function or
            class that creates one from `rngs` or `key`, and optionally `example`, an example batch.
        loss: `loss(model, batch, train) -> loss, metrics`, or only the loss; it may also take `rng` and `step`.
        trainable: nnx filter of the variables that are parameters; all others are model state.
        to_input: selects the inputs of the model from a batch for predictions; a tuple is several arguments.
        options: see `make_program`.
    """

    def init(batch: Batch, key: jax.Array) -> nnx.Module:
        module = _built(model, nnx.Rngs(key), key=key, example=batch)
        return with_variables(module, to_input(batch), stream(key, "bridged"))

    hooks = ModelHooks(to_input, init=None if isinstance(model, nnx.Module) else init)
    return NnxHandle(model, hooks, trainable).program(loss, tx, **options)


def _built(build: Any, rngs: nnx.Rngs, **offered: Any) -> nnx.Module:
    """The module that a class or function builds from `rngs`, and those of `offered` that it has parameters for."""
    names = _parameters(build)
    given = {name: value for name, value in offered.items() if name in names}
    if "rngs" in names:
        given["rngs"] = rngs
    first = () if given.keys() & {"rngs", "key"} else (rngs,)
    needed = [
        p.name for p in names.values() if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    if others := [name for name in needed if name not in given][len(first) :]:
        raise TypeError(
            f"`{name_of(build)}` is called with `rngs` only, but also requires {', '.join(others)}. Pass an nnx or "
            f"linen module, or a function of `rngs`: `lambda rngs: {name_of(build)}(…, rngs=rngs)`."
        )
    module = build(*first, **given)
    if not isinstance(module, nnx.Module):
        raise TypeError(f"`{name_of(build)}` must return an nnx module, got a {type(module).__name__}.")
    return module


def _parameters(build: Any) -> dict[str, inspect.Parameter]:
    """The parameters of a function or of a class's `__init__`, which Flax hides behind its own."""
    if not inspect.isclass(build):
        return dict(inspect.signature(build).parameters)
    _, *others = inspect.signature(build.__init__).parameters.items()  # without `self`
    return dict(others)
