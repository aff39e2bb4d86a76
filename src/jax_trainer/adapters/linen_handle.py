"""Handles of linen modules, and of Flax states with their `apply_fn`."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

from jax_trainer.adapters.calls import arguments, mode_flags, takes_optimizer
from jax_trainer.adapters.handle import WIDE, ModelHandle, ModelHooks
from jax_trainer.adapters.linen import LinenView, flax_state_program, linen_program, split_variables
from jax_trainer.adapters.remat import RECOMPUTED, linen_remat
from jax_trainer.core import Batch, FlaxState, Program, PyTree, StepOptions, TrainState, merged, stream
from jax_trainer.core.random import key_data
from jax_trainer.core.state import EVALUATED, averages_in, strong
from jax_trainer.diagnostics.user_frame import attribute_to

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
        first = lambda key, batch: self._init(batch, key)
        return linen_program(self.module, loss, tx, to_input=self.hooks.inputs_of, init_variables=first, **options)

    def variables(self, key: jax.Array, batch: Batch) -> tuple[PyTree, PyTree]:
        return split_variables(self._init(batch, key))

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
