"""`ModelHandle`: what trainers and `fit` do with a model, the same for every model library."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, ClassVar, Unpack

import jax
import jax.numpy as jnp
import optax
from compoconf import ConfigInterface
from flax import nnx

from jax_trainer.adapters.calls import (
    ToInput,
    allow_sow,
    arguments,
    full_batch,
    requested,
    required_rngs,
    takes_optimizer,
)
from jax_trainer.adapters.interfaces import ModelMode, build_model
from jax_trainer.core import (
    Batch,
    Program,
    PyTree,
    StepOptions,
    TrainState,
    copied,
    make_program,
    model_params,
    stream,
    streams,
)
from jax_trainer.core.optimizers import Optimizers
from jax_trainer.core.steps import Reported, Written
from jax_trainer.diagnostics.returned import check_call, loss_and_metrics
from jax_trainer.diagnostics.user_frame import attribute_to

WIDE = {"width": 140, "force_terminal": False, "force_jupyter": False}  # the console of a table


@dataclass(frozen=True)
class ModelHooks:
    """What the owner of a handle, such as a trainer, knows about the model's data and may override.

    Args:
        to_input: selects the inputs of the model from a batch; a tuple is several arguments.
        key: returns the root key of the run.
        example: returns an example batch, as the model receives it.
        inputs: returns example inputs for `build`.
        build: `(inputs, rngs) -> model`, instead of `ModelHandle.build`.
        init: `(batch, key) -> weights`, instead of `ModelHandle.init`.
        rngs: the random streams with which a linen module is initialised.
    """

    to_input: ToInput = full_batch
    key: Callable[[], jax.Array] = lambda: jax.random.key(0)
    example: Callable[[], Batch] | None = None
    inputs: Callable[[], Any] = lambda: None
    build: Callable[[Any, nnx.Rngs], Any] | None = None
    init: Callable[[Batch, jax.Array], Any] | None = None
    rngs: Callable[[jax.Array], dict[str, jax.Array]] = lambda key: streams(key, "params", "dropout")

    def inputs_of(self, batch: Batch) -> Any:
        """The inputs of the model in `batch`; a `ValueError` if they have one axis less than those of the example."""
        found = self.to_input(batch)
        example = None if self.example is None else self.example()
        like = None if example is None else jax.eval_shape(lambda: self.to_input(example))
        for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(like), strict=False):
            if jnp.ndim(one) == other.ndim - 1:
                shape = ", ".join(["n", *map(str, other.shape[1:])])
                raise ValueError(
                    f"The inputs have the shape {jnp.shape(one)}, those of the training have [{shape}]. For a single "
                    "example, pass `x[None]`; other batches need the form of those of the training."
                )
        return found


class ModelHandle(ABC):
    """A model of one library: builds, initialises, calls and tabulates it, and makes its `Program`.

    Attributes:
        mode: the name of the library's kind of models.
        loss_name: the method of `TrainerModule` that computes the loss.
        loss_argument: the first argument of a loss that takes the batch.
        has_modules: whether the path of a parameter is that of its module, and its name there.
        tx: the optimizer of a state that has one; otherwise None.
        is_builder: whether the model is a class or function that builds a module.
        has_weights: whether the model that was passed has its initial weights.
    """

    mode: ClassVar[ModelMode]
    loss_name: ClassVar[str] = "loss_function"
    loss_argument: ClassVar[str] = "model"
    has_modules: ClassVar[bool] = False
    tx: optax.GradientTransformation | None = None
    is_builder: bool = False
    has_weights: bool = False

    def __init__(self, model: Any, hooks: ModelHooks | None = None) -> None:
        self.model, self.hooks = model, hooks or ModelHooks()
        self.config = model if isinstance(model, ConfigInterface) else None
        self.name = name_of(model)

    def build(self, inputs: Any, rngs: nnx.Rngs) -> Any:
        """The model for such inputs, built from its configuration; an object that was passed is returned as it is."""
        return self.model if self.config is None else build_model(self.config, inputs, rngs)

    @abstractmethod
    def init(self, batch: Batch, key: jax.Array) -> Any:
        """The initial weights, in the form that the library uses."""

    def program(self, loss: Any, tx: optax.GradientTransformation, **options: Unpack[StepOptions]) -> Program:
        """A program that trains the model with a loss of the library's form; options: see `make_program`."""
        name, modes = getattr(loss, "__name__", "loss"), options.get("intermediates", ())
        offered = ("rng", "step", *(("optimizer",) if isinstance(tx, Optimizers) else ()))
        check_call(loss, name, "model", "batch", "train", offered=offered)

        def loss_fn(  # `chosen`: the name of an optimizer
            params: PyTree, model_state: PyTree, batch: Batch, rng: jax.Array, *, train: bool, step: Any, **chosen: str
        ) -> Reported:
            def called(params: PyTree) -> tuple[Any, Any]:
                model = self.with_weights(params, model_state, rng, train=train)
                offered = {"rng": stream(rng, "user"), "step": step, **chosen}
                with allow_sow():
                    return model, loss(model, batch, train, **requested(loss, offered))

            model, returned = called(params)
            value, reported = loss_and_metrics(returned, name)
            if not train:
                return value, (model_state, reported)
            new_state, sown = self.after_call(model, model_state, modes)
            written = self.written(model, params, lambda params: called(params)[0])
            return value, (Written(new_state, written) if written else new_state, {**reported, **sown})

        def predict_fn(params: PyTree, model_state: PyTree, batch: Batch, rng: jax.Array) -> PyTree:
            model = self.with_weights(params, model_state, rng)
            with allow_sow():
                return model(*arguments(self.hooks.inputs_of(batch)), **required_rngs(model, stream(rng, "model")))

        if self.has_weights:
            options["init_is_traced"] = False
        wrapped: Any = attribute_to(loss_fn, loss)
        return make_program(
            self.variables, wrapped, tx, predict_fn=predict_fn, per_optimizer=takes_optimizer(loss), **options
        )

    def variables(self, key: jax.Array, batch: Batch) -> tuple[PyTree, PyTree]:
        """The parameters and the model state of the initial weights."""
        raise NotImplementedError

    def initial_weights(self, batch: Batch = None) -> tuple[PyTree, PyTree]:
        """The parameters and the model state before training: arrays if the model has its weights, otherwise shapes.

        `batch` is an example, of which only shapes and dtypes matter.
        """
        key = jax.random.key(0)
        return self.variables(key, batch) if self.has_weights else jax.eval_shape(self.variables, key, batch)

    @abstractmethod
    def filled(self, params: PyTree, model_state: PyTree) -> Any:
        """What `init` returns, with these arrays, which have the structure of `initial_weights`.

        A module that was passed with its weights is updated and returned.
        """

    def after_call(self, model: Any, model_state: PyTree, modes: Sequence[str]) -> tuple[PyTree, dict[str, Any]]:
        """The model state after calls of `model` in training, and statistics (`modes`) of what it has sown."""
        return model_state, {}

    def written(self, model: Any, params: PyTree, again: Callable[[PyTree], Any]) -> dict[str, Any]:
        """The parameters that calls of `model`, made with `params`, have written to, by path; `again` calls another."""
        return {}

    @abstractmethod
    def with_weights(self, params: PyTree, model_state: PyTree, rng: jax.Array, *, train: bool = False) -> Any:
        """The model with these arrays, in training or evaluation mode."""

    @abstractmethod
    def apply(self, model: Any, inputs: Any, train: bool | None = None, **options: Any) -> Any:
        """Calls a model with weights; a tuple is several arguments. `train` sets the mode."""

    @abstractmethod
    def tabulate(self, model: Any, inputs: tuple[Any, ...]) -> str:
        """A table of the parts of the model, called with these inputs."""

    def named_modules(self) -> AbstractContextManager[Any]:
        """Inside the block, steps are traced with a `jax.named_scope` for every module, which `module_of` reads."""
        return nullcontext()

    def module_of(self, scopes: tuple[str, ...]) -> str:
        """The dotted path of the module with these scopes; "" for the model itself, and outside of it."""
        return ""

    @property
    def apply_fn(self) -> Callable[..., Any]:
        """The function that calls the model with parameters, as in Flax's `TrainState`."""

        def no_apply(*_: Any, **__: Any) -> Any:
            raise TypeError(
                f"`state.apply_fn` exists for linen models only; this is a {self.mode} model: call `state.model`."
            )

        return no_apply

    @property
    def train_apply_fn(self) -> Callable[..., Any]:
        """`apply_fn` in a training step."""
        return self.apply_fn

    @property
    def key(self) -> jax.Array:
        """The root key of the run."""
        return self.hooks.key()

    @cached_property
    def module(self) -> Any:
        """The built model, without weights."""
        return self._build(self.hooks.inputs(), nnx.Rngs(0))

    def module_at(self, state: Callable[[], TrainState]) -> Any:
        """What `TrainerModule.model` returns: the model with the weights of the current state."""
        return self.bind(state())

    def bind(self, state: TrainState) -> Any:
        """The model with a copy of the weights of a state (averaged ones, if it has any), in evaluation mode."""
        params, model_state = copied((model_params(state), state.model_state))
        return self.with_weights(params, model_state, stream(state.key, "bound"))

    def network(self, state: TrainState) -> Any:
        """The model of `bind` as a callable pytree of arrays, which can be an argument of a compiled function."""
        return jax.tree_util.Partial(self._call, model_params(state), state.model_state, stream(state.key, "bound"))

    def _call(self, params: PyTree, model_state: PyTree, rng: jax.Array, *inputs: Any) -> Any:
        return self.with_weights(params, model_state, rng)(*inputs)

    def calling(self, loss: Callable[..., Any]) -> Any:
        """A loss of the library's form, from `loss(model, batch, train, rng, step)` that calls `model` with `apply`."""
        return loss

    def loss_subject(self, model: Any) -> Any:
        """The first argument of a loss that takes the batch, from the model of `calling`."""
        return model

    def as_passed(self, state: TrainState) -> Any:
        """The state in the form that the user passed."""
        return state

    def evaluated(self, state: TrainState) -> Any:
        """What a user's `eval_step` receives: the model with the weights of a state, in evaluation mode."""
        return self.with_weights(model_params(state, averaged=False), state.model_state, stream(state.key, "eval"))

    def write_back(self, state: TrainState) -> Any:
        """The trained model; a module that was passed is updated. None for models that do not hold weights."""
        return self.bind(state)

    def step_apply(self, state: Any, params: PyTree, *inputs: Any, train: bool = False, **options: Any) -> Any:
        """Calls the model in a custom step with `params`; returns its output and the model state after the call."""
        model = self.with_weights(params, state.model_state, state.key, train=train)
        outputs = self.apply(model, inputs, train, **options)
        return outputs, self.after_call(model, state.model_state, ())[0] if train else state.model_state

    def step_model(self, *, train: bool) -> "StepModel":
        """The model in a custom step."""
        return StepModel(self, train=train)

    def _build(self, inputs: Any, rngs: nnx.Rngs) -> Any:
        return (self.hooks.build or self.build)(inputs, rngs)

    def _init(self, batch: Batch, key: jax.Array) -> Any:
        return (self.hooks.init or self.init)(batch, key)

    def _init_example(self) -> Any:
        """The weights that a run starts from, for an example batch."""
        if self.hooks.example is None:
            raise RuntimeError(
                "The model has not been created yet. Call `init(key, example_batch)`, or `shapes` of the compiled "
                "program, before the first step."
            )
        return self._init(self.hooks.example(), stream(self.key, "init"))


