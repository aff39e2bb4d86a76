"""Plain functions and callable pytrees, such as Equinox modules: their programs and their handle."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jax_trainer.adapters.calls import arguments, mode_flags, requested, takes_optimizer
from jax_trainer.adapters.handle import ModelHandle, ModelHooks
from jax_trainer.core import Batch, Program, PyTree, StepOptions, make_program, stream
from jax_trainer.core.steps import Reported
from jax_trainer.diagnostics.leaves import leaf_path
from jax_trainer.diagnostics.returned import loss_and_metrics
from jax_trainer.diagnostics.user_frame import attribute_to

_CONSTANTS = "constants"  # the arrays of a model that are not trained: integers, keys


PureLoss = Callable[..., Any]  # (params, batch, *, rng, train) -> the loss, or the loss and a dict of metrics
StatefulLoss = Callable[..., Any]  # (params, model_state, batch, *, rng, train) -> loss, (new model state, metrics)


def function_program(
    init: Callable[[jax.Array, Batch], PyTree],
    loss: PureLoss,
    tx: optax.GradientTransformation,
    **options: Unpack[StepOptions],
) -> Program:
    """A program from `init(key, batch) -> params` and `loss(params, batch, *, rng, train)`.

    The loss returns a number, or a number and a dict of metrics. Options: see `make_program`.

    >>> import jax.numpy as jnp
    >>> fit_mean = function_program(
    ...     init=lambda key, batch: jnp.zeros(()),
    ...     loss=lambda params, batch, *, rng, train: ((batch - params) ** 2).mean(),
    ...     tx=optax.sgd(0.1),
    ... )
    """

    def loss_fn(params: PyTree, model_state: PyTree, batch: Batch, rng: Any, *, train: bool, **chosen: str) -> Reported:
        returned = loss(params, batch, rng=rng, train=train, **chosen)
        value, reported = loss_and_metrics(returned, getattr(loss, "__name__", "loss"))
        return value, (model_state, reported)

    attribute_to(loss_fn, loss)
    variables = lambda key, batch: (init(key, batch), {})
    return make_program(variables, loss_fn, tx, per_optimizer=takes_optimizer(loss), **options)


def stateful_program(
    init: Callable[[jax.Array, Batch], tuple[PyTree, PyTree]],
    loss: StatefulLoss,
    tx: optax.GradientTransformation,
    **options: Unpack[StepOptions],
) -> Program:
    """`function_program` for models with a mutable state.

    `init(key, batch) -> (params, model_state)` and
    `loss(params, model_state, batch, *, rng, train) -> (loss, (model_state, metrics))`.
    """

    def loss_fn(params: PyTree, model_state: PyTree, batch: Batch, rng: Any, *, train: bool, **chosen: str) -> Reported:
        value, (new_state, reported) = loss(params, model_state, batch, rng=rng, train=train, **chosen)
        return value, (new_state if train else model_state, reported)

    attribute_to(loss_fn, loss)
    return make_program(init, loss_fn, tx, per_optimizer=takes_optimizer(loss), **options)


class FunctionModel(NamedTuple):
    """A model of two functions, for plain JAX and for model libraries other than Flax.

    Args:
        init: `init(key, *inputs) -> params`, any pytree; its float arrays are trained.
        apply: `apply(params, *inputs)`. It may have a parameter `train` (or another name of the mode), and `key` or
            `rng` for a random key. None: the pytree itself is called.

    >>> model = FunctionModel(
    ...     init=lambda key, x: {"w": jax.random.normal(key, (x.shape[-1], 3)), "b": jnp.zeros(3)},
    ...     apply=lambda params, x: x @ params["w"] + params["b"],
    ... )
    """

    init: Callable[..., PyTree]
    apply: Callable[..., Any] | None = None


class FunctionHandle(ModelHandle):
    """A callable pytree with its initial weights; or an object with `init` and `apply`, or the configuration of one.

    The float arrays of the pytree are the parameters, its other arrays are part of the state, and the rest is static.
    """

    mode = "function"

    def __init__(self, model: Any, hooks: ModelHooks | None = None) -> None:
        super().__init__(model, hooks)
        self.has_weights = self.config is None and not hasattr(model, "init")
        self._static: dict[bool, PyTree] = {}  # what is not an array, in training and in evaluation
        self._calls: dict[bool, Callable[..., Any]] = {}

    def init(self, batch: Batch, key: jax.Array) -> PyTree:
        model = self.module
        return model.init(key, *arguments(self.hooks.to_input(batch))) if hasattr(model, "init") else model

    def filled(self, params: PyTree, model_state: PyTree) -> PyTree:
        return self._joined(params, model_state, train=False)

    def _joined(self, params: PyTree, model_state: PyTree, *, train: bool) -> PyTree:
        first = lambda *leaves: next((leaf for leaf in leaves if leaf is not None), None)
        constants = (model_state[_CONSTANTS],) if model_state else ()
        return jax.tree.map(first, params, *constants, self._static[train], is_leaf=lambda leaf: leaf is None)

    def with_weights(self, params: PyTree, model_state: PyTree, rng: jax.Array, *, train: bool = False) -> Any:
        if not self._static:
            jax.eval_shape(lambda: self._arrays(self._init_example()))
        tree = self._joined(params, model_state, train=train)
        apply = self._apply
        if apply is None:
            return tree
        if train not in self._calls:  # kept, so that functions compiled with it are compiled once
            self._calls[train] = partial(apply, **mode_flags(apply, train=train))
        keys = requested(apply, dict.fromkeys(("key", "rng"), stream(rng, "model")))
        return jax.tree_util.Partial(self._calls[train], tree, **keys)

    def apply(self, model: Any, inputs: Any, train: bool | None = None, **options: Any) -> Any:
        if train is None:
            return model(*arguments(inputs), **options)
        function = self._apply
        if function is None:
            model, function = _in_mode(model, train=train), type(model).__call__
        return model(*arguments(inputs), **{**mode_flags(function, train=train), **options})

    def tabulate(self, model: Any, inputs: tuple[Any, ...]) -> str:
        leaves = [(path, leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(model) if _is_array(leaf)]
        # the wrapper of `apply` and its parameters has a path of its own
        start = 0 if self._apply is None else 2
        lines = [f"{leaf_path(path[start:])}  {leaf.dtype}{list(leaf.shape)}" for path, leaf in leaves]
        outputs = jax.eval_shape(lambda: self.apply(model, inputs, train=False))
        shapes = [
            ", ".join(f"{leaf.dtype}{list(leaf.shape)}" for leaf in jax.tree.leaves(t)) for t in (inputs, outputs)
        ]
        total = sum(leaf.size for _, leaf in leaves if _is_trained(leaf))
        return "\n".join([f"{self.name}: {shapes[0]} -> {shapes[1]}", *lines, f"Total parameters: {total:,}"])

    @property
    def _apply(self) -> Callable[..., Any] | None:
        return getattr(self.module, "apply", None)

    def variables(self, key: jax.Array, batch: Batch) -> tuple[PyTree, PyTree]:
        return self._arrays(self._init(batch, key))

    def _arrays(self, tree: PyTree) -> tuple[PyTree, PyTree]:
        """The parameters and the model state of `tree`, with None for everything else."""
        params = jax.tree.map(lambda leaf: leaf if _is_trained(leaf) else None, tree)
        if not jax.tree.leaves(params):
            raise ValueError(f"{self.name} has no parameters to train: no leaf is a float array.")
        static = jax.tree.map(lambda leaf: None if _is_array(leaf) else leaf, tree)
        self._static = {train: _in_mode(static, train=train) for train in (True, False)}
        constants = jax.tree.map(lambda leaf: leaf if _is_array(leaf) and not _is_trained(leaf) else None, tree)
        return params, {_CONSTANTS: constants} if jax.tree.leaves(constants) else {}


def is_function_model(model: Any) -> bool:
    """Whether `model` has `init` and `apply`, or is a callable pytree with arrays."""
    if isinstance(model, type):
        return False
    if callable(getattr(model, "init", None)) and hasattr(model, "apply"):
        return True
    is_tree = callable(model) and not jax.tree_util.all_leaves([model])
    return is_tree and any(map(_is_array, jax.tree.leaves(model)))


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray)


def _is_trained(leaf: Any) -> bool:
    return _is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.inexact)


def _in_mode(tree: PyTree, *, train: bool) -> PyTree:
    """`tree` with its flags `inference`, as those of Equinox, set for training or evaluation."""
    is_flag = lambda path, leaf: isinstance(leaf, bool) and leaf_path(path[-1:]) == "inference"
    return jax.tree_util.tree_map_with_path(lambda path, leaf: not train if is_flag(path, leaf) else leaf, tree)
