"""Applies what callbacks add to a step: `Callback.wrap` and `Callback.wrap_optimizer`."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import optax

from jax_trainer.callbacks.callback import Callback, CallbackConfig
from jax_trainer.config.registration import implementation_of
from jax_trainer.core import Program, PyTree, TrainState
from jax_trainer.core.extra_args import Update
from jax_trainer.core.wrappers import with_initial
from jax_trainer.optimizer.reported import with_learning_rate, with_update

OPTIMIZERS = "wrapped_optimizer"  # in `extra`: the states of optimizers that wrap the one of the program, by name


class _Inner(NamedTuple):
    """The place of the state of the inner optimizer in that of the optimizer around it."""

    opt_state: PyTree


def with_needs_of(
    callbacks: Iterable[Callback | CallbackConfig], program: Program, *, log_rate: bool = False
) -> Program:
    """`program`, wrapped by `callbacks` in their order, the first one innermost.

    Args:
        callbacks: callbacks, or configurations of some.
        program: the program.
        log_rate: log the learning rate of windows of steps and of epochs, whatever callbacks do.
    """
    for callback in callbacks:
        kind = type(callback) if isinstance(callback, Callback) else implementation_of(callback) or Callback
        wraps_optimizer = kind.wrap_optimizer is not Callback.wrap_optimizer
        if not wraps_optimizer and kind.wrap is Callback.wrap:
            continue
        callback = callback if isinstance(callback, Callback) else kind(callback)
        if wraps_optimizer:
            program = with_optimizer(program, callback.wrap_optimizer, kind.__name__)
        program = callback.wrap(program)
    return with_learning_rate(program) if log_rate else program


def with_optimizer(
    program: Program, wrap: Callable[[Any], optax.GradientTransformation], name: str = "optimizer"
) -> Program:
    """`program` whose optimizer is `wrap` of its own; what that adds is in `extra["wrapped_optimizer"][name]`.

    ```
    noisy = with_optimizer(program, lambda tx: optax.chain(tx, optax.add_noise(0.01, 0.55, 0)))
    ```
    """

    def around(opt_state: PyTree, update: Any = None) -> optax.GradientTransformationExtraArgs:
        inner = optax.GradientTransformationExtraArgs(lambda params: _Inner(opt_state), update)
        return optax.with_extra_args_support(wrap(inner))

    def add_state(state: TrainState) -> TrainState:
        added, _ = _taken_out(around(state.opt_state).init(state.params))
        known = state.extra.get(OPTIMIZERS, {})
        if name in known:
            raise ValueError(f"Two callbacks {name!r} wrap the optimizer. Use one, or a subclass of another name.")
        return state.replace(extra={**state.extra, OPTIMIZERS: {**known, name: added}})

    def updated(update: Update, grads: PyTree, state: TrainState, offered: Mapping[str, Any]) -> Any:
        extra: dict[str, Any] = {}

        def own(grads: PyTree, inner: _Inner, params: PyTree = None, **_: Any) -> tuple[PyTree, _Inner]:
            if jax.tree.structure(grads) != jax.tree.structure(state.params):
                raise TypeError(f"`{name}.wrap_optimizer` must pass the gradients of all parameters on to `tx`.")
            updates, opt_state, extra_of_update = update(grads, state.replace(opt_state=inner.opt_state), offered)
            extra.update(extra_of_update)
            return updates, _Inner(opt_state)

        before = _put_in(state.extra[OPTIMIZERS][name], state.opt_state)
        updates, after = around(state.opt_state, own).update(grads, before, state.params, **offered)
        added, opt_state = _taken_out(after)
        known = {**state.extra, **extra}
        return updates, opt_state, {**known, OPTIMIZERS: {**known[OPTIMIZERS], name: added}}

    refusal = (
        f"`{name}` cannot wrap the optimizer: the training step updates the parameters itself. Use "
        "`state.apply_gradients(grads=grads)` in it."
    )
    return with_update(with_initial(add_state, program), updated, refusal)


def _is_inner(node: Any) -> bool:
    return isinstance(node, _Inner)


def _taken_out(wrapped: PyTree) -> tuple[PyTree, PyTree]:
    """The state of an optimizer without that of the inner one, and the latter."""
    [inner] = [node for node in jax.tree.leaves(wrapped, is_leaf=_is_inner) if _is_inner(node)]
    emptied = jax.tree.map(lambda node: _Inner(()) if _is_inner(node) else node, wrapped, is_leaf=_is_inner)
    return emptied, inner.opt_state


def _put_in(emptied: PyTree, opt_state: PyTree) -> PyTree:
    return jax.tree.map(lambda node: _Inner(opt_state) if _is_inner(node) else node, emptied, is_leaf=_is_inner)
