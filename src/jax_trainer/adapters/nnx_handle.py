"""The handle of nnx modules."""

import inspect
from collections.abc import Iterable
from typing import Any, Unpack

import jax
import optax
from flax import nnx

from jax_trainer.adapters.bridged import lacks_variables, with_variables
from jax_trainer.adapters.calls import arguments
from jax_trainer.adapters.handle import WIDE, ModelHandle, ModelHooks, StepModel, are_identical, name_of
from jax_trainer.adapters.mode import mode_flags
from jax_trainer.adapters.nnx import Split, kept_state, matching_grads, split_program, write_back
from jax_trainer.core import Batch, Program, PyTree, StepOptions, TrainState, stream


class NnxHandle(ModelHandle):
    """An nnx module with its initial weights; or a configuration, a class or a function that builds one."""

    mode = "nnx"

    def __init__(self, model: Any, hooks: ModelHooks | None = None) -> None:
        super().__init__(model, hooks)
        self._has_weights = isinstance(model, nnx.Module)
        self.is_builder = not self._has_weights and self.config is None
        self._splits: list[Split] = []  # one, as soon as the module is known

    def build(self, inputs: Any, rngs: nnx.Rngs) -> nnx.Module:
        return _built(self.model, inputs, rngs) if self.is_builder else super().build(inputs, rngs)

    def init(self, batch: Batch, key: jax.Array) -> nnx.Module:
        inputs = self.hooks.to_input(batch)
        return with_variables(self._build(inputs, nnx.Rngs(key)), inputs, stream(key, "bridged"))

    def program(self, loss: Any, tx: optax.GradientTransformation, **options: Unpack[StepOptions]) -> Program:
        self._splits = []
        if self._has_weights and lacks_variables(self.model):
            self._init_example()  # in place, so before tracing
        starts_from_it = self._has_weights and self.hooks.init is None
        model = self.model if starts_from_it else lambda key, example: self._init(example, key)
        options["init_is_traced"] = not self._has_weights
        return split_program(model, loss, tx, self._splits, to_input=self.hooks.to_input, **options)

    def with_weights(self, params: PyTree, model_state: PyTree, rng: jax.Array, *, train: bool = False) -> Any:
        return self.split.join(params, model_state, rng, train=train)

    def apply(self, model: Any, inputs: Any, train: bool | None = None, **options: Any) -> Any:
        flags: dict[str, Any] = {}
        if train is not None:
            model.train() if train else model.eval()
            flags = mode_flags(type(model).__call__, train=train)
        return model(*arguments(inputs), **{**flags, **options})

    def tabulate(self, model: Any, inputs: tuple[Any, ...]) -> str:
        return nnx.tabulate(model, *inputs, console_kwargs=WIDE)

    def network(self, state: TrainState) -> Any:
        return self.bind(state)  # a pytree itself

    def write_back(self, state: TrainState) -> Any:
        if not self._has_weights:
            return self.bind(state)
        write_back(self.model, state)
        self.model.eval()
        return self.model

    def step_model(self, *, train: bool) -> StepModel:
        return _NnxStepModel(self, train=train)

    @property
    def split(self) -> Split:
        """The split module."""
        if not self._splits:
            with nnx.use_eager_sharding(False):  # partitioned parameters would need a mesh
                self._splits.append(Split(nnx.eval_shape(self._init_example), nnx.Param))
        return self._splits[0]


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

    def apply(self, state: Any, params: PyTree, *inputs: Any, **options: Any) -> tuple[Any, PyTree]:
        return self.handle.apply_fn()  # an nnx module holds its collections itself

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


def _built(build: Any, inputs: Any, rngs: nnx.Rngs) -> nnx.Module:
    names = _parameters(build)
    example = {"exmp_input": inputs} if "exmp_input" in names else {}
    if others := _others_needed(list(names.values()), ("rngs", *example)):
        raise TypeError(
            f"`{name_of(build)}` is called with `rngs` only, but also requires {', '.join(others)}. Pass an nnx or "
            f"linen module, or a function of `rngs`: `lambda rngs: {name_of(build)}(…, rngs=rngs)`."
        )
    module = build(rngs=rngs, **example) if "rngs" in names else build(rngs, **example)
    if not isinstance(module, nnx.Module):
        raise TypeError(f"`{name_of(build)}` must return an nnx module, got a {type(module).__name__}.")
    return module


def _parameters(build: Any) -> dict[str, inspect.Parameter]:
    """The parameters of a function or of a class's `__init__`, which Flax hides behind its own."""
    if not inspect.isclass(build):
        return dict(inspect.signature(build).parameters)
    _, *others = inspect.signature(build.__init__).parameters.items()  # without `self`
    return dict(others)


def _others_needed(parameters: list[inspect.Parameter], passed: tuple[str, ...]) -> list[str]:
    """The required parameters besides `passed`; without a parameter `rngs`, the first one receives them."""
    needed = [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    others = [name for name in needed if name not in passed]
    return others if any(p.name == "rngs" for p in parameters) else others[1:]