class StepModel:
    """The model in a custom step, in the mode of the step. `state` is the state that the step receives."""

    def __init__(self, handle: ModelHandle, *, train: bool) -> None:
        self.handle, self.train = handle, train

    def module(self, state: Any) -> Any:
        """The model with the weights of `state`."""
        return self.handle.with_weights(state.params, state.model_state, state.key, train=self.train)

    def gradients(self, grads: Any, params: PyTree) -> PyTree:
        """`grads` as a tree like `params`."""
        return grads

    def update(self, state: Any, names: Iterable[str]) -> None:
        """Updates the module with these fields of `state`."""

    def changes(self, state: Any) -> dict[str, PyTree]:
        """The fields of `state` that the step has changed in the module."""
        return {}


def are_identical(a: PyTree, b: PyTree) -> bool:
    """Whether two trees have the same arrays, by identity."""
    return all(one is other for one, other in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=False))


def name_of(model: Any) -> str:
    """The name of a model in run folders and messages; "" for a lambda, which has none.

    >>> from functools import partial
    >>> name_of(partial(nnx.Linear, 4, 2)), name_of(lambda rngs: nnx.Linear(4, 2, rngs=rngs))
    ('Linear', '')
    """
    if isinstance(model, ConfigInterface):
        return model.class_name.rpartition(".")[2]
    model = model.func if isinstance(model, partial) else model
    name = getattr(model, "__name__", type(model).__name__)
    return "" if name == "<lambda>" else name.strip("<>")
